"""Compiles calls in PostgreSQL's expressions: functions, aggregates, windows, special syntax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from sqlglot import exp

from actors.doors.postgres.pg_catalog.catalog_errors import NOT_SUPPORTED, CatalogQueryError
from actors.doors.postgres.pg_catalog.function_calls import (
    AGGREGATES,
    FunctionCatalog,
    decide_arguments,
)
from actors.doors.postgres.pg_catalog.pg_types import ELEMENT_OF
from actors.doors.postgres.pg_catalog.query_scope import QueryScope
from actors.doors.postgres.pg_catalog.sql_dialect import (
    called_function,
    called_name,
    identifier_name,
    refuse_unread,
)
from actors.doors.postgres.pg_catalog.typed_sql import TypedSql, cast_value, decide_type
from actors.model.pgwire import type_oids as pg

_CAST_FUNCTIONS: Final = frozenset({"text", "oid", "int4", "int8", "name", "varchar"})
"""Types whose names are also functions, which are casts."""


class ExpressionContext(Protocol):
    """Compiles the arguments of calls."""

    def compile(self, node: Any, scope: QueryScope) -> TypedSql:
        """Compile an expression."""

    def compile_condition(self, node: Any, scope: QueryScope) -> str:
        """Compile a condition to SQL."""

    def compile_as(self, node: Any, scope: QueryScope, type_oid: int) -> TypedSql:
        """Compile an expression, and give it a type if its own is undecided."""

    def compile_query_array(self, query: Any, scope: QueryScope) -> TypedSql:
        """Compile a subquery to an array of its rows."""

    def decide_parameter(self, value: TypedSql) -> None:
        """Record the type of a value that is a parameter."""


class CallCompiler:
    """Compiles calls to SQLite's SQL; `context` compiles their arguments."""

    def __init__(
        self,
        context: ExpressionContext,
        functions: FunctionCatalog,
        type_oids: Callable[[str], int | None],
    ) -> None:
        self._context = context
        self._functions = functions
        self._type_oids = type_oids

    def methods(self) -> dict[Any, Callable[[Any, QueryScope], TypedSql]]:
        """Map the classes of syntax nodes to the methods that compile them."""
        return {
            exp.Anonymous: self._anonymous,
            exp.Window: self._window,
            exp.Filter: self._filter,
            exp.Pow: lambda node, scope: self.call(
                "power",
                [
                    self._context.compile(node.this, scope),
                    self._context.compile(node.expression, scope),
                ],
            ),
            exp.Extract: self._extract,
        }

    def call(self, name: str, arguments: list[TypedSql]) -> TypedSql:
        """Compile a call of a function with compiled arguments."""
        signature = self._functions.choose(name, arguments)
        if signature is not None:
            arguments = decide_arguments(signature, arguments)
        for argument in arguments:
            self._context.decide_parameter(decide_type(argument, pg.TEXT))
        return self._functions.call(name, signature, arguments)

    def compile_call(self, node: Any, scope: QueryScope) -> TypedSql:
        """Compile a call of a function that is not an aggregate. A set-returning function gives an
        array of its rows."""
        name = called_name(node)
        arguments = []
        for each in called_function(node).expressions:
            # Our functions take a VARIADIC array as a single argument.
            if isinstance(each, exp.Variadic):
                each = each.this
            # Drop the names of arguments: clients call catalog functions in positional order.
            if isinstance(each, exp.Kwarg | exp.PropertyEQ):
                each = each.expression
            if isinstance(each, exp.Column) and isinstance(each.this, exp.Star):
                # An entire row. Only templates accept one, by its alias.
                arguments.append(TypedSql(f'"{identifier_name(each.args["table"])}"', pg.RECORD))
                continue
            arguments.append(self._context.compile(each, scope))
        # Calls such as `text(x)` are casts.
        cast = self._type_oids(name) if len(arguments) == 1 else None
        if cast is not None and not self._functions.is_known(name):
            return cast_value(arguments[0], cast)
        if cast is not None and name in _CAST_FUNCTIONS:
            return cast_value(arguments[0], cast)
        made = self.call(name, arguments)
        # The template returns the array unchanged; its elements are the rows.
        if name == "unnest":
            element = ELEMENT_OF.get(made.type, pg.TEXT)
            return TypedSql(made.sql, element)
        return made

    def _anonymous(self, node: Any, scope: QueryScope) -> TypedSql:
        name = called_name(node)
        # Check for aggregates first: SQLite also has scalar functions `min` and `max`.
        if name in AGGREGATES:
            return self._aggregate(node, scope)
        if name == "array" and len(node.expressions) == 1:
            return self._context.compile_query_array(node.expressions[0], scope)
        if name == "row":
            values = [self._context.compile(each, scope) for each in node.expressions]
            return TypedSql(f"({', '.join(value.sql for value in values)})", pg.RECORD)
        if name == "exists":
            return self._context.compile(exp.Exists(this=node.expressions[0]), scope)
        # The compiler of SELECT has removed sets from the select list and FROM before this point.
        if self._functions.returns_set(name):
            raise CatalogQueryError(
                f"set-returning function {name} is not allowed here", NOT_SUPPORTED
            )
        return self.compile_call(node, scope)

    def _aggregate(self, node: Any, scope: QueryScope, behind: str = "") -> TypedSql:
        """Compile an aggregate. `behind` is its compiled FILTER and OVER, which must directly
        follow SQLite's aggregate."""
        name, arguments = called_name(node), list(called_function(node).expressions)
        order, distinct = "", ""
        # sqlglot attaches the ORDER BY of an aggregate to its last argument.
        if arguments and isinstance(arguments[-1], exp.Order):
            order = self.compile_order(arguments[-1], scope)
            arguments[-1] = arguments[-1].this
        # DISTINCT contains all arguments, including the separator of string_agg.
        if arguments and isinstance(arguments[0], exp.Distinct):
            arguments, distinct = list(arguments[0].expressions), "DISTINCT "
        if name == "count" and (not arguments or isinstance(arguments[0], exp.Star)):
            return TypedSql(f"count(*){behind}", pg.INT8)
        values = [self._context.compile(each, scope) for each in arguments]
        first, returns = values[0], self._functions.result_type(name, values)
        if name == "string_agg":
            first = cast_value(decide_type(first, pg.TEXT), pg.TEXT)
        inside = f"{distinct}{first.sql}{order}"
        if name in ("array_agg", "json_agg", "jsonb_agg", "string_agg"):
            if name.startswith("json"):
                inside = f"{distinct}{_as_json(first)}{order}"
            # For no rows PostgreSQL returns NULL, but SQLite an empty array.
            rows = f"nullif(json_group_array({inside}){behind}, '[]')"
            if name == "string_agg":
                # SQLite's own string_agg does not support a separator with DISTINCT.
                rows = f"pg_fn_array_to_string({rows}, {values[1].sql}, NULL)"
            # The binary format of jsonb differs from its text, so clients are told that it is json.
            return TypedSql(rows, pg.JSON if name.startswith("json") else returns)
        if name in ("json_object_agg", "jsonb_object_agg"):
            sql = f"json_group_object({first.sql}, {_as_json(values[1])})"
            return TypedSql(f"{sql}{behind}", pg.JSON)
        # Booleans are 0 and 1, so their maximum is the OR.
        native = {"bool_or": "max", "bool_and": "min", "every": "min"}.get(name, name)
        return TypedSql(f"{native}({inside}){behind}", returns)

    def compile_order(self, node: Any, scope: QueryScope) -> str:
        """Compile an ORDER BY clause, with a leading space."""
        terms = []
        for each in node.expressions:
            value = self._context.compile(each.this, scope)
            terms.append(value.sql + ordering(each))
        return f" ORDER BY {', '.join(terms)}"

    def _filter(self, node: Any, scope: QueryScope, over: str = "") -> TypedSql:
        name = called_name(node.this)
        if name not in AGGREGATES:
            raise CatalogQueryError(
                f"FILTER is only supported for aggregates, not for {name}", NOT_SUPPORTED
            )
        condition = self._context.compile_condition(node.expression.this, scope)
        return self._aggregate(node.this, scope, f" FILTER (WHERE {condition}){over}")

    def _window(self, node: Any, scope: QueryScope) -> TypedSql:
        over = self._compile_over(node, scope)
        if isinstance(node.this, exp.Filter):
            return self._filter(node.this, scope, over)
        name = called_name(node.this)
        if name in AGGREGATES:
            return self._aggregate(node.this, scope, over)
        # SQLite has all window functions of PostgreSQL, under the same names.
        if not self._functions.is_window_function(name):
            raise CatalogQueryError(
                f"OVER is not supported for {name} in a catalog query", NOT_SUPPORTED
            )
        arguments = [
            self._context.compile(each, scope) for each in called_function(node.this).expressions
        ]
        returns = self._functions.result_type(name, arguments)
        return TypedSql(f"{name}({', '.join(each.sql for each in arguments)}){over}", returns)

    def _compile_over(self, node: Any, scope: QueryScope) -> str:
        refuse_unread(node, "this", "over", "partition_by", "order", "spec")
        parts = []
        if node.args.get("partition_by"):
            keys = ", ".join(
                self._context.compile(each, scope).sql for each in node.args["partition_by"]
            )
            parts.append(f"PARTITION BY {keys}")
        if node.args.get("order"):
            parts.append(self.compile_order(node.args["order"], scope).strip())
        # Generate the frame, so that the client's text never reaches SQLite.
        if node.args.get("spec"):
            parts.append(_frame(node.args["spec"]))
        return f" OVER ({' '.join(parts)})"

    def _extract(self, node: Any, scope: QueryScope) -> TypedSql:
        value = self._context.compile_as(node.expression, scope, pg.TIMESTAMPTZ)
        field = str(node.this.name if hasattr(node.this, "name") else node.this).lower()
        # Times are in UTC here. SQLite cannot parse the zone as PostgreSQL writes it.
        moment = f"substr({value.sql}, 1, 19)"
        if field == "epoch":
            return TypedSql(f"unixepoch({moment})", pg.NUMERIC)
        formats = {"year": "%Y", "month": "%m", "day": "%d", "hour": "%H", "minute": "%M"}
        if field not in formats:
            raise CatalogQueryError(
                f"EXTRACT of {field} is not supported in a catalog query", NOT_SUPPORTED
            )
        return TypedSql(f"CAST(strftime('{formats[field]}', {moment}) AS INTEGER)", pg.NUMERIC)


def _frame(spec: Any) -> str:
    """Compile a window's frame clause. Raises `CatalogQueryError` for bounds other than numbers."""
    refuse_unread(spec, "kind", "start", "start_side", "end", "end_side")
    bounds = []
    for name in ("start", "end"):
        bound, side = spec.args.get(name), spec.args.get(f"{name}_side")
        if bound is None:
            continue
        text = bound if isinstance(bound, str) else str(bound.name)
        if text not in ("UNBOUNDED", "CURRENT ROW") and not (text.isascii() and text.isdecimal()):
            raise CatalogQueryError(
                f"invalid window bound {text}: catalog queries support only numbers", NOT_SUPPORTED
            )
        bounds.append(f"{text} {str(side).upper()}" if side else text)
    kind = {"ROWS": "ROWS", "RANGE": "RANGE", "GROUPS": "GROUPS"}[str(spec.args["kind"]).upper()]
    return f"{kind} {bounds[0]}" if len(bounds) == 1 else f"{kind} BETWEEN {' AND '.join(bounds)}"


def ordering(node: Any) -> str:
    """Return the direction of an ORDER BY term, with NULLS FIRST or LAST: the defaults of
    PostgreSQL and SQLite differ."""
    word = " DESC" if node.args.get("desc") else ""
    return f"{word} NULLS {'FIRST' if node.args.get('nulls_first') else 'LAST'}"


def _as_json(value: TypedSql) -> str:
    """Return a value's SQL for use as an argument of SQLite's JSON functions."""
    # Mark JSON as such, or SQLite would quote it as text.
    if value.type in (pg.JSON, pg.JSONB, pg.RECORD) or value.type in ELEMENT_OF:
        return f"json({value.sql})"
    if value.type == pg.BOOL:
        return f"json(pg_json_value('b', {value.sql}))"
    return value.sql
