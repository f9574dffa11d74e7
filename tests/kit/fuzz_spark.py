"""The grammar of random views on Spark: adds constructs that only Spark's own plans make
incremental.

`SparkWriter` writes everything that `fuzz.QueryWriter` does, and in addition: window functions over
several partitions with filters by rank, GROUPING SETS, ROLLUP and CUBE with `grouping_id()`,
INTERSECT and EXCEPT, LATERAL VIEW and generators in the select list, first rows by a total order,
tumbling and hopping time windows, scalar subqueries, IN and EXISTS inside expressions, joins
without an equality, table expressions that are read several times, and several DISTINCT aggregates
in one grouping.

Rules: no query leaves Spark a choice, so plain Spark's answer is the only right one. If a function
depends on which of two rows comes first, the order is over all columns, so rows that it leaves
equal are identical. Doubles, whose last bits depend on the order of rows, are never used in an
order or in such a function. A query that Spark rejects is also refused as a view, and costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from tests.kit.fuzz import DOMAINS, NUMBERS, TYPES, FuzzColumn, FuzzTable, QueryWriter

WHOLE: Final = ("int", "bigint")
SHAPE: Final = 0.4
"""Probability that a query has one of the shapes of this file."""
ORDERED_COLUMNS_MAX: Final = 8
"""Most columns of a total order; for a wider relation a few of its columns are ordered."""
Query = tuple[str, tuple[FuzzColumn, ...]]


def _comparable(columns: Sequence[FuzzColumn]) -> list[FuzzColumn]:
    return [column for column in columns if column.type != "double"]


class SparkWriter(QueryWriter):
    """Writes queries with every construct that is maintained incrementally on Spark."""

    types: ClassVar[Sequence[str]] = (*TYPES, "timestamp")
    glues: ClassVar[Sequence[str]] = (
        " union all ", " union all ", " union ", " intersect ", " except ", " minus ",
    )  # fmt: skip

    def view(self) -> Query:
        """Return the text of a view, and its columns."""
        if self._pick.random() < 0.12:
            self._operators = 3
            return self._read_twice()
        return super().view()

    def _read_twice(self) -> Query:
        """Return a query with a table expression that the query and all its subqueries may read."""
        kept = self._pick.random() < 0.4
        inner, columns = self._names_kept() if kept else self._select(self._pick.choice((0, 1)))
        outside = self.tables
        expression = FuzzTable("cte", columns)
        self.tables = [*outside, *[expression] * len(outside)]
        head = f"with cte as ({inner})"
        if self._pick.random() < 0.4:
            second, more = self._select(0, first=expression)
            self.tables.append(FuzzTable("cte2", more))
            head += f", cte2 as ({second})"
        outer, made = self._select(1, first=expression)
        self.tables = outside
        return f"{head} {outer}", made

    def _names_kept(self) -> Query:
        """Return a query of a table's columns under their own names, or of groups by them."""
        pick = self._pick
        table = pick.choice(self.tables)
        columns = [FuzzColumn(column.name, column.type) for column in table.columns]
        where = f" where {self._test(plain, 1)}" if (plain := _comparable(columns)) else ""
        if not plain or pick.random() < 0.5:
            names = ", ".join(column.name for column in columns)
            return f"select {names} from {table.name}{where}", tuple(columns)
        keys = pick.sample(plain, pick.randint(1, min(2, len(plain))))
        names = ", ".join(column.name for column in keys)
        text = f"select {names}, count(*) as x9 from {table.name}{where} group by {names}"
        return text, (*keys, FuzzColumn("x9", "bigint"))

    def _select(self, depth: int, first: FuzzTable | None = None) -> Query:
        if self._pick.random() >= SHAPE or not self._may():
            return super()._select(depth, first)
        shapes: tuple[Callable[[int, FuzzTable | None], Query], ...] = (
            self._windows, self._windows, self._windows, self._first_rows, self._first_rows,
            self._grouping_sets, self._grouping_sets, self._of_times, self._of_distincts,
            self._set_operation,
        )  # fmt: skip
        return self._pick.choice(shapes)(depth, first)

    # -- window functions -------------------------------------------------------------------------

    def _windows(self, depth: int, first: FuzzTable | None) -> Query:
        """Return columns of a relation with window functions over it, sometimes only for rows of
        low rank."""
        pick = self._pick
        source, columns = self._from(depth, first)
        plain = _comparable(columns)
        where = self._where(columns)
        if len(plain) > ORDERED_COLUMNS_MAX or len(plain) < len(columns):
            some = pick.sample(plain, min(len(plain), 3))
            alias = self._alias()
            listed = ", ".join(f"{column.ref} as x{n}" for n, column in enumerate(some))
            source, where = f"(select {listed or '1 as x0'} from {source}{where}) {alias}", ""
            plain = [FuzzColumn(f"{alias}.x{n}", column.type) for n, column in enumerate(some)]
            plain = plain or [FuzzColumn(f"{alias}.x0", "int")]
        shown = pick.sample(plain, pick.randint(1, min(3, len(plain))))
        items = [f"{column.ref} as x{n}" for n, column in enumerate(shown)]
        made = [FuzzColumn(f"x{n}", column.type) for n, column in enumerate(shown)]
        # All functions of a query share this order, because another order of equal rows could
        # permute the values of a single function.
        rows = f"{self._partition(plain)}{self._order(plain, total=True)}"
        for number in range(pick.choice((1, 1, 2, 2, 3))):
            if pick.random() < 0.6:
                text, kind = self._by_place(plain, rows)
            else:
                text, kind = self._by_value(plain)
            items.append(f"{text} as a{number}")
            made.append(FuzzColumn(f"a{number}", kind))
        sql = f"select {', '.join(items)} from {source}{where}"
        ranked = self._of(made, "int")
        if ranked and pick.random() < 0.4:
            alias, column = self._alias(), pick.choice(ranked)
            sign = pick.choice(("<=", "=", "<"))
            test = f"{alias}.{column.name} {sign} {pick.randint(1, 3)}"
            kept = made if pick.random() < 0.5 else made[: len(shown)]
            names = ", ".join(f"{alias}.{each.name} as {each.name}" for each in kept)
            return f"select {names} from ({sql}) {alias} where {test}", tuple(kept)
        return sql, tuple(made)

    def _partition(self, plain: Sequence[FuzzColumn]) -> str:
        pick = self._pick
        some = pick.sample(plain, min(len(plain), pick.choice((1, 1, 1, 1, 1, 2, 2, 0))))
        if len(some) == 1 and some[0].type in WHOLE and pick.random() < 0.15:
            return f"partition by {some[0].ref} % 2 "
        return f"partition by {', '.join(each.ref for each in some)} " if some else ""

    def _order(self, columns: Sequence[FuzzColumn], *, total: bool) -> str:
        pick = self._pick
        count = len(columns) if total else min(len(columns), pick.choice((1, 1, 2)))
        ways = ("", "", " desc", " desc nulls first", " asc nulls last")
        terms = [f"{each.ref}{pick.choice(ways)}" for each in pick.sample(columns, count)]
        return f"order by {', '.join(terms)}" if terms else ""

    def _by_place(self, plain: Sequence[FuzzColumn], rows: str) -> tuple[str, str]:
        """Return the text and type of a function of a row's position in a total order."""
        pick = self._pick
        column = pick.choice(plain)
        dice = pick.random()
        if dice < 0.4:
            return (
                f"{pick.choice(('row_number()', 'row_number()', 'ntile(2)'))} over ({rows})",
                "int",
            )
        if dice < 0.65:
            missing = f", {pick.choice(DOMAINS[column.type])}" if pick.random() < 0.3 else ""
            nulls = pick.choice(("", "", " ignore nulls"))
            call = (
                f"{pick.choice(('lag', 'lead'))}({column.ref}, {pick.choice((1, 1, 2))}{missing})"
            )
            return f"{call}{nulls} over ({rows})", column.type
        if dice < 0.75:
            call = pick.choice(("first_value({})", "last_value({})", "nth_value({}, 2)"))
            nulls = pick.choice(("", " ignore nulls"))
            return f"{call.format(column.ref)}{nulls} over ({rows} {self._frame()})", column.type
        text, kind = self._window_sum(plain)
        return self._cast(f"{text} over ({rows} {self._frame()})", kind), kind

    def _by_value(self, plain: Sequence[FuzzColumn]) -> tuple[str, str]:
        """Return the text and type of a function with the same value for equal rows, in a window of
        its own."""
        pick = self._pick
        by, order = self._partition(plain), self._order(plain, total=False)
        dice = pick.random()
        if dice < 0.4:
            rank = pick.choice(
                ("rank()", "rank()", "dense_rank()", "percent_rank()", "cume_dist()")
            )
            return f"{rank} over ({by}{order})", "double" if rank[0] in "pc" else "int"
        text, kind = self._window_sum(plain)
        numbers = self._of(plain, *WHOLE)
        if dice < 0.6:
            over = by
        elif dice < 0.85 or not numbers:
            over = by + order
        else:
            frame = "range between 1 preceding and 1 following"
            over = f"{by}order by {pick.choice(numbers).ref} {frame}"
        return self._cast(f"{text} over ({over})", kind), kind

    def _window_sum(self, plain: Sequence[FuzzColumn]) -> tuple[str, str]:
        """Return the text and type of an aggregate, without its OVER clause."""
        pick = self._pick
        column = pick.choice(plain)
        choices = [("count(*)", "bigint"), (f"count({column.ref})", "bigint")]
        choices += [(f"{name}({column.ref})", column.type) for name in ("min", "max")]
        if column.type in NUMBERS:
            kind = column.type if column.type.startswith("decimal") else "bigint"
            choices += [(f"sum({column.ref})", kind)] * 3
        text, kind = pick.choice(choices)
        if pick.random() < 0.15:
            text += f" filter (where {self._test(plain, 1)})"
        return text, kind

    def _cast(self, text: str, kind: str) -> str:
        return f"cast({text} as {kind})" if kind.startswith("decimal") else text

    def _frame(self) -> str:
        """Return a frame of rows, mostly one that contains rows."""
        bounds = ("unbounded preceding", "2 preceding", "1 preceding", "current row",
                  "1 following", "2 following", "unbounded following")  # fmt: skip
        start = self._pick.randrange(0, 5)
        end = self._pick.randrange(max(start, 1), 7)
        return f"rows between {bounds[start]} and {bounds[end]}"

    # -- first rows, sets, times ------------------------------------------------------------------

    def _first_rows(self, depth: int, first: FuzzTable | None) -> Query:
        """Return the first rows of a query by all of its columns."""
        pick = self._pick
        sql, columns = super()._select(depth, first)
        if any(column.type == "double" for column in columns):
            return sql, columns
        order = self._order(columns, total=True)
        if pick.random() < 0.08:
            return f"{sql} {order} offset {pick.randint(1, 2)}", columns
        skipped = f" offset {pick.randint(0, 3)}" if pick.random() < 0.3 else ""
        return f"{sql} {order} limit {pick.choice((1, 2, 2, 3, 5))}{skipped}", columns

    def _set_operation(self, depth: int, first: FuzzTable | None) -> Query:
        del first
        return self._union(depth)

    def _grouping_sets(self, depth: int, first: FuzzTable | None) -> Query:
        """Return subtotals. The NULL key of a subtotal may meet a row whose key is NULL."""
        pick = self._pick
        source, columns = self._from(depth, first)
        where = self._where(columns)
        plain = _comparable(columns)
        if not plain:
            return self._grouped(source, columns, where, keyed=False)
        keys = pick.sample(plain, min(len(plain), pick.choice((1, 2, 2, 3))))
        refs = [key.ref for key in keys]
        listed = ", ".join(refs)
        items = [f"{ref} as k{n}" for n, ref in enumerate(refs)]
        made = [FuzzColumn(f"k{n}", key.type) for n, key in enumerate(keys)]
        if pick.random() < 0.6:
            items.append("grouping_id() as k7")
            made.append(FuzzColumn("k7", "bigint"))
        elif pick.random() < 0.5:
            items.append(f"cast(grouping({refs[-1]}) as int) as k7")
            made.append(FuzzColumn("k7", "int"))
        for number in range(pick.randint(1, 2)):
            text, kind = self._aggregate([*columns, *keys])
            items.append(f"{text} as a{number}")
            made.append(FuzzColumn(f"a{number}", kind))
        sets = ", ".join(
            f"({', '.join(pick.sample(refs, pick.randint(0, len(refs))))})" for _ in range(3)
        )
        forms = [f"rollup({listed})", f"cube({listed})", f"grouping sets (({listed}), {sets})"]
        if len(refs) > 1:
            forms.append(f"{refs[0]}, rollup({', '.join(refs[1:])})")
        sql = f"select {', '.join(items)} from {source}{where} group by {pick.choice(forms)}"
        if pick.random() < 0.2:
            sql += f" having {pick.choice(('grouping_id() > 0', self._having(columns)))}"
        return sql, tuple(made)

    def _of_times(self, depth: int, first: FuzzTable | None) -> Query:
        """Return a grouping by tumbling or hopping time windows."""
        pick = self._pick
        source, columns = self._from(depth, first)
        where = self._where(columns)
        times = self._of(columns, "timestamp")
        if not times:
            return self._grouped(source, columns, where, keyed=True)
        length = pick.choice(("5 minutes", "10 minutes", "1 hour"))
        hop = pick.choice(("", "", ", '5 minutes'", ", '2 minutes'", ", '5 minutes', '1 minute'"))
        window = f"window({pick.choice(times).ref}, '{length}'{hop})"
        items = ["window.start as k0", "window.end as k1"][: pick.randint(1, 2)]
        made = [FuzzColumn("k0", "timestamp"), FuzzColumn("k1", "timestamp")][: len(items)]
        keys = [window]
        if pick.random() < 0.4:
            column = pick.choice(_comparable(columns))
            keys.append(column.ref)
            items.append(f"{column.ref} as k2")
            made.append(FuzzColumn("k2", column.type))
        for number in range(pick.randint(1, 2)):
            text, kind = self._aggregate(columns)
            items.append(f"{text} as a{number}")
            made.append(FuzzColumn(f"a{number}", kind))
        sql = f"select {', '.join(items)} from {source}{where} group by {', '.join(keys)}"
        return (sql + f" having {self._having(columns)}" if pick.random() < 0.2 else sql), tuple(
            made
        )

    def _of_distincts(self, depth: int, first: FuzzTable | None) -> Query:
        """Return a grouping with DISTINCT aggregates of several columns, some with a FILTER."""
        pick = self._pick
        source, columns = self._from(depth, first)
        where = self._where(columns)
        plain = _comparable(columns)
        if not plain:
            return self._grouped(source, columns, where, keyed=False)
        key = pick.choice(plain) if pick.random() < 0.8 else None
        items = [] if key is None else [f"{key.ref} as k0"]
        made = [] if key is None else [FuzzColumn("k0", key.type)]
        for number in range(pick.randint(2, 4)):
            column, other = pick.choice(plain), pick.choice(plain)
            choices = [
                (f"count(distinct {column.ref})", "bigint"),
                (f"count(distinct {column.ref}, {other.ref})", "bigint"),
                (f"max(distinct {column.ref})", column.type),
                ("count(*)", "bigint"),
            ]
            if column.type in WHOLE:
                choices += [(f"sum(distinct {column.ref})", "bigint"),
                            (f"avg(distinct {column.ref})", "double")]  # fmt: skip
            text, kind = pick.choice(choices)
            if pick.random() < 0.4:
                text += f" filter (where {self._test(plain, 1)})"
            items.append(f"{text} as a{number}")
            made.append(FuzzColumn(f"a{number}", kind))
        group = "" if key is None else f" group by {key.ref}"
        return f"select {', '.join(items)} from {source}{where}{group}", tuple(made)

    # -- relations: generators, joins without an equality -----------------------------------------

    def _from(self, depth: int, first: FuzzTable | None) -> tuple[str, list[FuzzColumn]]:
        text, columns = super()._from(depth, first)
        pick = self._pick
        while pick.random() < 0.13 and _comparable(columns):
            alias = self._alias()
            outer = pick.choice(("", "outer "))
            call, names = self._generator(_comparable(columns))
            listed = ", ".join(column.name for column in names)
            text += f" lateral view {outer}{call} {alias} as {listed}"
            columns = [*columns, *(FuzzColumn(f"{alias}.{each.name}", each.type) for each in names)]
        return text, columns

    def _array(self, columns: Sequence[FuzzColumn], kind: str) -> str:
        """Return an array of a type, which may be empty, NULL, or contain NULLs."""
        pick = self._pick
        parts = [self._expr(columns, kind, 1) for _ in range(pick.choice((1, 2, 2, 3)))]
        made = f"array({', '.join(parts)})"
        dice = pick.random()
        if dice < 0.2:
            return f"case when {self._test(columns, 1)} then {made} end"
        if dice < 0.4:
            return f"filter({made}, e -> e is not null)"
        if dice < 0.5 and kind == "int":
            return f"sequence(0, {self._expr(columns, kind, 0)})"
        return made

    def _generator(self, columns: Sequence[FuzzColumn]) -> tuple[str, list[FuzzColumn]]:
        """Return the call of a generator, and its output columns."""
        pick = self._pick
        kind = pick.choice(("int", "string", "date", "bigint"))
        array = self._array(columns, kind)
        dice = pick.random()
        if dice < 0.5:
            return f"explode({array})", [FuzzColumn("c80", kind)]
        if dice < 0.75:
            return f"posexplode({array})", [FuzzColumn("c81", "int"), FuzzColumn("c80", kind)]
        if dice < 0.85:
            one, two = (self._expr(columns, kind, 1) for _ in range(2))
            return f"stack(2, {one}, {two})", [FuzzColumn("c80", kind)]
        rows = ", ".join(
            f"struct({self._expr(columns, kind, 1)} as a, {self._expr(columns, 'int', 1)} as b)"
            for _ in range(pick.randint(1, 2))
        )
        return f"inline(array({rows}))", [FuzzColumn("c80", kind), FuzzColumn("c81", "int")]

    def _on(self, left: Sequence[FuzzColumn], right: Sequence[FuzzColumn]) -> str:
        pairs = self._pairs(left, right)
        if pairs and self._pick.random() < 0.1:
            a, b = self._pick.choice(pairs)
            return f"{a.ref} {self._pick.choice(('<', '<=', '<>'))} {b.ref}"
        return super()._on(left, right)

    # -- subqueries in expressions ----------------------------------------------------------------

    def _inner(self) -> tuple[str, list[FuzzColumn]]:
        """Return a table for a subquery, and its columns."""
        alias, table = self._alias(), self._pick.choice(self.tables)
        columns = [FuzzColumn(f"{alias}.{column.name}", column.type) for column in table.columns]
        return f"{table.name} {alias}", columns

    def _scalar(self, columns: Sequence[FuzzColumn]) -> tuple[str, str] | None:
        """Return the text and type of a scalar subquery; None if the tables have no comparable
        columns."""
        pick = self._pick
        table, inner = self._inner()
        plain = _comparable(inner)
        if not plain:
            return None
        pairs = self._pairs(columns, inner)
        where = f" where {self._test(plain, 1)}" if pick.random() < 0.4 else ""
        correlated = bool(pairs) and pick.random() < 0.65
        if correlated:
            a, b = pick.choice(pairs)
            sign = pick.choice(("=", "=", "=", "=", "<=>", "<"))
            where += f"{' and' if where else ' where'} {b.ref} {sign} {a.ref}"
        column = pick.choice(plain)
        dice = pick.random()
        if dice < (0.06 if correlated else 0.15):  # may fail because it returns two rows
            return f"(select {column.ref} from {table}{where})", column.type
        if dice < 0.25:
            order = self._order(plain, total=True) if len(plain) <= ORDERED_COLUMNS_MAX else ""
            if order:
                return f"(select {column.ref} from {table}{where} {order} limit 1)", column.type
        choices = [("count(*)", "bigint"), (f"count(distinct {column.ref})", "bigint")]
        choices += [(f"{name}({column.ref})", column.type) for name in ("min", "max")]
        if column.type in WHOLE:
            choices += [(f"sum({column.ref})", "bigint"), (f"sum({column.ref}) + 1", "bigint")]
            choices.append((f"coalesce(sum({column.ref}), 0)", "bigint"))
        text, kind = pick.choice(choices)
        having = f" having {self._having(plain)}" if pick.random() < 0.1 else ""
        return f"(select {text} from {table}{where}{having})", kind

    def _mark(self, columns: Sequence[FuzzColumn]) -> str:
        """Return a predicate with a subquery inside an expression, not as a separate conjunct."""
        pick = self._pick
        found = self._subquery(columns)
        pairs = self._pairs(columns, columns)
        if pick.random() < 0.15 and len(pairs) > 1:
            table, inner = self._inner()
            near = self._pairs(columns, inner)
            if len(near) > 1:
                (a, b), (c, d) = pick.sample(near, 2)
                negated = pick.choice(("", "not "))
                found = f"({a.ref}, {c.ref}) {negated}in (select {b.ref}, {d.ref} from {table})"
        if not found:
            return ""
        plain = _comparable(columns)
        test = self._test(plain, 1)
        return pick.choice(
            (f"({test} or {found})", f"(({found}) is null)", f"not ({test} and {found})",
             f"(({found}) = ({test}))", f"(({found}) <=> null)", found)
        )  # fmt: skip

    def _where(self, columns: Sequence[FuzzColumn]) -> str:
        pick = self._pick
        where = super()._where(columns)
        plain = _comparable(columns)
        if not plain or pick.random() >= 0.18 or not self._may():
            return where
        term = ""
        if pick.random() < 0.5:
            term = self._mark(columns)
        else:
            scalar = self._scalar(columns)
            if scalar is not None:
                text, kind = scalar
                sign = pick.choice(("=", "<", ">=", "<>", "<=>"))
                term = f"{self._expr(plain, kind, 1)} {sign} {text}"
        if not term:
            return where
        return f"{where} and {term}" if where else f" where {term}"

    def _items(self, columns: Sequence[FuzzColumn], *, doubles: bool) -> Query:
        """Return columns, sometimes with a scalar subquery, a test by a subquery, or a
        generator."""
        pick = self._pick
        text, made = super()._items(columns, doubles=doubles)
        plain = _comparable(columns)
        dice = pick.random()
        if not plain or dice >= 0.26 or not self._may():
            return text, made
        if dice < 0.11:
            scalar = self._scalar(columns)
            if scalar is None:
                return text, made
            return f"{text}, {scalar[0]} as x7", (*made, FuzzColumn("x7", scalar[1]))
        if dice < 0.18:
            mark = self._mark(columns)
            return (
                (f"{text}, {mark} as x7", (*made, FuzzColumn("x7", "boolean")))
                if mark
                else (text, made)
            )
        call, names = self._generator(plain)
        named = [FuzzColumn(f"x{8 + n}", column.type) for n, column in enumerate(names)]
        listed = ", ".join(column.name for column in named)
        return f"{text}, {call} as ({listed})", (*made, *named)
