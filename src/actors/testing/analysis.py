"""Types queries without Spark: answers the engine's `AnalyzeStatement` from sqlglot trees and the
plans of `actors.testing.parsed`.

For the queries that tests use, it returns what Spark's analysis returns: names, types and
nullability (exact for columns, counts and literals; anything else may be NULL) of SELECT with
joins, derived tables, groupings, set operators, windows and subqueries. Unknown names, aggregates
in WHERE and functions outside the subset raise `QueryRejected`. An unnamed column gets its text as
name, nearly as in Spark. It checks no more than that: Spark rejects many queries that this accepts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from actors.engine.catalyst.permitted_functions import FUNCTION_NAMES, REFUSED_NAMES, refusal_of
from actors.engine.spark.remote_analysis import volatility_of
from actors.engine.views.operators import UnsupportedConstruct
from actors.engine.views.query_analysis import Conf, Tables
from actors.model.plan.jobs import (
    AnalyzeStatement,
    ParseText,
    QueryAnalyzed,
    QueryTranslation,
    StatementParsed,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import AccessDenied, QueryRejected
from actors.testing.aggregates import aggregate_type, with_canonical_names
from actors.testing.expressions import (
    Compiled,
    common_type,
    compile_expression,
)
from actors.testing.parsed.build import build, probe_texts
from actors.testing.parsed.char_columns import check_char_columns
from actors.testing.parsed.parse import UnknownTable, read_tables
from actors.testing.parsed.resolve import resolve

_INT_RESULTS: Final = (exp.RowNumber,)
_RANKS: Final = ("rank", "denserank", "ntile", "rownumber")


class AnalysisScope(msgspec.Struct):
    """Columns that a SELECT's expressions may name, by lower-cased name and alias.name."""

    columns: dict[str, TableColumn] = {}
    """Columns by name and by alias.name."""
    ambiguous: set[str] = set()
    """Names that several sources have."""
    tables: dict[str, tuple[TableColumn, ...]] = {}
    """Columns that ``*`` expands to, by source."""
    merged: dict[str, TableColumn] = {}
    """Columns of USING, which ``*`` lists first."""
    nullable: bool = False
    """True if all columns may be NULL, as on the padded side of an outer join."""

    def add(self, alias: str, columns: tuple[TableColumn, ...], shared: set[str]) -> None:
        """Add a source. Columns in `shared` (USING) are not ambiguous."""
        self.tables[alias] = tuple(c for c in columns if c.name.lower() not in shared)
        for column in columns:
            low = column.name.lower()
            self.columns[f"{alias}.{low}"] = column
            if low in self.columns and low not in shared:
                self.ambiguous.add(low)
            self.columns.setdefault(low, column)


def analyze(sql: str, tables: Mapping[str, TableSchema]) -> TableSchema:
    """Return the schema of a query. Raises `QueryRejected`."""
    try:
        trees = sqlglot.parse(sql, dialect="spark")
    except SqlglotError as error:
        raise QueryRejected(f"[PARSE_SYNTAX_ERROR] {error}") from None
    if len(trees) != 1 or not isinstance(trees[0], exp.Query):
        raise QueryRejected("[PARSE_SYNTAX_ERROR] not one query")
    if _WIDE_COUNT.search(sql):
        raise QueryRejected("[INVALID_LIMIT_LIKE_EXPRESSION.DATA_TYPE] not a number of type int")
    known = {name.lower(): schema.columns for name, schema in tables.items()}
    return TableSchema(_Typer(known).query(trees[0], AnalysisScope()))


_WIDE_COUNT: Final = re.compile(
    r"\b(?:LIMIT|OFFSET)\s+\(*\s*(?:-?[0-9]+[LSY]|CAST\(NULL AS (?:bigint|smallint)\))",
    re.IGNORECASE,
)
"""Matches a number of rows that is not an int, which Spark refuses."""


def analyzed(job: AnalyzeStatement) -> QueryAnalyzed:
    """Return the answer to an `AnalyzeStatement`. Raises `QueryRejected`, and `AccessDenied` for a
    function that a restricted statement may not call."""
    if job.restricted:
        _check_functions(job.sql)
    tables = dict(job.tables)
    try:
        tree, reason, inputs = read_tables(job.sql, tables)
    except UnknownTable as error:
        return QueryAnalyzed(job.job_id, missing=str(error))
    columns = {column.name.lower() for name in inputs for column in tables[name].columns}
    volatility = volatility_of(job.sql, columns)
    if volatility is not None:
        return QueryAnalyzed(job.job_id, TableSchema(()), inputs, volatility)
    schema = analyze(job.sql, tables)
    translation = None
    if job.translate and inputs:
        translation = _translated(job.sql, tree, reason, schema, {n: tables[n] for n in inputs})
    return QueryAnalyzed(job.job_id, schema, inputs, None, translation)


def _check_functions(sql: str) -> None:
    # Functions that sqlglot knows never reach other systems. A text that is not a single query is
    # refused later.
    with suppress(SqlglotError):
        for call in sqlglot.parse_one(sql, dialect="spark").find_all(exp.Anonymous):
            if call.name.lower() in REFUSED_NAMES:
                raise AccessDenied(refusal_of("function", call.name))


def parsed(job: ParseText) -> StatementParsed:
    """Return the answer to a `ParseText`, approximately as Spark's parser would. Raises
    `QueryRejected`."""
    try:
        tree = sqlglot.parse_one(job.sql, dialect="spark")
    except SqlglotError as error:
        raise QueryRejected(f"[PARSE_SYNTAX_ERROR] {error} SQLSTATE: 42601") from None
    if not job.expression and not isinstance(tree, exp.Query):
        return StatementParsed(job.job_id, command=tree.key)
    known = {each.alias_or_name.lower() for each in tree.find_all(exp.CTE)}
    tables = [tuple(part.name for part in each.parts) for each in tree.find_all(exp.Table)]
    relations = tuple(each for each in tables if len(each) > 1 or each[0].lower() not in known)
    calls = [each.name for each in tree.find_all(exp.Anonymous)]
    refused = next((each for each in calls if each.lower() in REFUSED_NAMES), "")
    unknown = tuple(each for each in calls if each.lower() not in FUNCTION_NAMES)
    return StatementParsed(
        job.job_id, relations, tuple(calls), unknown, "", "function" if refused else "", refused
    )


async def analyze_in_memory(
    tables: Tables, sql: str, conf: Conf, *, translate: bool = False
) -> QueryAnalyzed:
    """Return the analysis that `compile_view` requests, without an engine. Raises
    `QueryRejected`."""
    return analyzed(AnalyzeStatement("analyze", tables, sql, conf, translate))


def _translated(
    sql: str, tree: Any, reason: str, output: TableSchema, tables: Mapping[str, TableSchema]
) -> QueryTranslation:
    inputs = tuple(tables)
    try:
        if tree is None:
            raise UnsupportedConstruct(reason)
        resolved = resolve(tree, inputs, tables)
        types = {text: analyze(text, tables) for text in probe_texts(resolved, inputs)}
        check_char_columns(resolved.root, tuple(tables.values()))
        return ParsedTranslation(build(resolved, inputs, output, types))
    except UnsupportedConstruct as why:
        return ParsedTranslation(None, str(why))
    except QueryRejected as why:
        return ParsedTranslation(None, f"an expression that is not a scalar of the query: {why}")
    except (SqlglotError, RecursionError, LookupError) as error:
        return ParsedTranslation(None, f"a query that cannot be resolved ({type(error).__name__})")


class ParsedTranslation(QueryTranslation, frozen=True):
    """A plan made by the parser, without Spark. For some queries it differs from Spark's plan."""


class _Typer:
    def __init__(self, tables: Mapping[str, tuple[TableColumn, ...]]) -> None:
        self._tables = tables

    def query(self, tree: Any, outer: AnalysisScope) -> tuple[TableColumn, ...]:
        """Return the columns of a query."""
        with_ = tree.args.get("with_")
        if with_ is not None:
            inner = _Typer(dict(self._tables))
            for cte in with_.expressions:
                columns = _renamed(inner.query(cte.this, AnalysisScope()), cte)
                inner._tables = {**inner._tables, cte.alias.lower(): columns}
            bare = tree.copy()
            bare.set("with_", None)
            return inner.query(bare, outer)
        if isinstance(tree, exp.Subquery):
            return self.query(tree.this, outer)
        if isinstance(tree, exp.SetOperation):
            return self._set_operation(tree, outer)
        if not isinstance(tree, exp.Select):
            raise QueryRejected(f"the in-memory engine does not know {tree.key.upper()}")
        return self._select(tree, outer)

    def _set_operation(self, tree: Any, outer: AnalysisScope) -> tuple[TableColumn, ...]:
        left, right = self.query(tree.left, outer), self.query(tree.right, outer)
        if len(left) != len(right):
            raise QueryRejected("[NUM_COLUMNS_MISMATCH] sides of a set operator differ")
        return tuple(
            TableColumn(a.name, common_type(a.type, b.type), a.nullable or b.nullable)
            for a, b in zip(left, right, strict=True)
        )

    def _select(self, tree: Any, outer: AnalysisScope) -> tuple[TableColumn, ...]:
        scope = AnalysisScope({**outer.columns}, set(), {})
        source = tree.args.get("from_")
        joins = tree.args.get("joins") or []
        if source is not None:
            scope = AnalysisScope()
            self._source(source.this, scope, set(), outer)
        for join in joins:
            self._join(join, scope, outer)
        for name, column in outer.columns.items():
            scope.columns.setdefault(name, column)
        where = tree.args.get("where")
        for condition in [*([where.this] if where else []), *(j.args.get("on") for j in joins)]:
            if condition is None:
                continue
            if any(True for _ in condition.find_all(exp.AggFunc)) and not condition.find(
                exp.Subquery, exp.Exists
            ):
                raise QueryRejected("[INVALID_WHERE_CONDITION] an aggregate in WHERE")
            if self.type_of(condition, scope)[0] not in ("boolean", "void"):
                raise QueryRejected(f"[DATATYPE_MISMATCH] {condition.sql()} is not boolean")
        outputs: list[TableColumn] = []
        for item in tree.expressions:
            made = self._project(item, scope)
            outputs += made
            for column in made:
                # Later items of the list, GROUP BY and HAVING may refer to an alias.
                scope.columns.setdefault(column.name.lower(), column)
        having = tree.args.get("having")
        if having is not None:
            self.type_of(having.this, scope)
        group = tree.args.get("group")
        for key in group.expressions if group is not None else []:
            self.type_of(key, scope)
        return tuple(outputs)

    def _join(self, join: Any, scope: AnalysisScope, outer: AnalysisScope) -> None:
        side, kind = str(join.args.get("side") or ""), str(join.args.get("kind") or "")
        using = {item.name.lower() for item in join.args.get("using") or []}
        left = {name: scope.columns[name] for name in using if name in scope.columns}
        if side in ("RIGHT", "FULL"):
            scope.columns = {name: _null(column) for name, column in scope.columns.items()}
            scope.tables = {a: tuple(map(_null, c)) for a, c in scope.tables.items()}
        target = AnalysisScope() if kind in ("SEMI", "ANTI") else scope
        scope.nullable = side in ("LEFT", "FULL")
        self._source(join.this, target, using, outer, nullable=scope.nullable)
        if target is not scope:
            for name, column in target.columns.items():
                scope.columns.setdefault(name, column)
            return
        for item in join.args.get("using") or []:
            low = item.name.lower()
            right = scope.columns[f"{join.this.alias_or_name.lower()}.{low}"]
            found = left.get(low)
            if found is None:
                raise QueryRejected(f"[UNRESOLVED_USING_COLUMN_FOR_JOIN] {item.name}")
            kind = found.type if side != "FULL" else common_type(found.type, right.type)
            merged = {"RIGHT": right, "FULL": TableColumn(found.name, kind)}.get(side, found)
            scope.columns[low] = scope.merged[low] = merged

    def _source(
        self,
        tree: Any,
        scope: AnalysisScope,
        shared: set[str],
        outer: AnalysisScope,
        *,
        nullable: bool = False,
    ) -> None:
        if isinstance(tree, exp.Subquery):
            columns = _renamed(self.query(tree.this, outer), tree)
        elif isinstance(tree, exp.Table) and isinstance(tree.this, exp.Identifier):
            found = self._tables.get(tree.name.lower())
            if found is None:
                raise QueryRejected(f"[TABLE_OR_VIEW_NOT_FOUND] {tree.name}")
            columns = found
        else:
            raise QueryRejected(f"the in-memory engine does not know {tree.sql()[:60]} in FROM")
        if nullable:
            columns = tuple(map(_null, columns))
        scope.add(tree.alias_or_name.lower(), columns, shared)

    def _project(self, tree: Any, scope: AnalysisScope) -> list[TableColumn]:
        if isinstance(tree, exp.Star):
            columns = [column for columns in scope.tables.values() for column in columns]
            rest = [column for column in columns if column.name.lower() not in scope.merged]
            return [*scope.merged.values(), *rest]
        if isinstance(tree, exp.Column) and isinstance(tree.this, exp.Star):
            return list(scope.tables[tree.table.lower()])
        kind, nullable = self.type_of(tree.unalias(), scope)
        name = tree.alias or (tree.name if isinstance(tree, exp.Column) else "")
        return [TableColumn(name or tree.sql(dialect="spark").lower(), kind, nullable)]

    def type_of(self, tree: Any, scope: AnalysisScope) -> tuple[str, bool]:
        """Return (type, nullable) of an expression. Raises `QueryRejected`."""
        known: dict[str, tuple[int, str]] = {}
        for name, column in scope.columns.items():
            if name not in scope.ambiguous:
                known[name] = (0, column.type)
        made: dict[str, TableColumn] = {}

        def replace(node: Any) -> Any:
            node = with_canonical_names(node)
            kind = self._special(node, scope)
            if kind is None:
                return node
            name = f"__made{len(made)}"
            made[name] = TableColumn(name, *kind)
            return exp.column(name)

        plain = tree.copy().transform(replace)
        known |= {name: (0, column.type) for name, column in made.items()}
        compiled: Compiled = compile_expression(plain, known)
        return compiled[0], _nullable(plain, {**scope.columns, **made})

    def _special(self, node: Any, scope: AnalysisScope) -> tuple[str, bool] | None:
        """Return (type, nullable) of an aggregate, window or subquery; None for a scalar."""
        if isinstance(node, exp.Window):
            inner = node.this
            if inner.key in _RANKS:
                return "int", False
            return self.type_of(inner, scope)[0], True
        if isinstance(node, exp.Filter):
            return self.type_of(node.this, scope)
        if isinstance(node, exp.AggFunc):
            argument = node.this
            if isinstance(argument, exp.Distinct):
                argument = argument.expressions[0]
            if isinstance(argument, exp.Star):
                return "bigint", False
            if isinstance(node, exp.Count) and len(node.expressions) > 0:
                for other in node.expressions:
                    self.type_of(other, scope)
            kind = aggregate_type(node, self.type_of(argument, scope)[0])
            return kind, not isinstance(node, exp.Count | exp.CountIf)
        if isinstance(node, exp.Exists) or (isinstance(node, exp.In) and node.args.get("query")):
            self.query(node.args.get("query") or node.this, scope)
            return "boolean", True
        if isinstance(node, exp.Subquery):
            return self.query(node.this, scope)[0].type, True
        return None


def _nullable(tree: Any, columns: Mapping[str, TableColumn]) -> bool:
    if isinstance(tree, exp.Paren | exp.Neg):
        return _nullable(tree.this, columns)
    if isinstance(tree, exp.Literal | exp.Boolean):
        return False
    if isinstance(tree, exp.Column):
        name = f"{tree.table}.{tree.name}" if tree.table else tree.name
        column = columns.get(name.lower())
        return column is None or column.nullable
    return True


def _null(column: TableColumn) -> TableColumn:
    return TableColumn(column.name, column.type, True)


def _renamed(columns: tuple[TableColumn, ...], tree: Any) -> tuple[TableColumn, ...]:
    alias = tree.args.get("alias")
    names = [item.name for item in alias.args.get("columns") or []] if alias else []
    if not names:
        return columns
    return tuple(
        TableColumn(name, column.type, column.nullable)
        for name, column in zip(names, columns, strict=True)
    )
