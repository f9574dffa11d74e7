"""Compiles PostgreSQL's expressions to SQLite's SQL, with their types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from sqlglot import exp

from actors.doors.postgres.pg_catalog.call_compiler import CallCompiler
from actors.doors.postgres.pg_catalog.catalog_errors import (
    NOT_SUPPORTED,
    SYNTAX_ERROR,
    UNDEFINED_COLUMN,
    UNDEFINED_FUNCTION,
    UNDEFINED_OBJECT,
    UNDEFINED_PARAMETER,
    UNDEFINED_TABLE,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.function_calls import FunctionCatalog
from actors.doors.postgres.pg_catalog.pg_types import (
    ELEMENT_OF,
    NUMBERS,
    REGISTERED,
    TEXTUAL,
    VECTORS,
)
from actors.doors.postgres.pg_catalog.query_scope import QueryScope, RelationShape
from actors.doors.postgres.pg_catalog.sql_dialect import (
    called_name,
    identifier_name,
    parse_query,
)
from actors.doors.postgres.pg_catalog.typed_sql import (
    NULL_VALUE,
    TypedSql,
    array_type,
    cast_value,
    common_type,
    decide_type,
    text_constant,
    unify_values,
)
from actors.model.pgwire import type_oids as pg
from actors.model.pgwire.quoting import quote_text

CompiledQuery = tuple[str, RelationShape]
"""A compiled query: its SQL and its columns."""

_COMPARISONS: Final[dict[Any, str]] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.NullSafeEQ: "IS",
    exp.NullSafeNEQ: "IS NOT",
}
_ARITHMETIC: Final[dict[Any, str]] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
    exp.BitwiseAnd: "&",
    exp.BitwiseOr: "|",
    exp.BitwiseLeftShift: "<<",
    exp.BitwiseRightShift: ">>",
}
_SIGN: Final = re.compile(r"[-+*/<>=~!@#%^&|`?]+")
_NUMBER: Final = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_UNICODE: Final = re.compile(r"\\(?:\+([0-9a-fA-F]{6})|([0-9a-fA-F]{4}))")
_TYPED_NAME: Final = re.compile(r'("char"|[^(\[]+)(?:\(([\d,]+)\))?((?:\[\])*)')


class ParameterTypes:
    """The types of a query's parameters, which are decided by their uses."""

    def __init__(self, given: dict[int, int]) -> None:
        # The decided types by number, and the highest number that was read.
        self._types = dict(given)
        self._highest = 0

    def read(self, number: int) -> TypedSql:
        """Return the expression of a parameter, with its type if that is decided."""
        self._highest = max(self._highest, number)
        return TypedSql(f":p{number}", self._types.get(number, pg.UNKNOWN), parameter=number)

    def decide(self, value: TypedSql) -> None:
        """Record the type of a value that is a parameter."""
        if value.parameter and value.type != pg.UNKNOWN:
            # As in PostgreSQL, the first use decides.
            self._types.setdefault(value.parameter, value.type)

    def all_types(self) -> tuple[int, ...]:
        """Return the types in order; those that no use has decided are text."""
        return tuple(self._types.get(at, pg.TEXT) for at in range(1, self._highest + 1))


class ExpressionCompiler:
    """Compiles expressions of one query text; `compile_query` compiles its subqueries."""

    def __init__(
        self,
        functions: FunctionCatalog,
        type_oids: Callable[[str], int | None],
        parameters: ParameterTypes,
        compile_query: Callable[[Any, QueryScope], CompiledQuery],
    ) -> None:
        self.calls = CallCompiler(self, functions, type_oids)
        self._methods = {**self._own_methods(), **self.calls.methods()}
        self._type_oids = type_oids
        self.parameters = parameters
        self._compile_query = compile_query

    def compile(self, node: Any, scope: QueryScope) -> TypedSql:
        """Compile an expression. Raises `CatalogQueryError`."""
        # Look up the exact class: in sqlglot, a subclass is another operator.
        method = self._methods.get(type(node))
        if method is not None:
            return method(node, scope)
        if type(node) in _COMPARISONS:
            return self._comparison(node, scope, _COMPARISONS[type(node)])
        if type(node) in _ARITHMETIC:
            return self._arithmetic(node, scope, _ARITHMETIC[type(node)])
        if isinstance(node, exp.Query):
            return self._scalar_subquery(node, scope)
        raise CatalogQueryError(
            f"{type(node).__name__.lower()} is not supported in a catalog query:"
            f" {node.sql('postgres')}",
            NOT_SUPPORTED,
        )

    def compile_condition(self, node: Any, scope: QueryScope) -> str:
        """Compile a condition of WHERE, ON, HAVING or FILTER to SQL."""
        return self.compile_as(node, scope, pg.BOOL).sql

    def compile_as(self, node: Any, scope: QueryScope, type_oid: int) -> TypedSql:
        """Compile an expression, and give it a type if its own is undecided."""
        return self._note(self.compile(node, scope), type_oid)

    def decide_parameter(self, value: TypedSql) -> None:
        """Record the type of a value that is a parameter."""
        self.parameters.decide(value)

    def _note(self, value: TypedSql, type_oid: int) -> TypedSql:
        decided = decide_type(value, type_oid)
        self.parameters.decide(decided)
        return decided

    def _own_methods(self) -> dict[Any, Callable[[Any, QueryScope], TypedSql]]:
        return {
            exp.Literal: self._literal,
            exp.Null: lambda node, scope: NULL_VALUE,
            exp.Boolean: lambda node, scope: TypedSql(str(int(node.this)), pg.BOOL),
            exp.ByteString: lambda node, scope: text_constant(str(node.this)),
            exp.RawString: lambda node, scope: text_constant(str(node.this)),
            exp.UnicodeString: self._unicode,
            exp.National: lambda node, scope: text_constant(str(node.this)),
            exp.Parameter: self._parameter,
            exp.Column: self._column,
            exp.Dot: self._dot,
            exp.Paren: self._paren,
            exp.Alias: lambda node, scope: self.compile(node.this, scope),
            exp.And: lambda node, scope: self._connect(node, scope, "AND"),
            exp.Or: lambda node, scope: self._connect(node, scope, "OR"),
            exp.Not: lambda node, scope: TypedSql(
                f"(NOT {self.compile_condition(node.this, scope)})", pg.BOOL
            ),
            exp.Neg: self._negative,
            exp.BitwiseNot: lambda node, scope: TypedSql(
                f"(~{self.compile(node.this, scope).sql})", pg.INT4
            ),
            exp.Is: self._is,
            exp.In: self._in,
            exp.Between: self._between,
            exp.Exists: self._exists,
            exp.Case: self._case,
            exp.Cast: self._cast,
            exp.Collate: lambda node, scope: self.compile(node.this, scope),
            exp.Tuple: self._tuple,
            exp.Array: self._array,
            exp.Bracket: self._bracket,
            exp.DPipe: self._concatenate,
            exp.Operator: self._operator,
            exp.Escape: self._escape,
            exp.Like: self._like,
            exp.ILike: self._like,
            exp.RegexpLike: self._match,
            exp.RegexpILike: self._match,
            exp.ArrayContainsAll: lambda node, scope: self._arrays(node, scope, "pg_contains"),
            exp.ArrayOverlaps: lambda node, scope: self._arrays(node, scope, "pg_overlap"),
            exp.ArrayContainedBy: self._contained_by,
            exp.JSONExtract: lambda node, scope: self._json_path(node, scope, "->", pg.JSON),
            exp.JSONExtractScalar: lambda node, scope: self._json_path(node, scope, "->>", pg.TEXT),
            exp.AtTimeZone: lambda node, scope: self.compile(node.this, scope),
            exp.Interval: lambda node, scope: TypedSql(
                quote_text(node.sql("postgres").removeprefix("INTERVAL ").strip("'")), pg.INTERVAL
            ),
        }

    # -- values --------------------------------------------------------------------------------

    def _literal(self, node: Any, scope: QueryScope) -> TypedSql:
        text = str(node.this)
        # The type is decided by the use: 'f' may be a text, a Boolean or an OID.
        if node.is_string:
            return text_constant(text)
        if text.isascii() and text.isdecimal():
            return TypedSql(text, pg.INT4 if int(text) < 2**31 else pg.INT8)
        # The text is copied into SQL, so it must be a valid number for SQLite.
        if _NUMBER.fullmatch(text) is None:
            raise CatalogQueryError(f"invalid number {text}", SYNTAX_ERROR)
        return TypedSql(text, pg.NUMERIC)

    def _unicode(self, node: Any, scope: QueryScope) -> TypedSql:
        """Compile a constant with Unicode escapes, such as ``U&'\\0061'``."""
        text = _UNICODE.sub(lambda found: chr(int(found[1] or found[2], 16)), str(node.this))
        return text_constant(text)

    def _parameter(self, node: Any, scope: QueryScope) -> TypedSql:
        text = str(node.this.name if hasattr(node.this, "name") else node.this)
        if not text.isdecimal() or not int(text):
            raise CatalogQueryError(f"there is no parameter ${text}", UNDEFINED_PARAMETER)
        value = self.parameters.read(int(text))
        # A LATERAL subquery binds parameters under its own names.
        carried = scope.carry_in_all(value)
        return TypedSql(carried.sql, value.type, parameter=value.parameter)

    def _column(self, node: Any, scope: QueryScope) -> TypedSql:
        if isinstance(node.this, exp.Star):
            raise CatalogQueryError("* is not supported as a value", NOT_SUPPORTED)
        name = identifier_name(node.this)
        table = identifier_name(node.args["table"]) if node.args.get("table") else ""
        found = scope.resolve(table, name)
        if found is not None:
            return found
        if (
            not table
            and name in ("user", "current_catalog", "current_role")
            and not (node.this.args.get("quoted"))
        ):
            return self.calls.call(name, [])
        if table:
            found = self._field_of_column(table, name, scope)
            if found is not None:
                return found
            # An unknown table and an unknown column of a table are different errors.
            if scope.source(table) is None:
                raise CatalogQueryError(
                    f'missing FROM-clause entry for table "{table}"', UNDEFINED_TABLE
                )
        shown = f"{table}.{name}" if table else f'"{name}"'
        raise CatalogQueryError(f"column {shown} does not exist", UNDEFINED_COLUMN)

    def _field_of_column(self, column: str, field: str, scope: QueryScope) -> TypedSql | None:
        """Return a field of a composite column, written as ``column.field``; None if the column is
        not a composite."""
        whole = scope.resolve("", column)
        return self._field(whole, field) if whole is not None and whole.fields else None

    def _field(self, whole: TypedSql, name: str) -> TypedSql:
        for field, type_oid in whole.fields:
            if field == name:
                return TypedSql(f"json_extract({whole.sql}, '$.{name}')", type_oid)
        raise CatalogQueryError(f'column "{name}" not found in data type record', UNDEFINED_COLUMN)

    def _dot(self, node: Any, scope: QueryScope) -> TypedSql:
        inner = node.expression
        # A call qualified with a schema.
        if isinstance(inner, exp.Anonymous | exp.Window | exp.Filter):
            schema = identifier_name(node.this)
            self._check_schema(schema, inner)
            return self.compile(inner, scope)
        if isinstance(inner, exp.Func):
            return self.compile(inner, scope)
        whole = self.compile(node.this, scope)
        return self._field(whole, identifier_name(inner))

    def _check_schema(self, schema: str, call: Any) -> None:
        if schema not in ("pg_catalog", "information_schema"):
            shown = f"{schema}.{call.name}"
            raise CatalogQueryError(f"function {shown} does not exist", UNDEFINED_FUNCTION)

    def _paren(self, node: Any, scope: QueryScope) -> TypedSql:
        value = self.compile(node.this, scope)
        # Parentheses leave the type undecided.
        if value.literal is not None or value.parameter:
            return value
        return TypedSql(f"({value.sql})", value.type, value.fields)

    # -- conditions ----------------------------------------------------------------------------

    def _connect(self, node: Any, scope: QueryScope, word: str) -> TypedSql:
        # A long chain nests to the left. Flatten it in a loop to avoid deep recursion.
        parts, left = [], node
        while type(left) is type(node):
            parts.append(left.expression)
            left = left.this
        texts = [self.compile_condition(each, scope) for each in [left, *reversed(parts)]]
        return TypedSql(f"({f' {word} '.join(texts)})", pg.BOOL)

    def _pair(self, node: Any, scope: QueryScope) -> tuple[TypedSql, TypedSql]:
        left, right = self.compile(node.this, scope), self.compile(node.expression, scope)
        return self._match_types(left, right)

    def _match_types(self, left: TypedSql, right: TypedSql) -> tuple[TypedSql, TypedSql]:
        """Give two compared values a common type; an undecided one gets the other's."""
        chosen = common_type((left.type, right.type))
        # Compare a name with the object's name instead of its OID.
        if left.type in REGISTERED and right.type in TEXTUAL - {pg.UNKNOWN}:
            left = cast_value(left, pg.TEXT)
        elif right.type in REGISTERED and left.type in TEXTUAL - {pg.UNKNOWN}:
            right = cast_value(right, pg.TEXT)
        return self._note(left, chosen), self._note(right, chosen)

    def _comparison(self, node: Any, scope: QueryScope, operator: str) -> TypedSql:
        quantifier = _quantifier_of(node.expression)
        if quantifier is not None:
            return self._quantified(self.compile(node.this, scope), operator, quantifier, scope)
        one, other = self._pair(node, scope)
        return TypedSql(f"({one.sql} {operator} {other.sql})", pg.BOOL)

    def _quantified(
        self, left: TypedSql, operator: str, quantifier: tuple[Any, bool], scope: QueryScope
    ) -> TypedSql:
        """Compile ``left operator ANY (values)`` or ALL; the values are an array or a query."""
        inner, every = quantifier
        negated = "NOT " if every else ""
        plain = operator in (("<>",) if every else ("=",))
        if isinstance(inner, exp.Query):
            sql, shape = self._compile_query(inner, scope)
            left = self._note(left, shape.columns[0].type)
            if plain:
                return TypedSql(f"({left.sql} {negated}IN ({sql}))", pg.BOOL)
            rows, place = f"({sql}) AS q", f"q.{shape.columns[0].sql}"
        else:
            array = self.compile(inner, scope)
            element = ELEMENT_OF.get(array.type)
            # A constant or a parameter is an array of the left side's type.
            if element is None:
                array = self._note(array, array_type(pg.TEXT if left.undecided else left.type))
                element = ELEMENT_OF.get(array.type, pg.TEXT)
            left, array = self._match_array(left, array, element)
            rows, place = f"json_each({array.sql}) AS q", "q.value"
            if plain:
                # Use IN instead of a join, so that SQLite can use an index on the left side.
                sql = f"SELECT value FROM json_each({array.sql})"
                return TypedSql(f"({left.sql} {negated}IN ({sql}))", pg.BOOL)
        condition = self._operate(left, operator, place)
        # ALL holds unless the condition fails for some value.
        condition = f"NOT ({condition})" if every else condition
        return TypedSql(f"({negated}EXISTS (SELECT 1 FROM {rows} WHERE {condition}))", pg.BOOL)

    def _match_array(
        self, left: TypedSql, array: TypedSql, element: int
    ) -> tuple[TypedSql, TypedSql]:
        left = self._note(left, element)
        if left.type in REGISTERED and element in TEXTUAL:
            return left, cast_value(array, array_type(left.type))
        return left, array

    def _operate(self, left: TypedSql, operator: str, place: str) -> str:
        if operator in ("~", "~*"):
            flags = "i" if operator == "~*" else ""
            return f"pg_fn_regexp_like({left.sql}, {place}, '{flags}')"
        if operator.endswith("ILIKE"):
            like = operator.replace("ILIKE", "LIKE")
            return f"lower({left.sql}) {like} lower({place}) ESCAPE '\\'"
        if operator.endswith("LIKE"):
            return f"{left.sql} {operator} {place} ESCAPE '\\'"
        return f"{left.sql} {operator} {place}"

    def _is(self, node: Any, scope: QueryScope) -> TypedSql:
        word = "IS NOT" if node.args.get("negate") else "IS"
        if isinstance(node.expression, exp.Boolean):
            value = self.compile_as(node.this, scope, pg.BOOL)
            return TypedSql(f"({value.sql} {word} {int(node.expression.this)})", pg.BOOL)
        # IS UNKNOWN means IS NULL.
        return TypedSql(f"({self.compile(node.this, scope).sql} {word} NULL)", pg.BOOL)

    def _in(self, node: Any, scope: QueryScope) -> TypedSql:
        left = self.compile(node.this, scope)
        query = node.args.get("query")
        if query is not None:
            sql, shape = self._compile_query(query, scope)
            # A query with several columns is compared with a row.
            if len(shape.columns) == 1:
                left = self._note(left, shape.columns[0].type)
            return TypedSql(f"({left.sql} IN ({sql}))", pg.BOOL)
        values = [self.compile(each, scope) for each in node.expressions]
        if left.type == pg.RECORD:
            return TypedSql(f"({left.sql} IN (VALUES {', '.join(v.sql for v in values)}))", pg.BOOL)
        decided = [left, *values]
        chosen = common_type(value.type for value in decided)
        if left.type in REGISTERED and any(
            value.type in TEXTUAL - {pg.UNKNOWN} for value in values
        ):
            left = cast_value(left, pg.TEXT)
        left, *values = (self._note(value, chosen) for value in (left, *values))
        return TypedSql(f"({left.sql} IN ({', '.join(value.sql for value in values)}))", pg.BOOL)

    def _between(self, node: Any, scope: QueryScope) -> TypedSql:
        values = [
            self.compile(each, scope) for each in (node.this, node.args["low"], node.args["high"])
        ]
        chosen = common_type(value.type for value in values)
        one, low, high = (self._note(value, chosen) for value in values)
        return TypedSql(f"({one.sql} BETWEEN {low.sql} AND {high.sql})", pg.BOOL)

    def _exists(self, node: Any, scope: QueryScope) -> TypedSql:
        sql, _ = self._compile_query(node.this, scope)
        return TypedSql(f"EXISTS ({sql})", pg.BOOL)

    def _scalar_subquery(self, node: Any, scope: QueryScope) -> TypedSql:
        sql, shape = self._compile_query(node, scope)
        column = shape.columns[0]
        return TypedSql(f"({sql})", column.type, column.fields)

    def _case(self, node: Any, scope: QueryScope) -> TypedSql:
        operand = node.args.get("this")
        subject = self.compile(operand, scope) if operand is not None else None
        heads, values = [], []
        for branch in node.args["ifs"]:
            # CASE without an operand has conditions.
            if subject is None:
                heads.append(self.compile_condition(branch.this, scope))
            else:
                one, other = self._match_types(subject, self.compile(branch.this, scope))
                heads.append(f"{one.sql} = {other.sql}")
            values.append(self.compile(branch.args["true"], scope))
        default = node.args.get("default")
        values.append(NULL_VALUE if default is None else self.compile(default, scope))
        # Like PostgreSQL, consider the type of ELSE first.
        chosen = common_type(value.type for value in (values[-1], *values[:-1]))
        values = [decide_type(value, chosen) for value in values]
        values = self._unify_registered(values, chosen)
        for value in values:
            self.parameters.decide(value)
        *branches, last = values
        body = " ".join(
            f"WHEN {head} THEN {value.sql}" for head, value in zip(heads, branches, strict=True)
        )
        fields = next((value.fields for value in values if value.fields), ())
        return TypedSql(f"CASE {body} ELSE {last.sql} END", chosen, fields)

    def _unify_registered(self, values: list[TypedSql], chosen: int) -> list[TypedSql]:
        """Convert values such as `regclass` to their names if the common type is textual."""
        if chosen in TEXTUAL:
            return [
                cast_value(value, pg.TEXT) if value.type in REGISTERED else value
                for value in values
            ]
        return values

    def _tuple(self, node: Any, scope: QueryScope) -> TypedSql:
        values = [self.compile(each, scope) for each in node.expressions]
        return TypedSql(f"({', '.join(value.sql for value in values)})", pg.RECORD)

    # -- operators -----------------------------------------------------------------------------

    def _arithmetic(self, node: Any, scope: QueryScope, operator: str) -> TypedSql:
        left, right = self._pair(node, scope)
        types = [each.type for each in (left, right) if each.type in NUMBERS]
        chosen = common_type(types) if types else pg.INT4
        # An OID combined with an integer is an integer. SQLite's integers have 64 bits, so nothing
        # overflows.
        chosen = pg.INT8 if chosen == pg.OID else chosen
        if chosen == pg.TEXT:
            chosen = pg.NUMERIC
        return TypedSql(f"({left.sql} {operator} {right.sql})", chosen)

    def _negative(self, node: Any, scope: QueryScope) -> TypedSql:
        value = self.compile_as(node.this, scope, pg.INT4)
        return TypedSql(f"(-{value.sql})", value.type)

    def _concatenate(self, node: Any, scope: QueryScope) -> TypedSql:
        left, right = self.compile(node.this, scope), self.compile(node.expression, scope)
        if left.type in ELEMENT_OF or right.type in ELEMENT_OF:
            return self._concatenate_arrays(left, right)
        texts = []
        for value in (left, right):
            value = self._note(value, pg.TEXT)
            # SQLite formats numbers as PostgreSQL does, but not Booleans and names.
            texts.append(value.sql if value.type in NUMBERS else cast_value(value, pg.TEXT).sql)
        return TypedSql(f"({texts[0]} || {texts[1]})", pg.TEXT)

    def _concatenate_arrays(self, left: TypedSql, right: TypedSql) -> TypedSql:
        # One operand may be an element that is prepended or appended.
        if left.type not in ELEMENT_OF and not left.undecided:
            return TypedSql(f"pg_fn_array_prepend({left.sql}, {right.sql})", right.type)
        if right.type not in ELEMENT_OF and not right.undecided:
            return TypedSql(f"pg_fn_array_append({left.sql}, {right.sql})", left.type)
        kind = left.type if left.type in ELEMENT_OF else right.type
        left, right = self._note(left, kind), self._note(right, kind)
        return TypedSql(f"pg_fn_array_cat({left.sql}, {right.sql})", kind)

    def _operator(self, node: Any, scope: QueryScope) -> TypedSql:
        """Compile ``left OPERATOR(schema.sign) right`` as ``left sign right``."""
        sign = str(node.args["operator"]).rpartition(".")[2]
        if _SIGN.fullmatch(sign) is None:
            raise CatalogQueryError(
                f"operator {sign} is not supported in a catalog query", NOT_SUPPORTED
            )
        # Let the parser choose the node for the sign, with two names as placeholder operands.
        tree = parse_query(f"SELECT one {sign} other").expressions[0]
        places = {column.name: column for column in tree.find_all(exp.Column)}
        places["one"].replace(node.this.copy())
        places["other"].replace(node.expression.copy())
        return self.compile(tree, scope)

    def _match(self, node: Any, scope: QueryScope) -> TypedSql:
        flags = "i" if isinstance(node, exp.RegexpILike) else ""
        quantifier = _quantifier_of(node.expression)
        if quantifier is not None:
            left = self.compile_as(node.this, scope, pg.TEXT)
            return self._quantified(left, "~*" if flags else "~", quantifier, scope)
        text = cast_value(self.compile_as(node.this, scope, pg.TEXT), pg.TEXT)
        pattern = self.compile_as(node.expression, scope, pg.TEXT)
        return TypedSql(f"pg_fn_regexp_like({text.sql}, {pattern.sql}, '{flags}')", pg.BOOL)

    def _like(self, node: Any, scope: QueryScope, escape: str = "\\") -> TypedSql:
        word = "ILIKE" if isinstance(node, exp.ILike) else "LIKE"
        negated = "NOT " if node.args.get("negate") else ""
        quantifier = _quantifier_of(node.expression)
        if quantifier is not None:
            left = self.compile_as(node.this, scope, pg.TEXT)
            return self._quantified(left, negated + word, quantifier, scope)
        text = cast_value(self.compile_as(node.this, scope, pg.TEXT), pg.TEXT).sql
        pattern = self.compile_as(node.expression, scope, pg.TEXT).sql
        # SQLite's LIKE is case-sensitive here.
        if word == "ILIKE":
            text, pattern = f"lower({text})", f"lower({pattern})"
        # The default escape character is a backslash in PostgreSQL, but none in SQLite.
        escaped = f" ESCAPE {quote_text(escape)}" if escape else ""
        return TypedSql(f"({text} {negated}LIKE {pattern}{escaped})", pg.BOOL)

    def _escape(self, node: Any, scope: QueryScope) -> TypedSql:
        if isinstance(node.this, exp.Like | exp.ILike):
            return self._like(node.this, scope, str(node.expression.name))
        return self.compile(node.this, scope)

    def _arrays(self, node: Any, scope: QueryScope, function: str) -> TypedSql:
        left, right = self._pair(node, scope)
        return TypedSql(f"{function}({left.sql}, {right.sql})", pg.BOOL)

    def _contained_by(self, node: Any, scope: QueryScope) -> TypedSql:
        left, right = self._pair(node, scope)
        return TypedSql(f"pg_contains({right.sql}, {left.sql})", pg.BOOL)

    def _json_path(self, node: Any, scope: QueryScope, operator: str, returns: int) -> TypedSql:
        value = self.compile_as(node.this, scope, pg.JSON)
        path = node.expression
        # sqlglot has converted a plain key to a path.
        if isinstance(path, exp.JSONPath):
            last = path.expressions[-1]
            key = quote_text(str(last.this)) if not isinstance(last.this, int) else str(last.this)
        else:
            key = self.compile(path, scope).sql
        kind = pg.JSONB if returns == pg.JSON and value.type == pg.JSONB else returns
        return TypedSql(f"({value.sql} {operator} {key})", kind)

    # -- types ---------------------------------------------------------------------------------

    def type_of(self, node: Any) -> tuple[int, int]:
        """Return the OID and the length (-1 for none) of the type that a cast names."""
        text = str(node.args.get("kind") or node)
        found = _TYPED_NAME.fullmatch(text)
        oid = None
        if found is not None:
            name = found[1] if found[1] != '"char"' else "char"
            oid = self._type_oids(("_" if found[3] else "") + name)
        if found is None or oid is None:
            raise CatalogQueryError(f'type "{text}" does not exist', UNDEFINED_OBJECT)
        length = int(found[2].partition(",")[0]) if found[2] else -1
        return oid, length

    def _cast(self, node: Any, scope: QueryScope) -> TypedSql:
        target, length = self.type_of(node.args["to"])
        inner = node.this
        # The cast gives an empty array its type.
        if isinstance(inner, exp.Array) and not inner.expressions:
            return TypedSql("'[]'", target)
        value = self.compile(inner, scope)
        made = cast_value(value, target, length)
        self.parameters.decide(made)
        return made

    def _array(self, node: Any, scope: QueryScope) -> TypedSql:
        if len(node.expressions) == 1 and isinstance(node.expressions[0], exp.Query):
            return self.compile_query_array(node.expressions[0], scope)
        values, element = unify_values([self.compile(each, scope) for each in node.expressions])
        texts = []
        for value in values:
            self.parameters.decide(value)
            # An array within an array is JSON instead of text.
            nested = value.type in ELEMENT_OF
            texts.append(f"json({value.sql})" if nested else value.sql)
        kind = element if element in ELEMENT_OF else array_type(element)
        return TypedSql(f"json_array({', '.join(texts)})", kind)

    def compile_query_array(self, query: Any, scope: QueryScope) -> TypedSql:
        """Compile a subquery to an array of its rows."""
        sql, shape = self._compile_query(query, scope)
        column = shape.columns[0]
        # Nesting the subquery preserves the order of its ORDER BY.
        return TypedSql(
            f"(SELECT json_group_array(q.{column.sql}) FROM ({sql}) AS q)", array_type(column.type)
        )

    def _bracket(self, node: Any, scope: QueryScope) -> TypedSql:
        array = self.compile(node.this, scope)
        if not node.expressions:
            # This is `x::oid[]`, whose type was parsed without the brackets.
            return array
        # Vectors count from 0, arrays from 1.
        first = 0 if array.type in VECTORS else 1
        place = node.expressions[0]
        if array.type in (pg.JSON, pg.JSONB):
            return TypedSql(f"({array.sql} -> {self.compile(place, scope).sql})", array.type)
        if isinstance(place, exp.Slice):
            low, high = (
                "NULL" if each is None else f"({self.compile(each, scope).sql} - {first})"
                for each in (place.this, place.args.get("expression"))
            )
            return TypedSql(f"pg_slice({array.sql}, {low}, {high})", array.type)
        at = self.compile_as(place, scope, pg.INT4)
        shift = f"{at.sql} - {first}" if first else at.sql
        element = ELEMENT_OF.get(array.type, pg.TEXT)
        return TypedSql(f"pg_subscript({array.sql}, {shift})", element)


def _quantifier_of(node: Any) -> tuple[Any, bool] | None:
    """Return the operand of ANY, SOME or ALL, and whether it is ALL; None for any other node."""
    name = called_name(node)
    if isinstance(node, exp.Any | exp.All):
        values, every = node.this, isinstance(node, exp.All)
    elif name in ("all", "any", "some"):
        values, every = node.expressions[0], name == "all"
    else:
        return None
    # ANY ((x)) means ANY (x).
    while isinstance(values, exp.Paren):
        values = values.this
    return values, every
