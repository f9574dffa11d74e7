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
 * A job of Spark's serializes its plan, schedules a task, deserializes the plan in the task and
 * announces all of this to listeners: two thirds of the work of a small step. Its task may also run
 * where the driver's files do not exist.
 */
public class DriverExecution {
  /** The current executions, by their groups. */
  private final Map running = new ConcurrentHashMap();

  /** A driver that runs tasks of its own numbers them from 0 upwards; these numbers go
   *  downwards. */
  private final AtomicLong attempts = new AtomicLong(0L);

  private final ExecutorService threads = Executors.newCachedThreadPool(new DaemonThreads());

  /**
   * Executes a plan again and writes its rows, byte strings, to a file without separators.
   *
   * @param properties the properties by which Spark tells tasks the settings of the session
   * @throws IllegalStateException if the plan has several partitions, or the rows take more than
   *     the given number of bytes
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

  /** Makes the execution of a group, if there is one, fail immediately. */
  public void cancel(String group) {
    OneExecution found = (OneExecution) running.get(group);
    if (found != null) {
      found.cancel();
    }
  }
}

/** Makes threads that do not keep the JVM alive. */
class DaemonThreads implements ThreadFactory {
  public Thread newThread(Runnable work) {
    Thread made = new Thread(work, "driver execution");
    made.setDaemon(true);
    return made;
  }
}

/** One execution, in a thread of its own. Like a task, it may continue for a while after it was
 *  cancelled, since not all operators check for cancellation. */
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
    // From here on nothing may interrupt this thread, which others will reuse.
    runsIn(null);
    Thread.interrupted();
    try {
      // Readers close their files here, and sorts release their memory.
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

  /** Returns the memory manager that all executions in this JVM share. */
  private static MemoryManager memoryManager() throws Throwable {
    // Through handles of only these two methods: the compiler, or a search through all methods of
    // the class, would load every class that they name, and some of these do not come with PySpark.
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
    // The parameters after these have defaults, whose types differ between releases of Spark.
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
