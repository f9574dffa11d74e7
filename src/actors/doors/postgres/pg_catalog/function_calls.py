"""Calls of PostgreSQL's functions in SQLite's SQL: which function is meant, and what it returns.

Signatures are those of `pg_proc`. A function is a text of SQLite's SQL (`SQL_FORMS`), one that
depends on the types of its arguments (`TEMPLATES`), or one of Python's, which SQLite knows as
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
"""Pseudo-types: any array, element, …, and ``"any"``."""
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
"""Functions whose sets are always empty here: no partitions, publications, channels."""
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
    """One function of PostgreSQL."""

    arguments: tuple[int, ...]
    returns: int
    required: int
    """Arguments without a default."""
    returns_set: bool
    variadic: bool
    kind: str
    """A letter, as `pg_proc.prokind` has it."""
    fields: tuple[tuple[str, int], ...]
    """The names and types of its OUT parameters."""


def json_letters(values: Iterable[TypedSql]) -> str:
    """Return how JSON functions take each value: see `scalar_functions`."""
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
    """Return a value as a text function takes it: registered objects by name."""
    if (
        value.type in pg_types.REGISTERED
        or value.type == pg.BOOL
        or value.type in pg_types.ELEMENT_OF
    ):
        return cast_value(value, pg.TEXT)
    return value


def _object_description(args: list[TypedSql]) -> TypedSql:
    where = f"objoid = {args[0].sql} AND objsubid = 0"
    # Objects of two catalogs may have one OID.
    if len(args) > 1:
        where += f" AND classoid = {_CATALOG_OID.format(args[1].sql)}"
    return TypedSql(f"(SELECT description FROM pg_description WHERE {where})", pg.TEXT)


def _greatest(name: str) -> Callable[[list[TypedSql]], TypedSql]:
    def template(args: list[TypedSql]) -> TypedSql:
        values, chosen = unify_values(args)
        # SQLite's return NULL where one is NULL; PostgreSQL's leave NULLs out.
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
        # The length of an empty array is NULL, and so are its bounds.
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
        raise CatalogQueryError("age of a time is not supported here", NOT_SUPPORTED)
    # Of a transaction: nothing ever ages here.
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
"""Functions that are written in SQLite's SQL by the types of their arguments."""

_CATALOG_OID: Final = "(SELECT oid FROM pg_class WHERE relnamespace = 11 AND relname = {0})"
SQL_FORMS: Final[dict[str, str]] = {
    # Of a type's OID and modifier, as `information_schema` has them.
    "_pg_char_max_length": "CASE WHEN {1} <> -1 THEN CASE WHEN {0} IN (1042, 1043) THEN {1} - 4"
    " WHEN {0} IN (1560, 1562) THEN {1} END END",
    # Four bytes a character, which is UTF-8's most.
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
    # From here on the answer is always the same.
    "inet_server_addr": "NULL",
    "inet_server_port": "NULL",
    # There are no advisory locks; pools of connections release all of theirs between users.
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
"""Functions in SQLite's SQL: a number in braces is the place of an argument, ``{all}`` stands for
all of them. The types of their results are those of `pg_proc`."""

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
    """Return whether a function's name tells a catalog query: it asks the server about itself.

    >>> is_session_function("pg_backend_pid"), is_session_function("lower")
    (True, False)
    """
    return name in SESSION_NAMES or name.startswith(_SESSION_HEADS)


class FunctionCatalog:
    """Finds the function that a call means, and writes the call."""

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
        """Return whether there is a function of this name, here or in PostgreSQL."""
        return name in self._signatures or name in TEMPLATES or name in self._in_python

    def returns_set(self, name: str) -> bool:
        """Return whether a function returns a set."""
        return any(each.returns_set for each in self._signatures.get(name, ()))

    def is_window_function(self, name: str) -> bool:
        """Return whether a function may stand before OVER alone."""
        return any(each.kind == "w" for each in self._signatures.get(name, ()))

    def result_type(self, name: str, arguments: list[TypedSql]) -> int:
        """Return the type of a call's value; of a set that of its elements."""
        return _return_type(name, self.choose(name, arguments), arguments)

    def choose(self, name: str, arguments: list[TypedSql]) -> FunctionSignature | None:
        """Return the signature that fits the arguments best."""
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
        """Return a call by the signature that fits its arguments. Raises `CatalogQueryError` for a
        function that there is not."""
        if name in TEMPLATES:
            return TEMPLATES[name](arguments)
        if name in self._in_python:
            return self._call_python(name, arguments, signature)
        if signature is not None:
            if name in SQL_FORMS:
                texts = _shown_texts(signature, arguments)
                sql = SQL_FORMS[name].format(*texts, all=", ".join(texts))
                return TypedSql(sql, _return_type(name, signature, arguments))
            # As an array without elements, whose rows are none.
            if name in EMPTY_SETS:
                return TypedSql("'[]'", signature.returns, signature.fields)
            if name.startswith("pg_stat_get_"):
                # Nothing is counted here: a counter is 0, and what would be a time is unknown.
                counted = signature.returns in pg_types.NUMBERS
                return TypedSql("0" if counted else "NULL", signature.returns)
        shown = f"{name}({', '.join(_type_name(argument.type) for argument in arguments)})"
        # PostgreSQL has it, and we do not: that is another error than an unknown function.
        if signature is not None:
            raise CatalogQueryError(f"function {shown} is not supported here", NOT_SUPPORTED)
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
    """Return the SQL of arguments, with texts where the function takes texts."""
    return [
        _shown(argument).sql if wanted in pg_types.TEXTUAL or wanted == ANY else argument.sql
        for argument, wanted in zip(arguments, _parameters(signature, len(arguments)), strict=False)
    ]


def _out_parameters(row: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the names and types of the OUT parameters of a row of `pg_proc`."""
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
    """Return a value whose text is wanted, or that of its elements."""
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
    """Return the types of the parameters that so many arguments are for."""
    wanted = list(signature.arguments)
    # The last parameter takes all arguments that are left.
    if signature.variadic and wanted:
        wanted += [wanted[-1]] * (count - len(wanted))
    return wanted


def _fitness(signature: FunctionSignature, types: list[int]) -> int | None:
    """Return how well a signature fits: higher is better, None not at all."""
    points = 0
    for want, given in zip(_parameters(signature, len(types)), types, strict=False):
        if want == given:
            points += 4
        elif given == pg.UNKNOWN:
            # A constant without a type is a text before it is anything else.
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
        # A row fits what takes rows of its relation. Names and arrays can be made texts.
        elif given != pg.RECORD and (
            want not in pg_types.TEXTUAL
            or (given not in pg_types.REGISTERED and given not in pg_types.ELEMENT_OF)
        ):
            return None
    return points


def decide_arguments(signature: FunctionSignature, arguments: list[TypedSql]) -> list[TypedSql]:
    """Return arguments with the types that the function gives those of undecided type."""
    decided = []
    parameters = _parameters(signature, len(arguments))
    for argument, want in zip(arguments, parameters, strict=False):
        if want in _POLYMORPHIC:
            # A parameter needs a type; a constant may wait for the other arguments.
            want = pg.TEXT if argument.parameter else pg.UNKNOWN
        decided.append(decide_type(argument, want))
    if pg.ANYARRAY in signature.arguments or 5078 in signature.arguments:
        decided = _decide_elements(decided)
    return decided


def _decide_elements(arguments: list[TypedSql]) -> list[TypedSql]:
    """Return arguments of a function on arrays, with elements and arrays of one type."""
    arrays = [each.type for each in arguments if each.type in pg_types.ELEMENT_OF]
    # None says what it is: braces tell an array, then one of texts.
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
    """Return the type of a call's value; of a set that of its elements."""
    # Words of the standard, which are not in `pg_proc`.
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
    # `anyelement` is what the array has, where one was asked for.
    if arrays and _POLYMORPHIC_ARRAYS.intersection(signature.arguments):
        return pg_types.ELEMENT_OF[arrays[0]]
    return common_type(types)
