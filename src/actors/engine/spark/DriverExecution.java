import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;
import java.lang.reflect.Constructor;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.ThreadFactory;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.spark.SparkEnv;
import org.apache.spark.TaskContext$;
import org.apache.spark.TaskContextImpl;
import org.apache.spark.memory.MemoryManager;
import org.apache.spark.memory.TaskMemoryManager;
import org.apache.spark.rdd.RDD;

/**
 * Executes plans of one partition in the driver.
 *
 * A job of Spark's serializes its plan, schedules a task, reads the plan again in it and announces
 * all of that: two thirds of the work of a small step. And its task may run where the driver's
 * files are not.
 */
public class DriverExecution {
  /** Executions by their groups. */
  private final Map running = new ConcurrentHashMap();

  /** The tasks of a driver that runs some itself have numbers from 0 up: these go down. */
  private final AtomicLong attempts = new AtomicLong(0L);

  private final ExecutorService threads = Executors.newCachedThreadPool(new DaemonThreads());

  /**
   * Executes a plan afresh and writes its rows, byte strings, to a file, one behind the other.
   *
   * @param properties what Spark tells tasks of the session's settings
   * @throws IllegalStateException if the plan has several partitions, or the rows take more than
   *     so many bytes
   */
  public void run(RDD plan, String group, Properties properties, String path, long bytesMax)
      throws Throwable {
    if (plan.getNumPartitions() != 1) {
      throw new IllegalStateException("the plan has " + plan.getNumPartitions() + " partitions");
    }
    OneExecution made =
        new OneExecution(plan, attempts.decrementAndGet(), properties, path, bytesMax);
    running.put(group, made);
    threads.execute(made);
    try {
      made.ended.get();
    } catch (ExecutionException error) {
      throw error.getCause();
    } finally {
      running.remove(group);
    }
  }

  /** Makes the execution of a group, if there is one, fail at once. */
  public void cancel(String group) {
    OneExecution found = (OneExecution) running.get(group);
    if (found != null) {
      found.cancel();
    }
  }
}

/** Makes threads that keep no JVM alive. */
class DaemonThreads implements ThreadFactory {
  public Thread newThread(Runnable work) {
    Thread made = new Thread(work, "driver execution");
    made.setDaemon(true);
    return made;
  }
}

/** One execution, in a thread of its own: as a task's, it may go on for a while when it was
 *  cancelled, since not all operators look whether they were. */
class OneExecution implements Runnable {
  final CompletableFuture ended = new CompletableFuture();

  private final RDD plan;
  private final TaskMemoryManager memory;
  private final TaskContextImpl context;
  private final String path;
  private final long bytesMax;
  private Thread thread;

  OneExecution(RDD plan, long attempt, Properties properties, String path, long bytesMax)
      throws Throwable {
    this.plan = plan;
    this.path = path;
    this.bytesMax = bytesMax;
    memory = new TaskMemoryManager(memoryManager(), attempt);
    context = contextOf(memory, attempt, properties);
  }

  void cancel() {
    context.markInterrupted("canceled");
    synchronized (this) {
      if (thread != null) {
        thread.interrupt();
      }
    }
    ended.completeExceptionally(new IllegalStateException("the execution was canceled"));
  }

  private synchronized void runsIn(Thread given) {
    thread = given;
  }

  public void run() {
    Throwable failure = null;
    TaskContext$.MODULE$.setTaskContext(context);
    runsIn(Thread.currentThread());
    try {
      write(plan.iterator(plan.partitions()[0], context), path, bytesMax);
    } catch (Throwable error) {
      failure = error;
      context.markTaskFailed(error);
    }
    // From here on nobody interrupts this thread, which others will use.
    runsIn(null);
    Thread.interrupted();
    try {
      // Readers close their files here, and sorts let go of their memory.
      context.markTaskCompleted(scala.Option.apply(failure));
    } catch (Throwable error) {
      failure = failure == null ? error : failure;
    }
    memory.cleanUpAllAllocatedMemory();
    TaskContext$.MODULE$.unset();
    if (failure == null) {
      ended.complete(null);
    } else {
      ended.completeExceptionally(failure);
    }
  }

  private static void write(scala.collection.Iterator rows, String path, long bytesMax)
      throws IOException {
    long size = 0L;
    OutputStream out = new FileOutputStream(path);
    try {
      while (rows.hasNext()) {
        byte[] row = (byte[]) rows.next();
        size += row.length;
        if (size > bytesMax) {
          throw new IllegalStateException("the answer takes more than spark.driver.maxResultSize");
        }
        out.write(row);
      }
    } finally {
      out.close();
    }
  }

  /** Returns the memory that all executions in this JVM share. */
  private static MemoryManager memoryManager() throws Throwable {
    // By handles of the two methods alone: the compiler, and a look through all methods of the
    // class, would load every class that they name, some of which do not come with PySpark.
    MethodHandles.Lookup methods = MethodHandles.publicLookup();
    Object env =
        methods
            .findStatic(SparkEnv.class, "get", MethodType.methodType(SparkEnv.class))
            .invokeWithArguments(new Object[0]);
    return (MemoryManager)
        methods
            .findVirtual(
                SparkEnv.class, "memoryManager", MethodType.methodType(MemoryManager.class))
            .invokeWithArguments(new Object[] {env});
  }

  private static TaskContextImpl contextOf(
      TaskMemoryManager memory, long attempt, Properties properties)
      throws ReflectiveOperationException {
    Object[] own = {
      Integer.valueOf(0), // stage
      Integer.valueOf(0), // its attempt
      Integer.valueOf(0), // partition
      Long.valueOf(attempt),
      Integer.valueOf(0), // number of the attempt
      Integer.valueOf(1), // partitions
      memory,
      properties,
      null // measures of sources
    };
    // What follows these has defaults, of other types in other releases of Spark.
    Constructor made = TaskContextImpl.class.getConstructors()[0];
    Object[] given = new Object[made.getParameterTypes().length];
    System.arraycopy(own, 0, given, 0, own.length);
    for (int place = own.length; place < given.length; place++) {
      String name = "$lessinit$greater$default$" + (place + 1);
      given[place] =
          TaskContextImpl.class.getMethod(name, new Class[0]).invoke(null, new Object[0]);
    }
    return (TaskContextImpl) made.newInstance(given);
  }
}
