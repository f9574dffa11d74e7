import org.apache.spark.sql.catalyst.expressions.SubqueryExpression;
import org.apache.spark.sql.catalyst.plans.logical.GlobalLimit;
import org.apache.spark.sql.catalyst.plans.logical.LocalLimit;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Offset;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.RebalancePartitions;
import org.apache.spark.sql.catalyst.plans.logical.RepartitionOperation;
import org.apache.spark.sql.catalyst.plans.logical.Sort;
import org.apache.spark.sql.catalyst.plans.logical.SubqueryAlias;
import org.apache.spark.sql.catalyst.plans.logical.Tail;
import org.apache.spark.sql.catalyst.rules.Rule;

/**
 * Applies rules of Catalyst, given by their names, to an analysed plan. Compiled by Janino, which
 * comes with Spark and knows no generics and no lambdas.
 */
public class PlanRewriter {
  /** More rounds than any plan takes: each pushes something further down or removes a node. */
  private static final int ROUNDS_MAX = 100;

  /**
   * Returns the plan after the rules `once` and then, until nothing changes, the rules `repeated`.
   * Both are class names, one a line; the plans of subqueries are rewritten first, innermost first.
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

  /** Returns a rule that is an object; one that is a class with flags is given in brackets. */
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
      if (made.fastEquals(before)) return made;
    }
    throw new IllegalStateException("rules do not come to an end");
  }

  /** Contents are a bag: order and partitions mean nothing but below a limit. `kept`: whether the
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

  /** Rules do not go into the plans of subqueries by themselves: nested correlation would stay. */
  private static LogicalPlan withSubqueries(
      LogicalPlan plan, final Rule[] once, final Rule[] repeated) {
    return (LogicalPlan) plan.transformAllExpressions(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return node instanceof SubqueryExpression;
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        if (!(node instanceof SubqueryExpression)) return otherwise.apply(node);
        SubqueryExpression it = (SubqueryExpression) node;
        return it.withNewPlan(rewritten((LogicalPlan) it.plan(), once, repeated));
      }
    });
  }
}
