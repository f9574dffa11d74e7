"""A grammar fuzzer: makes random view scripts over the engine's rules, from a seed.

`make_case` returns a `FuzzCase`: some tables, a few views and explicit changes, which
`FuzzCase.text` writes as a view script. Queries are typed while they are written, so nearly all of
them are valid Spark SQL. They combine all rules, nested to some depth: projections, filters in
three-valued logic, inner joins with residuals, outer, semi and anti joins, EXISTS and IN, UNION
ALL, UNION, DISTINCT, groupings with every aggregate and FILTER, HAVING, global aggregates,
aggregates below joins and of aggregates, derived tables, table expressions, and views on views.
Most bugs show in small views, and a plan multiplies with each operator above another. So most views
have up to three operators, and one of `DEEP_EVERY` has more.

Rules: values come from such small domains that rows match, groups come and go, and NULLs are
frequent. Changes delete existing rows, repeat rows, touch a row several times at the same
timestamp, and leave timestamps without changes. Tables have 1 to `WIDE_COLUMNS_MAX` columns, and
some scripts have many changes per timestamp. Doubles are returned but never compared, because their
last bits depend on the order of rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

TYPES: Final = ("int", "int", "bigint", "decimal(8,2)", "string", "string", "boolean", "date")
NUMBERS: Final = ("int", "bigint", "decimal(8,2)")
DOMAINS: Final[dict[str, tuple[str, ...]]] = {
    "int": ("0", "1", "2", "3", "-1"),
    "bigint": ("0", "1", "2", "3"),
    "decimal(8,2)": ("0.00", "1.00", "1.50", "-2.25"),
    "string": ("'a'", "'b'", "'c'", "''"),
    "boolean": ("true", "false"),
    "date": ("date '2013-01-01'", "date '2013-01-02'", "date '2013-02-01'"),
    "timestamp": (
        "timestamp '2013-01-01 00:00:00'",
        "timestamp '2013-01-01 00:04:30'",
        "timestamp '2013-01-01 00:10:00'",
        "timestamp '2013-01-01 00:13:00'",
    ),
}
"""Values by type. Timestamps are few, and only used by grammars that support them
(`fuzz_spark`)."""
NULLS: Final = 0.22
OPERATORS: Final = (1, 1, 1, 2, 2, 2, 3)
"""Most joins, groupings, unions and subqueries of a view; one of these numbers is drawn."""
NARROW_EVERY: Final = 16
WIDE_EVERY: Final = 24
WIDE_COLUMNS_MAX: Final = 200
WHOLE: Final = ("int", "bigint")
WIDE_JOINS: Final = 0.06
"""Fraction of views that join a relation to a table by its key and aggregate by that table's
columns."""
KEYED_EVERY: Final = 3
"""One of this many tables has a PRIMARY KEY."""
MANY_EVERY: Final = 12
"""One of this many scripts has many changes per timestamp."""
DEEP: Final = (3, 4, 5, 6)
DEEP_EVERY: Final = 10


class FuzzColumn(msgspec.Struct, frozen=True):
    """A column as expressions refer to it, and its type."""

    ref: str
    type: str

    @property
    def name(self) -> str:
        """Return the name without the alias of the relation, in backticks if `ref` has them."""
        quoted = self.ref.endswith("`")
        return self.ref[self.ref.rindex("`", 0, -1) :] if quoted else self.ref.rsplit(".", 1)[-1]


class FuzzTable(msgspec.Struct, frozen=True):
    """A table, or anything else that a FROM clause may name."""

    name: str
    columns: tuple[FuzzColumn, ...]
    keyed: bool = False
    """True if its first column is its PRIMARY KEY."""


class FuzzChange(msgspec.Struct, frozen=True):
    """One change of a script; `count` is negative for deletes."""

    time: int
    table: str
    row: str
    count: int


class FuzzCase(msgspec.Struct, frozen=True):
    """A random script."""

    tables: tuple[FuzzTable, ...]
    views: tuple[tuple[str, str], ...]
    changes: tuple[FuzzChange, ...]
    times: tuple[int, ...]
    conf: tuple[str, ...] = ()

    def text(self, comment: str = "") -> str:
        """Return the case as a view script."""
        lines = [f"-- {line}" for line in comment.splitlines()]
        lines.append("--! determined")
        lines += [f"--! conf {conf}" for conf in self.conf]
        for table in self.tables:
            items = [f"{column.name} {column.type}" for column in table.columns]
            items += [f"primary key ({table.columns[0].name})"] if table.keyed else []
            lines.append(f"create table {table.name} ({', '.join(items)});")
        for name, sql in self.views:
            lines.append(f"create materialized view {name} as\n  {sql};")
        for time in self.times:
            lines.append(f"@ {time}")
            for change in self.changes:
                if change.time == time:
                    sign = "+" if change.count > 0 else "-"
                    copies = "" if abs(change.count) == 1 else str(abs(change.count))
                    lines.append(f"{sign}{copies} {change.table} ({change.row})")
        return "\n".join(lines) + "\n"


def make_case(
    seed: int, number: int, views: int = 4, grammar: type[QueryWriter] | None = None
) -> FuzzCase:
    """Return script `number` of a seed in a grammar. It is always the same."""
    pick = random.Random(f"{seed}/{number}")
    made_of = grammar or QueryWriter
    keys = random.Random(f"{seed}/{number} keys")
    tables = tuple(
        msgspec.structs.replace(
            _table(pick, index, made_of.types), keyed=keys.randrange(KEYED_EVERY) == 0
        )
        for index in range(pick.choice((2, 2, 3)))
    )
    writer = made_of(pick, list(tables))
    texts: list[tuple[str, str]] = []
    for index in range(views):
        sql, columns = writer.view()
        texts.append((f"v{index}", sql))
        if pick.random() < 0.3 and not any(column.type == "double" for column in columns):
            writer.tables.append(FuzzTable(f"v{index}", columns))
    times = tuple(range(10, 10 + 10 * pick.randint(3, 6), 10))
    changes = tuple(_changes(pick, tables, times))
    conf = ("spark.sql.ansi.enabled false",) if pick.random() < 0.1 else ()
    return FuzzCase(tables, tuple(texts), changes, times, conf)


def _table(pick: random.Random, index: int, types: Sequence[str]) -> FuzzTable:
    if pick.randrange(NARROW_EVERY) == 0:
        return FuzzTable(f"t{index}", (FuzzColumn("k", "int"),))
    columns = [FuzzColumn("k", "int"), FuzzColumn("g", pick.choice(("string", "int", "date")))]
    columns += [FuzzColumn(f"c{n}", pick.choice(types)) for n in range(_further_columns(pick))]
    return FuzzTable(f"t{index}", tuple(columns))


def _further_columns(pick: random.Random) -> int:
    if pick.randrange(WIDE_EVERY) == 0:
        return pick.randint(20, WIDE_COLUMNS_MAX - 2)
    return pick.randint(1, 3)


def _changes(
    pick: random.Random, tables: Sequence[FuzzTable], times: Sequence[int]
) -> list[FuzzChange]:
    present: dict[str, list[str]] = {table.name: [] for table in tables}
    made: list[FuzzChange] = []
    most = 60 if pick.randrange(MANY_EVERY) == 0 else 9
    for time in times:
        if pick.random() < 0.12:
            continue
        for _ in range(pick.randint(1, most)):
            table = pick.choice(tables)
            rows = present[table.name]
            dice = pick.random()
            if rows and dice < 0.4:
                row = rows.pop(pick.randrange(len(rows)))
                made.append(FuzzChange(time, table.name, row, -1))
                if dice < 0.25:
                    continue
                if dice < 0.3:  # inserted and deleted at the same timestamp
                    rows.append(row)
                    made.append(FuzzChange(time, table.name, row, 1))
                    continue
            copies = pick.choice((1, 1, 1, 1, 2, 3))
            if rows and pick.random() < 0.2:
                row = pick.choice(rows)
            else:
                values = [_value(pick, column.type) for column in table.columns]
                if table.keyed and values[0] == "null":
                    values[0] = DOMAINS[table.columns[0].type][0]
                row = ", ".join(values)
            if table.keyed:
                copies = 1
                key = row.partition(", ")[0]
                for old in [each for each in rows if each.partition(", ")[0] == key]:
                    rows.remove(old)
                    made.append(FuzzChange(time, table.name, old, -1))
            rows += [row] * copies
            made.append(FuzzChange(time, table.name, row, copies))
    return made


def _value(pick: random.Random, kind: str) -> str:
    return "null" if pick.random() < NULLS else pick.choice(DOMAINS[kind])


class QueryWriter:
    """Writes queries over the tables it knows. Subclasses add constructs to the grammar."""

    types: ClassVar[Sequence[str]] = TYPES
    """Types of the columns of tables."""
    glues: ClassVar[Sequence[str]] = (" union all ", " union all ", " union ")
    """Keywords between the branches of a union."""

    def __init__(self, pick: random.Random, tables: list[FuzzTable]) -> None:
        self.tables = tables
        self._pick = pick
        self._aliases = 0
        self._operators = 0

    def view(self) -> tuple[str, tuple[FuzzColumn, ...]]:
        """Return the text of a view, and its columns."""
        deep = self._pick.randrange(DEEP_EVERY) == 0
        self._operators = self._pick.choice(DEEP if deep else OPERATORS)
        dice = self._pick.random()
        if dice < 0.12:
            return self._union(self._pick.choice((1, 1, 2)))
        if dice < 0.22:
            inner, columns = self._select(1)
            table = FuzzTable("cte", columns)
            outer, made = self._select(1, first=table)
            return f"with cte as ({inner}) {outer}", made
        keyed = [table for table in self.tables if table.keyed and len(table.columns) > 1]
        if dice > 1 - WIDE_JOINS and keyed:
            return self._wide_join(self._pick.choice(keyed))
        return self._select(self._pick.choice((0, 1, 1, 1, 2)))

    def _may(self) -> bool:
        """Take one operator from the view's budget. Return whether one was left."""
        self._operators -= 1
        return self._operators >= 0

    # -- expressions ------------------------------------------------------------------------------

    def _of(self, columns: Sequence[FuzzColumn], *kinds: str) -> list[FuzzColumn]:
        return [column for column in columns if column.type in kinds]

    def _expr(self, columns: Sequence[FuzzColumn], kind: str, depth: int = 2) -> str:
        pick = self._pick
        own = self._of(columns, kind)
        dice = pick.random()
        if own and (depth <= 0 or dice < 0.5):
            return pick.choice(own).ref
        if depth <= 0 or dice < 0.62:
            return pick.choice(DOMAINS[kind])
        if dice < 0.72:
            test, other = self._test(columns, depth - 1), self._expr(columns, kind, depth - 1)
            return f"case when {test} then {self._expr(columns, kind, depth - 1)} else {other} end"
        if dice < 0.8:
            return f"coalesce({self._expr(columns, kind, depth - 1)}, {pick.choice(DOMAINS[kind])})"
        if kind in ("int", "bigint"):
            left, right = (self._expr(columns, kind, depth - 1) for _ in range(2))
            return pick.choice((f"({left} + {right})", f"({left} - {right})", f"({left} % 3)"))
        if kind == "string":
            inner = self._expr(columns, kind, depth - 1)
            return pick.choice((f"upper({inner})", f"concat({inner}, 'x')"))
        if kind == "boolean":
            return f"({self._test(columns, depth - 1)})"
        return f"nullif({self._expr(columns, kind, depth - 1)}, {pick.choice(DOMAINS[kind])})"

    def _test(self, columns: Sequence[FuzzColumn], depth: int = 2) -> str:
        """Return a predicate that may be NULL."""
        pick = self._pick
        known = [column for column in columns if column.type != "double"]
        if not known:
            return "true"
        column = pick.choice(known)
        dice = pick.random()
        if depth > 0 and dice < 0.25:
            glue = pick.choice((" and ", " or "))
            return f"({self._test(columns, depth - 1)}{glue}{self._test(columns, depth - 1)})"
        if depth > 0 and dice < 0.33:
            return f"not ({self._test(columns, depth - 1)})"
        if dice < 0.43:
            return f"{column.ref} is {pick.choice(('', 'not '))}null"
        if dice < 0.53:
            values = ", ".join(_value(pick, column.type) for _ in range(pick.randint(1, 3)))
            return f"{column.ref} {pick.choice(('', 'not '))}in ({values})"
        if column.type == "boolean" and dice < 0.7:
            return column.ref
        sign = pick.choice(("=", "<>", "<", ">=", "<=>"))
        return f"{column.ref} {sign} {self._expr(known, column.type, depth - 1)}"

    # -- relations --------------------------------------------------------------------------------

    def _alias(self) -> str:
        self._aliases += 1
        return f"r{self._aliases}"

    def _relation(self, depth: int, first: FuzzTable | None = None) -> tuple[str, list[FuzzColumn]]:
        """Return the text of a relation with its alias, and its columns."""
        alias = self._alias()
        if first is None and depth > 0 and self._pick.random() < 0.3:
            if self._pick.random() < 0.25:
                sql, columns = self._union(depth - 1)
            else:
                sql, columns = self._select(depth - 1)
            text = f"({sql}) {alias}"
        else:
            table = first or self._pick.choice(self.tables)
            text, columns = f"{table.name} {alias}", table.columns
        return text, [FuzzColumn(f"{alias}.{column.name}", column.type) for column in columns]

    def _pairs(
        self, left: Sequence[FuzzColumn], right: Sequence[FuzzColumn]
    ) -> list[tuple[FuzzColumn, FuzzColumn]]:
        """Return pairs of columns that can be compared."""
        whole = ("int", "bigint")
        return [
            (a, b)
            for a in left
            for b in right
            if a.type != "double"
            and (a.type == b.type or (a.type in whole and b.type in whole))
            and a.type != "boolean"
        ]

    def _on(self, left: Sequence[FuzzColumn], right: Sequence[FuzzColumn]) -> str:
        pick = self._pick
        if pick.random() < 0.04:  # no equality between the two sides
            return self._test(pick.choice((left, right, [*left, *right])), 1)
        pairs = self._pairs(left, right)
        plain = [(a, b) for a, b in pairs if a.name[0] in "kgx" and b.name[0] in "kgx"]
        if plain and pick.random() < 0.85:
            pairs = plain
        terms = []
        for a, b in pick.sample(pairs, min(len(pairs), pick.choice((1, 1, 1, 2)))):
            sign = "<=>" if pick.random() < 0.12 else "="
            computed = f"coalesce({a.ref}, {pick.choice(DOMAINS[a.type])})"
            terms.append(f"{computed if pick.random() < 0.06 else a.ref} {sign} {b.ref}")
        if pick.random() < 0.25 or not terms:
            terms.append(self._test([*left, *right], 1))
        return " and ".join(terms)

    def _from(self, depth: int, first: FuzzTable | None) -> tuple[str, list[FuzzColumn]]:
        pick = self._pick
        text, columns = self._relation(depth, first)
        for _ in range(pick.choice((0, 0, 1, 1, 1, 2, 3) if depth else (0, 0, 0, 1))):
            if not self._may():
                break
            other, added = self._relation(depth - 1 if pick.random() < 0.6 else 0)
            if not self._pairs(columns, added) and pick.random() < 0.9:
                continue
            kind = pick.choice(
                ("join", "join", "join", "left join", "left join", "right join", "full join",
                 "left semi join", "left anti join")
            )  # fmt: skip
            if kind == "join" and pick.random() < 0.06:
                text += f" cross join {other}"
                columns = [*columns, *added]
                continue
            text += f" {kind} {other} on {self._on(columns, added)}"
            if "semi" not in kind and "anti" not in kind:
                columns = [*columns, *added]
        return text, columns

    def _subquery(self, columns: Sequence[FuzzColumn]) -> str:
        """Return a predicate with a subquery; "" if no columns can be compared."""
        pick = self._pick
        alias = self._alias()
        table = pick.choice(self.tables)
        inner = [FuzzColumn(f"{alias}.{column.name}", column.type) for column in table.columns]
        pairs = self._pairs(columns, inner)
        negated = pick.choice(("", "", "not "))
        if pick.random() < 0.12:  # uncorrelated
            where = f" where {self._test(inner, 1)}" if pick.random() < 0.7 else ""
            return f"{negated}exists (select 1 from {table.name} {alias}{where})"
        if not pairs:
            return ""
        a, b = pick.choice(pairs)
        extra = f" and {self._test(inner, 1)}" if pick.random() < 0.4 else ""
        if pick.random() < 0.55:
            if pick.random() < 0.2:
                other = pick.choice(pairs)
                extra += f" and {other[0].ref} < {other[1].ref}"
            inner_text = f"{table.name} {alias} where {a.ref} = {b.ref}{extra}"
            return f"{negated}exists (select 1 from {inner_text})"
        where = f" where {self._test(inner, 1)}" if extra else ""
        if pick.random() < 0.2:
            where += f" group by {b.ref} having {self._having(inner)}"
        return f"{a.ref} {negated}in (select {b.ref} from {table.name} {alias}{where})"

    def _where(self, columns: Sequence[FuzzColumn]) -> str:
        pick = self._pick
        terms = [self._test(columns)] if pick.random() < 0.45 else []
        if pick.random() < 0.22 and self._may():
            found = self._subquery(columns)
            if found and terms and pick.random() < 0.15:
                return f" where ({terms[0]} or {found})"
            terms += [found] if found else []
        return f" where {' and '.join(terms)}" if terms else ""

    # -- queries ----------------------------------------------------------------------------------

    def _select(
        self, depth: int, first: FuzzTable | None = None
    ) -> tuple[str, tuple[FuzzColumn, ...]]:
        dice = self._pick.random()
        if dice < 0.55 and not self._may():
            dice = 1.0
        source, columns = self._from(depth, first)
        where = self._where(columns)
        if dice < 0.42:
            return self._grouped(source, columns, where, keyed=dice < 0.36)
        items, made = self._items(columns, doubles=dice >= 0.55)
        distinct = "distinct " if dice < 0.55 else ""
        return f"select {distinct}{items} from {source}{where}", made

    def _items(
        self, columns: Sequence[FuzzColumn], *, doubles: bool
    ) -> tuple[str, tuple[FuzzColumn, ...]]:
        pick = self._pick
        usable = [column for column in columns if doubles or column.type != "double"]
        items, made = [], []
        for index in range(pick.randint(1, 4)):
            name = f"x{index}"
            if usable and pick.random() < 0.7:
                column = pick.choice(usable)
                items.append(f"{column.ref} as {name}")
                made.append(FuzzColumn(name, column.type))
            elif doubles and pick.random() < 0.08 and len(self._of(columns, "int")) > 1:
                a, b = pick.sample(self._of(columns, "int"), 2)
                items.append(f"{a.ref} / {b.ref} as {name}")
                made.append(FuzzColumn(name, "double"))
            else:
                kind = pick.choice(("int", "string", "boolean", "date", "bigint"))
                items.append(f"{self._expr(columns, kind)} as {name}")
                made.append(FuzzColumn(name, kind if kind != "int" else "int"))
        return ", ".join(items), tuple(made)

    def _grouped(
        self, source: str, columns: Sequence[FuzzColumn], where: str, *, keyed: bool
    ) -> tuple[str, tuple[FuzzColumn, ...]]:
        pick = self._pick
        items: list[str] = []
        made: list[FuzzColumn] = []
        keys: list[str] = []
        plain = [column for column in columns if column.type != "double"]
        if keyed and plain:
            for index in range(pick.choice((1, 1, 2))):
                column = pick.choice(plain)
                key, kind = column.ref, column.type
                if kind == "int" and pick.random() < 0.2:
                    key = f"({column.ref} % 2)"
                keys.append(key)
                items.append(f"{key} as k{index}")
                made.append(FuzzColumn(f"k{index}", kind))
        for index in range(pick.randint(1, 3)):
            text, kind = self._aggregate(columns)
            items.append(f"{text} as a{index}")
            made.append(FuzzColumn(f"a{index}", kind))
        sql = f"select {', '.join(items)} from {source}{where}"
        if keys:
            sql += f" group by {', '.join(keys)}"
        if pick.random() < 0.3:
            sql += f" having {self._having(columns)}"
        return sql, tuple(made)

    def _having(self, columns: Sequence[FuzzColumn]) -> str:
        pick = self._pick
        numbers = self._of(columns, "int", "bigint")
        tests = [f"count(*) > {pick.randint(0, 2)}"]
        if numbers:
            ref = pick.choice(numbers).ref
            tests += [f"sum({ref}) > 1", f"max({ref}) is null or min({ref}) < 1",
                      f"count({ref}) <> 1"]  # fmt: skip
        test = pick.choice(tests)
        return f"not ({test})" if pick.random() < 0.2 else test

    def _aggregate(self, columns: Sequence[FuzzColumn]) -> tuple[str, str]:
        """Return the text and type of an aggregate. Decimals that became wider are cast back."""
        pick = self._pick
        plain = [column for column in columns if column.type != "double"]
        column = pick.choice(plain) if plain else FuzzColumn("1", "int")
        text, kind = pick.choice(self._choices(column, plain))
        if pick.random() < 0.2 and plain:
            text += f" filter (where {self._test(plain, 1)})"
        if kind == "decimal(8,2)":
            text = f"cast({text} as decimal(8,2))"
        if kind == "bigint" and pick.random() < 0.15:
            text = f"({text} + 1)"
        return text, kind

    def _wide_join(self, few: FuzzTable) -> tuple[str, tuple[FuzzColumn, ...]]:
        """Return a grouping of a relation by columns of a table to which it is joined by the
        table's key."""
        pick = self._pick
        many = pick.choice([t for t in self.tables if any(c.type in WHOLE for c in t.columns)])
        left, columns = self._relation(0, many)
        right, (key, *others) = self._relation(0, few)
        tie = pick.choice(self._of(columns, *WHOLE))
        groups = [tie] if pick.random() < 0.2 else []
        groups += pick.sample(others, min(len(others), pick.choice((0, 1, 1, 2))))
        items = [f"{column.ref} as k{index}" for index, column in enumerate(groups)]
        made = [FuzzColumn(f"k{index}", column.type) for index, column in enumerate(groups)]
        for index in range(pick.randint(1, 3)):
            column = pick.choice(columns)
            calls = [("count(*)", "bigint"), (f"count({column.ref})", "bigint")]
            calls += [(f"{name}({column.ref})", column.type) for name in ("min", "max")]
            if column.type in WHOLE:
                calls += 2 * [(f"sum({column.ref})", "bigint")]
                calls.append((f"avg({column.ref})", "double"))
            text, kind = pick.choice(calls)
            items.append(f"{text} as a{index}")
            made.append(FuzzColumn(f"a{index}", kind))
        source = f"{left} join {right} on {tie.ref} = {key.ref}"
        if pick.random() < 0.3:
            source += f" and {self._test(others, 1)}"
        where = f" where {self._test(columns, 1)}" if pick.random() < 0.3 else ""
        sql = f"select {', '.join(items)} from {source}{where}"
        if groups:
            sql += f" group by {', '.join(column.ref for column in groups)}"
        return f"{sql} having count(*) > 1" if pick.random() < 0.15 else sql, tuple(made)

    def _choices(self, column: FuzzColumn, plain: Sequence[FuzzColumn]) -> list[tuple[str, str]]:
        x, kind = column.ref, column.type
        found = [
            ("count(*)", "bigint"),
            (f"count({x})", "bigint"),
            (f"count(distinct {x})", "bigint"),
            (f"min({x})", kind),
            (f"max({x})", kind),
        ]
        if plain:
            test = self._test(plain, 1)
            found.append((f"count_if({test})", "bigint"))
            found.append((f"{self._pick.choice(('bool_and', 'bool_or'))}({test})", "boolean"))
        if kind in NUMBERS:
            total = kind if kind.startswith("decimal") else "bigint"
            found += [(f"sum({x})", total), (f"sum({x})", total), (f"sum(distinct {x})", total)]
            average = f"avg({x})"
            found.append((average, "decimal(8,2)" if total != "bigint" else "double"))
            spread = self._pick.choice(("stddev", "stddev_pop", "var_samp", "var_pop"))
            found.append((f"{spread}({x})", "double"))
        return found

    def _union(self, depth: int) -> tuple[str, tuple[FuzzColumn, ...]]:
        """Return a UNION [ALL] of two or three queries with the same types."""
        pick = self._pick
        kinds = [
            pick.choice(("int", "string", "bigint", "date")) for _ in range(pick.randint(1, 3))
        ]
        branches = []
        for _ in range(pick.choice((2, 2, 3))):
            self._may()
            source, columns = self._from(max(0, depth - 1), None)
            items = [
                f"{self._expr(columns, kind, 1)} as x{index}" for index, kind in enumerate(kinds)
            ]
            branches.append(f"select {', '.join(items)} from {source}{self._where(columns)}")
        glue = [pick.choice(self.glues) for _ in branches[1:]]
        text = branches[0]
        for sign, branch in zip(glue, branches[1:], strict=True):
            text += sign + branch
        return text, tuple(FuzzColumn(f"x{index}", kind) for index, kind in enumerate(kinds))
