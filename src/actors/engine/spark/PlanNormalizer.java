import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.analysis.FunctionRegistry$;
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.And;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.expressions.AttributeReference;
import org.apache.spark.sql.catalyst.expressions.CaseWhen;
import org.apache.spark.sql.catalyst.expressions.Cast$;
import org.apache.spark.sql.catalyst.expressions.CreateNamedStruct;
import org.apache.spark.sql.catalyst.expressions.EqualNullSafe;
import org.apache.spark.sql.catalyst.expressions.EqualTo;
import org.apache.spark.sql.catalyst.expressions.Exists;
import org.apache.spark.sql.catalyst.expressions.ExprId;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.GreaterThan;
import org.apache.spark.sql.catalyst.expressions.IsNotNull;
import org.apache.spark.sql.catalyst.expressions.IsNull;
import org.apache.spark.sql.catalyst.expressions.KnownNullable;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.Literal$;
import org.apache.spark.sql.catalyst.expressions.MicrosToTimestamp;
import org.apache.spark.sql.catalyst.expressions.NamedExpression;
import org.apache.spark.sql.catalyst.expressions.NamedExpression$;
import org.apache.spark.sql.catalyst.expressions.Or;
import org.apache.spark.sql.catalyst.expressions.PreciseTimestampConversion;
import org.apache.spark.sql.catalyst.expressions.RaiseError;
import org.apache.spark.sql.catalyst.expressions.ScalarSubquery;
import org.apache.spark.sql.catalyst.expressions.SubqueryExpression;
import org.apache.spark.sql.catalyst.expressions.UnixMicros;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateExpression;
import org.apache.spark.sql.catalyst.expressions.aggregate.AggregateFunction;
import org.apache.spark.sql.catalyst.expressions.aggregate.Count;
import org.apache.spark.sql.catalyst.expressions.aggregate.Max;
import org.apache.spark.sql.catalyst.optimizer.BooleanSimplification$;
import org.apache.spark.sql.catalyst.optimizer.ColumnPruning$;
import org.apache.spark.sql.catalyst.optimizer.PruneFilters$;
import org.apache.spark.sql.catalyst.plans.Cross$;
import org.apache.spark.sql.catalyst.plans.ExistenceJoin;
import org.apache.spark.sql.catalyst.plans.FullOuter$;
import org.apache.spark.sql.catalyst.plans.Inner$;
import org.apache.spark.sql.catalyst.plans.JoinType;
import org.apache.spark.sql.catalyst.plans.LeftAnti$;
import org.apache.spark.sql.catalyst.plans.LeftOuter$;
import org.apache.spark.sql.catalyst.plans.LeftSemi$;
import org.apache.spark.sql.catalyst.plans.QueryPlan$;
import org.apache.spark.sql.catalyst.plans.RightOuter$;
import org.apache.spark.sql.catalyst.plans.logical.Aggregate;
import org.apache.spark.sql.catalyst.plans.logical.Expand;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.Generate;
import org.apache.spark.sql.catalyst.plans.logical.GlobalLimit;
import org.apache.spark.sql.catalyst.plans.logical.Join;
import org.apache.spark.sql.catalyst.plans.logical.JoinHint$;
import org.apache.spark.sql.catalyst.plans.logical.LocalLimit;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Offset;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.Sort;
import org.apache.spark.sql.catalyst.plans.logical.Union;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.LongType;
import scala.jdk.javaapi.CollectionConverters;

/**
 * Brings a rewritten plan into a form that does not depend on how the query was written: columns
 * are not renamed or pruned, expressions are inlined where they are used, inner joins become one
 * product under a sorted conjunction, and aggregates have no FILTER. Two plans in this form are the
 * same query if they are canonically equal. The form is only compared and never run.
 *
 * Compiled by Janino, which comes with Spark and supports neither generics nor lambdas.
 */
public class PlanNormalizer {
  private static final int PRUNING_ROUNDS_MAX = 20;
  private static final String TOO_MANY_ROWS = "[SCALAR_SUBQUERY_TOO_MANY_ROWS] More than one row "
      + "returned by a subquery used as an expression.";
  /** Aggregates that ignore NULL, so that a FILTER is a CASE in their argument. */
  private static final List PASS_OVER_NULL = java.util.Arrays.asList(new String[] {
    "Count", "CountIf", "Sum", "Average", "Min", "Max", "StddevSamp", "StddevPop", "VarianceSamp",
    "VariancePop", "BoolAnd", "BoolOr"});
  /** Those of them that repeated values do not affect. */
  private static final List SAME_DISTINCT =
      java.util.Arrays.asList(new String[] {"Min", "Max", "BoolAnd", "BoolOr"});

  /** A product of plans under a conjunction, with the expressions that attributes of the query
   *  stand for in it. */
  private static class Block {
    final List plans = new ArrayList();
    final List conjuncts = new ArrayList();
    final Map columns = new LinkedHashMap();
  }

  /** Returns the normal form of a plan that went through the rules. */
  public static LogicalPlan normalForm(LogicalPlan plan) {
    LogicalPlan made = projected(plan.output(), visit(plan));
    // Columns that were read only by a filter above are no longer read once the filter has moved
    // into a union, and there it may always be true.
    for (int round = 0; round < PRUNING_ROUNDS_MAX; round++) {
      LogicalPlan before = made;
      made = (LogicalPlan) BooleanSimplification$.MODULE$.apply(made);
      made = (LogicalPlan) PruneFilters$.MODULE$.apply(made);
      made = ColumnPruning$.MODULE$.apply(made);
      if (made.fastEquals(before)) break;
    }
    return made;
  }

  private static Block visit(LogicalPlan plan) {
    if (plan instanceof Project) return visitProject((Project) plan);
    if (plan instanceof Filter) {
      Block block = visit(((Filter) plan).child());
      addConjuncts(block, lifted(((Filter) plan).condition(), block));
      return block;
    }
    if (plan instanceof Join) return visitJoin((Join) plan);
    if (plan instanceof Aggregate) return visitAggregate((Aggregate) plan);
    if (plan instanceof Union) return visitUnion((Union) plan);
    if (plan instanceof Expand) return visitExpand((Expand) plan);
    if (plan instanceof GlobalLimit || plan instanceof LocalLimit || plan instanceof Offset
        || plan instanceof Sort) {
      return visitChoice(plan);
    }
    return visitOther(plan);
  }

  private static Block visitProject(Project plan) {
    Block block = visit(plan.child());
    Map made = new LinkedHashMap();
    Iterator items = list(plan.projectList()).iterator();
    while (items.hasNext()) {
      NamedExpression item = (NamedExpression) items.next();
      Expression bare = lifted(withoutAlias(item), block);
      made.put(item.exprId(), substituted(bare, block.columns));
    }
    block.columns.clear();
    block.columns.putAll(made);
    return block;
  }

  private static Block visitJoin(Join plan) {
    JoinType type = plan.joinType();
    boolean turned = type == RightOuter$.MODULE$;
    Block left = visit(turned ? plan.right() : plan.left());
    Block right = visit(turned ? plan.left() : plan.right());
    if (turned) type = LeftOuter$.MODULE$;
    if (type instanceof ExistenceJoin) return visitMark(plan, left, right);
    if (type == LeftAnti$.MODULE$ && plan.condition().isDefined()) {
      List parts = new ArrayList();
      split((Expression) plan.condition().get(), Collections.EMPTY_MAP, parts);
      for (int i = 0; i < parts.size(); i++) {
        if (isNullAware((Expression) parts.get(i))) return visitNotIn(plan, left, right);
      }
    }
    if (type == Inner$.MODULE$ || type == Cross$.MODULE$) {
      left.plans.addAll(right.plans);
      left.conjuncts.addAll(right.conjuncts);
      left.columns.putAll(right.columns);
      if (plan.condition().isDefined()) addConjuncts(left, (Expression) plan.condition().get());
      return left;
    }
    Map both = new HashMap(left.columns);
    both.putAll(right.columns);
    boolean one = type == LeftSemi$.MODULE$ || type == LeftAnti$.MODULE$;
    // Tests of rows that a join keeps may be above the join as well as inside it.
    boolean full = type == FullOuter$.MODULE$;
    LogicalPlan mine = full ? padded(left) : product(left);
    LogicalPlan theirs = one ? closed(right) : padded(right);
    scala.Option condition = plan.condition();
    if (condition.isDefined()) {
      List parts = new ArrayList();
      split((Expression) condition.get(), both, parts);
      Join product = new Join(mine, theirs, Inner$.MODULE$, none(), JoinHint$.MODULE$.NONE());
      condition = scala.Option.apply(conjunction(parts, product));
    }
    Block block = new Block();
    block.plans.add(new Join(mine, theirs, type, condition, JoinHint$.MODULE$.NONE()));
    if (!full) block.conjuncts.addAll(left.conjuncts);
    block.columns.putAll(left.columns);
    if (!one) block.columns.putAll(right.columns);
    return block;
  }

  /** A semi join that keeps all rows becomes the rows with a match, for each reason for one, and
   *  the rows without a match. */
  private static Block visitMark(Join plan, Block left, Block right) {
    LogicalPlan rest = product(left);
    LogicalPlan theirs = closed(right);
    List output = list(plan.left().output());
    List children = new ArrayList();
    List reasons = reasons(plan.condition(), left, right, rest);
    for (int i = 0; i < reasons.size(); i++) {
      List tests = new ArrayList();
      List own = new ArrayList(left.conjuncts);
      List parts = (List) reasons.get(i);
      for (int j = 0; j < parts.size(); j++) {
        Expression part = (Expression) parts.get(j);
        // A predicate over only the left side may be above the join as well as inside it.
        boolean alone = j < parts.size() - 1 || reasons.size() == 1;
        (alone && part.references().subsetOf(rest.outputSet()) ? own : tests).add(part);
      }
      LogicalPlan joined = restricted(joined(rest, theirs, true, tests), own);
      children.add(marked(joined, output, left, true));
      rest = joined(rest, theirs, false, parts);
    }
    children.add(marked(restricted(rest, left.conjuncts), output, left, false));
    Block block = new Block();
    LogicalPlan union = new Union(seq(flat(children)), false, false);
    block.plans.add(union);
    List made = list(union.output());
    for (int i = 0; i < output.size(); i++) {
      Object id = ((Attribute) output.get(i)).exprId();
      if (!block.columns.containsKey(id)) block.columns.put(id, made.get(i));
    }
    Object mark = ((ExistenceJoin) plan.joinType()).exists().exprId();
    block.columns.put(mark, made.get(output.size()));
    return block;
  }

  private static LogicalPlan marked(LogicalPlan plan, List output, Block left, boolean matched) {
    List items = new ArrayList();
    for (int i = 0; i < output.size(); i++) {
      Expression item = substituted((Expression) output.get(i), left.columns);
      items.add(alias(item, NamedExpression$.MODULE$.newExprId()));
    }
    Expression mark = Literal$.MODULE$.apply(Boolean.valueOf(matched));
    items.add(alias(mark, NamedExpression$.MODULE$.newExprId()));
    return new Project(seq(items), plan);
  }

  /** ``a = b OR (a = b) IS NULL``, as made for NOT IN. */
  private static boolean isNullAware(Expression part) {
    return part instanceof Or && ((Or) part).left() instanceof EqualTo
        && ((Or) part).right() instanceof IsNull;
  }

  /** An anti join for each reason for which a row is dropped. */
  private static Block visitNotIn(Join plan, Block left, Block right) {
    LogicalPlan mine = product(left);
    LogicalPlan theirs = closed(right);
    List reasons = reasons(plan.condition(), left, right, mine);
    for (int i = 0; i < reasons.size(); i++) {
      mine = joined(mine, theirs, false, (List) reasons.get(i));
    }
    Block block = new Block();
    block.plans.add(mine);
    block.conjuncts.addAll(left.conjuncts);
    block.columns.putAll(left.columns);
    return block;
  }

  /**
   * Returns the conditions under which a row has a match, one for each reason. For a null-aware
   * equality these are an equal value, a NULL on the right, and a NULL in the row itself if the
   * right side has any row. The condition itself comes last in each.
   */
  private static List reasons(scala.Option condition, Block left, Block right, LogicalPlan mine) {
    Map both = new HashMap(left.columns);
    both.putAll(right.columns);
    List parts = new ArrayList();
    if (condition.isDefined()) split((Expression) condition.get(), Collections.EMPTY_MAP, parts);
    EqualTo given = null;
    List plain = new ArrayList();
    for (int i = 0; i < parts.size(); i++) {
      Expression part = (Expression) parts.get(i);
      if (given == null && isNullAware(part)) given = (EqualTo) ((Or) part).left();
      else plain.add(substituted(part, both));
    }
    if (given == null) return Collections.singletonList(plain);
    Expression a = substituted(given.left(), both);
    Expression b = substituted(given.right(), both);
    boolean aMayBeNull = given.left().nullable();
    boolean bMayBeNull = given.right().nullable();
    if (!a.references().subsetOf(mine.outputSet())) {
      Expression other = a;
      a = b;
      b = other;
      aMayBeNull = given.right().nullable();
      bMayBeNull = given.left().nullable();
    }
    List conditions = new ArrayList();
    conditions.add(new EqualTo(a, b));
    if (bMayBeNull) {
      conditions.add(new EqualNullSafe(Literal$.MODULE$.create(null, b.dataType()), b));
    }
    if (aMayBeNull) {
      Expression one = Literal$.MODULE$.apply(Integer.valueOf(1));
      conditions.add(new EqualTo(when(new IsNull(a), one), one));
    }
    List found = new ArrayList();
    for (int i = 0; i < conditions.size(); i++) {
      List all = new ArrayList(plain);
      all.add(conditions.get(i));
      found.add(all);
    }
    return found;
  }

  private static LogicalPlan joined(
      LogicalPlan mine, LogicalPlan theirs, boolean semi, List parts) {
    JoinType type = LeftAnti$.MODULE$;
    if (semi) type = LeftSemi$.MODULE$;
    Join product = new Join(mine, theirs, Inner$.MODULE$, none(), JoinHint$.MODULE$.NONE());
    scala.Option condition = scala.Option.apply(conjunction(parts, product));
    return new Join(mine, theirs, type, condition, JoinHint$.MODULE$.NONE());
  }

  /** Returns an expression in which a subquery without correlation is a column of the block: its
   *  only value, or whether it has a row. */
  private static Expression lifted(Expression node, final Block block) {
    return (Expression) node.transformUp(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object each) {
        return (each instanceof ScalarSubquery || each instanceof Exists)
            && ((SubqueryExpression) each).children().isEmpty();
      }
      public Object applyOrElse(Object each, scala.Function1 otherwise) {
        if (!isDefinedAt(each)) return otherwise.apply(each);
        SubqueryExpression it = (SubqueryExpression) each;
        if (!block.columns.containsKey(it.exprId())) {
          LogicalPlan plan = (LogicalPlan) it.plan();
          Block inner = visit(plan);
          Expression value;
          if (it instanceof Exists) {
            value = anyRow(inner);
          } else {
            Attribute output = (Attribute) plan.output().head();
            Object stands = inner.columns.get(output.exprId());
            value = (Expression) (stands == null ? output : stands);
            if (!isOneRow(plan)) value = singleValue(inner, value);
          }
          block.columns.put(it.exprId(), value);
          block.plans.addAll(inner.plans);
          block.conjuncts.addAll(inner.conjuncts);
        }
        return block.columns.get(it.exprId());
      }
    });
  }

  /** Turns a block into a single row that tells whether the block had any rows. */
  private static Expression anyRow(Block block) {
    LogicalPlan below = closed(block);
    Expression one = Literal$.MODULE$.apply(Integer.valueOf(1));
    Count count = new Count(seq(Collections.singletonList(one)));
    Alias rows = alias(count.toAggregateExpression(), NamedExpression$.MODULE$.newExprId());
    List items = Collections.singletonList(rows);
    block.plans.clear();
    block.conjuncts.clear();
    block.plans.add(new Aggregate(seq(new ArrayList()), seq(items), below, none()));
    return new GreaterThan(rows.toAttribute(), Literal$.MODULE$.apply(Long.valueOf(0L)));
  }

  /** Turns a block into a single row with its only value: NULL if it has no row, an error if it
   *  has two. */
  private static Expression singleValue(Block block, Expression value) {
    LogicalPlan below = closed(block);
    Expression one = Literal$.MODULE$.apply(Integer.valueOf(1));
    Count count = new Count(seq(Collections.singletonList(one)));
    Map sorted = new java.util.TreeMap();
    AggregateFunction[] functions = new AggregateFunction[] {count, new Max(value)};
    Alias[] columns = new Alias[2];
    for (int i = 0; i < 2; i++) {
      AggregateExpression call = functions[i].toAggregateExpression();
      columns[i] = alias(call, NamedExpression$.MODULE$.newExprId());
      sorted.put("call " + keyOf(call, below), columns[i]);
    }
    List items = new ArrayList(sorted.values());
    block.plans.clear();
    block.conjuncts.clear();
    block.plans.add(new Aggregate(seq(new ArrayList()), seq(items), below, none()));
    Expression rows = columns[0].toAttribute();
    Expression many = new GreaterThan(rows, Literal$.MODULE$.apply(Long.valueOf(1L)));
    Expression error = Cast$.MODULE$.apply(new RaiseError(Literal$.MODULE$.apply(TOO_MANY_ROWS)),
        value.dataType(), SQLConf.get().ansiEnabled());
    return new CaseWhen(seq(Collections.singletonList(new scala.Tuple2(many, error))),
        scala.Option.apply(columns[1].toAttribute()));
  }

  private static boolean isOneRow(LogicalPlan given) {
    LogicalPlan plan = given;
    while (plan instanceof Project) plan = ((Project) plan).child();
    return plan instanceof Aggregate && ((Aggregate) plan).groupingExpressions().isEmpty();
  }

  /** Lifts the subqueries that aggregates read; those read outside aggregates are lifted above
   *  the grouping. */
  private static Expression liftedInCalls(Expression node, final Block block) {
    return (Expression) node.transformUp(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object each) {
        return each instanceof AggregateExpression;
      }
      public Object applyOrElse(Object each, scala.Function1 otherwise) {
        return isDefinedAt(each) ? lifted((Expression) each, block) : otherwise.apply(each);
      }
    });
  }

  /** Calls and keys become columns of the grouping, in an order that does not depend on the
   *  text; expressions over them are inlined where they are used. */
  private static Block visitAggregate(Aggregate plan) {
    final Block block = visit(plan.child());
    List bare = new ArrayList();
    Iterator written = list(plan.aggregateExpressions()).iterator();
    while (written.hasNext()) bare.add(liftedInCalls(withoutAlias(written.next()), block));
    LogicalPlan below = closed(block);
    final Map places = new HashMap();
    List keys = new ArrayList();
    Map sorted = new java.util.TreeMap();
    Iterator given = list(plan.groupingExpressions()).iterator();
    while (given.hasNext()) {
      Expression key = substituted((Expression) given.next(), block.columns);
      keys.add(key);
      sorted.put("key " + keyOf(key, below), key);
    }
    List items = new ArrayList();
    Iterator results = list(plan.aggregateExpressions()).iterator();
    while (results.hasNext()) {
      NamedExpression item = (NamedExpression) results.next();
      Expression made = substituted((Expression) bare.get(items.size()), block.columns);
      final List calls = new ArrayList();
      made.foreach(new scala.runtime.AbstractFunction1() {
        public Object apply(Object node) {
          if (node instanceof AggregateExpression) calls.add(node);
          return null;
        }
      });
      for (int i = 0; i < calls.size(); i++) {
        AggregateExpression call = plain((AggregateExpression) calls.get(i));
        sorted.put("call " + keyOf(call, below), call);
      }
      items.add(new Object[] {item.exprId(), made});
    }
    List columns = new ArrayList();
    Iterator texts = sorted.keySet().iterator();
    while (texts.hasNext()) {
      String text = (String) texts.next();
      Alias column = alias((Expression) sorted.get(text), NamedExpression$.MODULE$.newExprId());
      columns.add(column);
      places.put(text, column.toAttribute());
    }
    Block made = new Block();
    Aggregate grouped = new Aggregate(seq(keys), seq(columns), below, none());
    made.plans.add(grouped);
    for (int i = 0; i < items.size(); i++) {
      Object[] item = (Object[]) items.get(i);
      made.columns.put(item[0], lifted(overCalls((Expression) item[1], places, below), made));
    }
    return made;
  }

  private static Expression overCalls(
      Expression item, final Map places, final LogicalPlan below) {
    return (Expression) item.transform(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object node) {
        return place(node) != null;
      }
      public Object applyOrElse(Object node, scala.Function1 otherwise) {
        Object found = place(node);
        return found == null ? otherwise.apply(node) : found;
      }
      private Object place(Object node) {
        if (node instanceof AggregateExpression) {
          return places.get("call " + keyOf(plain((AggregateExpression) node), below));
        }
        if (!(node instanceof Expression) || node instanceof Literal) return null;
        Expression it = (Expression) node;
        if (it.references().isEmpty() || holdsAggregate(it)) return null;
        return places.get("key " + keyOf(it, below));
      }
    });
  }

  private static boolean holdsAggregate(Expression node) {
    return node.exists(new scala.runtime.AbstractFunction1() {
      public Object apply(Object each) {
        return Boolean.valueOf(each instanceof AggregateExpression);
      }
    });
  }

  /** Returns a call without FILTER, and ``count`` with a single argument. */
  private static AggregateExpression plain(AggregateExpression call) {
    AggregateFunction function = call.aggregateFunction();
    String name = function.getClass().getSimpleName();
    if (!PASS_OVER_NULL.contains(name)) return call;
    boolean distinct = call.isDistinct() && !SAME_DISTINCT.contains(name);
    List arguments = new ArrayList(list(function.children()));
    Expression one = Literal$.MODULE$.apply(Integer.valueOf(1));
    Expression argument = (Expression) arguments.get(0);
    if (name.equals("CountIf")) {
      argument = when(argument, one);
    } else if (arguments.size() > 1) {
      List tests = new ArrayList();
      List fields = new ArrayList();
      for (int i = 0; i < arguments.size(); i++) {
        tests.add(new IsNotNull((Expression) arguments.get(i)));
        fields.add(Literal$.MODULE$.apply("c" + i));
        fields.add(arguments.get(i));
      }
      argument = when(conjunction(tests), distinct ? new CreateNamedStruct(seq(fields)) : one);
    } else if (name.equals("Count") && !distinct && !argument.nullable()) {
      argument = one;
    }
    if (call.filter().isDefined()) argument = when((Expression) call.filter().get(), argument);
    AggregateFunction made = name.startsWith("Count")
        ? new Count(seq(Collections.singletonList(argument)))
        : (AggregateFunction) function.withNewChildren(seq(Collections.singletonList(argument)));
    return new AggregateExpression(made, call.mode(), distinct, none(), call.resultId());
  }

  private static Expression when(Expression test, Expression value) {
    return new CaseWhen(seq(Collections.singletonList(new scala.Tuple2(test, value))), none());
  }

  private static Block visitUnion(Union plan) {
    List children = new ArrayList();
    Iterator given = list(plan.children()).iterator();
    while (given.hasNext()) {
      LogicalPlan child = (LogicalPlan) given.next();
      children.add(projected(child.output(), visit(child)));
    }
    LogicalPlan made = new Union(seq(flat(children)), plan.byName(), plan.allowMissingCol());
    return renumbered(plan, made);
  }

  /** Returns the inputs of a union, with nested unions replaced by their inputs. */
  private static List flat(List children) {
    List made = new ArrayList();
    for (int i = 0; i < children.size(); i++) {
      Project child = (Project) children.get(i);
      if (!(child.child() instanceof Union)) {
        made.add(child);
        continue;
      }
      List output = list(child.child().output());
      Iterator inner = list(child.child().children()).iterator();
      while (inner.hasNext()) {
        Project branch = (Project) inner.next();
        Map columns = branchColumns(output, branch);
        List items = new ArrayList();
        Iterator given = list(child.projectList()).iterator();
        while (given.hasNext()) {
          Expression item = substituted(withoutAlias(given.next()), columns);
          items.add(alias(item, NamedExpression$.MODULE$.newExprId()));
        }
        made.add(new Project(seq(items), branch.child()));
      }
    }
    return made;
  }

  private static Map branchColumns(List output, Project branch) {
    Map columns = new HashMap();
    List items = list(branch.projectList());
    for (int i = 0; i < items.size(); i++) {
      columns.put(((Attribute) output.get(i)).exprId(), withoutAlias(items.get(i)));
    }
    return columns;
  }

  /** An expansion is a union of projections of one input. */
  private static Block visitExpand(Expand plan) {
    Block block = visit(plan.child());
    LogicalPlan below = closed(block);
    List children = new ArrayList();
    Iterator rows = list(plan.projections()).iterator();
    while (rows.hasNext()) {
      List items = new ArrayList();
      Iterator given = list((scala.collection.immutable.Seq) rows.next()).iterator();
      while (given.hasNext()) {
        Expression item = substituted((Expression) given.next(), block.columns);
        items.add(alias(item, NamedExpression$.MODULE$.newExprId()));
      }
      children.add(new Project(seq(items), below));
    }
    if (children.size() == 1) return renumbered(plan, (LogicalPlan) children.get(0));
    return renumbered(plan, new Union(seq(flat(children)), false, false));
  }

  /** Operators that order rows, or take some of them, do not change the rows. */
  private static Block visitChoice(LogicalPlan plan) {
    Block block = visit((LogicalPlan) plan.children().head());
    LogicalPlan below = closed(block);
    LogicalPlan made = (LogicalPlan) withColumns(plan, block.columns)
        .withNewChildren(seq(Collections.singletonList(below)));
    block.plans.clear();
    block.conjuncts.clear();
    block.plans.add(made);
    return block;
  }

  /** Returns a block of a single plan whose output columns replace those of another plan, by
   *  position. */
  private static Block renumbered(LogicalPlan before, LogicalPlan after) {
    Block block = new Block();
    block.plans.add(after);
    List old = list(before.output());
    List now = list(after.output());
    for (int i = 0; i < old.size(); i++) {
      ExprId id = ((Attribute) old.get(i)).exprId();
      if (!block.columns.containsKey(id)) block.columns.put(id, now.get(i));
    }
    return block;
  }

  private static Block visitOther(LogicalPlan plan) {
    List children = new ArrayList();
    Map columns = new LinkedHashMap();
    Iterator given = list(plan.children()).iterator();
    while (given.hasNext()) {
      Block block = visit((LogicalPlan) given.next());
      children.add(materialised(block));
      columns.putAll(block.columns);
    }
    LogicalPlan made = plan;
    if (!children.isEmpty()) {
      made = withColumns(plan, columns);
      if (made instanceof Generate) {
        Generate it = (Generate) made;
        // The columns of the input that are not passed on are identified by position, so all are
        // passed on.
        made = new Generate(it.generator(), seq(new ArrayList()), it.outer(), none(),
            it.generatorOutput(), it.child());
      }
      made = (LogicalPlan) made.withNewChildren(seq(children));
    }
    Block block = new Block();
    block.plans.add(made);
    Iterator output = list(plan.output()).iterator();
    while (output.hasNext()) {
      Attribute each = (Attribute) output.next();
      Object stands = columns.get(each.exprId());
      block.columns.put(each.exprId(), stands == null ? each : stands);
    }
    return block;
  }

  private static LogicalPlan withColumns(LogicalPlan plan, final Map columns) {
    return (LogicalPlan) plan.mapExpressions(new scala.runtime.AbstractFunction1() {
      public Object apply(Object each) {
        Expression made = substituted((Expression) each, columns);
        return each instanceof Alias ? alias(made, ((Alias) each).exprId()) : made;
      }
    });
  }

  // Blocks.

  private static void addConjuncts(Block block, Expression condition) {
    split(condition, block.columns, block.conjuncts);
  }

  private static void split(Expression condition, Map columns, List into) {
    if (condition instanceof And) {
      split(((And) condition).left(), columns, into);
      split(((And) condition).right(), columns, into);
    } else if (!condition.equals(Literal$.MODULE$.TrueLiteral())) {
      into.add(substituted(condition, columns));
    }
  }

  private static LogicalPlan closed(Block block) {
    return restricted(product(block), block.conjuncts);
  }

  private static LogicalPlan product(Block block) {
    LogicalPlan made = (LogicalPlan) block.plans.get(0);
    for (int i = 1; i < block.plans.size(); i++) {
      LogicalPlan next = (LogicalPlan) block.plans.get(i);
      made = new Join(made, next, Inner$.MODULE$, none(), JoinHint$.MODULE$.NONE());
    }
    return made;
  }

  /** Returns the rows of a plan that satisfy all tests, each tested as far down as possible. */
  private static LogicalPlan restricted(LogicalPlan plan, List conjuncts) {
    if (conjuncts.isEmpty()) return plan;
    if (plan instanceof Union) return restricted((Union) plan, conjuncts);
    List parts = new ArrayList(conjuncts);
    if (plan instanceof Filter) {
      split(((Filter) plan).condition(), Collections.EMPTY_MAP, parts);
      return restricted(((Filter) plan).child(), parts);
    }
    LogicalPlan below = plan;
    if (plan instanceof Join && keepsLeft(((Join) plan).joinType())) {
      Join it = (Join) plan;
      List left = new ArrayList();
      for (int i = parts.size() - 1; i >= 0; i--) {
        Expression part = (Expression) parts.get(i);
        boolean own = part.references().subsetOf(it.left().outputSet());
        if (own && !part.references().isEmpty()) left.add(parts.remove(i));
      }
      LogicalPlan mine = restricted(it.left(), left);
      below = new Join(mine, it.right(), it.joinType(), it.condition(), it.hint());
    }
    Expression condition = conjunction(parts, below);
    return condition == null ? below : new Filter(condition, below);
  }

  private static boolean keepsLeft(JoinType type) {
    return type == LeftOuter$.MODULE$ || type == LeftSemi$.MODULE$ || type == LeftAnti$.MODULE$;
  }

  /** Tests of a union become tests of its inputs. */
  private static LogicalPlan restricted(Union plan, List conjuncts) {
    List children = new ArrayList();
    List output = list(plan.output());
    Iterator given = list(plan.children()).iterator();
    while (given.hasNext()) {
      Project child = (Project) given.next();
      Map columns = branchColumns(output, child);
      List parts = new ArrayList();
      for (int i = 0; i < conjuncts.size(); i++) {
        parts.add(substituted((Expression) conjuncts.get(i), columns));
      }
      children.add(new Project(child.projectList(), restricted(child.child(), parts)));
    }
    return (LogicalPlan) plan.withNewChildren(seq(children));
  }

  /** Returns the plan of a block as a side that may be padded with NULLs: what is computed from
   *  it is NULL if a column that is never NULL otherwise is NULL. */
  private static LogicalPlan padded(Block block) {
    LogicalPlan made = closed(block);
    List items = new ArrayList(list(made.output()));
    Expression yes = Literal$.MODULE$.apply(Boolean.TRUE);
    Alias present = alias(yes, NamedExpression$.MODULE$.newExprId());
    items.add(present);
    Iterator ids = new ArrayList(block.columns.keySet()).iterator();
    while (ids.hasNext()) {
      Object id = ids.next();
      Expression stands = (Expression) block.columns.get(id);
      if (!(stands instanceof Attribute)) {
        block.columns.put(id, when(present.toAttribute(), stands));
      }
    }
    return new Project(seq(items), made);
  }

  /** Returns the plan of a block with all computed expressions as columns; the block's own
   *  columns then become attributes. */
  private static LogicalPlan materialised(Block block) {
    LogicalPlan made = closed(block);
    List items = new ArrayList(list(made.output()));
    boolean computed = false;
    Iterator ids = new ArrayList(block.columns.keySet()).iterator();
    while (ids.hasNext()) {
      ExprId id = (ExprId) ids.next();
      Expression stands = (Expression) block.columns.get(id);
      if (stands instanceof Attribute) continue;
      Alias column = alias(stands, id);
      items.add(column);
      block.columns.put(id, column.toAttribute());
      computed = true;
    }
    return computed ? new Project(seq(items), made) : made;
  }

  private static LogicalPlan projected(Object output, Block block) {
    List items = new ArrayList();
    Iterator given = list((scala.collection.immutable.Seq) output).iterator();
    while (given.hasNext()) {
      Attribute each = (Attribute) given.next();
      Expression stands = (Expression) block.columns.get(each.exprId());
      items.add(alias(stands == null ? each : stands, NamedExpression$.MODULE$.newExprId()));
    }
    return new Project(seq(items), closed(block));
  }

  /** Returns a single condition made of several, without repetition, in an order that does not
   *  depend on the text. */
  private static Expression conjunction(List parts, LogicalPlan over) {
    Map sorted = new java.util.TreeMap();
    for (int i = 0; i < parts.size(); i++) {
      sorted.put(keyOf((Expression) parts.get(i), over), parts.get(i));
    }
    return conjunction(sorted.values());
  }

  private static Expression conjunction(Collection parts) {
    Expression made = null;
    Iterator given = parts.iterator();
    while (given.hasNext()) {
      Expression each = (Expression) given.next();
      made = made == null ? each : new And(made, each);
    }
    return made;
  }

  // Expressions.

  /** Returns a text that two expressions over a plan share if they are the same. */
  private static String keyOf(Expression node, LogicalPlan over) {
    org.apache.spark.sql.catalyst.expressions.package$AttributeSeq columns =
        new org.apache.spark.sql.catalyst.expressions.package$AttributeSeq(over.output());
    Expression made = QueryPlan$.MODULE$.normalizeExpressions(node, columns).canonicalized();
    final StringBuilder types = new StringBuilder();
    made.foreach(new scala.runtime.AbstractFunction1() {
      public Object apply(Object each) {
        // A function with two names (stddev, stddev_samp) is a single function.
        ((Expression) each).unsetTagValue(FunctionRegistry$.MODULE$.FUNC_ALIAS());
        // The text of a literal does not contain its type.
        if (each instanceof Literal) types.append(((Literal) each).dataType().catalogString());
        return null;
      }
    });
    return made.toString() + " " + types;
  }

  private static Expression withoutAlias(Object item) {
    return item instanceof Alias ? ((Alias) item).child() : (Expression) item;
  }

  /** Returns an expression over the expressions that its columns stand for, without names inside
   *  it. */
  private static Expression substituted(Expression node, final Map columns) {
    Expression bare = (Expression) node.transformUp(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object each) {
        return each instanceof Alias || each instanceof KnownNullable
            || each instanceof PreciseTimestampConversion;
      }
      public Object applyOrElse(Object each, scala.Function1 otherwise) {
        if (each instanceof PreciseTimestampConversion) {
          // What time windows are made of; SQL has these functions for it.
          PreciseTimestampConversion it = (PreciseTimestampConversion) each;
          return it.toType() instanceof LongType
              ? new UnixMicros(it.child()) : new MicrosToTimestamp(it.child());
        }
        return isDefinedAt(each) ? ((Expression) each).children().head() : otherwise.apply(each);
      }
    });
    return (Expression) bare.transform(new scala.runtime.AbstractPartialFunction() {
      public boolean isDefinedAt(Object each) {
        return each instanceof SubqueryExpression
            || each instanceof AttributeReference
            && columns.containsKey(((AttributeReference) each).exprId());
      }
      public Object applyOrElse(Object each, scala.Function1 otherwise) {
        if (each instanceof SubqueryExpression) {
          SubqueryExpression it = (SubqueryExpression) each;
          LogicalPlan plan = (LogicalPlan) it.plan();
          // For EXISTS it matters only whether there is a row.
          Object output = it instanceof Exists ? seq(new ArrayList()) : plan.output();
          return it.withNewPlan(projected(output, visit(plan)));
        }
        if (!isDefinedAt(each)) return otherwise.apply(each);
        return columns.get(((AttributeReference) each).exprId());
      }
    });
  }

  private static Alias alias(Expression node, ExprId id) {
    return new Alias(node, "c", id, seq(new ArrayList()), none(), seq(new ArrayList()));
  }

  // Scala's collections.

  private static scala.Option none() {
    return scala.Option.empty();
  }

  private static List list(scala.collection.immutable.Seq given) {
    return CollectionConverters.asJava(given);
  }

  private static scala.collection.immutable.Seq seq(List given) {
    return CollectionConverters.asScala(given).toSeq();
  }
}
