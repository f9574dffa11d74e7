"""Calls of PostgreSQL's functions in SQLite's SQL: which function is meant, and what it returns.

Signatures are those of `pg_proc`. A function is SQLite's own where the two agree (`TEMPLATES`),
a subquery (`obj_description`), or one of Python's, which SQLite knows as ``pg_fn_name``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from actors.doors.postgres.pg_catalog.catalog_data import SystemCatalog
from actors.doors.postgres.pg_catalog.catalog_errors import (
    NOT_SUPPORTED,
    UNDEFINED_FUNCTION,
    CatalogQueryError,
)
from actors.doors.postgres.pg_catalog.pg_types import (
    ELEMENT_OF,
    INTEGERS,
    NUMBERS,
    REGISTERED,
    TEXTUAL,
    VECTORS,
)
from actors.doors.postgres.pg_catalog.typed_sql import (
    TypedSql,
    array_type,
    cast_value,
    common_type,
    decide_type,
    unify_values,
)
from actors.model.pgwire.type_oids import (
    ANYARRAY,
    ANYELEMENT,
    BOOL,
    CHAR,
    FLOAT8,
    INT4,
    INT8,
    JSON,
    JSONB,
    NAME,
    NUMERIC,
    OID,
    RECORD,
    REGCLASS,
    REGTYPE,
    TEXT,
    UNKNOWN,
    VOID,
)

FUNCTION_PREFIX: Final = "pg_fn_"
_POLYMORPHIC: Final = frozenset({ANYARRAY, ANYELEMENT, 2276, 2776, 5077, 5078, 5079, 5080})
"""Pseudo-types: any array, element, …, and ``"any"``."""
_POLYMORPHIC_ARRAYS: Final = frozenset({ANYARRAY, 5078})
SET_FUNCTIONS: Final[dict[str, tuple[tuple[str, int], ...]]] = {
    # Columns of what returns sets of rows.
    "_pg_expandarray": (("x", UNKNOWN), ("n", INT4)),
    "aclexplode": (
        ("grantor", OID),
        ("grantee", OID),
        ("privilege_type", TEXT),
        ("is_grantable", BOOL),
    ),
    "pg_get_keywords": (
        ("word", TEXT),
        ("catcode", CHAR),
        ("barelabel", BOOL),
        ("catdesc", TEXT),
        ("baredesc", TEXT),
    ),
    "pg_options_to_table": (("option_name", TEXT), ("option_value", TEXT)),
}
EMPTY_SETS: Final[dict[str, tuple[tuple[str, int], ...]]] = {
    "pg_partition_ancestors": (("relid", REGCLASS),),
    "pg_partition_tree": (
        ("relid", REGCLASS),
        ("parentrelid", REGCLASS),
        ("isleaf", BOOL),
        ("level", INT4),
    ),
    "pg_listening_channels": (("pg_listening_channels", TEXT),),
    "pg_get_publication_tables": (("relid", OID), ("attrs", 22), ("qual", 194)),
    "pg_event_trigger_ddl_commands": (("classid", OID), ("objid", OID)),
    "pg_sequence_parameters": (("start_value", INT8), ("minimum_value", INT8)),
    "pg_get_sequence_data": (("last_value", INT8), ("is_called", BOOL)),
}
"""Functions whose sets are always empty here: no partitions, sequences, publications."""
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
WINDOW_FUNCTIONS: Final[dict[str, int]] = {
    "row_number": INT8,
    "rank": INT8,
    "dense_rank": INT8,
    "first_value": ANYELEMENT,
    "last_value": ANYELEMENT,
    "lag": ANYELEMENT,
    "lead": ANYELEMENT,
    "ntile": INT4,
}


class FunctionSignature(msgspec.Struct, frozen=True):
    """One function of PostgreSQL."""

    arguments: tuple[int, ...]
    returns: int
    required: int
    """Arguments without a default."""
    returns_set: bool
    variadic: bool


def json_letters(values: Iterable[TypedSql]) -> str:
    """Return how JSON functions take each value: see `scalar_functions`."""
    letters = []
    for value in values:
        if value.type == BOOL:
            letters.append("b")
        elif value.type in (JSON, JSONB, RECORD) or value.type in ELEMENT_OF:
            letters.append("j")
        else:
            letters.append("x")
    return "".join(letters)


def _shown(value: TypedSql) -> TypedSql:
    """Return a value as a text function takes it: registered objects by name."""
    if value.type in REGISTERED or value.type == BOOL or value.type in ELEMENT_OF:
        return cast_value(value, TEXT)
    return value


def _native(name: str, returns: int) -> Callable[[list[TypedSql]], TypedSql]:
    """Return the template of a function that SQLite has, too."""
    return lambda args: TypedSql(f"{name}({', '.join(arg.sql for arg in args)})", returns)


def _description(catalog_at: int | None) -> Callable[[list[TypedSql]], TypedSql]:
    def template(args: list[TypedSql]) -> TypedSql:
        oid = decide_type(args[0], OID).sql
        where = f"objoid = {oid} AND objsubid = 0"
        # Objects of two catalogs may have one OID.
        if catalog_at is not None and len(args) > 1:
            where += (
                " AND classoid = (SELECT oid FROM pg_class WHERE relnamespace = 11"
                f" AND relname = {args[1].sql})"
            )
        return TypedSql(f"(SELECT description FROM pg_description WHERE {where})", TEXT)

    return template


def _column_description(args: list[TypedSql]) -> TypedSql:
    where = f"objoid = {args[0].sql} AND classoid = 1259 AND objsubid = {args[1].sql}"
    # 0 is the relation itself, which is no column.
    where += f" AND {args[1].sql} <> 0"
    return TypedSql(f"(SELECT description FROM pg_description WHERE {where})", TEXT)


def _shared_description(args: list[TypedSql]) -> TypedSql:
    where = (
        f"objoid = {args[0].sql} AND classoid = (SELECT oid FROM pg_class"
        f" WHERE relnamespace = 11 AND relname = {args[1].sql})"
    )
    return TypedSql(f"(SELECT description FROM pg_shdescription WHERE {where})", TEXT)


def _true_type(args: list[TypedSql]) -> TypedSql:
    attribute, kind = args[0].sql, args[1].sql
    return TypedSql(
        f"CASE {kind}.typtype WHEN 'd' THEN {kind}.typbasetype ELSE {attribute}.atttypid END", OID
    )


def _true_modifier(args: list[TypedSql]) -> TypedSql:
    attribute, kind = args[0].sql, args[1].sql
    return TypedSql(
        f"CASE {kind}.typtype WHEN 'd' THEN {kind}.typtypmod ELSE {attribute}.atttypmod END", INT4
    )


def _index_position(args: list[TypedSql]) -> TypedSql:
    keys = f"(SELECT indkey FROM pg_index WHERE indexrelid = {args[0].sql})"
    place = f"(SELECT key + 1 FROM json_each({keys}) WHERE value = {args[1].sql} LIMIT 1)"
    return TypedSql(place, INT4)


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
    return TypedSql(f"pg_json_object('{json_letters(args)}'{inside})", JSON)


def _json_array(args: list[TypedSql]) -> TypedSql:
    inside = "".join(f", {arg.sql}" for arg in args)
    return TypedSql(f"pg_json_array('{json_letters(args)}'{inside})", JSON)


def _to_json(args: list[TypedSql]) -> TypedSql:
    return TypedSql(f"pg_json_value('{json_letters(args)}', {args[0].sql})", JSON)


def _array_bound(upper: bool) -> Callable[[list[TypedSql]], TypedSql]:
    def template(args: list[TypedSql]) -> TypedSql:
        length = f"nullif(json_array_length({args[0].sql}), 0)"
        # The length of an empty array is NULL, and so are its bounds.
        if args[0].type in VECTORS:
            sql = f"({length} - 1)" if upper else f"({length} * 0)"
        else:
            sql = length if upper else f"({length} * 0 + 1)"
        return TypedSql(sql, INT4)

    return template


def _subscripts(args: list[TypedSql]) -> TypedSql:
    first = 0 if args[0].type in VECTORS else 1
    return TypedSql(f"pg_subscripts({args[0].sql}, {args[1].sql}, {first})", INT4)


def _age(args: list[TypedSql]) -> TypedSql:
    if args[0].type in TEXTUAL or len(args) > 1:
        raise CatalogQueryError("age of a time is not supported here", NOT_SUPPORTED)
    # Of a transaction: nothing ever ages here.
    return TypedSql(f"(0 * {args[0].sql} + 1)", INT4)


def _type_of(args: list[TypedSql]) -> TypedSql:
    return TypedSql(str(TEXT if args[0].undecided else args[0].type), REGTYPE)


def _trim(name: str) -> Callable[[list[TypedSql]], TypedSql]:
    return lambda args: TypedSql(f"{name}({', '.join(_shown(arg).sql for arg in args)})", TEXT)


def _first_argument(args: list[TypedSql]) -> TypedSql:
    return args[0]


TEMPLATES: Final[dict[str, Callable[[list[TypedSql]], TypedSql]]] = {
    "abs": lambda args: TypedSql(f"abs({args[0].sql})", args[0].type),
    "age": _age,
    "array_lower": _array_bound(upper=False),
    "array_upper": _array_bound(upper=True),
    "btrim": _trim("trim"),
    "ceil": _native("ceil", FLOAT8),
    "ceiling": _native("ceil", FLOAT8),
    "char_length": _native("length", INT4),
    "character_length": _native("length", INT4),
    "coalesce": _coalesce,
    "col_description": _column_description,
    "floor": _native("floor", FLOAT8),
    "generate_subscripts": _subscripts,
    "greatest": _greatest("max"),
    "json_build_array": _json_array,
    "json_build_object": _json_object,
    "jsonb_build_array": _json_array,
    "jsonb_build_object": _json_object,
    "least": _greatest("min"),
    "length": _native("length", INT4),
    "lower": lambda args: TypedSql(f"lower({_shown(args[0]).sql})", TEXT),
    "ltrim": _trim("ltrim"),
    "mod": lambda args: TypedSql(f"({args[0].sql} % {args[1].sql})", args[0].type),
    "nameconcatoid": lambda args: TypedSql(f"({args[0].sql} || '_' || {args[1].sql})", NAME),
    "nullif": _nullif,
    "obj_description": _description(1),
    "pg_column_size": lambda args: TypedSql(f"length({args[0].sql})", INT4),
    "pg_typeof": _type_of,
    "position": lambda args: TypedSql(f"instr({args[1].sql}, {args[0].sql})", INT4),
    "power": _native("power", FLOAT8),
    "replace": _native("replace", TEXT),
    "round": _native("round", NUMERIC),
    "rtrim": _trim("rtrim"),
    "shobj_description": _shared_description,
    "sign": _native("sign", FLOAT8),
    "sqrt": _native("sqrt", FLOAT8),
    "strpos": _native("instr", INT4),
    "to_json": _to_json,
    "to_jsonb": _to_json,
    "trunc": lambda args: TypedSql(f"CAST(trunc({args[0].sql}) AS INTEGER)", args[0].type),
    "unnest": _first_argument,
    "upper": lambda args: TypedSql(f"upper({_shown(args[0]).sql})", TEXT),
    "_pg_index_position": _index_position,
    "int8in": lambda args: TypedSql(args[0].sql, INT8),
    "xidout": lambda args: TypedSql(args[0].sql, INT8),
    "_pg_truetypid": _true_type,
    "_pg_truetypmod": _true_modifier,
}
"""Functions that are written in SQLite's SQL, by PostgreSQL's name."""

CONSTANTS: Final[dict[str, TypedSql]] = {
    # There are no advisory locks; pools of connections release all of theirs between users.
    "pg_advisory_unlock_all": TypedSql("''", VOID),
    "pg_backup_start_time": TypedSql("NULL", 1184),
    "pg_blocking_pids": TypedSql("'[]'", 1007),
    "pg_current_xact_id_if_assigned": TypedSql("NULL", 5069),
    "pg_export_snapshot": TypedSql("NULL", TEXT),
    "pg_is_in_backup": TypedSql("0", BOOL),
    "pg_is_in_recovery": TypedSql("0", BOOL),
    "pg_is_other_temp_schema": TypedSql("0", BOOL),
    "pg_is_wal_replay_paused": TypedSql("0", BOOL),
    "pg_last_wal_receive_lsn": TypedSql("NULL", 3220),
    "pg_last_wal_replay_lsn": TypedSql("NULL", 3220),
    "pg_last_xact_replay_timestamp": TypedSql("NULL", 1184),
    "pg_current_wal_lsn": TypedSql("'0/0'", 3220),
    "pg_current_wal_insert_lsn": TypedSql("'0/0'", 3220),
    "pg_current_wal_flush_lsn": TypedSql("'0/0'", 3220),
    "pg_my_temp_schema": TypedSql("0", OID),
    "pg_relation_filepath": TypedSql("NULL", TEXT),
    "pg_relation_is_publishable": TypedSql("0", BOOL),
    "pg_sequence_last_value": TypedSql("NULL", INT8),
    "pg_tablespace_location": TypedSql("''", TEXT),
    "pg_trigger_depth": TypedSql("0", INT4),
    "pg_current_xact_id": TypedSql("'1'", 5069),
    "txid_current": TypedSql("1", INT8),
    "txid_current_if_assigned": TypedSql("NULL", INT8),
    "txid_snapshot_xmin": TypedSql("1", INT8),
    "pg_jit_available": TypedSql("0", BOOL),
}
"""Functions whose answer is always the same here."""

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
                )
            )

    def is_known(self, name: str) -> bool:
        """Return whether there is a function of this name, here or in PostgreSQL."""
        return (
            name in self._signatures
            or name in TEMPLATES
            or name in CONSTANTS
            or name in self._in_python
        )

    def returns_set(self, name: str) -> bool:
        """Return whether a function returns a set."""
        if name in ("unnest", "generate_series", "generate_subscripts"):
            return True
        return any(each.returns_set for each in self._signatures.get(name, ()))

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

    def call(self, name: str, arguments: list[TypedSql]) -> TypedSql:
        """Return a call. Raises `CatalogQueryError` for a function that there is not."""
        # Before the signatures: no argument changes these.
        if name in CONSTANTS:
            return CONSTANTS[name]
        signature = self.choose(name, arguments)
        if signature is not None:
            arguments = _decide_arguments(signature, arguments)
        if name in TEMPLATES:
            return TEMPLATES[name](arguments)
        # As an array without elements, whose rows are none.
        if name in EMPTY_SETS:
            return TypedSql("'[]'", RECORD, EMPTY_SETS[name])
        if name in self._in_python:
            return self._call_python(name, arguments, signature)
        if name.startswith("pg_stat_get_") and signature is not None:
            # Nothing is counted here: a counter is 0, and what would be a time is unknown.
            counted = signature.returns in NUMBERS
            return TypedSql("0" if counted else "NULL", signature.returns)
        shown = f"{name}({', '.join(_type_name(argument.type) for argument in arguments)})"
        # PostgreSQL has it, and we do not: that is another error than an unknown name.
        if name in self._signatures:
            raise CatalogQueryError(f"function {shown} is not supported here", NOT_SUPPORTED)
        raise CatalogQueryError(f"function {shown} does not exist", UNDEFINED_FUNCTION)

    def _call_python(
        self, name: str, arguments: list[TypedSql], signature: FunctionSignature | None
    ) -> TypedSql:
        if name in ("concat", "concat_ws", "format", "array_to_string", "quote_literal"):
            arguments = [_shown_inside(argument) for argument in arguments]
        if name == "substring" and len(arguments) == 2 and arguments[1].type in TEXTUAL:
            return TypedSql(f"pg_find_substring({_joined(arguments)})", TEXT)
        returns = _return_type(name, signature, arguments)
        fields = SET_FUNCTIONS.get(name, ())
        if name == "_pg_expandarray":
            fields = (("x", ELEMENT_OF.get(arguments[0].type, TEXT)), fields[1])
        return TypedSql(f"{FUNCTION_PREFIX}{name}({_joined(arguments)})", returns, fields)


def _joined(arguments: Iterable[TypedSql]) -> str:
    return ", ".join(argument.sql for argument in arguments)


def _shown_inside(value: TypedSql) -> TypedSql:
    """Return a value whose text is wanted, or that of its elements."""
    element = ELEMENT_OF.get(value.type)
    if element is not None:
        return cast_value(value, array_type(TEXT)) if element not in TEXTUAL else value
    return _shown(value)


def _type_name(type_oid: int) -> str:
    return {UNKNOWN: "unknown", TEXT: "text", INT4: "integer", OID: "oid", NAME: "name"}.get(
        type_oid, str(type_oid)
    )


def _fitness(signature: FunctionSignature, types: list[int]) -> int | None:
    """Return how well a signature fits: higher is better, None not at all."""
    points = 0
    wanted = list(signature.arguments)
    # The last parameter takes all arguments that are left.
    if signature.variadic and wanted:
        wanted += [wanted[-1]] * (len(types) - len(wanted))
    for want, given in zip(wanted, types, strict=False):
        if want == given:
            points += 4
        elif given == UNKNOWN:
            # A constant without a type is a text before it is anything else.
            points += 2 if want in TEXTUAL else 1
        elif want in _POLYMORPHIC:
            if want in _POLYMORPHIC_ARRAYS and given not in ELEMENT_OF:
                return None
            points += 1
        elif want in TEXTUAL and given in TEXTUAL:
            points += 3
        elif want in INTEGERS and given in INTEGERS:
            points += 3 if want == INT8 else 2
        elif want in NUMBERS and given in NUMBERS:
            points += 1
        elif want in (OID, REGCLASS) and given in REGISTERED:
            points += 3
        elif want in REGISTERED and given in INTEGERS:
            points += 2
        # What is left can at best be made a text.
        elif given not in REGISTERED and given not in ELEMENT_OF:
            return None
    return points


def _decide_arguments(signature: FunctionSignature, arguments: list[TypedSql]) -> list[TypedSql]:
    decided = []
    for at, argument in enumerate(arguments):
        want = signature.arguments[min(at, len(signature.arguments) - 1)]
        if want in _POLYMORPHIC:
            # A parameter needs a type; a constant may wait for the other arguments.
            want = TEXT if argument.parameter else UNKNOWN
        decided.append(decide_type(argument, want))
    if ANYARRAY in signature.arguments or 5078 in signature.arguments:
        decided = _decide_elements(decided)
    return decided


def _decide_elements(arguments: list[TypedSql]) -> list[TypedSql]:
    """Return arguments of a function on arrays, with elements and arrays of one type."""
    arrays = [each.type for each in arguments if each.type in ELEMENT_OF]
    # None says what it is: braces tell an array, then one of texts.
    if not arrays:
        return [
            decide_type(each, array_type(TEXT)) if (each.literal or "").startswith("{") else each
            for each in arguments
        ]
    element = ELEMENT_OF[arrays[0]]
    return [
        decide_type(each, arrays[0] if (each.literal or "").startswith("{") else element)
        for each in arguments
    ]


def _return_type(name: str, signature: FunctionSignature | None, arguments: list[TypedSql]) -> int:
    """Return the type of a call's value; of a set that of its elements."""
    if name in ("current_user", "session_user", "user", "current_role"):
        return NAME
    if name in SET_FUNCTIONS:
        return RECORD
    if signature is None:
        return TEXT
    returns = signature.returns
    if returns not in _POLYMORPHIC:
        return returns
    arrays = [argument.type for argument in arguments if argument.type in ELEMENT_OF]
    if returns in _POLYMORPHIC_ARRAYS:
        if arrays:
            return arrays[0]
        return array_type(common_type(argument.type for argument in arguments))
    # `anyelement` is what the array has.
    if arrays:
        return ELEMENT_OF[arrays[0]]
    return common_type(argument.type for argument in arguments)
