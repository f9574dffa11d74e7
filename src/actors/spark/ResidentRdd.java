package org.apache.spark.rdd;

import java.io.Serializable;
import java.lang.ref.Reference;
import java.lang.ref.WeakReference;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.Partition;
import org.apache.spark.TaskContext;
import scala.collection.immutable.Nil$;
import scala.runtime.AbstractFunction2;
import scala.runtime.BoxedUnit;

/**
 * Runs a plan of one partition where it is: its tasks carry the plan's number and find it here.
 *
 * Spark serializes a plan three times for each job and reads it once in each task, since its tasks
 * may run elsewhere. Of a plan of some hundred operators over a few rows that is a third of the
 * work. Where tasks run in the driver's JVM they can execute the driver's own objects, if no two
 * tasks of a plan run at the same time: whoever makes one of these sees to that.
 */
public class ResidentRdd extends RDD {
  /** The plans by number, each for as long as the driver holds it. */
  private static final Map PLANS = new ConcurrentHashMap();

  private final transient RDD plan;

  private ResidentRdd(RDD plan) {
    super(plan.sparkContext(), Nil$.MODULE$, plan.elementClassTag());
    this.plan = plan;
  }

  /** Returns what runs a plan so; null if the plan has several partitions, whose tasks would run at
   *  the same time. */
  public static RDD of(RDD plan) {
    if (plan.getNumPartitions() != 1) {
      return null;
    }
    Iterator known = PLANS.values().iterator();
    while (known.hasNext()) {
      if (((Reference) known.next()).get() == null) {
        known.remove();
      }
    }
    ResidentRdd made = new ResidentRdd(plan);
    PLANS.put(Integer.valueOf(made.id()), new WeakReference(made));
    return made;
  }

  public Partition[] getPartitions() {
    return new Partition[] {new CheckpointRDDPartition(0)};
  }

  public scala.collection.Iterator compute(Partition split, TaskContext context) {
    Reference known = (Reference) PLANS.get(Integer.valueOf(id()));
    ResidentRdd here = known == null ? null : (ResidentRdd) known.get();
    if (here == null) {
      throw new IllegalStateException("prepared plan " + id() + " is not in this JVM");
    }
    return here.plan.iterator(here.plan.partitions()[0], context);
  }

  /** As Spark's own, without the look into the bytes of its classes for what the job captures. */
  public Object collect() {
    KeptAnswer answer = new KeptAnswer();
    sparkContext()
        .dagScheduler()
        .runJob(
            this,
            new RowsOfTask(),
            Nil$.MODULE$.$colon$colon(Integer.valueOf(0)),
            sparkContext().getCallSite(),
            answer,
            sparkContext().getLocalProperties());
    return answer.rows;
  }
}

/** Gathers the rows of a task, in it. */
class RowsOfTask extends AbstractFunction2 implements Serializable {
  public Object apply(Object context, Object given) {
    scala.collection.Iterator rows = (scala.collection.Iterator) given;
    ArrayList gathered = new ArrayList();
    while (rows.hasNext()) {
      gathered.add(rows.next());
    }
    return gathered.toArray(new byte[0][]);
  }
}

/** Keeps the answer of a job of one task, in the driver. */
class KeptAnswer extends AbstractFunction2 {
  Object rows;

  public Object apply(Object partition, Object given) {
    rows = given;
    return BoxedUnit.UNIT;
  }
}
