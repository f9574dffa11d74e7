"""Translates Catalyst's rewritten plan of a view to the view's relational plan.

The tree is read bottom up. A node becomes a `PlanBlock`. Inner joins, and projections that only
pass on or rename columns, do not close it, so a chain of joins becomes a single `JoinNode` with
many inputs. A table expression that is used twice becomes two plans with different ids.

`NotTranslated` names a construct that no rule supports; the view is then opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from actors.engine.catalyst.aggregates import CallCollector
from actors.engine.catalyst.blocks import (
    ColumnBinding,
    Equality,
    FreshIds,
    PlanBlock,
    PlanConjunct,
    WrittenExpression,
    add_key_columns,
    filtered,
    split_conjuncts,
)
from actors.engine.catalyst.expressions import ExpressionWriter
from actors.engine.catalyst.filter_safety import is_surely_safe
from actors.engine.catalyst.function_calls import FunctionNames
from actors.engine.catalyst.literals import NotRendered
from actors.engine.catalyst.plan_nodes import (
    PASSING,
    NotTranslated,
    constant_of,
    construct_of,
    existence_of,
    is_null_aware,
    is_one_row,
    join_kind,
)
from actors.engine.catalyst.plan_tree import (
    TreeNode,
    attribute_in_place_of,
    conjuncts_of,
    is_nullable,
    type_of,
    walk,
    without_aliases,
)
from actors.engine.catalyst.temporal import is_row_safe, reads_clock, time_bound
from actors.engine.catalyst.widening_casts import strip_widening_casts
from actors.engine.catalyst.window_calls import window_parts, window_reach
from actors.model.plan.relational import (
    AggregateCall,
    AggregationNode,
    ColumnEquality,
    DistinctNode,
    ExpandNode,
    GenerateNode,
    GroupKey,
    LimitNode,
    NamedExpression,
    OuterJoin,
    Plan,
    ProjectNode,
    ScanNode,
    SemiJoin,
    UnionAll,
    ValuesNode,
    WindowCall,
    WindowFunctions,
    columns_of,
)
from actors.model.plan.relational_walk import prune_columns

TABLE_METADATA: Final = "penstock_table"
"""Key of a table's number in the metadata of its columns."""
RANGE_ROWS_MAX: Final = 10_000
"""Maximum number of rows of a ``range()``, since a step makes all of them."""
SESSION_MARK: Final = "spark.sessionWindow"
"""Key with which Spark marks, in the metadata, the column by which a grouping merges sessions."""
TOO_MANY_ROWS: Final = (
    "[SCALAR_SUBQUERY_TOO_MANY_ROWS] More than one row "
    "returned by a subquery used as an expression."
)
_UNORDERED: Final = ("map<", "variant", "interval")


_LIFTED: Final = ("ScalarSubquery", "Exists")
_Reason: TypeAlias = Callable[[PlanBlock], tuple[PlanBlock, PlanBlock, list[PlanConjunct]]]
"""Takes rows of the left side. Returns them (possibly with an additional column), the right side,
and the predicates under which two rows match."""


class RelationalBuilder:
    """Builds the relational plan of one view."""

    def __init__(
        self,
        functions: FunctionNames,
        column_names: Mapping[int, Sequence[str]],
        *,
        ansi: bool,
        zone: str,
    ) -> None:
        """`column_names`: the column names of each table, by the number in its columns' metadata,
        in the order of the plan's inputs. `zone`: the time zone of the session."""
        self._functions = functions
        self._column_names = column_names
        self._places = {number: place for place, number in enumerate(column_names)}
        self._ansi = ansi
        self._zone = zone
        # Ids follow the order of the visit. Catalyst's own ids differ between analyses, but the
        # same text must have the same plan and fingerprint.
        self._fresh = FreshIds()
        # Number of occurrences of each table so far.
        self._scans: dict[int, int] = {}
        self._types = self._fresh.types

    def build(self, root: TreeNode, names: Sequence[str]) -> ProjectNode:
        """Return the plan of a rewritten tree, with its output columns under `names`.

        Raises `NotTranslated`.
        """
        try:
            block = self._block(root)
        except NotRendered as error:
            raise NotTranslated(str(error)) from None
        if len(block.output) != len(names):
            raise NotTranslated(f"a plan of {len(block.output)} columns instead of {len(names)}")
        plan = block.close(self._fresh)
        ids = [block.columns[number].id for number in block.output]
        columns = tuple(NamedExpression(name, id_) for name, id_ in zip(names, ids, strict=True))
        return ProjectNode(prune_columns(plan, frozenset(ids)), columns)

    # -- expressions -------------------------------------------------------------------------------

    def _writer(
        self,
        columns: Mapping[int, ColumnBinding],
        read: set[str] | None = None,
        *,
        clock: bool = False,
    ) -> ExpressionWriter:
        def column(number: int) -> str:
            bound = columns.get(number)
            if bound is None:
                raise NotTranslated("a column of an outer query")
            if read is not None:
                read.add(bound.id)
            return bound.id

        return ExpressionWriter(self._functions, column, ansi=self._ansi, clock=clock)

    def _write(self, node: TreeNode, columns: Mapping[int, ColumnBinding]) -> WrittenExpression:
        read: set[str] = set()
        text = self._writer(columns, read).write(node)
        return WrittenExpression(text, frozenset(read), type_of(node))

    def _lifted(self, block: PlanBlock, node: TreeNode) -> tuple[PlanBlock, TreeNode]:
        """Return an expression without subqueries, over a block that has their values. A scalar
        subquery of one row becomes an additional input; an EXISTS tests a count."""
        if not any(each.name in _LIFTED for each in walk(node)):
            return block, node
        if node.name not in _LIFTED:
            children = []
            for each in node.children:
                block, made = self._lifted(block, each)
                children.append(made)
            return block, node.replaced(children)
        number = node.fields["exprId"]
        if number not in block.columns:
            if node.children:
                raise NotTranslated("a correlated subquery that is not a join")
            plan = node.fields["plan"]
            inner = self._block(plan)
            if node.name == "Exists":
                inner, bound = self._any_row(inner)
            elif is_one_row(plan):
                bound = inner.columns[inner.output[0]]
            else:
                inner, bound = self._single_value(inner, inner.columns[inner.output[0]])
            columns = {number: bound}
            block = block.merged(PlanBlock(inner.inputs, inner.conjuncts, [], columns), [])
        return block, attribute_in_place_of(node, number)

    def _single_value(
        self, block: PlanBlock, bound: ColumnBinding
    ) -> tuple[PlanBlock, ColumnBinding]:
        """Return a single row with the only value of a column: NULL if there is no row, an error if
        there are two."""
        if any(word in bound.type for word in _UNORDERED):
            raise NotTranslated(f"a scalar subquery of type {bound.type}")
        count, value, made = (
            self._fresh.take(prefix, kind)
            for prefix, kind in (("a", "bigint"), ("a", bound.type), ("c", bound.type))
        )
        calls = (
            AggregateCall(count, "count", None, "bigint", "bigint", False),
            # `max` of at most one row is its value.
            AggregateCall(value, "max", bound.id, bound.type, bound.type, bound.nullable),
        )
        grouped = AggregationNode(block.close(self._fresh), (), calls, self._ansi)
        text = f"CASE WHEN ({count} > 1L) THEN raise_error('{TOO_MANY_ROWS}') ELSE {value} END"
        plan = ProjectNode(grouped, (NamedExpression(made, text),))
        return PlanBlock([plan], [], [], {}), ColumnBinding(made, bound.type, True)

    def _any_row(self, block: PlanBlock) -> tuple[PlanBlock, ColumnBinding]:
        """Return a single row with a boolean: whether the block has any row."""
        count, made = self._fresh.take("a", "bigint"), self._fresh.take("c", "boolean")
        calls = (AggregateCall(count, "count", None, "bigint", "bigint", False),)
        grouped = AggregationNode(block.close(self._fresh), (), calls, self._ansi)
        plan = ProjectNode(grouped, (NamedExpression(made, f"({count} > 0L)"),))
        return PlanBlock([plan], [], [], {}), ColumnBinding(made, "boolean", False)

    def _conjuncts(
        self, condition: TreeNode | None, columns: Mapping[int, ColumnBinding]
    ) -> list[PlanConjunct]:
        found = []
        for part in [] if condition is None else conjuncts_of(condition):
            if reads_clock(part):
                found.append(self._clock_test(part, columns))
                continue
            written = self._write(part, columns)
            sides = None
            if part.name in ("EqualTo", "EqualNullSafe"):
                left, right = (self._write(each, columns) for each in strip_widening_casts(part))
                sides = (left, right)
            null_safe = part.name == "EqualNullSafe"
            found.append(PlanConjunct(written, sides, null_safe, safe=is_surely_safe(part)))
        return found

    def _clock_test(self, part: TreeNode, columns: Mapping[int, ColumnBinding]) -> PlanConjunct:
        """Return a comparison with the clock. Raises `NotTranslated` for any other use of the
        clock."""
        read: set[str] = set()
        writer = self._writer(columns, read, clock=True)
        bound = time_bound(part, writer.write(part), writer.write, self._zone)
        written = WrittenExpression(bound.test, frozenset(read))
        return PlanConjunct(written, clock=bound, safe=is_row_safe(part))

    def _new_column(self, prefix: str, node: TreeNode) -> ColumnBinding:
        kind = type_of(node)
        return ColumnBinding(self._fresh.take(prefix, kind), kind, is_nullable(node))

    # -- nodes -------------------------------------------------------------------------------------

    def _block(self, node: TreeNode) -> PlanBlock:
        if node.name in PASSING:
            return self._block(node.children[0])
        read: Callable[[TreeNode], PlanBlock] | None = {
            "LocalRelation": self._table,
            "LogicalRDD": self._table,
            "OneRowRelation": self._one_row,
            "Range": self._range,
            "Project": self._project,
            "Filter": self._filter,
            "Join": self._join,
            "Aggregate": self._aggregate,
            "Union": self._union,
            "Expand": self._expand,
            "Generate": self._generate,
            "Window": self._window,
            "GlobalLimit": self._limit,
            "Offset": self._limit,
        }.get(node.name)
        if read is None:
            raise NotTranslated(construct_of(node))
        return read(node)

    def _table(self, node: TreeNode) -> PlanBlock:
        attributes = node.kids("output")
        numbers = {each.fields["metadata"].get(TABLE_METADATA) for each in attributes}
        number = numbers.pop() if len(numbers) == 1 else None
        if number is None:
            return self._values(node)
        place = self._places[number]
        seen = self._scans.get(place, 0)
        self._scans[place] = seen + 1
        # Each occurrence of a table has its own ids.
        suffix = "" if seen == 0 else chr(ord("a") + seen) if seen < 26 else f"_{seen}"
        own = tuple(self._column_names[number])
        columns: dict[int, ColumnBinding] = {}
        pairs = []
        for each in attributes:
            name = each.fields["name"]
            id_ = column_id(f"i{place}{suffix}", name, own)
            columns[each.fields["exprId"]] = ColumnBinding(id_, type_of(each), is_nullable(each))
            self._types[id_] = type_of(each)
            pairs.append((id_, name))
        return PlanBlock([ScanNode(place, tuple(pairs))], [], list(columns), columns)

    def _values(self, node: TreeNode) -> PlanBlock:
        """Return the block of a VALUES, whose rows are literals."""
        rows = [[self._write(each, {}).text for each in row] for row in node.fields["rows"]]
        if not rows:
            raise NotTranslated("a constant table without rows")
        made = self._made("v", node.kids("output"))
        fields = [
            ", ".join(f"'c{place}', {text}" for place, text in enumerate(row)) for row in rows
        ]
        structs = ", ".join(f"named_struct({each})" for each in fields)
        tuples = ", ".join(f"({', '.join(row)})" for row in rows)
        plan = ValuesNode(made, f"VALUES {tuples}", f"inline(array({structs}))")
        return self._constants(node, plan)

    def _range(self, node: TreeNode) -> PlanBlock:
        start, end, step = (int(node.fields[name]) for name in ("start", "end", "step"))
        numbers = range(start, end, step)
        if not 0 < len(numbers) <= RANGE_ROWS_MAX:
            raise NotTranslated(f"range() of {len(numbers)} rows")
        made = self._made("v", node.kids("output"))
        generator = f"explode(sequence({start}L, {numbers[-1]}L, {step}L))"
        table = f"range({start}L, {end}L, {step}L)"
        return self._constants(node, ValuesNode(made, table, generator))

    def _one_row(self, node: TreeNode) -> PlanBlock:
        return self._constants(node, ValuesNode((), "", ""))

    def _constants(self, node: TreeNode, plan: ValuesNode) -> PlanBlock:
        columns = _columns_by_number(node.kids("output"), plan.columns)
        return PlanBlock([plan], [], list(columns), columns)

    def _project(self, node: TreeNode) -> PlanBlock:
        return self._projected(self._block(node.children[0]), node.kids("projectList"))

    def _projected(self, block: PlanBlock, items: Sequence[TreeNode]) -> PlanBlock:
        """Return the block with these columns; it is closed if one of them is computed."""
        columns: dict[int, ColumnBinding] = {}
        computed: list[NamedExpression] = []
        output = []
        lifted = []
        for item in items:
            block, bare = self._lifted(block, item)
            lifted.append(bare)
        inputs = list(block.inputs)
        for item in lifted:
            number = item.fields["exprId"]
            output.append(number)
            if number in columns:
                continue
            inner = without_aliases(item)
            if inner.name == "AttributeReference":
                columns[number] = self._bound(inner, block.columns)
                continue
            written = self._write(inner, block.columns)
            columns[number] = self._new_column("c", item)
            made = NamedExpression(columns[number].id, written.text)
            # Below the join an expression also sees rows without a match: only a safe one may move
            # there.
            if len(inputs) == 1 or not (
                is_surely_safe(inner) and _computed_at_one(inputs, made, written.reads)
            ):
                computed.append(made)
        if not computed:
            return PlanBlock(inputs, block.conjuncts, output, columns)
        block = PlanBlock(inputs, block.conjuncts, block.output, block.columns)
        plan = block.close(self._fresh)
        passed = {bound.id for bound in columns.values()} & set(columns_of(plan))
        named = [NamedExpression(id_, id_) for id_ in columns_of(plan) if id_ in passed]
        return PlanBlock([ProjectNode(plan, (*named, *computed))], [], output, columns)

    def _bound(self, node: TreeNode, columns: Mapping[int, ColumnBinding]) -> ColumnBinding:
        bound = columns.get(node.fields["exprId"])
        if bound is None:
            raise NotTranslated("a column of an outer query")
        return bound

    def _filter(self, node: TreeNode) -> PlanBlock:
        block = self._block(node.children[0])
        condition = node.kid("condition")
        assert condition is not None, "a filter has a condition"
        parts = conjuncts_of(condition)
        tests = [part for part in parts if existence_of(part) is not None]
        plain = [part for part in parts if existence_of(part) is None]
        found: list[PlanConjunct] = []
        for part in plain:
            block, bare = self._lifted(block, part)
            found += self._conjuncts(bare, block.columns)
        block = PlanBlock(block.inputs, [*block.conjuncts, *found], block.output, block.columns)
        for part in tests:
            plan, anti = existence_of(part) or (part, False)
            block = self._semi_join(block, self._block(plan), [], anti=anti)
        return block

    # -- joins -------------------------------------------------------------------------------------

    def _join(self, node: TreeNode) -> PlanBlock:
        kind = join_kind(node)
        left, right = (self._block(each) for each in node.children)
        condition = node.kid("condition")
        if kind in ("anti", "mark"):
            parts = [] if condition is None else conjuncts_of(condition)
            reasons = self._reasons(left, right, parts)
            if kind == "anti":
                return self._anti_join(left, reasons)
            return self._mark_join(left, reasons, node.fields["joinType"]["exists"])
        conjuncts = self._conjuncts(condition, left.columns | right.columns)
        if kind == "inner":
            return left.merged(right, conjuncts)
        if kind == "semi":
            return self._semi_join(left, right, conjuncts, anti=False)
        return self._outer_join(left, right, conjuncts, kind)

    def _reasons(
        self, left: PlanBlock, right: PlanBlock, parts: Sequence[TreeNode]
    ) -> Iterator[_Reason]:
        """Yield the reasons for which a row of the left side has a match. Each is tested on the
        rows for which no earlier reason holds.

        For ``a = b OR (a = b) IS NULL`` (NOT IN) these are an equal value, a NULL on the right, and
        a NULL on the left if the right side has any row.
        """
        aware = [part for part in parts if is_null_aware(part)]
        both = left.columns | right.columns
        plain = [each for p in parts if p not in aware for each in self._conjuncts(p, both)]
        if len(aware) > 1:
            raise NotTranslated("NOT IN of several columns that may be NULL")
        if not aware:
            yield lambda rows: (rows, right, plain)
            return
        equality = aware[0].children[0]
        mine, theirs = (self._write(each, both) for each in equality.children)
        nullable = [is_nullable(each) for each in equality.children]
        names = {bound.id for bound in left.columns.values()}
        if not mine.reads <= names:
            mine, theirs, nullable = theirs, mine, nullable[::-1]
        tests = [*plain, *self._conjuncts(equality, both)]
        yield lambda rows: (rows, right, tests)

        def null_there(rows: PlanBlock) -> tuple[PlanBlock, PlanBlock, list[PlanConjunct]]:
            made, null = self._with_column(rows, f"CAST(NULL AS {theirs.type})", theirs.type)
            return made, right, [*plain, equal_to(null, theirs, null_safe=True)]

        def null_here(rows: PlanBlock) -> tuple[PlanBlock, PlanBlock, list[PlanConjunct]]:
            marked = f"CASE WHEN ({mine.text} IS NULL) THEN 1 END"
            made, mark = self._with_column(rows, marked, "int")
            ones, one = self._with_column(right, "1", "int")
            return made, ones, [*plain, equal_to(mark, one, null_safe=False)]

        if nullable[1]:
            yield null_there
        if nullable[0]:
            yield null_here

    def _anti_join(self, left: PlanBlock, reasons: Iterable[_Reason]) -> PlanBlock:
        """Return the rows of the left side that have no match for any reason."""
        made = left
        for reason in reasons:
            rows, right, tests = reason(made)
            made = self._semi_join(rows, right, tests, anti=True)
        return made

    def _with_column(
        self, block: PlanBlock, text: str, kind: str
    ) -> tuple[PlanBlock, WrittenExpression]:
        """Return a block with an additional column, and the column."""
        plan = block.close(self._fresh)
        id_ = self._fresh.take("c", kind)
        passed = tuple(NamedExpression(name, name) for name in columns_of(plan))
        made = ProjectNode(plan, (*passed, NamedExpression(id_, text)))
        written = WrittenExpression(id_, frozenset({id_}), kind)
        return PlanBlock([made], [], block.output, block.columns), written

    def _mark_join(self, left: PlanBlock, reasons: Iterable[_Reason], mark: TreeNode) -> PlanBlock:
        """Return the rows of the left side with a mark: true for rows that have a match, false for
        all others."""
        kinds = [left.columns[number].type for number in left.output]
        ids = [self._fresh.take("u", kind) for kind in (*kinds, "boolean")]
        sides: list[tuple[PlanBlock, str]] = []
        rest = left
        for reason in reasons:
            rows, right, tests = reason(rest)
            sides.append((self._semi_join(rows, right, tests, anti=False), "true"))
            rest = self._semi_join(rows, right, tests, anti=True)
        made: list[Plan] = []
        for block, said in (*sides, (rest, "false")):
            texts = [*(block.columns[number].id for number in block.output), said]
            named = (NamedExpression(id_, text) for id_, text in zip(ids, texts, strict=True))
            made.append(ProjectNode(block.close(self._fresh), tuple(named)))
        columns: dict[int, ColumnBinding] = {}
        for number, id_ in zip(left.output, ids, strict=False):
            columns.setdefault(number, msgspec.structs.replace(left.columns[number], id=id_))
        number = mark.fields["exprId"]
        columns[number] = ColumnBinding(ids[-1], "boolean", False)
        return PlanBlock([UnionAll(tuple(made))], [], [*left.output, number], columns)

    def _outer_join(
        self, left: PlanBlock, right: PlanBlock, conjuncts: list[PlanConjunct], kind: str
    ) -> PlanBlock:
        output = [*left.output, *right.output]
        columns = (_padded(left) if kind != "left" else left.columns) | (
            _padded(right) if kind != "right" else right.columns
        )
        if kind == "right":
            left, right = right, left
        mine, theirs = left.close(self._fresh), right.close(self._fresh)
        equal, rest, own, other = split_conjuncts(conjuncts, mine, theirs)
        # A predicate over the preserved side decides which rows match, not which rows are kept.
        rest = [*(each.text() for each in own), *rest]
        if kind == "full":
            rest += (each.text() for each in other)
        else:
            for each in other:
                theirs = filtered(theirs, each, self._fresh)
        mine, theirs, tied = self._tied(mine, theirs, equal)
        made = OuterJoin(
            mine,
            theirs,
            "full" if kind == "full" else "left",
            tied,
            tuple(rest),
            self._types_of(mine, theirs),
        )
        return PlanBlock([made], [], output, columns)

    def _semi_join(
        self, left: PlanBlock, right: PlanBlock, conjuncts: list[PlanConjunct], *, anti: bool
    ) -> PlanBlock:
        mine, theirs = left.close(self._fresh), right.close(self._fresh)
        equal, rest, own, other = split_conjuncts(conjuncts, mine, theirs)
        for each in other:
            theirs = filtered(theirs, each, self._fresh)
        if anti:
            # An anti join keeps rows for which the predicate is false, so it must not filter them.
            rest = [*(each.text() for each in own), *rest]
        else:
            for each in own:
                mine = filtered(mine, each, self._fresh)
        mine, theirs, tied = self._tied(mine, theirs, equal)
        made = SemiJoin(mine, theirs, anti, tied, tuple(rest), self._types_of(mine, theirs))
        return PlanBlock([made], [], left.output, left.columns)

    def _tied(
        self,
        left: Plan,
        right: Plan,
        equal: list[Equality],
    ) -> tuple[Plan, Plan, tuple[ColumnEquality, ...]]:
        left, mine = add_key_columns(left, [each for each, _, _ in equal], self._fresh)
        right, theirs = add_key_columns(right, [each for _, each, _ in equal], self._fresh)
        made = [ColumnEquality(mine[a.text], theirs[b.text], safe) for a, b, safe in equal]
        return left, right, tuple(dict.fromkeys(made))

    def _types_of(self, left: Plan, right: Plan) -> tuple[tuple[str, str], ...]:
        ids = (*columns_of(left), *columns_of(right))
        return tuple((id_, self._types[id_]) for id_ in ids)

    # -- groupings and unions ----------------------------------------------------------------------

    def _aggregate(self, node: TreeNode) -> PlanBlock:
        block = self._block(node.children[0])
        results = []
        for each in node.kids("aggregateExpressions"):
            block, result = self._lifted_in_calls(block, each)
            results.append(result)
        below = block.close(self._fresh)
        keys: list[GroupKey] = []
        columns: dict[int, ColumnBinding] = {}
        for each in node.kids("groupingExpressions"):
            if any(SESSION_MARK in (part.fields.get("metadata") or {}) for part in walk(each)):
                raise NotTranslated("session_window()")
            if "map<" in type_of(each):
                raise NotTranslated(f"GROUP BY over {type_of(each)}")
            bound = self._new_column("k", each)
            written = self._write(each, block.columns)
            keys.append(GroupKey(bound.id, written.text, bound.type, bound.nullable))
            if each.name == "AttributeReference":
                columns[each.fields["exprId"]] = bound
        calls = CallCollector(
            lambda each, more: self._write(each, {**block.columns, **more}),
            self._fresh,
            results,
            ansi=self._ansi,
        )
        items = [calls.replaced(each) for each in results]
        columns |= calls.columns
        made: Plan
        if keys and not calls.calls:
            # Only the keys are read, so the grouping is a DISTINCT.
            named = tuple(NamedExpression(key.name, key.expression) for key in keys)
            passed = tuple(msgspec.structs.replace(key, expression=key.name) for key in keys)
            made = DistinctNode(ProjectNode(below, named), passed)
        else:
            made = AggregationNode(below, tuple(keys), calls.all_calls(), self._ansi)
        return self._projected(PlanBlock([made], [], list(columns), columns), items)

    def _lifted_in_calls(self, block: PlanBlock, node: TreeNode) -> tuple[PlanBlock, TreeNode]:
        """Lift the subqueries inside aggregates; those outside aggregates are lifted above the
        grouping."""
        if node.name == "AggregateExpression":
            return self._lifted(block, node)
        children = []
        for each in node.children:
            block, made = self._lifted_in_calls(block, each)
            children.append(made)
        return block, node.replaced(children)

    def _union(self, node: TreeNode) -> PlanBlock:
        if node.fields.get("byName"):
            raise NotTranslated("UNION BY NAME")
        blocks = [self._block(each) for each in node.children]
        first = blocks[0]
        kinds = [first.columns[number].type for number in first.output]
        ids = [self._fresh.take("u", kind) for kind in kinds]
        inputs = []
        for block in blocks:
            plan = block.close(self._fresh)
            bound = [block.columns[number].id for number in block.output]
            named = (NamedExpression(id_, own) for id_, own in zip(ids, bound, strict=True))
            inputs.append(ProjectNode(plan, tuple(named)))
        columns: dict[int, ColumnBinding] = {}
        for position, (number, id_) in enumerate(zip(first.output, ids, strict=True)):
            places = [block.columns[block.output[position]] for block in blocks]
            # If the first branch has a column twice, Catalyst means its first position.
            columns.setdefault(
                number, ColumnBinding(id_, kinds[position], any(p.nullable for p in places))
            )
        return PlanBlock([UnionAll(tuple(inputs))], [], first.output, columns)

    # -- expansions, windows and limits ------------------------------------------------------------

    def _made(self, prefix: str, attributes: Sequence[TreeNode]) -> tuple[GroupKey, ...]:
        """Return columns for the attributes that a node makes."""
        bound = [self._new_column(prefix, each) for each in attributes]
        return tuple(GroupKey(each.id, each.id, each.type, each.nullable) for each in bound)

    def _expand(self, node: TreeNode) -> PlanBlock:
        block = self._block(node.children[0])
        below = block.close(self._fresh)
        attributes = node.kids("output")
        made = self._made("e", attributes)
        rows = tuple(
            tuple(self._write(each, block.columns).text for each in row)
            for row in node.fields["projections"]
        )
        columns = _columns_by_number(attributes, made)
        return PlanBlock([ExpandNode(below, made, rows)], [], list(columns), columns)

    def _generate(self, node: TreeNode) -> PlanBlock:
        block = self._block(node.children[0])
        generator = node.kid("generator")
        assert generator is not None, "a Generate has a generator"
        below = block.close(self._fresh)
        attributes = node.kids("generatorOutput")
        made = self._made("g", attributes)
        left_out = set(node.fields.get("unrequiredChildIndex") or ())
        kept = [number for place, number in enumerate(block.output) if place not in left_out]
        columns = {number: block.columns[number] for number in kept}
        columns |= _columns_by_number(attributes, made)
        text = self._write(generator, block.columns).text
        plan = GenerateNode(below, text, bool(node.fields["outer"]), made)
        return PlanBlock([plan], [], [*kept, *_numbers(attributes)], columns)

    def _window(self, node: TreeNode) -> PlanBlock:
        block = self._block(node.children[0])
        below = self._closed_narrow(block)
        below, names = add_key_columns(
            below,
            keys := [self._write(each, block.columns) for each in node.kids("partitionSpec")],
            self._fresh,
        )
        order = tuple(self._write(each, block.columns).text for each in node.kids("orderSpec"))
        types = tuple((id_, self._types[id_]) for id_ in columns_of(below))
        calls = []
        columns = dict(block.columns)
        for item in node.kids("windowExpressions"):
            bound = self._new_column("w", item)
            columns[item.fields["exprId"]] = bound
            parts = window_parts(without_aliases(item), ordered=bool(order))
            writer = self._writer(block.columns)
            function, frame = parts.write(writer)
            reach, size = window_reach(parts)
            by_row = parts.by_row
            calls.append(WindowCall(bound.id, function, frame, bound.type, by_row, reach, size))
        if any(call.by_row for call in calls) or not order:
            _check_ordered(types)
        partition = tuple(names[key.text] for key in keys)
        plan = WindowFunctions(below, partition, order, tuple(calls), types)
        output = [*block.output, *_numbers(node.kids("windowExpressions"))]
        return PlanBlock([plan], [], output, columns)

    def _closed_narrow(self, block: PlanBlock) -> Plan:
        """Return the block as a plan that has only its output columns."""
        plan = block.close(self._fresh)
        # Other columns would take part in the total order of rows.
        ids = tuple(dict.fromkeys(block.columns[number].id for number in block.output))
        if ids == columns_of(plan):
            return plan
        return ProjectNode(plan, tuple(NamedExpression(id_, id_) for id_ in ids))

    def _limit(self, node: TreeNode) -> PlanBlock:
        """Return a LIMIT or OFFSET over its order, which may be below projections."""
        count = None
        if node.name == "GlobalLimit":
            count = constant_of(node.kid("limitExpr"))
            node = node.children[0]
            if node.name != "LocalLimit":
                raise NotTranslated("LIMIT")
            node = node.children[0]
        offset = 0
        if node.name == "Offset":
            offset = constant_of(node.kid("offsetExpr"))
            node = node.children[0]
        sort, projects = node, []
        # Catalyst puts projections above a sort by columns that are not selected.
        while sort.name == "Project":
            projects.append(sort)
            sort = sort.children[0]
        if sort.name == "Sort":
            block = self._block(sort.children[0])
            sorts = sort.kids("order")
        else:
            block, sorts, projects = self._block(node), [], []
        below = self._closed_narrow(block)
        order = tuple(self._write(each, block.columns).text for each in sorts)
        types = tuple((id_, self._types[id_]) for id_ in columns_of(below))
        _check_ordered(types)
        plan = LimitNode(below, order, count, offset, types)
        made = PlanBlock([plan], [], block.output, block.columns)
        for project in reversed(projects):
            made = self._projected(made, project.kids("projectList"))
        return made


# -- parts of trees --------------------------------------------------------------------------------


def column_id(prefix: str, name: str, names: Sequence[str]) -> str:
    """Return the id of the column `name` in a table with columns `names`, a word that needs no
    quotes.

    >>> column_id("i0", "net price", ["net price", "net-price"])
    'i0_net_price_0'
    """
    plain = "".join(char if char.isascii() and char.isalnum() else "_" for char in name)
    # Columns whose names differ only in punctuation must not share an id.
    return f"{prefix}_{plain}" + ("" if plain == name else f"_{list(names).index(name)}")


def equal_to(left: WrittenExpression, right: WrittenExpression, *, null_safe: bool) -> PlanConjunct:
    """Return the equality of two expressions."""
    sign = "<=>" if null_safe else "="
    text = f"({left.text} {sign} {right.text})"
    written = WrittenExpression(text, left.reads | right.reads)
    return PlanConjunct(written, (left, right), null_safe, safe=True)


def _numbers(attributes: Sequence[TreeNode]) -> list[int]:
    return [each.fields["exprId"] for each in attributes]


def _columns_by_number(
    attributes: Sequence[TreeNode], made: Sequence[GroupKey]
) -> dict[int, ColumnBinding]:
    return {
        number: ColumnBinding(key.name, key.type, key.nullable)
        for number, key in zip(_numbers(attributes), made, strict=True)
    }


def _check_ordered(types: Iterable[tuple[str, str]]) -> None:
    """Raise `NotTranslated` if rows cannot be ordered by all their columns."""
    for id_, kind in types:
        if any(word in kind for word in _UNORDERED):
            raise NotTranslated(f"an order of rows with a column of type {kind} ({id_})")


def _computed_at_one(inputs: list[Plan], made: NamedExpression, reads: frozenset[str]) -> bool:
    """Compute a column at the one input that has all columns it reads; return whether there is such
    an input."""
    for place, plan in enumerate(inputs):
        names = columns_of(plan)
        # If it is computed there, the join stays a single join of all inputs.
        if reads and reads <= frozenset(names):
            passed = tuple(NamedExpression(name, name) for name in names)
            inputs[place] = ProjectNode(plan, (*passed, made))
            return True
    return False


def _padded(block: PlanBlock) -> dict[int, ColumnBinding]:
    return {
        number: msgspec.structs.replace(bound, nullable=True)
        for number, bound in block.columns.items()
    }
