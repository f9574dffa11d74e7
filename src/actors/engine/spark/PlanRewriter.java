import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.EqualTo;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.IsNotNull;
import org.apache.spark.sql.catalyst.expressions.IsNull;
import org.apache.spark.sql.catalyst.expressions.Or;
import org.apache.spark.sql.catalyst.expressions.SubqueryExpression;
import org.apache.spark.sql.catalyst.plans.LeftAnti$;
import org.apache.spark.sql.catalyst.plans.logical.GlobalLimit;
import org.apache.spark.sql.catalyst.plans.logical.Join;
import org.apache.spark.sql.catalyst.plans.logical.LocalLimit;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Offset;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RebalancePartitions;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionOperation;
import org.apache.spark.sql.catalyst.plans.logical.Sort;
import org.apache.spark.sql.catalyst.plans.logical.Subquery;
import org.apache.spark.sql.catalyst.plans.logical.SubqueryAlias;
import org.apache.spark.sql.catalyst.plans.logical.Tail;
import org.apache.spark.sql.catalyst.rules.Rule;

/**
 * Applies rules of Catalyst, given by their names, to an analysed plan. Compiled by Janino, which
 * comes with Spark and supports neither generics nor lambdas.
 */
public class PlanRewriter {
  /** More rounds than any plan needs: each round pushes something further down or removes a
   *  node. */
  private static final int ROUNDS_MAX = 100;

  /**
   * Returns the plan after applying the rules `once` and then, until nothing changes, the rules
   * `repeated`. Both are class names, one per line. The plans of subqueries are rewritten first,
   * from the innermost outwards.
   */
  public static Object rewrite(Object plan, String once, String repeated) throws Exception {
    return rewritten((LogicalPlan) plan, rules(once), rules(repeated));
  }

  private static Rule[] rules(String names) throws Exception {
    String[] lines = names.split("\n");
    Rule[] found = new Rule[lines.length];
    for (int i = 0; i < lines.length; i++) found[i] = rule(lines[i]);
    return found;
  }

  /** Returns a rule by its name: an object, or a class with flags, which are given in brackets. */
  private static Rule rule(String name) throws Exception {
    ClassLoader loader = Thread.currentThread().getContextClassLoader();
    int bracket = name.indexOf('(');
    if (bracket < 0) {
      return (Rule) loader.loadClass(name + "$").getField("MODULE$").get(null);
    }
    String[] written = name.substring(bracket + 1, name.length() - 1).split(",");
    Class[] kinds = new Class[written.length];
    Object[] flags = new Object[written.length];
    for (int i = 0; i < written.length; i++) {
      kinds[i] = Boolean.TYPE;
      flags[i] = Boolean.valueOf(written[i].trim());
    }
    return (Rule) loader.loadClass(name.substring(0, bracket)).getConstructor(kinds).newInstance(flags);
  }

  private static LogicalPlan rewritten(LogicalPlan plan, final Rule[] once, final Rule[] repeated) {
    LogicalPlan made = withoutOrder(plan, false);
    for (int i = 0; i < once.length; i++) made = (LogicalPlan) once[i].apply(made);
    for (int round = 0; round < ROUNDS_MAX; round++) {
      LogicalPlan before = made;
      made = withSubqueries(made, once, repeated);
      for (int i = 0; i < repeated.length; i++) made = (LogicalPlan) repeated[i].apply(made);
      made = withoutUnknowns(made);
      if (made.fastEquals(before)) return made;
    }
    throw new IllegalStateException("rules do not come to an end");
  }

  /** Contents are a bag, so order and partitions matter only below a limit. `kept`: whether the
   *  order of this plan's rows decides which of them a limit above takes. */
  private static LogicalPlan withoutOrder(LogicalPlan plan, boolean kept) {
    boolean order = plan instanceof Sort;
    if ((order && !kept) || plan instanceof RepartitionOperation
        || plan instanceof RebalancePartitions) {
      return withoutOrder((LogicalPlan) plan.children().head(), kept);
    }
    final boolean below = plan instanceof GlobalLimit || plan instanceof LocalLimit
        || plan instanceof Offset || plan instanceof Tail
        || kept && (plan instanceof Project || plan instanceof SubqueryAlias);
    return (LogicalPlan) plan.mapChildren(new scala.runtime.AbstractFunction1() {
      public Object apply(Object child) {
        return withoutOrder((LogicalPlan) child, below);
      }
    });
  }

  /** NOT IN becomes an anti join on `a = b OR (a = b) IS NULL`. If neither can be NULL, the
   *  equality suffices. Spark's own rule for that, NullPropagation, would also fold expressions
   *  that must be written again. */
  private static LogicalPlan withoutUnknowns(LogicalPlan plan) {
    return (LogicalPlan) plan.transformDown(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return isAntiJoin(node);
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        if (!isAntiJoin(node)) return otherwise.apply(node);
        final Join join = (Join) node;
        Expression condition = (Expression) join.condition().get();
        Object made = condition.transformDown(new scala.runtime.AbstractPartialFunction() {
          public boolean isDefinedAt(Object each) {
            return isKnown(each, join);
          }
          public Object applyOrElse(Object each, scala.Function1 otherwise) {
            return isKnown(each, join) ? ((Or) each).left() : otherwise.apply(each);
          }
        });
        if (made == condition) return join;
        return new Join(
            join.left(), join.right(), join.joinType(), new scala.Some(made), join.hint());
      }
    });
  }

  private static boolean isAntiJoin(Object node) {
    return node instanceof Join && ((Join) node).joinType() == LeftAnti$.MODULE$
        && ((Join) node).condition().isDefined();
  }

  /** Returns whether this is `a = b OR (a = b) IS NULL` over values that are never NULL. */
  private static boolean isKnown(Object node, Join join) {
    if (!(node instanceof Or) || !(((Or) node).left() instanceof EqualTo)) return false;
    Or or = (Or) node;
    if (!(or.right() instanceof IsNull)) return false;
    EqualTo equal = (EqualTo) or.left();
    return ((IsNull) or.right()).child().semanticEquals(equal)
        && isNeverNull(equal.left(), join) && isNeverNull(equal.right(), join);
  }

  /** Returns whether a side is never NULL, because of its type or because the joined rows were
   *  filtered by it. */
  private static boolean isNeverNull(Expression side, Join join) {
    if (!side.nullable()) return true;
    if (!(side instanceof Attribute)) return false;
    Expression test = new IsNotNull(side);
    return isAmong(test, join.left()) || isAmong(test, join.right());
  }

  private static boolean isAmong(Expression test, LogicalPlan plan) {
    return plan.outputSet().contains((Attribute) ((IsNotNull) test).child())
        && plan.constraints().contains(test);
  }

  /** Rules do not visit the plans of subqueries by themselves, so nested correlation would
   *  remain. A mark at the root tells them that its columns keep their ids, which conditions
   *  outside refer to. */
  private static LogicalPlan withSubqueries(
      LogicalPlan plan, final Rule[] once, final Rule[] repeated) {
    return (LogicalPlan) plan.transformAllExpressions(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return node instanceof SubqueryExpression;
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        if (!(node instanceof SubqueryExpression)) return otherwise.apply(node);
        SubqueryExpression it = (SubqueryExpression) node;
        Subquery marked = new Subquery((LogicalPlan) it.plan(), it.isCorrelated());
        return it.withNewPlan(((Subquery) rewritten(marked, once, repeated)).child());
      }
    });
  }
}
