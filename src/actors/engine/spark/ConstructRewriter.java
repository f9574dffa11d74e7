import java.util.ArrayList;
import java.util.Collections;
import java.util.Iterator;
import java.util.List;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Ascending$;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.CaseWhen;
import org.apache.spark.sql.catalyst.expressions.CreateArray;
import org.apache.spark.sql.catalyst.expressions.CreateNamedStruct;
import org.apache.spark.sql.catalyst.expressions.CurrentRow$;
import org.apache.spark.sql.catalyst.expressions.EqualNullSafe;
import org.apache.spark.sql.catalyst.expressions.Exists;
import org.apache.spark.sql.catalyst.expressions.Explode;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.GetStructField;
import org.apache.spark.sql.catalyst.expressions.GreaterThan;
import org.apache.spark.sql.catalyst.expressions.GreaterThanOrEqual;
import org.apache.spark.sql.catalyst.expressions.IsNull;
import org.apache.spark.sql.catalyst.expressions.Least;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.Literal$;
import org.apache.spark.sql.catalyst.expressions.MicrosToTimestamp;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.expressions.NamedExpression$;
import org.apache.spark.sql.catalyst.expressions.Not;
import org.apache.spark.sql.catalyst.expressions.NullsFirst$;
import org.apache.spark.sql.catalyst.expressions.Or;
import org.apache.spark.sql.catalyst.expressions.RangeFrame$;
import org.apache.spark.sql.catalyst.expressions.RowFrame$;
import org.apache.spark.sql.catalyst.expressions.Sequence;
import org.apache.spark.sql.catalyst.expressions.SortOrder;
import org.apache.spark.sql.catalyst.expressions.SpecifiedWindowFrame;
import org.apache.spark.sql.catalyst.expressions.Subtract;
import org.apache.spark.sql.catalyst.expressions.UnaryMinus;
import org.apache.spark.sql.catalyst.expressions.UnboundedFollowing$;
import org.apache.spark.sql.catalyst.expressions.UnboundedPreceding$;
import org.apache.spark.sql.catalyst.expressions.UnixMicros;
import org.apache.spark.sql.catalyst.expressions.WindowExpression;
import org.apache.spark.sql.catalyst.expressions.WindowSpecDefinition;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateExpression;
import org.apache.spark.sql.catalyst.expressions.aggregate.Count;
import org.apache.spark.sql.catalyst.expressions.aggregate.First;
import org.apache.spark.sql.catalyst.expressions.aggregate.Max;
import org.apache.spark.sql.catalyst.expressions.aggregate.PivotFirst;
import org.apache.spark.sql.catalyst.plans.logical.Aggregate;
import org.apache.spark.sql.catalyst.plans.logical.Except;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.Generate;
import org.apache.spark.sql.catalyst.plans.logical.GlobalLimit;
import org.apache.spark.sql.catalyst.plans.logical.Intersect;
import org.apache.spark.sql.catalyst.plans.logical.LocalLimit;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.Union;
import org.apache.spark.sql.catalyst.plans.logical.Window;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.TimestampType;
import scala.jdk.javaapi.CollectionConverters;

/**
 * Replaces constructs that Spark itself rewrites only when it runs them by operators that the delta
 * rules support. No rule of Catalyst does that.
 *
 * - A pivot becomes a grouping that also groups by the pivoted column, and above it a grouping that
 *   collects its values: for each of them there is only one.
 * - EXCEPT ALL and INTERSECT ALL become a grouping by all columns that counts the rows of either
 *   side, and above it a generator that repeats each group as often as it remains.
 * - A LIMIT of one or more rows inside an EXISTS has no effect and is removed.
 * - Sessions are merged while Spark runs: taking the `[start, end]` of each row in the order of the
 *   starts, a row belongs to the session before it if that has not ended before the row's start. So
 *   a row starts a session if its start is after the ends of all rows that start before it, and it
 *   belongs to the last session that started up to its start. The end of a session is a window over
 *   its rows, so both bounds are keys of the grouping.
 *
 * Compiled by Janino, which comes with Spark and supports neither generics nor lambdas.
 */
public class ConstructRewriter {
  /** The key with which Spark marks, in the metadata, the column by which a grouping merges
   *  sessions. */
  private static final String SESSION_MARK = "spark.sessionWindow";

  /** Returns an analysed plan, including the plans of its subqueries, without these constructs. */
  public static Object rewrite(Object plan) {
    LogicalPlan made = (LogicalPlan) ((LogicalPlan) plan).transformUpWithSubqueries(
        new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return node instanceof Aggregate
            || node instanceof Except && ((Except) node).isAll()
            || node instanceof Intersect && ((Intersect) node).isAll();
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        if (!isDefinedAt(node)) return otherwise.apply(node);
        if (node instanceof Except) {
          return copies(((Except) node).left(), ((Except) node).right(), true);
        }
        if (node instanceof Intersect) {
          return copies(((Intersect) node).left(), ((Intersect) node).right(), false);
        }
        Aggregate plan = (Aggregate) node;
        Attribute session = sessionOf(plan);
        return withoutPivots(session == null ? plan : sessions(plan, session));
      }
    });
    return made.transformAllExpressionsWithSubqueries(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return node instanceof Exists && isLimited(((Exists) node).plan());
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        if (!isDefinedAt(node)) return otherwise.apply(node);
        GlobalLimit limit = (GlobalLimit) ((Exists) node).plan();
        return ((Exists) node).withNewPlan(((LocalLimit) limit.child()).child());
      }
    });
  }

  /** Returns whether a plan has the first rows of another one, and has a row if that one has
   *  any. */
  private static boolean isLimited(LogicalPlan plan) {
    if (!(plan instanceof GlobalLimit)) return false;
    GlobalLimit limit = (GlobalLimit) plan;
    if (!(limit.child() instanceof LocalLimit) || !(limit.limitExpr() instanceof Literal)) {
      return false;
    }
    Object count = ((Literal) limit.limitExpr()).value();
    return count instanceof Integer && ((Integer) count).intValue() > 0;
  }

  // Pivots.

  private static LogicalPlan withoutPivots(LogicalPlan plan) {
    return (LogicalPlan) plan.transformExpressions(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return node instanceof AggregateExpression
            && ((AggregateExpression) node).aggregateFunction() instanceof PivotFirst;
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        return isDefinedAt(node)
            ? gathered((AggregateExpression) node) : otherwise.apply(node);
      }
    });
  }

  private static Expression gathered(AggregateExpression call) {
    PivotFirst pivot = (PivotFirst) call.aggregateFunction();
    List made = new ArrayList();
    Iterator values = CollectionConverters.asJava(pivot.pivotColumnValues()).iterator();
    while (values.hasNext()) {
      Expression value = Literal$.MODULE$.create(values.next(), pivot.pivotColumn().dataType());
      Expression test = new EqualNullSafe(pivot.pivotColumn(), value);
      made.add(new First(when(test, pivot.valueColumn()), true).toAggregateExpression());
    }
    return new CreateArray(seq(made), false);
  }

  // Set operators that count duplicates.

  /** Returns the rows of the left side as often as they exceed, or occur in, the right side. */
  private static LogicalPlan copies(LogicalPlan left, LogicalPlan right, boolean more) {
    Alias side = alias(Literal$.MODULE$.apply(Boolean.TRUE));
    Alias other = alias(Literal$.MODULE$.apply(Boolean.FALSE));
    List both = new ArrayList();
    both.add(new Project(seq(with(left.output(), side)), left));
    both.add(new Project(seq(with(right.output(), other)), right));
    LogicalPlan union = new Union(seq(both), false, false);
    List columns = new ArrayList(CollectionConverters.asJava(union.output()));
    Expression mine = (Expression) columns.remove(columns.size() - 1);
    Alias lefts = alias(counted(mine));
    Alias rights = alias(counted(new Not(mine)));
    List items = new ArrayList(columns);
    items.add(lefts);
    items.add(rights);
    LogicalPlan made = new Aggregate(seq(columns), seq(items), union, none());
    List counts = new ArrayList();
    counts.add(lefts.toAttribute());
    counts.add(rights.toAttribute());
    Alias times = alias(more
        ? new Subtract(lefts.toAttribute(), rights.toAttribute())
        : new Least(seq(counts)));
    made = new Project(seq(with(seq(columns), times)), made);
    Expression one = Literal$.MODULE$.apply(Long.valueOf(1));
    made = new Filter(new GreaterThanOrEqual(times.toAttribute(), one), made);
    Alias number = alias(one);
    scala.Option zone = scala.Option.apply(SQLConf.get().sessionLocalTimeZone());
    made = new Generate(new Explode(new Sequence(one, times.toAttribute(), none(), zone)),
        seq(new ArrayList()), false, none(),
        seq(Collections.singletonList(number.toAttribute())), made);
    return new Project(seq(columns), made);
  }

  private static Expression counted(Expression test) {
    Expression one = Literal$.MODULE$.apply(Integer.valueOf(1));
    return new Count(seq(Collections.singletonList(when(test, one)))).toAggregateExpression();
  }

  private static List with(scala.collection.immutable.Seq columns, NamedExpression last) {
    List made = new ArrayList(CollectionConverters.asJava(columns));
    made.add(last);
    return made;
  }

  // Sessions.

  /** Returns the column by which a grouping merges sessions of timestamps; null if there is
   *  none. */
  private static Attribute sessionOf(Aggregate plan) {
    Iterator keys = CollectionConverters.asJava(plan.groupingExpressions()).iterator();
    while (keys.hasNext()) {
      Object key = keys.next();
      if (!(key instanceof AttributeReference)) continue;
      Attribute it = (Attribute) key;
      if (!it.metadata().contains(SESSION_MARK) || !(it.dataType() instanceof StructType)) continue;
      StructType kind = (StructType) it.dataType();
      if (kind.fields()[0].dataType() instanceof TimestampType) return it;
    }
    return null;
  }

  private static LogicalPlan sessions(Aggregate plan, final Attribute session) {
    List grouped = new ArrayList();
    List keys = new ArrayList();
    List below = new ArrayList(CollectionConverters.asJava(plan.child().output()));
    Iterator given = CollectionConverters.asJava(plan.groupingExpressions()).iterator();
    while (given.hasNext()) {
      Expression key = (Expression) given.next();
      if (key.semanticEquals(session)) continue;
      grouped.add(key);
      if (!(key instanceof Attribute)) {
        Alias named = alias(key);
        below.add(named);
        key = named.toAttribute();
      }
      keys.add(key);
    }
    Alias start = alias(new UnixMicros(new GetStructField(session, 0, none())));
    Alias end = alias(new UnixMicros(new GetStructField(session, 1, none())));
    below.add(start);
    below.add(end);
    LogicalPlan made = new Project(seq(below), plan.child());
    Expression at = start.toAttribute();

    Expression minus = new UnaryMinus(Literal$.MODULE$.apply(Long.valueOf(1)));
    Alias ended = alias(over(end.toAttribute(), keys, at, minus));
    made = window(ended, keys, at, made);
    Expression before = ended.toAttribute();
    Expression begins = new Or(new IsNull(before), new GreaterThan(at, before));
    Alias begun = alias(when(begins, at));
    List all = new ArrayList(CollectionConverters.asJava(made.output()));
    all.add(begun);
    made = new Project(seq(all), made);
    Alias first = alias(over(begun.toAttribute(), keys, at, CurrentRow$.MODULE$));
    made = window(first, keys, at, made);

    List one = new ArrayList(keys);
    one.add(first.toAttribute());
    Alias last = alias(new WindowExpression(new Max(end.toAttribute()).toAggregateExpression(),
        new WindowSpecDefinition(seq(one), seq(new ArrayList()), new SpecifiedWindowFrame(
            RowFrame$.MODULE$, UnboundedPreceding$.MODULE$, UnboundedFollowing$.MODULE$))));
    made = new Window(seq(Collections.singletonList(last)), seq(one), seq(new ArrayList()), made,
        none());

    final Expression whole = struct(session, first.toAttribute(), last.toAttribute());
    grouped.add(first.toAttribute());
    grouped.add(last.toAttribute());
    List items = new ArrayList();
    Iterator written = CollectionConverters.asJava(plan.aggregateExpressions()).iterator();
    while (written.hasNext()) {
      NamedExpression item = (NamedExpression) written.next();
      Expression inner = item instanceof Alias ? ((Alias) item).child() : (Expression) item;
      if (isAggregated(inner, session)) return plan;
      Expression merged = (Expression) inner.transform(of(session, whole));
      items.add(merged == item ? item : new Alias(merged, item.name(), item.exprId(),
          item.qualifier(), none(), seq(new ArrayList())));
    }
    return new Aggregate(seq(grouped), seq(items), made, none());
  }

  private static scala.PartialFunction of(final Attribute session, final Expression whole) {
    return new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return node instanceof Attribute && ((Attribute) node).semanticEquals(session);
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        return isDefinedAt(node) ? whole : otherwise.apply(node);
      }
    };
  }

  /** Returns whether an aggregate reads the session, which Spark has merged by then. */
  private static boolean isAggregated(Expression item, final Attribute session) {
    return item.exists(new scala.runtime.AbstractFunction1() {
      public Object apply(Object node) {
        return Boolean.valueOf(node instanceof AggregateExpression
            && ((Expression) node).references().contains(session));
      }
    });
  }

  private static Expression struct(Attribute session, Expression start, Expression end) {
    String[] names = ((StructType) session.dataType()).fieldNames();
    List fields = new ArrayList();
    fields.add(Literal$.MODULE$.apply(names[0]));
    fields.add(new MicrosToTimestamp(start));
    fields.add(Literal$.MODULE$.apply(names[1]));
    fields.add(new MicrosToTimestamp(end));
    return new CreateNamedStruct(seq(fields));
  }

  /** Returns the greatest value among the rows with the same keys that start up to a bound. */
  private static Expression over(Expression value, List keys, Expression at, Expression upper) {
    SpecifiedWindowFrame frame =
        new SpecifiedWindowFrame(RangeFrame$.MODULE$, UnboundedPreceding$.MODULE$, upper);
    return new WindowExpression(new Max(value).toAggregateExpression(),
        new WindowSpecDefinition(seq(keys), seq(Collections.singletonList(order(at))), frame));
  }

  private static LogicalPlan window(Alias call, List keys, Expression at, LogicalPlan child) {
    return new Window(seq(Collections.singletonList(call)), seq(new ArrayList(keys)),
        seq(Collections.singletonList(order(at))), child, none());
  }

  private static SortOrder order(Expression at) {
    return new SortOrder(at, Ascending$.MODULE$, NullsFirst$.MODULE$, seq(new ArrayList()));
  }

  // Parts of expressions.

  private static Expression when(Expression test, Expression value) {
    return new CaseWhen(seq(Collections.singletonList(new scala.Tuple2(test, value))), none());
  }

  private static Alias alias(Expression node) {
    return new Alias(node, "c", NamedExpression$.MODULE$.newExprId(), seq(new ArrayList()), none(),
        seq(new ArrayList()));
  }

  private static scala.Option none() {
    return scala.Option.empty();
  }

  private static scala.collection.immutable.Seq seq(List given) {
    return CollectionConverters.asScala(given).toSeq();
  }
}
