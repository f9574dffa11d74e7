import java.util.IdentityHashMap;
import java.util.LinkedHashSet;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.regex.Pattern;
import org.antlr.v4.runtime.tree.ParseTree;
import org.apache.spark.sql.catalyst.analysis.EliminateSubqueryAliases$;
import org.apache.spark.sql.catalyst.analysis.EliminateView$;
import org.apache.spark.sql.catalyst.analysis.ResolvedInlineTable;
import org.apache.spark.sql.catalyst.expressions.AesEncrypt;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.Cast;
import org.apache.spark.sql.catalyst.expressions.CurrentDate;
import org.apache.spark.sql.catalyst.expressions.CurrentTimestampLike;
import org.apache.spark.sql.catalyst.expressions.ExprId;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.LocalTimestamp;
import org.apache.spark.sql.catalyst.expressions.PlanExpression;
import org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable;
import org.apache.spark.sql.catalyst.expressions.SubqueryExpression;
import org.apache.spark.sql.catalyst.expressions.TimestampAdd;
import org.apache.spark.sql.catalyst.expressions.TimestampDiff;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateFunction;
import org.apache.spark.sql.catalyst.optimizer.BooleanSimplification$;
import org.apache.spark.sql.catalyst.optimizer.ConstantFolding$;
import org.apache.spark.sql.catalyst.optimizer.InlineCTE;
import org.apache.spark.sql.catalyst.optimizer.RemoveNoopOperators$;
import org.apache.spark.sql.catalyst.optimizer.ReplaceExpressions$;
import org.apache.spark.sql.catalyst.parser.AbstractSqlParser;
import org.apache.spark.sql.catalyst.parser.SqlBaseParser;
import org.apache.spark.sql.catalyst.plans.Cross$;
import org.apache.spark.sql.catalyst.plans.Inner$;
import org.apache.spark.sql.catalyst.plans.logical.CTERelationRef;
import org.apache.spark.sql.catalyst.plans.logical.Join;
import org.apache.spark.sql.catalyst.plans.logical.LocalRelation;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.OneRowRelation;
import org.apache.spark.sql.catalyst.plans.logical.Range;
import org.apache.spark.sql.catalyst.plans.logical.Sample;
import org.apache.spark.sql.catalyst.plans.logical.UnionLoopRef;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreePattern;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Metadata;
import org.apache.spark.sql.types.StringType;

/**
 * Answers questions about analysed plans that only Catalyst can answer: whether two plans are the
 * same query, and whether a query's result depends on more than its tables. Compiled by Janino,
 * which comes with Spark and supports neither generics nor lambdas.
 */
public class PlanInspector {
  /** Words that denote the day or the time if a string becomes a date or a timestamp. */
  private static final Pattern MOVING =
      Pattern.compile("\\b(now|today|yesterday|tomorrow)\\b", Pattern.CASE_INSENSITIVE);
  private static final int LINE_CHARACTERS_MAX = 200;
  private static final java.util.UUID CLOCK_IDS = java.util.UUID.randomUUID();

  private final Map seen = new IdentityHashMap();
  private String found = "";
  private String clock = "";

  // Two plans: whether they are the same query.

  /**
   * Returns the first line of the left plan that differs in the right one; "" if both are the same
   * query after rules that do not change the meaning.
   */
  public static String difference(Object left, Object right) {
    LogicalPlan mine = normalised((LogicalPlan) left);
    LogicalPlan theirs = normalised((LogicalPlan) right);
    if (mine.sameResult(theirs)) return "";
    String[] lines = mine.toString().split("\n");
    String[] own = mine.canonicalized().toString().split("\n");
    String[] others = theirs.canonicalized().toString().split("\n");
    int at = 0;
    while (at < own.length && at < others.length && own[at].equals(others[at])) at++;
    String line = at < lines.length ? lines[at] : lines[0];
    line = line.replaceAll("#\\d+L?", "").replaceAll("^[ :+|-]+", "");
    return line.length() > LINE_CHARACTERS_MAX ? line.substring(0, LINE_CHARACTERS_MAX) : line;
  }

  /**
   * Returns a plan without what may differ between two ways to write the same query: table
   * expressions, aliases of relations, other names of a function, constants that are not computed
   * yet, double negations, a product written with a comma or CROSS JOIN.
   */
  private static LogicalPlan normalised(LogicalPlan plan) {
    final Rule[] rules = new Rule[] {
      new InlineCTE(true, false, false),
      (Rule) EliminateSubqueryAliases$.MODULE$,
      (Rule) EliminateView$.MODULE$,
      (Rule) ReplaceExpressions$.MODULE$,
      (Rule) ConstantFolding$.MODULE$,
      (Rule) BooleanSimplification$.MODULE$,
      (Rule) RemoveNoopOperators$.MODULE$,
    };
    return normalised(plan, rules);
  }

  private static LogicalPlan normalised(LogicalPlan plan, final Rule[] rules) {
    LogicalPlan made = withClockAsColumn(plan);
    for (int i = 0; i < rules.length; i++) made = (LogicalPlan) rules[i].apply(made);
    made = (LogicalPlan) made.transformUp(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return node instanceof Join && ((Join) node).joinType() == Cross$.MODULE$;
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        if (!isDefinedAt(node)) return otherwise.apply(node);
        Join it = (Join) node;
        return new Join(it.left(), it.right(), Inner$.MODULE$, it.condition(), it.hint());
      }
    });
    // Rules do not visit the plans of subqueries by themselves.
    return (LogicalPlan) made.transformAllExpressions(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return node instanceof SubqueryExpression
            || node instanceof TimestampAdd || node instanceof TimestampDiff;
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        if (node instanceof SubqueryExpression) {
          SubqueryExpression it = (SubqueryExpression) node;
          return it.withNewPlan(normalised((LogicalPlan) it.plan(), rules));
        }
        if (node instanceof TimestampAdd) {
          TimestampAdd it = (TimestampAdd) node;
          String unit = it.unit().toUpperCase(Locale.ROOT);
          return new TimestampAdd(unit, it.quantity(), it.timestamp(), it.timeZoneId());
        }
        if (node instanceof TimestampDiff) {
          TimestampDiff it = (TimestampDiff) node;
          String unit = it.unit().toUpperCase(Locale.ROOT);
          return new TimestampDiff(unit, it.startTimestamp(), it.endTimestamp(), it.timeZoneId());
        }
        return otherwise.apply(node);
      }
    });
  }

  /** Returns a plan in which calls of the clock are columns, so that all other constants are
   *  computed. */
  private static LogicalPlan withClockAsColumn(LogicalPlan plan) {
    return (LogicalPlan) plan.transformAllExpressions(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return isClock(node);
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        if (!isDefinedAt(node)) return otherwise.apply(node);
        DataType kind = ((Expression) node).dataType();
        ExprId id = new ExprId(kind.hashCode(), CLOCK_IDS);
        scala.collection.immutable.Seq none = scala.collection.immutable.Nil$.MODULE$;
        return new AttributeReference("clock", kind, false, Metadata.empty(), id, none);
      }
    });
  }

  private static boolean isClock(Object node) {
    return node instanceof CurrentTimestampLike || node instanceof CurrentDate
        || node instanceof LocalTimestamp;
  }

  // One plan: what it reads.

  /**
   * Returns the numbers of the tables that an analysed plan reads, in its order, separated by
   * commas; or "!" and the first relation that is not one of them. The columns of a table have its
   * number in their metadata under `key`.
   */
  public static String tables(Object plan, String key) {
    LinkedHashSet numbers = new LinkedHashSet();
    String foreign = tables((LogicalPlan) plan, key, numbers, new IdentityHashMap());
    if (foreign != null) return "!" + foreign;
    StringBuilder text = new StringBuilder();
    for (Object number : numbers) text.append(text.length() == 0 ? "" : ",").append(number);
    return text.toString();
  }

  private static String tables(LogicalPlan plan, String key, Set numbers, Map seen) {
    if (seen.put(plan, plan) != null) return null;
    if (plan.children().isEmpty() && !(plan instanceof CTERelationRef)) {
      boolean values = plan instanceof LocalRelation || plan instanceof OneRowRelation
          || plan instanceof Range || plan instanceof UnionLoopRef
          || plan instanceof ResolvedInlineTable; // VALUES with the clock in it
      if (!values) {
        String line = plan.toString().split("\n")[0].replaceAll("#\\d+L?", "");
        return line.length() > LINE_CHARACTERS_MAX ? line.substring(0, LINE_CHARACTERS_MAX) : line;
      }
      scala.collection.Iterator columns = plan.output().iterator();
      while (columns.hasNext()) {
        Metadata marks = ((Attribute) columns.next()).metadata();
        if (plan instanceof LocalRelation && marks.contains(key)) numbers.add(marks.getLong(key));
      }
    }
    String foreign = null;
    scala.collection.Iterator below = plan.children().iterator();
    while (foreign == null && below.hasNext()) {
      foreign = tables((LogicalPlan) below.next(), key, numbers, seen);
    }
    scala.collection.Iterator queries = plan.subqueries().iterator();
    while (foreign == null && queries.hasNext()) {
      foreign = tables((LogicalPlan) queries.next(), key, numbers, seen);
    }
    return foreign;
  }

  // One plan: what else its result depends on.

  /**
   * Returns the call or literal that makes the result of a query depend on more than its tables; ""
   * if there is none. The first character is "@" for the time, the session or the release, "?" for
   * randomness, and "&" if there are only calls of the clock. Takes the parser of the session, the
   * text of the query and its analysed plan.
   */
  public static String volatileCall(Object parser, String text, Object plan) {
    PlanInspector inspector = new PlanInspector();
    inspector.visitPlan((LogicalPlan) plan);
    if (inspector.found.isEmpty()) inspector.visitText((AbstractSqlParser) parser, text);
    return inspector.found.isEmpty() ? inspector.clock : inspector.found;
  }

  private void visitPlan(LogicalPlan plan) {
    if (!found.isEmpty() || seen.put(plan, plan) != null) return;
    if (plan instanceof Sample) {
      found = "?TABLESAMPLE";
      return;
    }
    scala.collection.Iterator own = plan.expressions().iterator();
    while (own.hasNext()) visit((Expression) own.next(), "");
    scala.collection.Iterator below = plan.children().iterator();
    while (below.hasNext()) visitPlan((LogicalPlan) below.next());
  }

  /** Searches below first, so that the innermost call is found. `name`: the name of a call that
   *  the expression stands for; "" if it stands for itself. */
  private void visit(Expression node, String name) {
    if (!found.isEmpty() || seen.put(node, node) != null) return;
    boolean replaceable = node instanceof RuntimeReplaceable;
    String pretty = node.prettyName().toLowerCase(Locale.ROOT);
    String called = name.isEmpty() || replaceable ? pretty : name;
    boolean moving = node.containsPattern(TreePattern.CURRENT_LIKE());
    // Aggregates that may choose among rows (first) do not count as random: they are recomputed.
    boolean drawn = !node.deterministic() && !(node instanceof AggregateFunction);
    scala.collection.Iterator below = node.children().iterator();
    while (below.hasNext()) {
      Expression child = (Expression) below.next();
      visit(child, replaceable ? called : name);
      moving = moving && !child.containsPattern(TreePattern.CURRENT_LIKE());
      drawn = drawn && child.deterministic();
    }
    if (replaceable) visit(((RuntimeReplaceable) node).replacement(), called);
    if (node instanceof PlanExpression && ((PlanExpression) node).plan() instanceof LogicalPlan) {
      LogicalPlan plan = (LogicalPlan) ((PlanExpression) node).plan();
      visitPlan(plan);
      moving = moving && !plan.containsPattern(TreePattern.CURRENT_LIKE());
      drawn = drawn && plan.deterministic();
    }
    if (!found.isEmpty()) return;
    if (isClock(node)) {
      if (clock.isEmpty()) clock = "&" + pretty + "()";
      return;
    }
    if (moving || node.getClass().getSimpleName().equals("SparkVersion")) {
      found = "@" + called + "()";
    } else if (drawn || node instanceof AesEncrypt && drawsVector((AesEncrypt) node)) {
      found = "?" + called + "()";
    } else if (node instanceof Cast) {
      visitCast((Cast) node);
    }
  }

  /** Returns whether an encryption may draw a random initialization vector, which Spark does not
   *  flag. */
  private static boolean drawsVector(AesEncrypt node) {
    String mode = constant(node.mode());
    if (mode != null && mode.equalsIgnoreCase("ECB")) return false;
    if (!node.iv().foldable()) return true;
    Object vector = node.iv().eval(null);
    return vector instanceof byte[] && ((byte[]) vector).length == 0;
  }

  private void visitCast(Cast node) {
    String kind = node.dataType().typeName();
    boolean day = kind.equals("date") || kind.startsWith("timestamp");
    if (!day || !(node.child().dataType() instanceof StringType)) return;
    String value = constant(node.child());
    if (value != null && MOVING.matcher(value).find()) found = "@the " + kind + " '" + value + "'";
  }

  private static String constant(Expression node) {
    if (!node.foldable()) return null;
    try {
      Object value = node.eval(null);
      return value == null ? null : value.toString();
    } catch (Throwable fails) {  // whoever evaluates it will see the error
      return null;
    }
  }

  /** Typed literals become values when they are parsed, so their words are only in the text. */
  private void visitText(AbstractSqlParser parser, String text) {
    parser.parse(text, new scala.runtime.AbstractFunction1() {
      public Object apply(Object given) {
        visitTree(((SqlBaseParser) given).compoundOrSingleStatement());
        return null;
      }
    });
  }

  private void visitTree(ParseTree tree) {
    if (tree instanceof SqlBaseParser.TypeConstructorContext) {
      String written = tree.getText();
      boolean day = written.toLowerCase(Locale.ROOT).matches("(?s)(date|timestamp).*");
      if (day && MOVING.matcher(written).find()) found = "@the literal " + written;
    }
    for (int i = 0; i < tree.getChildCount(); i++) visitTree(tree.getChild(i));
  }
}
