"""Infers the types of parameters from the expressions around them, as PostgreSQL does.

A parameter takes the type of the value that it is compared with, combined with by an operator, or
assigned to. Column names there are resolved in the query's scope: its tables, CTEs and subqueries,
then the enclosing queries. A parameter may have no inferred type. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

from sqlglot import exp, parse_one
from sqlglot.errors import SqlglotError

from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import TextSpan
from actors.engine.sql.tokens import SqlDialect, lex_text
from actors.engine.sql.type_dependent_places import CHAR, PLACE, PlaceRoles
from actors.engine.sql.type_names import read_type
from actors.model.pgwire import type_map
from actors.model.pgwire import type_oids as pg
from actors.model.plan.schema import TableSchema
from actors.model.protocol.relations import fold
from actors.runtime.errors import SqlSyntaxError

Columns: TypeAlias = list[tuple[str, int | None]]
"""Folded names and types of a relation's columns, in order; None: the type is unknown."""
Sources: TypeAlias = list[tuple[str, Columns | None]]
"""The relations of one query, by their names in it; None: the columns are unknown."""

_OWN_SCHEMAS: Final = ("", "public", "default")
_PARAMETER: Final = "penstock parameter "
_KEPT_CHARACTERS_MAX: Final = 4_096
_NUMBERS: Final = (pg.INT2, pg.INT4, pg.INT8, pg.NUMERIC, pg.FLOAT4, pg.FLOAT8)
"""Numeric types in ascending order: an operator returns the higher type of its operands."""
_CLOCKS: Final = (pg.TIMESTAMP, pg.TIMESTAMPTZ)
_SAME: Final = (exp.Coalesce, exp.Greatest, exp.Least, exp.Nullif)
_TEXTS: Final = (exp.Lower, exp.Upper, exp.Concat, exp.DPipe, exp.Substring, exp.Trim)
_ARITHMETIC: Final = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod)
_COMPARED: Final = (
    *(exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE),
    *(exp.NullSafeEQ, exp.NullSafeNEQ),
)
_SUMS: Final[Mapping[int | None, int]] = {
    **{pg.INT2: pg.INT8, pg.INT4: pg.INT8, pg.INT8: pg.NUMERIC},
    **{each: each for each in (pg.NUMERIC, pg.FLOAT4, pg.FLOAT8)},
}
"""Maps the type of a summed expression to the type of its sum."""
_COUNTS: Final = (exp.Limit, exp.Offset, exp.Fetch)


def as_columns(span: TextSpan) -> str:
    """Replace the parameters in a part of a statement by column names, because sqlglot reads
    ``$1,$2`` as the start of a dollar-quoted string."""
    parts, at, text = [], span.start, span.lexed.text
    for token in span.tokens:
        if token.kind == "parameter":
            parts += [text[at : token.start], f'"{_PARAMETER}{token.text[1:]}"']
            at = token.end
    return "".join([*parts, text[at : span.end]])


def scoped_types(text: str, schemas: Mapping[str, TableSchema]) -> dict[int, int]:
    """Infer the types of a query's parameters, by number. Those without an inferred type are
    missing.

    `text` is the result of `as_columns`.

    >>> from actors.engine.sql.statements import generated_span
    >>> from actors.model.plan.schema import TableColumn
    >>> table = TableSchema((TableColumn("code", "int"),))
    >>> def found(text):
    ...     return scoped_types(as_columns(generated_span(SqlDialect.POSTGRES, text)), {"t": table})
    >>> found("WITH q AS (SELECT 'a' AS code) SELECT 1 FROM q WHERE code = $1")
    {1: 25}
    >>> found("SELECT 1 FROM t WHERE code = $1")
    {1: 23}
    """
    # Drivers repeat the same short queries. Long ones are not worth caching.
    tree = _kept_tree(text) if len(text) <= _KEPT_CHARACTERS_MAX else _tree(text)
    if tree is None:
        return {}
    finder = _TypeFinder(_columns_of(schemas))
    finder.visit(tree, _Scope([], None, {}))
    return finder.found


def _columns_of(schemas: Mapping[str, TableSchema]) -> dict[str, Columns]:
    return {
        fold(name): [(fold(each.name), _oid(each.type)) for each in schema.columns]
        for name, schema in schemas.items()
    }


def place_roles(queries: list[str], schemas: Mapping[str, TableSchema]) -> PlaceRoles:
    """Return the roles of the places in the queries of `marked_queries`. Queries that sqlglot
    cannot parse are skipped."""
    finder = _RoleFinder(_columns_of(schemas))
    for text in queries:
        tree = _kept_tree(text) if len(text) <= _KEPT_CHARACTERS_MAX else _tree(text)
        if tree is not None:
            finder.visit(tree, _Scope([], None, {}))
    return finder.roles


def named_relations(text: str) -> list[str]:
    """Return the names of a query's relations, except its own CTEs and those of other schemas.

    >>> named_relations("WITH q AS (SELECT 1) SELECT * FROM q, public.t, penstock.objects")
    ['t']
    """
    tree = _kept_tree(text) if len(text) <= _KEPT_CHARACTERS_MAX else _tree(text)
    if tree is None:
        return []
    # Ignore the scopes of CTEs: Spark later refuses one that is out of scope.
    own = {fold(each.alias) for each in tree.find_all(exp.CTE)}
    return [
        each.name
        for each in tree.find_all(exp.Table)
        if isinstance(each.this, exp.Identifier)
        and not each.args.get("catalog")
        and fold(each.text("db")) in _OWN_SCHEMAS
        and fold(each.name) not in own
    ]


def _tree(text: str) -> Any:
    try:
        return parse_one(text, dialect="postgres")
    # sqlglot itself raises the last ones for texts of another grammar.
    except (SqlglotError, RecursionError, AttributeError, LookupError, TypeError, ValueError):
        return None


_kept_tree = lru_cache(maxsize=256)(_tree)


def _oid(spark: str) -> int:
    return type_map.pg_type_of_spark(spark).oid


class _Scope:
    """The names that an expression can use: those of its query and of the enclosing ones."""

    def __init__(
        self, sources: Sources, outer: _Scope | None, expressions: Mapping[str, Columns | None]
    ) -> None:
        self.sources = sources
        self.outer = outer
        self.expressions = expressions
        """The visible CTEs, by folded name."""

    def column(self, qualifier: str, name: str) -> int | None:
        """Return the type of a column; None if it is unknown."""
        for alias, columns in self.sources:
            if qualifier and alias != qualifier:
                continue
            for each, oid in columns or ():
                if each == name:
                    return oid
            # A relation with unknown columns may have this one, so do not search any further.
            if columns is None or qualifier:
                return None
        return None if self.outer is None else self.outer.column(qualifier, name)


class _TypeFinder:
    """Visits a statement and collects the types of its parameters."""

    def __init__(self, tables: Mapping[str, Columns]) -> None:
        self._tables = tables
        self.found: dict[int, int] = {}
        """Types by number of parameter; the first use of a parameter decides."""

    # -- visiting ----------------------------------------------------------------------------------

    def visit(self, node: Any, scope: _Scope) -> None:
        """Visit a node and its descendants."""
        scope = self._opened(node, scope)
        if self._noted(node, scope):
            return
        for child in node.iter_expressions():
            # `_expressions` has already visited the CTEs.
            if not isinstance(child, exp.With):
                self.visit(child, scope)

    def _noted(self, node: Any, scope: _Scope) -> bool:
        """Collect what a node contributes. Return True if its children need no visit."""
        if not (isinstance(node, exp.Column) and node.name.startswith(_PARAMETER)):
            return False
        number = node.name.removeprefix(_PARAMETER)
        oid = self._expected(node, scope) if number.isdecimal() and len(number) < 6 else None
        if oid is not None:
            # An interval is passed as text and cast by Spark, whose syntax differs from
            # PostgreSQL's.
            self.found.setdefault(int(number), pg.TEXT if oid == pg.INTERVAL else oid)
        return True

    def _opened(self, node: Any, scope: _Scope) -> _Scope:
        """Return the scope within a node. Queries and statements on a table have their own."""
        if isinstance(node, exp.Select | exp.SetOperation | exp.DML | exp.Subquery):
            expressions = self._expressions(node, scope)
            scope = _Scope(scope.sources, scope.outer, expressions)
        if isinstance(node, exp.Select):
            return _Scope(self._sources(node, scope), scope, scope.expressions)
        # An action of MERGE does not name a table of its own.
        is_action = isinstance(node.parent, exp.When)
        if isinstance(node, exp.Update | exp.Delete | exp.Merge | exp.Insert) and not is_action:
            return _Scope(self._sources(node, scope), None, scope.expressions)
        return scope

    def _expressions(self, node: Any, scope: _Scope) -> Mapping[str, Columns | None]:
        found = dict(scope.expressions)
        for each in node.ctes if hasattr(node, "ctes") else ():
            name = fold(each.alias)
            inner = _Scope([], scope, found)
            # A recursive CTE has the columns of its first part.
            found[name] = _renamed(self._output(each.this, inner), each)
            self.visit(each.this, _Scope([], scope, found))
        return found

    def _sources(self, node: Any, scope: _Scope) -> Sources:
        parts = [node.this] if isinstance(node, exp.Update | exp.Delete | exp.Merge) else []
        if isinstance(node, exp.Insert):
            table = node.this.this if isinstance(node.this, exp.Schema) else node.this
            columns = self._tables.get(fold(table.name))
            alias = table.args.get("alias")
            named = fold(alias.name) if alias is not None else fold(table.name)
            # ON CONFLICT refers to the row that was not inserted as `excluded`.
            return [(named, columns), ("excluded", columns)]
        for key in ("from_", "from", "using"):
            found = node.args.get(key)
            found = found.this if isinstance(found, exp.From) else found
            parts += found if isinstance(found, list) else [found] if found is not None else []
        joins = list(node.args.get("joins") or ())
        for part in list(parts):
            joins += part.args.get("joins") or () if isinstance(part, exp.Expression) else ()
        parts += [each.this for each in joins]
        return [self._source(each, scope) for each in parts if isinstance(each, exp.Expression)]

    def _source(self, node: Any, scope: _Scope) -> tuple[str, Columns | None]:
        name = fold(node.alias_or_name)
        if isinstance(node, exp.Table):
            own = fold(node.name)
            plain = fold(node.text("db")) in _OWN_SCHEMAS
            columns = scope.expressions.get(own, self._tables.get(own)) if plain else None
            return name, _renamed(columns, node)
        if isinstance(node, exp.Subquery):
            return name, _renamed(self._output(node.this, scope), node)
        if isinstance(node, exp.Values):
            rows = [row.expressions for row in node.expressions]
            types = [self._of_column(cells, scope) for cells in zip(*rows, strict=False)]
            numbered: Columns = [(f"column{at}", oid) for at, oid in enumerate(types, 1)]
            return name, _renamed(numbered, node)
        return name, None

    def _output(self, query: Any, scope: _Scope) -> Columns | None:
        """Return the columns of a query's result; None if they are unknown."""
        # The columns of a UNION are those of its first part.
        while isinstance(query, exp.Subquery | exp.SetOperation):
            scope = _Scope(scope.sources, scope.outer, self._expressions(query, scope))
            query = query.this
        if isinstance(query, exp.Values):
            return self._source(query, scope)[1]
        if not isinstance(query, exp.Select):
            return None
        scope = self._opened(query, scope)
        found: Columns = []
        for each in query.expressions:
            if not each.is_star:
                oid = self._of_column([each.unalias()], scope)
                found.append((fold(each.alias_or_name), oid))
                continue
            wanted = fold(each.table) if isinstance(each, exp.Column) else ""
            for alias, columns in scope.sources:
                if wanted in ("", alias):
                    if columns is None:
                        return None
                    found += columns
        return found

    # -- types -------------------------------------------------------------------------------------

    def _expected(self, node: Any, scope: _Scope) -> int | None:
        """Return the type that the context of an expression expects; None if it expects none."""
        parent = node.parent
        match parent:
            case exp.Paren() | exp.Neg() | exp.Alias():
                return self._expected(parent, scope)
            case exp.Array() if _is_quantifier(quantifier := _around(parent).parent):
                return self._sibling(quantifier.parent, quantifier, scope)
            case _ if _is_quantifier(parent):
                element = self._sibling(parent.parent, parent, scope)
                return pg.ARRAY_OF.get(element) if element is not None else None
            case exp.Cast():
                return self._type(parent, scope)
            case _ if isinstance(parent, _COUNTS):
                return pg.INT8
            case exp.Like() | exp.ILike() | exp.DPipe():
                return pg.TEXT
            case exp.And() | exp.Or() | exp.Not() | exp.Where() | exp.Having():
                return pg.BOOL
            case _ if isinstance(parent, _ARITHMETIC):
                return self._operand(parent, node, scope)
            case exp.Tuple():
                return self._of_tuple(parent, node, scope)
            case exp.In():
                return self._of_list(parent, node, scope)
            case exp.Between():
                return self._sibling(parent, node, scope)
            case _ if isinstance(parent, _COMPARED):
                return self._sibling(parent, node, scope)
            case _ if isinstance(parent, _SAME):
                return self._sibling(parent, node, scope) or self._expected(parent, scope)
            case exp.If() if isinstance(parent.parent, exp.Case):
                return self._of_case(parent.parent, node, scope)
            case exp.Case():
                return self._of_case(parent, node, scope)
            case exp.Select():
                return self._inserted(parent, node)
        return None

    def _sibling(self, parent: Any, node: Any, scope: _Scope) -> int | None:
        found = self._first((e for e in parent.iter_expressions() if e is not node), scope)
        if found is None and isinstance(parent, (*_COMPARED, exp.Between)):
            # Compared with a string literal, a parameter is text.
            texts = (exp.Literal,)
            others = [each for each in parent.iter_expressions() if each is not node]
            return pg.TEXT if any(isinstance(each, texts) for each in others) else None
        return found

    def _operand(self, parent: Any, node: Any, scope: _Scope) -> int | None:
        other = parent.expression if node is parent.this else parent.this
        oid = self._type(other, scope)
        if isinstance(parent, exp.Add) and oid in _CLOCKS:
            return pg.INTERVAL
        # A date plus a number of days.
        if isinstance(parent, exp.Add) and oid == pg.DATE:
            return pg.INT4
        return oid if oid is not None else self._expected(parent, scope)

    def _of_list(self, parent: Any, node: Any, scope: _Scope) -> int | None:
        if node is not parent.this:
            return self._type(parent.this, scope)
        query = parent.args.get("query")
        if query is None:
            return self._first(parent.expressions, scope)
        columns = self._output(query, scope)
        return columns[0][1] if columns else None

    def _of_tuple(self, parent: Any, node: Any, scope: _Scope) -> int | None:
        """Return the expected type of an element of a row, as in ``(a, b) = ($1, $2)``, ``IN``, or
        the INSERT of a MERGE."""
        place = next(at for at, each in enumerate(parent.expressions) if each is node)
        above, other = parent.parent, None
        if isinstance(above, exp.In):
            other = above.this
        elif isinstance(above, _COMPARED):
            other = above.expression if parent is above.this else above.this
        elif isinstance(above, exp.Insert) and isinstance(above.parent, exp.When):
            other = above.this
        cells = other.expressions if isinstance(other, exp.Tuple) else ()
        return self._type(cells[place], scope) if place < len(cells) else None

    def _of_case(self, case: Any, node: Any, scope: _Scope) -> int | None:
        if any(node is each.this for each in case.args["ifs"]):
            operand = case.this
            return pg.BOOL if operand is None else self._type(operand, scope)
        if node is case.this:
            return self._first((each.this for each in case.args["ifs"]), scope)
        return self._first(_results(case), scope) or self._expected(case, scope)

    def _inserted(self, select: Any, node: Any) -> int | None:
        """Return the type of the column into which ``INSERT … SELECT`` inserts an expression."""
        insert = select.parent
        if not isinstance(insert, exp.Insert):
            return None
        named = insert.this.expressions if isinstance(insert.this, exp.Schema) else ()
        table = insert.this.this if isinstance(insert.this, exp.Schema) else insert.this
        columns = self._tables.get(fold(table.name)) or []
        types = dict(columns)
        names = [fold(each.name) for each in named] or [name for name, _ in columns]
        values = [each.unalias() for each in select.expressions]
        place = next((at for at, each in enumerate(values) if each is node), len(names))
        return types.get(names[place]) if place < len(names) else None

    def _first(self, nodes: Any, scope: _Scope) -> int | None:
        """Return the first known type among several expressions; None if there is none."""
        found = (self._type(each, scope) for each in nodes)
        return next((oid for oid in found if oid is not None), None)

    def _of_column(self, nodes: Sequence[Any], scope: _Scope) -> int | None:
        """Return the type of a column with these values; string literals count as text."""
        oid = self._first(nodes, scope)
        texts = (isinstance(each, exp.Literal) and each.is_string for each in nodes)
        return pg.TEXT if oid is None and any(texts) else oid

    def _type(self, node: Any, scope: _Scope) -> int | None:
        """Return the type of an expression; None if it is unknown or an untyped string literal."""
        match node:
            case exp.Paren() | exp.Neg() | exp.Alias() | exp.Window() | exp.Filter():
                return self._type(node.this, scope)
            case exp.Column():
                return scope.column(fold(node.table), fold(node.name))
            case exp.Cast():
                return _named_type(node.to.sql(dialect="postgres"))
            case exp.Literal():
                return None if node.is_string else _number_type(node.name)
            case exp.Boolean() | exp.Predicate() | exp.Connector() | exp.Not():
                return pg.BOOL
            case exp.Count():
                return pg.INT8
            case exp.Length():
                return pg.INT4
            case exp.Extract() | exp.Avg():
                return pg.NUMERIC
            case exp.Sum():
                return _SUMS.get(self._type(node.this, scope))
            case exp.Abs():
                return self._type(node.this, scope)
            case exp.Max() | exp.Min():
                return self._type(node.this, scope)
            case exp.CurrentTimestamp():
                return pg.TIMESTAMPTZ
            case exp.CurrentDate():
                return pg.DATE
            case exp.Case():
                return self._first(_results(node), scope)
            case exp.Subquery():
                columns = self._output(node.this, scope)
                return columns[0][1] if columns else None
            case _ if isinstance(node, _SAME):
                return self._first(node.iter_expressions(), scope)
            case _ if isinstance(node, _TEXTS):
                return pg.TEXT
            case exp.Add() | exp.Sub() | exp.Mul() | exp.Mod():
                sides = [self._type(each, scope) for each in (node.this, node.expression)]
                if not all(each in _NUMBERS for each in sides):
                    return None
                return max((each for each in sides if each is not None), key=_NUMBERS.index)
        return None


class _RoleFinder(_TypeFinder):
    """Visits a query of `marked_queries` and collects the roles of its places."""

    def __init__(self, tables: Mapping[str, Columns]) -> None:
        super().__init__(tables)
        self.roles: dict[int, str] = {}
        """Roles by the offset of the place in the statement."""

    def _noted(self, node: Any, scope: _Scope) -> bool:
        if isinstance(node, exp.Cast) and (name := _place_of_type(node)):
            if name.endswith(CHAR):
                self._note(name.removesuffix(CHAR), self._char_role(node, scope))
            elif self._type(node.this, scope) == pg.TIMESTAMPTZ:
                self._note(name, "timestamptz")
        elif isinstance(node, exp.Column) and node.name.startswith(PLACE):
            if any(_is_char_cast(each) for each in _peers(node)):
                self._note(node.name, "char")
            elif self._expected(node, scope) == pg.BYTEA:
                self._note(node.name, "bytea")
            return True
        return False

    def _note(self, name: str, role: str) -> None:
        offset = name.removeprefix(PLACE)
        if role and offset.isdecimal():
            self.roles[int(offset)] = role

    def _char_role(self, node: Any, scope: _Scope) -> str:
        """Return the role of a cast to ``char(n)``, which decides whether trailing spaces count."""
        peers = _peers(node)
        for each in peers:
            if not _is_char_cast(each) and self._type(each, scope) == pg.BPCHAR:
                return "char column"
        return "char" if peers or isinstance(_around(node).parent, _WITHOUT_BLANKS) else ""

    def _type(self, node: Any, scope: _Scope) -> int | None:
        if isinstance(node, exp.Cast) and (name := _place_of_type(node)):
            return pg.BPCHAR if name.endswith(CHAR) else pg.TEXT
        return super()._type(node, scope)


_WITHOUT_BLANKS: Final = (exp.DPipe, exp.Cast, exp.Length, exp.Lower, exp.Upper, exp.Substring)
"""Operations that convert an operand of type ``char(n)`` to text, without trailing spaces."""


def _place_of_type(cast: Any) -> str:
    """Return the name of the place that stands for a cast's type; "" for an actual type."""
    name = str(cast.to.text("kind"))
    return name if name.startswith(PLACE) else ""


def _is_char_cast(node: Any) -> bool:
    return isinstance(node, exp.Cast) and _place_of_type(node).endswith(CHAR)


def _is_quantifier(node: Any) -> bool:
    """Return whether a node is the ``ANY (…)`` or ``ALL (…)`` of a comparison."""
    # sqlglot parses ALL as a function.
    is_all = isinstance(node, exp.Anonymous) and node.name.upper() == "ALL"
    return isinstance(node, exp.Any) or is_all


def _around(node: Any) -> Any:
    """Return a node including the parentheses around it."""
    while isinstance(node.parent, exp.Paren):
        node = node.parent
    return node


def _peers(node: Any) -> list[Any]:
    """Return the expressions that an expression is compared with, without their parentheses."""
    node = _around(node)
    parent = node.parent
    found: list[Any] = []
    case = parent.parent if isinstance(parent, exp.If) and node is parent.this else parent
    if isinstance(case, exp.Case) and case.this is not None:
        compared = [case.this, *(each.this for each in case.args["ifs"])]
        found = compared if any(each is node for each in compared) else []
    elif isinstance(parent, exp.In):
        query = parent.args.get("query")
        found = [parent.this, *parent.expressions, *([] if query is None else [query])]
    elif isinstance(parent, (*_COMPARED, exp.Between)):
        found = list(parent.iter_expressions())
    return [each.unnest() for each in found if each is not node]


def _results(case: Any) -> Iterator[Any]:
    for each in case.args["ifs"]:
        yield each.args["true"]
    if case.args.get("default") is not None:
        yield case.args["default"]


def _renamed(columns: Columns | None, node: Any) -> Columns | None:
    """Rename columns as an alias such as ``AS q (a, b)`` does."""
    alias = node.args.get("alias")
    names: Sequence[Any] = alias.args.get("columns") or () if alias is not None else ()
    if columns is None or not names:
        return columns
    given = [fold(each.name) for each in names]
    left = [name for name, _ in columns[len(given) :]]
    return [(name, oid) for name, (_, oid) in zip([*given, *left], columns, strict=False)]


def _named_type(text: str) -> int | None:
    try:
        return _oid(read_type(StatementReader(lex_text(text, SqlDialect.POSTGRES), 0)))
    except SqlSyntaxError:
        return None


def _number_type(text: str) -> int:
    if not text.isdecimal():
        return pg.NUMERIC
    # Truncate first: Python refuses to parse numbers with thousands of digits.
    return (
        pg.INT4 if int(text[:20]) < 1 << 31 else pg.INT8 if int(text[:20]) < 1 << 63 else pg.NUMERIC
    )
