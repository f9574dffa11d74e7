"""Resolves calls of PostgreSQL's functions, and compiles them to SQLite's SQL.

Signatures come from `pg_proc`. A function is implemented by SQL text (`SQL_FORMS`), by SQL that
depends on the types of its arguments (`TEMPLATES`), or in Python, which SQLite calls as
``pg_fn_name``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from actors.doors.postgres.pg_catalog import pg_types
from actors.doors.postgres.pg_catalog.catalog_data import SystemCatalog
from actors.doors.postgres.pg_catalog.catalog_errors import (
    NOT_SUPPORTED,
    UNDEFINED_FUNCTION,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.typed_sql import (
    TypedSql,
    array_type,
    cast_value,
    common_type,
    decide_type,
    unify_values,
)
from actors.model.pgwire import type_oids as pg

FUNCTION_PREFIX: Final = "pg_fn_"
ANY: Final = 2276
_POLYMORPHIC: Final = frozenset({pg.ANYARRAY, pg.ANYELEMENT, ANY, 2776, 5077, 5078, 5079, 5080})
"""The pseudo-types `anyarray`, `anyelement`, … and ``"any"``."""
_POLYMORPHIC_ARRAYS: Final = frozenset({pg.ANYARRAY, 5078})
EMPTY_SETS: Final = frozenset(
    {
        "pg_event_trigger_ddl_commands",
        "pg_get_publication_tables",
        "pg_listening_channels",
        "pg_partition_ancestors",
        "pg_partition_tree",
    }
)
"""Set-returning functions that are always empty here: there are no partitions, publications or
channels."""
AGGREGATES: Final = frozenset(
    {
        "array_agg",
        "avg",
        "bool_and",
        "bool_or",
        "count",
        "every",
        "json_agg",
        "json_object_agg",
        "jsonb_agg",
        "jsonb_object_agg",
        "max",
        "min",
        "string_agg",
        "sum",
    }
)


class FunctionSignature(msgspec.Struct, frozen=True):
    """The signature of one function of PostgreSQL; types are OIDs."""

    arguments: tuple[int, ...]
    returns: int
    required: int
    """Number of arguments without a default."""
    returns_set: bool
    variadic: bool
    kind: str
    """The letter of `pg_proc.prokind`."""
    fields: tuple[tuple[str, int], ...]
    """The names and types of its OUT parameters."""


def json_letters(values: Iterable[TypedSql]) -> str:
    """Return a letter for each value that tells JSON functions its kind: b for a Boolean, j for
    JSON, a record or an array, x for any other value."""
    letters = []
    for value in values:
        if value.type == pg.BOOL:
            letters.append("b")
        elif value.type in (pg.JSON, pg.JSONB, pg.RECORD) or value.type in pg_types.ELEMENT_OF:
            letters.append("j")
        else:
            letters.append("x")
    return "".join(letters)


def _shown(value: TypedSql) -> TypedSql:
    """Convert a value for a function on text: OIDs such as `regclass`, Booleans and arrays become
    text."""
    if (
        value.type in pg_types.REGISTERED
        or value.type == pg.BOOL
        or value.type in pg_types.ELEMENT_OF
    ):
        return cast_value(value, pg.TEXT)
    return value


def _object_description(args: list[TypedSql]) -> TypedSql:
    where = f"objoid = {args[0].sql} AND objsubid = 0"
    # Objects of different catalogs may have the same OID.
    if len(args) > 1:
        where += f" AND classoid = {_CATALOG_OID.format(args[1].sql)}"
    return TypedSql(f"(SELECT description FROM pg_description WHERE {where})", pg.TEXT)


def _greatest(name: str) -> Callable[[list[TypedSql]], TypedSql]:
    def template(args: list[TypedSql]) -> TypedSql:
        values, chosen = unify_values(args)
        # SQLite's functions return NULL if any argument is NULL; PostgreSQL's ignore NULLs.
        rows = " UNION ALL ".join(f"SELECT {value.sql} AS v" for value in values)
        return TypedSql(f"(SELECT {name}(v) FROM ({rows}))", chosen)

    return template


def _coalesce(args: list[TypedSql]) -> TypedSql:
    values, chosen = unify_values(args)
    if len(values) == 1:
        return TypedSql(values[0].sql, chosen)
    return TypedSql(f"coalesce({', '.join(value.sql for value in values)})", chosen)


def _nullif(args: list[TypedSql]) -> TypedSql:
    values, chosen = unify_values(args)
    return TypedSql(f"nullif({values[0].sql}, {values[1].sql})", chosen)


def _json_object(args: list[TypedSql]) -> TypedSql:
    inside = "".join(f", {arg.sql}" for arg in args)
    return TypedSql(f"pg_json_object('{json_letters(args)}'{inside})", pg.JSON)


def _json_array(args: list[TypedSql]) -> TypedSql:
    inside = "".join(f", {arg.sql}" for arg in args)
    return TypedSql(f"pg_json_array('{json_letters(args)}'{inside})", pg.JSON)


def _to_json(args: list[TypedSql]) -> TypedSql:
    return TypedSql(f"pg_json_value('{json_letters(args)}', {args[0].sql})", pg.JSON)


def _array_bound(upper: bool) -> Callable[[list[TypedSql]], TypedSql]:
    def template(args: list[TypedSql]) -> TypedSql:
        length = f"nullif(json_array_length({args[0].sql}), 0)"
        # The length and the bounds of an empty array are NULL.
        if args[0].type in pg_types.VECTORS:
            sql = f"({length} - 1)" if upper else f"({length} * 0)"
        else:
            sql = length if upper else f"({length} * 0 + 1)"
        return TypedSql(sql, pg.INT4)

    return template


def _subscripts(args: list[TypedSql]) -> TypedSql:
    first = 0 if args[0].type in pg_types.VECTORS else 1
    return TypedSql(f"pg_subscripts({args[0].sql}, {args[1].sql}, {first})", pg.INT4)


def _age(args: list[TypedSql]) -> TypedSql:
    if args[0].type in pg_types.TEXTUAL or len(args) > 1:
        raise CatalogQueryError("age(timestamp) is not supported in a catalog query", NOT_SUPPORTED)
    # The age of a transaction is constant here.
    return TypedSql(f"(0 * {args[0].sql} + 1)", pg.INT4)


def _type_of(args: list[TypedSql]) -> TypedSql:
    return TypedSql(str(pg.TEXT if args[0].undecided else args[0].type), pg.REGTYPE)


def _first_argument(args: list[TypedSql]) -> TypedSql:
    return args[0]


TEMPLATES: Final[dict[str, Callable[[list[TypedSql]], TypedSql]]] = {
    "age": _age,
    "array_lower": _array_bound(upper=False),
    "array_upper": _array_bound(upper=True),
    "coalesce": _coalesce,
    "generate_subscripts": _subscripts,
    "greatest": _greatest("max"),
    "json_build_array": _json_array,
    "json_build_object": _json_object,
    "jsonb_build_array": _json_array,
    "jsonb_build_object": _json_object,
    "least": _greatest("min"),
    "nullif": _nullif,
    "obj_description": _object_description,
    "pg_typeof": _type_of,
    "to_json": _to_json,
    "to_jsonb": _to_json,
    "unnest": _first_argument,
}
"""Functions whose SQL depends on the types of their arguments."""

_CATALOG_OID: Final = "(SELECT oid FROM pg_class WHERE relnamespace = 11 AND relname = {0})"
SQL_FORMS: Final[dict[str, str]] = {
    # Functions of a type's OID and modifier, which `information_schema` uses.
    "_pg_char_max_length": "CASE WHEN {1} <> -1 THEN CASE WHEN {0} IN (1042, 1043) THEN {1} - 4"
    " WHEN {0} IN (1560, 1562) THEN {1} END END",
    # Up to four bytes per character in UTF-8.
    "_pg_char_octet_length": "CASE WHEN {0} IN (25, 1042, 1043) THEN"
    " CASE WHEN {0} = 25 OR {1} = -1 THEN 1 << 30 ELSE 4 * ({1} - 4) END END",
    "_pg_datetime_precision": "CASE WHEN {0} = 1082 THEN 0"
    " WHEN {0} IN (1083, 1114, 1184, 1266) THEN CASE WHEN {1} < 0 THEN 6 ELSE {1} END END",
    "_pg_interval_type": "NULL",
    "_pg_numeric_precision": "CASE {0} WHEN 21 THEN 16 WHEN 23 THEN 32 WHEN 20 THEN 64"
    " WHEN 700 THEN 24 WHEN 701 THEN 53"
    " WHEN 1700 THEN CASE WHEN {1} <> -1 THEN ({1} - 4) >> 16 & 65535 END END",
    "_pg_numeric_precision_radix": "CASE WHEN {0} IN (20, 21, 23, 700, 701) THEN 2"
    " WHEN {0} = 1700 THEN 10 END",
    "_pg_numeric_scale": "CASE WHEN {0} IN (20, 21, 23) THEN 0"
    " WHEN {0} = 1700 AND {1} <> -1 THEN ({1} - 4) & 2047 END",
    "_pg_index_position": "(SELECT key + 1 FROM json_each((SELECT indkey FROM pg_index"
    " WHERE indexrelid = {0})) WHERE value = {1} LIMIT 1)",
    "_pg_truetypid": "CASE {1}.typtype WHEN 'd' THEN {1}.typbasetype ELSE {0}.atttypid END",
    "_pg_truetypmod": "CASE {1}.typtype WHEN 'd' THEN {1}.typtypmod ELSE {0}.atttypmod END",
    "abs": "abs({all})",
    "btrim": "trim({all})",
    "ceil": "CAST(ceil({all}) AS INTEGER)",
    "ceiling": "CAST(ceil({all}) AS INTEGER)",
    "char_length": "length({all})",
    "character_length": "length({all})",
    "chr": "char({all})",
    "col_description": "(SELECT description FROM pg_description WHERE objoid = {0}"
    " AND classoid = 1259 AND objsubid = {1})",
    "concat": "concat({all})",
    "concat_ws": "concat_ws({all})",
    "floor": "CAST(floor({all}) AS INTEGER)",
    "int8in": "{0}",
    "length": "length({all})",
    "lower": "lower({all})",
    "ltrim": "ltrim({all})",
    "mod": "({0} % {1})",
    "nameconcatoid": "({0} || '_' || {1})",
    "octet_length": "octet_length({all})",
    "pg_column_size": "length({all})",
    "position": "instr({all})",
    "power": "power({all})",
    "replace": "replace({all})",
    "round": "round({all})",
    "rtrim": "rtrim({all})",
    "shobj_description": "(SELECT description FROM pg_shdescription WHERE objoid = {0}"
    f" AND classoid = {_CATALOG_OID.format('{1}')})",
    "sign": "sign({all})",
    "sqrt": "sqrt({all})",
    "strpos": "instr({all})",
    "trunc": "CAST(trunc({all}) AS INTEGER)",
    "upper": "upper({all})",
    "xidout": "{0}",
    # The following functions are constant here.
    "inet_server_addr": "NULL",
    "inet_server_port": "NULL",
    # There are no advisory locks, but connection pools release them between users.
    "pg_advisory_unlock_all": "''",
    "pg_blocking_pids": "'[]'",
    "pg_current_xact_id_if_assigned": "NULL",
    "pg_export_snapshot": "NULL",
    "pg_is_in_recovery": "0",
    "pg_is_other_temp_schema": "0",
    "pg_is_wal_replay_paused": "0",
    "pg_last_wal_receive_lsn": "NULL",
    "pg_last_wal_replay_lsn": "NULL",
    "pg_last_xact_replay_timestamp": "NULL",
    "pg_current_wal_lsn": "'0/0'",
    "pg_current_wal_insert_lsn": "'0/0'",
    "pg_current_wal_flush_lsn": "'0/0'",
    "pg_database_size": "0",
    "pg_my_temp_schema": "0",
    "pg_relation_filepath": "NULL",
    "pg_relation_is_publishable": "0",
    "pg_sequence_last_value": "NULL",
    "pg_tablespace_location": "''",
    "pg_tablespace_size": "0",
    "pg_trigger_depth": "0",
    "pg_current_xact_id": "'1'",
    "txid_current": "1",
    "txid_current_if_assigned": "NULL",
    "txid_snapshot_xmin": "1",
    "pg_jit_available": "0",
}
"""Functions as SQL text. A number in braces is the position of an argument; ``{all}`` stands for
all arguments. Result types are those of `pg_proc`."""

SESSION_NAMES: Final = frozenset(
    {
        "current_catalog",
        "current_database",
        "current_schema",
        "current_schemas",
        "current_setting",
        "current_user",
        "current_role",
        "session_user",
        "user",
        "version",
        "set_config",
        "obj_description",
        "col_description",
        "shobj_description",
        "format_type",
        "getdatabaseencoding",
        "row_security_active",
        "acldefault",
        "aclexplode",
    }
)
_SESSION_HEADS: Final = ("pg_", "has_", "inet_", "to_reg", "txid_", "_pg_")


def is_session_function(name: str) -> bool:
    """Return whether a function asks the server about itself, which makes a query a catalog query.

    >>> is_session_function("pg_backend_pid"), is_session_function("lower")
    (True, False)
    """
    return name in SESSION_NAMES or name.startswith(_SESSION_HEADS)


class FunctionCatalog:
    """Resolves function calls by name and argument types, and compiles them."""

    def __init__(self, system: SystemCatalog, in_python: Iterable[str]) -> None:
        self._in_python = frozenset(in_python)
        self._signatures: dict[str, list[FunctionSignature]] = {}
        for row in system.rows["pg_proc"].records():
            arguments = tuple(row["proargtypes"])
            self._signatures.setdefault(row["proname"], []).append(
                FunctionSignature(
                    arguments=arguments,
                    returns=row["prorettype"],
                    required=len(arguments) - row["pronargdefaults"],
                    returns_set=bool(row["proretset"]),
                    variadic=bool(row["provariadic"]),
                    kind=row["prokind"],
                    fields=_out_parameters(row),
                )
            )

    def is_known(self, name: str) -> bool:
        """Return whether a function of this name exists, here or in PostgreSQL."""
        return name in self._signatures or name in TEMPLATES or name in self._in_python

    def returns_set(self, name: str) -> bool:
        """Return whether a function returns a set."""
        return any(each.returns_set for each in self._signatures.get(name, ()))

    def is_window_function(self, name: str) -> bool:
        """Return whether a function is a window function, which requires OVER."""
        return any(each.kind == "w" for each in self._signatures.get(name, ()))

    def result_type(self, name: str, arguments: list[TypedSql]) -> int:
        """Return the result type of a call; for a set, the type of its elements."""
        return _return_type(name, self.choose(name, arguments), arguments)

    def choose(self, name: str, arguments: list[TypedSql]) -> FunctionSignature | None:
        """Return the signature that matches the arguments best; None if none matches."""
        types = [argument.type for argument in arguments]
        fitting = [
            (_fitness(each, types), at, each)
            for at, each in enumerate(self._signatures.get(name, ()))
            if each.variadic or each.required <= len(types) <= len(each.arguments)
        ]
        ranked = [each for each in fitting if each[0] is not None]
        if not ranked:
            return None
        return max(ranked, key=lambda each: (each[0], -each[1]))[2]

    def call(
        self, name: str, signature: FunctionSignature | None, arguments: list[TypedSql]
    ) -> TypedSql:
        """Compile a call with the signature that `choose` returned. Raises `CatalogQueryError` for
        a function that does not exist or is not supported."""
        if name in TEMPLATES:
            return TEMPLATES[name](arguments)
        if name in self._in_python:
            return self._call_python(name, arguments, signature)
        if signature is not None:
            if name in SQL_FORMS:
                texts = _shown_texts(signature, arguments)
                sql = SQL_FORMS[name].format(*texts, all=", ".join(texts))
                return TypedSql(sql, _return_type(name, signature, arguments))
            # An array without elements has no rows.
            if name in EMPTY_SETS:
                return TypedSql("'[]'", signature.returns, signature.fields)
            if name.startswith("pg_stat_get_"):
                # There are no statistics here: counters are 0, and times are NULL.
                counted = signature.returns in pg_types.NUMBERS
                return TypedSql("0" if counted else "NULL", signature.returns)
        shown = f"{name}({', '.join(_type_name(argument.type) for argument in arguments)})"
        # A function that only PostgreSQL has is not the same error as an unknown function.
        if signature is not None:
            raise CatalogQueryError(
                f"function {shown} is not supported in a catalog query", NOT_SUPPORTED
            )
        raise CatalogQueryError(f"function {shown} does not exist", UNDEFINED_FUNCTION)

    def _call_python(
        self, name: str, arguments: list[TypedSql], signature: FunctionSignature | None
    ) -> TypedSql:
        if name in ("format", "array_to_string", "quote_literal"):
            arguments = [_shown_inside(argument) for argument in arguments]
        returns = _return_type(name, signature, arguments)
        fields = signature.fields if signature is not None and returns == pg.RECORD else ()
        if name == "_pg_expandarray":
            fields = (("x", pg_types.ELEMENT_OF.get(arguments[0].type, pg.TEXT)), fields[1])
        return TypedSql(f"{FUNCTION_PREFIX}{name}({_joined(arguments)})", returns, fields)


def _shown_texts(signature: FunctionSignature, arguments: list[TypedSql]) -> list[str]:
    """Return the SQL of the arguments, converted to text where the function takes text."""
    return [
        _shown(argument).sql if wanted in pg_types.TEXTUAL or wanted == ANY else argument.sql
        for argument, wanted in zip(arguments, _parameters(signature, len(arguments)), strict=False)
    ]


def _out_parameters(row: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the names and types of the OUT parameters in a row of `pg_proc`."""
    columns = zip(
        row["proargnames"] or (),
        row["proallargtypes"] or (),
        row["proargmodes"] or (),
        strict=False,
    )
    return tuple((name, kind) for name, kind, mode in columns if mode in "ot")


def _joined(arguments: Iterable[TypedSql]) -> str:
    return ", ".join(argument.sql for argument in arguments)


def _shown_inside(value: TypedSql) -> TypedSql:
    """Convert a value, or the elements of an array, to text."""
    element = pg_types.ELEMENT_OF.get(value.type)
    if element is not None:
        return cast_value(value, array_type(pg.TEXT)) if element not in pg_types.TEXTUAL else value
    return _shown(value)


def _type_name(type_oid: int) -> str:
    return {
        pg.UNKNOWN: "unknown",
        pg.TEXT: "text",
        pg.INT4: "integer",
        pg.OID: "oid",
        pg.NAME: "name",
    }.get(type_oid, str(type_oid))


def _parameters(signature: FunctionSignature, count: int) -> list[int]:
    """Return the parameter types for a call with `count` arguments."""
    wanted = list(signature.arguments)
    # A variadic last parameter takes all remaining arguments.
    if signature.variadic and wanted:
        wanted += [wanted[-1]] * (count - len(wanted))
    return wanted


def _fitness(signature: FunctionSignature, types: list[int]) -> int | None:
    """Return how well a signature matches argument types: higher is better, None is no match."""
    points = 0
    for want, given in zip(_parameters(signature, len(types)), types, strict=False):
        if want == given:
            points += 4
        elif given == pg.UNKNOWN:
            # An untyped constant is preferably text.
            points += 2 if want in pg_types.TEXTUAL else 1
        elif want in _POLYMORPHIC:
            if want in _POLYMORPHIC_ARRAYS and given not in pg_types.ELEMENT_OF:
                return None
            points += 1
        elif want in pg_types.TEXTUAL and given in pg_types.TEXTUAL:
            points += 3
        elif want in pg_types.INTEGERS and given in pg_types.INTEGERS:
            points += 3 if want == pg.INT8 else 2
        elif want in pg_types.NUMBERS and given in pg_types.NUMBERS:
            points += 2 if want == pg.FLOAT8 else 1
        elif want in (pg.OID, pg.REGCLASS) and given in pg_types.REGISTERED:
            points += 3
        elif want in pg_types.REGISTERED and given in pg_types.INTEGERS:
            points += 2
        # A row matches any parameter, which may take rows of its relation. Names and arrays can be
        # converted to text.
        elif given != pg.RECORD and (
            want not in pg_types.TEXTUAL
            or (given not in pg_types.REGISTERED and given not in pg_types.ELEMENT_OF)
        ):
            return None
    return points


def decide_arguments(signature: FunctionSignature, arguments: list[TypedSql]) -> list[TypedSql]:
    """Give undecided arguments the types of the function's parameters."""
    decided = []
    parameters = _parameters(signature, len(arguments))
    for argument, want in zip(arguments, parameters, strict=False):
        if want in _POLYMORPHIC:
            # A parameter needs a type now; a constant may get its type from other arguments.
            want = pg.TEXT if argument.parameter else pg.UNKNOWN
        decided.append(decide_type(argument, want))
    if pg.ANYARRAY in signature.arguments or 5078 in signature.arguments:
        decided = _decide_elements(decided)
    return decided


def _decide_elements(arguments: list[TypedSql]) -> list[TypedSql]:
    """Unify the types of arrays and elements in the arguments of a polymorphic array function."""
    arrays = [each.type for each in arguments if each.type in pg_types.ELEMENT_OF]
    # If no argument has an array type, constants with braces are arrays of text.
    if not arrays:
        return [
            decide_type(each, array_type(pg.TEXT)) if (each.literal or "").startswith("{") else each
            for each in arguments
        ]
    element = pg_types.ELEMENT_OF[arrays[0]]
    return [
        decide_type(each, arrays[0] if (each.literal or "").startswith("{") else element)
        for each in arguments
    ]


def _return_type(name: str, signature: FunctionSignature | None, arguments: list[TypedSql]) -> int:
    """Return the result type of a call; for a set, the type of its elements."""
    # Keywords of the SQL standard are not in `pg_proc`.
    if name in ("user", "current_role", "current_catalog"):
        return pg.NAME
    if signature is None:
        return pg.TEXT
    returns = signature.returns
    if returns not in _POLYMORPHIC:
        return returns
    parameters = _parameters(signature, len(arguments))
    types = [
        argument.type
        for argument, wanted in zip(arguments, parameters, strict=False)
        if wanted in _POLYMORPHIC
    ]
    arrays = [each for each in types if each in pg_types.ELEMENT_OF]
    if returns in _POLYMORPHIC_ARRAYS:
        return arrays[0] if arrays else array_type(common_type(types))
    # `anyelement` is the element type of the array argument, if there is one.
    if arrays and _POLYMORPHIC_ARRAYS.intersection(signature.arguments):
        return pg_types.ELEMENT_OF[arrays[0]]
    return common_type(types)
