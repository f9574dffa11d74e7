"""The rules of Catalyst's optimizer that a view's analysed plan goes through, each with its reason.

Spark's analyser gives a plan with table expressions, subqueries and set operators; the delta rules
know fewer operators. These rules change the form of a plan and not its meaning. `ONCE` are applied
first, in order; `REPEATED` after them, in order, until nothing changes. Both are applied inside the
plans of subqueries, too (``PlanRewriter.java``).

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
# - RewriteDistinctAggregates expands rows for each distinct aggregate; `views.rule_distinct` keeps
#   the values by counts.
# - DecimalAggregates sums unscaled values, which wrap around where the sum would be an error.
# - RewriteNonCorrelatedExists makes a scalar subquery where a semi join is enough.
# - OptimizeIn makes sets that have no SQL text.
# - InferFiltersFromConstraints adds tests that every step would have to evaluate.
# - PropagateEmptyRelation and ConvertToLocalRelation would take an empty table for a constant.
# - ReorderJoin and the rules that follow statistics make a plan depend on more than the text.
# - NormalizeFloatingNumbers, runtime filters and MergeScalarSubqueries are physical choices.
ONCE: Final[tuple[tuple[str, str], ...]] = (
    (_OPTIMIZER + "EliminateResolvedHint", "A hint changes no rows."),
    (_ANALYSIS + "EliminateSubqueryAliases", "Columns are told apart by their ids."),
    (_ANALYSIS + "EliminateView", "A temporary view is its own plan."),
    (_EXPRESSIONS + "EliminatePipeOperators", "Pipe operators are marks on ordinary operators."),
    (_OPTIMIZER + "EliminateSQLFunctionNode", "A SQL function's body stands in its place."),
    (_OPTIMIZER + "PullOutGroupingExpressions", "Group keys become columns of the input."),
    (_OPTIMIZER + "InlineCTE(true,false,false)", "A table expression is a plan at each use."),
    (_OPTIMIZER + "ReplaceIntersectWithSemiJoin", "INTERSECT is a null-safe semi join."),
    (_OPTIMIZER + "ReplaceExceptWithAntiJoin", "EXCEPT is a null-safe anti join."),
    (_OPTIMIZER + "ReplaceDistinctWithAggregate", "DISTINCT is a grouping by all columns."),
    (_OPTIMIZER + "ReplaceDeduplicateWithAggregate", "So is the removal of duplicates."),
    (_OPTIMIZER + "RemoveLiteralFromGroupExpressions", "A constant groups nothing."),
    (_OPTIMIZER + "RemoveRepetitionFromGroupExpressions", "A key counts once."),
    (_OPTIMIZER + "OptimizeOneRowRelationSubquery", "A subquery without FROM is an expression."),
    (_OPTIMIZER + "PullupCorrelatedPredicates", "Correlation becomes the condition of a join."),
    (_OPTIMIZER + "BooleanSimplification", "NOT NOT IN is IN, while it is no join yet."),
)
"""(class, reason) of the rules that are applied once."""

REPEATED: Final[tuple[tuple[str, str], ...]] = (
    (_OPTIMIZER + "RewritePredicateSubquery", "EXISTS and IN are semi and anti joins."),
    (_OPTIMIZER + "RewriteCorrelatedScalarSubquery", "A correlated value is a left join."),
    (_OPTIMIZER + "RewriteLateralSubquery", "A lateral subquery is a join."),
    (_OPTIMIZER + "ReplaceDistinctWithAggregate", "Decorrelation makes DISTINCT again."),
    (_OPTIMIZER + "BooleanSimplification", "Conjunctions are flat and common parts pulled out."),
    (_OPTIMIZER + "PushDownPredicates", "Rows that nobody needs are dropped at their table."),
    (_OPTIMIZER + "EliminateOuterJoin", "A test of the padded side makes a join inner."),
    (_OPTIMIZER + "ColumnPruning", "Columns that nobody reads are not carried."),
    (_OPTIMIZER + "CollapseProject", "Projections of projections are one."),
    (_OPTIMIZER + "RemoveNoopOperators", "What changes nothing goes."),
    (_OPTIMIZER + "CombineUnions", "A union of unions is one."),
    (_OPTIMIZER + "RemoveRedundantAliases", "A column keeps its id where it is only renamed."),
)
"""(class, reason) of the rules that are applied until nothing changes."""


def rule_names(rules: tuple[tuple[str, str], ...]) -> str:
    """Return the class names of rules, one a line."""
    return "\n".join(name for name, _ in rules)
