import org.apache.spark.TaskContext;
import org.apache.spark.sql.catalyst.expressions.And;
import org.apache.spark.sql.catalyst.expressions.BitwiseAnd;
import org.apache.spark.sql.catalyst.expressions.Cast;
import org.apache.spark.sql.catalyst.expressions.CreateArray;
import org.apache.spark.sql.catalyst.expressions.EqualTo;
import org.apache.spark.sql.catalyst.expressions.Explode;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.If;
import org.apache.spark.sql.catalyst.expressions.Literal$;
import org.apache.spark.sql.catalyst.expressions.MonotonicallyIncreasingID;
import org.apache.spark.sql.catalyst.expressions.RaiseError;
import org.apache.spark.sql.catalyst.expressions.objects.Invoke;
import org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke;
import org.apache.spark.sql.catalyst.plans.LeftAnti$;
import org.apache.spark.sql.catalyst.plans.LeftSemi$;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.Generate;
import org.apache.spark.sql.catalyst.plans.logical.Join;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Window;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.ObjectType;
import scala.Option;
import scala.collection.immutable.Seq;
import scala.collection.mutable.ArrayBuffer;
import scala.runtime.AbstractFunction1;

/**
 * Lets a task that is canceled end at one of its next rows. Spark checks for cancellation where it
 * takes a row of the task's input. One such row may make billions in a join or a generator, so that
 * the task of a canceled job would keep its core for minutes. So a filter that passes every row is
 * placed above each of these operators, and above windows; it fails if the task was canceled. It
 * costs about a nanosecond per row: a hundredth of a join of two columns. Compiled by Janino, which
 * does not support generics.
 */
public class CancelChecks extends Rule {
  /** Number of rows between two checks: a power of two. A check costs more than a simple join
   *  takes per row. */
  private static final long ROWS = 64L;

  /** Adds the filters to the plans of all sessions opened from a root, including those of Spark
   *  Connect's clients. */
  public void install(Object root) {
    ((SparkSession) root).extensions().injectPostHocResolutionRule(new CheckedSessions(this));
  }

  public TreeNode apply(TreeNode plan) {
    return checked((LogicalPlan) plan, false);
  }

  /** The method that Spark calls to apply a rule. */
  public Object apply(Object plan) {
    return checked((LogicalPlan) plan, false);
  }

  /** Returns the plan with its filters. `has`: there already is one above the plan, since Spark
   *  applies the rule until nothing changes. */
  private static LogicalPlan checked(LogicalPlan plan, boolean has) {
    boolean check = plan instanceof Filter && isCheck(((Filter) plan).condition());
    ArrayBuffer children = new ArrayBuffer();
    boolean changed = false;
    scala.collection.Iterator each = plan.children().iterator();
    while (each.hasNext()) {
      LogicalPlan child = (LogicalPlan) each.next();
      LogicalPlan made = checked(child, check);
      changed |= made != child;
      children.append(made);
    }
    LogicalPlan made = changed ? (LogicalPlan) plan.withNewChildren(children.toSeq()) : plan;
    return !has && isLong(plan) ? new Filter(condition(), made) : made;
  }

  /** Returns whether a row of the operator's input may keep it busy for long: because it makes
   *  many rows, or because many rows wait for the last one of their partition, and each is then
   *  computed from many. */
  private static boolean isLong(LogicalPlan plan) {
    if (plan instanceof Join) {
      Object kind = ((Join) plan).joinType();
      return kind != LeftSemi$.MODULE$ && kind != LeftAnti$.MODULE$;
    }
    if (plan instanceof Generate) {
      Expression generator = (Expression) ((Generate) plan).generator();
      // `explode(array(a, b))` makes only as many rows as it lists.
      return !(generator instanceof Explode
          && ((Explode) generator).child() instanceof CreateArray);
    }
    return plan instanceof Window;
  }

  private static boolean isCheck(Expression condition) {
    if (!(condition instanceof If)) return false;
    Expression failure = ((If) condition).trueValue();
    return failure instanceof Cast && ((Cast) failure).child() instanceof RaiseError;
  }

  /** For one row in `ROWS`: `if (TaskContext.get().isInterrupted()) raise_error(…) else true`.
   *  It is not deterministic, so no rule may move it below the operator. */
  private static Expression condition() {
    Expression place =
        new BitwiseAnd(new MonotonicallyIncreasingID(), literal(Long.valueOf(ROWS - 1L)));
    Expression due = new EqualTo(place, literal(Long.valueOf(0L)));
    Seq none = new ArrayBuffer().toSeq();
    Expression task =
        new StaticInvoke(
            TaskContext.class,
            new ObjectType(TaskContext.class),
            "get",
            none,
            none,
            true,
            true,
            false,
            Option.empty());
    Expression canceled =
        new Invoke(task, "isInterrupted", DataTypes.BooleanType, none, none, true, false, false);
    Expression failure =
        new Cast(
            new RaiseError(literal("the task was canceled")),
            DataTypes.BooleanType,
            Option.empty());
    return new If(new And(due, canceled), failure, literal(Boolean.TRUE));
  }

  private static Expression literal(Object value) {
    return Literal$.MODULE$.apply(value);
  }
}

/** Makes the rule of a new session that adds the checks to its optimizer. */
class CheckedSessions extends AbstractFunction1 {
  private final Rule checks;

  CheckedSessions(Rule checks) {
    this.checks = checks;
  }

  public Object apply(Object session) {
    return new CheckedSession((SparkSession) session, checks);
  }
}

/** Adds the checks as the last rule of the optimizer when a session analyses its first plan,
 *  since extensions cannot add rules that late. No filter may be between joins while these are
 *  reordered. */
class CheckedSession extends Rule {
  private final SparkSession session;
  private final Seq rules;

  CheckedSession(SparkSession session, Rule checks) {
    this.session = session;
    ArrayBuffer made = new ArrayBuffer();
    made.append(checks);
    rules = made.toSeq();
  }

  public TreeNode apply(TreeNode plan) {
    session.experimental().extraOptimizations_$eq(rules);
    return plan;
  }

  /** The method that Spark calls to apply a rule. */
  public Object apply(Object plan) {
    return apply((TreeNode) plan);
  }
}
