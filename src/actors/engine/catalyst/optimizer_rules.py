"""The rules of Catalyst's optimizer that are applied to the analysed plan of a view, with the
reason for each.

Spark's analyser gives a plan with table expressions, subqueries and set operators, more operators
than the delta rules support. These rules change the form of a plan but not its meaning. `ONCE` are
applied first, in order; then `REPEATED`, in order, until nothing changes. Both are also applied
inside the plans of subqueries (``PlanRewriter.java``).

Source: the batches of Catalyst's ``Optimizer.defaultBatches``.
"""

from __future__ import annotations

from typing import Final

_OPTIMIZER: Final = "org.apache.spark.sql.catalyst.optimizer."
_ANALYSIS: Final = "org.apache.spark.sql.catalyst.analysis."
_EXPRESSIONS: Final = "org.apache.spark.sql.catalyst.expressions."

# Rules that are left out on purpose:
# - ComputeCurrentTime and ConstantFolding freeze the clock.
# - ReplaceExpressions turns functions into calls of Java methods, which have no SQL text.
# - RewriteExceptAll and RewriteIntersectAll replicate rows by a generator without SQL text;
#   ConstructRewriter.java uses one that has a text.
# - RewriteDistinctAggregates expands each row once per distinct aggregate; `views.rule_distinct`
#   keeps the values with counts.
# - DecimalAggregates sums unscaled values, which wrap around where the sum should raise an error.
# - RewriteNonCorrelatedExists makes a scalar subquery where a semi join is enough.
# - OptimizeIn makes sets that have no SQL text.
# - InferFiltersFromConstraints adds tests that every step would have to evaluate.
# - PropagateEmptyRelation and ConvertToLocalRelation would treat an empty table as a constant.
# - ReorderJoin and the rules based on statistics make a plan depend on more than the text.
# - NormalizeFloatingNumbers, runtime filters and MergeScalarSubqueries are physical choices.
ONCE: Final[tuple[tuple[str, str], ...]] = (
    (_OPTIMIZER + "EliminateResolvedHint", "A hint changes no rows."),
    (_ANALYSIS + "EliminateSubqueryAliases", "Columns are identified by their ids."),
    (_ANALYSIS + "EliminateView", "A temporary view is replaced by its plan."),
    (_EXPRESSIONS + "EliminatePipeOperators", "Pipe operators only mark ordinary operators."),
    (_OPTIMIZER + "EliminateSQLFunctionNode", "A SQL function is replaced by its body."),
    (_OPTIMIZER + "PullOutGroupingExpressions", "Group keys become columns of the input."),
    (_OPTIMIZER + "InlineCTE(true,false,false)", "A table expression is inlined at each use."),
    (_OPTIMIZER + "ReplaceIntersectWithSemiJoin", "INTERSECT is a null-safe semi join."),
    (_OPTIMIZER + "ReplaceExceptWithAntiJoin", "EXCEPT is a null-safe anti join."),
    (_OPTIMIZER + "ReplaceDistinctWithAggregate", "DISTINCT is a grouping by all columns."),
    (_OPTIMIZER + "ReplaceDeduplicateWithAggregate", "So is removing duplicates."),
    (_OPTIMIZER + "RemoveLiteralFromGroupExpressions", "Grouping by a constant has no effect."),
    (_OPTIMIZER + "RemoveRepetitionFromGroupExpressions", "A repeated key has no effect."),
    (_OPTIMIZER + "OptimizeOneRowRelationSubquery", "A subquery without FROM is an expression."),
    (_OPTIMIZER + "PullupCorrelatedPredicates", "Correlation becomes the condition of a join."),
    (_OPTIMIZER + "BooleanSimplification", "NOT NOT IN becomes IN before it becomes a join."),
)
"""(class, reason) of the rules that are applied once."""

REPEATED: Final[tuple[tuple[str, str], ...]] = (
    (_OPTIMIZER + "RewritePredicateSubquery", "EXISTS and IN are semi and anti joins."),
    (_OPTIMIZER + "RewriteCorrelatedScalarSubquery", "A correlated value is a left join."),
    (_OPTIMIZER + "RewriteLateralSubquery", "A lateral subquery is a join."),
    (_OPTIMIZER + "ReplaceDistinctWithAggregate", "Decorrelation makes new DISTINCTs."),
    (_OPTIMIZER + "BooleanSimplification", "Flattens conjunctions, factors out common parts."),
    (_OPTIMIZER + "PushDownPredicates", "Rows that are not needed are dropped early."),
    (_OPTIMIZER + "EliminateOuterJoin", "A test of the padded side makes a join inner."),
    (_OPTIMIZER + "ColumnPruning", "Columns that are not read are dropped."),
    (_OPTIMIZER + "CollapseProject", "Nested projections are merged."),
    (_OPTIMIZER + "RemoveNoopOperators", "Operators without effect are removed."),
    (_OPTIMIZER + "CombineUnions", "Nested unions are merged."),
    (_OPTIMIZER + "RemoveRedundantAliases", "A column keeps its id where it is only renamed."),
)
"""(class, reason) of the rules that are applied until nothing changes."""


def rule_names(rules: tuple[tuple[str, str], ...]) -> str:
    """Return the class names of rules, one per line."""
    return "\n".join(name for name, _ in rules)
