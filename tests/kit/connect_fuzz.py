"""Random plans of Spark Connect clients, made to break the gateway.

`fuzzed_request` makes the bytes of a request: messages with random fields, which contain names of
objects and SQL texts. Then it changes the bytes: cuts, splices, nests, falsifies lengths,
compresses. `read_plan` decodes and rewrites them as the gateway does. The outcome must be a
rewritten plan, a plan passed on, or a named error; anything else is raised. Pure.

The test suite and ``tests/proof/fuzz_connect_plans.py`` share this module.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

import zstandard
from google.protobuf.message import EncodeError
from pyspark.sql.connect.proto import base_pb2, relations_pb2

from actors.doors.connect_gateway.error_status import SparkCondition
from actors.doors.connect_gateway.plain_reads import direct_read
from actors.doors.connect_gateway.plan_decoding import NESTING_MAX, decode_request
from actors.doors.connect_gateway.plan_rewriting import (
    bind_names,
    find_names,
    relation_of_command,
    statement_of,
    written_text_of,
)
from actors.doors.connect_gateway.sql_names import (
    dropped_view_of,
    is_query,
    needs_no_rows,
    setting_of,
    temporary_view_of,
)
from actors.model.plan.schema import TableColumn, TableSchema
from tests.kit.wire_fuzz import mutated

BYTES_MAX: Final = 1 << 20
_FIELDS_MAX: Final = 5
_DEPTH_MAX: Final = 7
_NAMES: Final = (
    *("orders", "default.orders", "spark_catalog.default.orders", "`odd name`", "ORDERS", "view1"),
    *("penstock.objects", "", "`", "a.b.c.d", "orders o", "`or``ders`", '"orders"', "nobody's"),
)
_TEXTS: Final = (
    "SELECT * FROM orders",
    "SELECT o.id, '--' FROM default.orders AS o /* orders */ WHERE o.id IN (SELECT 1)",
    "WITH t AS (SELECT * FROM orders) SELECT * FROM t, IDENTIFIER('orders')",
    "EXECUTE IMMEDIATE 'SELECT * FROM orders'",
    "CREATE OR REPLACE TEMP VIEW v (a COMMENT 'x') AS SELECT * FROM orders",
    "DROP VIEW IF EXISTS view1",
    "SET spark.sql.ansi.enabled = false",
    "id > 1 AND name = (SELECT max(name) FROM orders)",
    "INSERT INTO orders VALUES (1, 'x')",
    "EXPLAIN SELECT * FROM `odd name`",
    "/* /* */ orders",
    "`orders",
    "'\\",
    "",
)
_SCHEMAS: Final = {
    "orders": TableSchema((TableColumn("id", "bigint"), TableColumn("name", "string")), ("id",)),
    "odd name": TableSchema((TableColumn("x", "double"),)),
}
_TYPE_MESSAGE: Final = 11
_MAKERS: Final[dict[int, Callable[[Random], Any]]] = {
    1: lambda rng: rng.choice((0.0, -1.5, float("nan"), float("inf"))),
    2: lambda rng: rng.choice((0.0, 1.5)),
    3: lambda rng: rng.choice((0, 1, -1, (1 << 63) - 1, -(1 << 63))),
    4: lambda rng: rng.choice((0, 1, (1 << 64) - 1)),
    5: lambda rng: rng.choice((0, 1, -1, (1 << 31) - 1)),
    8: lambda rng: rng.random() < 0.5,
    9: lambda rng: rng.choice(_NAMES if rng.random() < 0.5 else _TEXTS),
    12: lambda rng: rng.randbytes(rng.randint(0, 12)),
    13: lambda rng: rng.choice((0, 1, (1 << 32) - 1)),
    14: lambda rng: rng.randint(0, 3),
    17: lambda rng: rng.choice((0, -1)),
    18: lambda rng: rng.choice((0, -1)),
}
"""A value for each protobuf type that is not a message, by the number of the type."""


def resolve_name(parts: tuple[str, ...]) -> str | None:
    """Return the object that a name means in these plans."""
    folded = [part.lower() for part in parts]
    for prefix in (["spark_catalog", "default"], ["default"]):
        if len(folded) > 1 and folded[:-1] == prefix:
            folded = folded[-1:]
    return folded[0] if len(folded) == 1 and folded[0] in _SCHEMAS else None


# -- requests --------------------------------------------------------------------------------------


def fuzzed_request(rng: Random) -> bytes:
    """Return the bytes of a valid or invalid request."""
    request = base_pb2.ExecutePlanRequest(session_id="s")
    if rng.random() < 0.7:
        _fill(request.plan.root, rng, _DEPTH_MAX)
    else:
        _fill(request.plan.command, rng, _DEPTH_MAX)
    data = _encoded(request)
    kind = rng.random()
    if kind < 0.2:
        return data
    if kind < 0.3:
        return _nested(data, rng)
    if kind < 0.45:
        return _compressed(request, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = mutated(data, [data, *_seeds()], rng)
    return data[: 2 * BYTES_MAX]


def _encoded(message: Any) -> bytes:
    data: bytes = message.SerializePartialToString()
    return data


def _seeds() -> list[bytes]:
    read = relations_pb2.Relation()
    read.read.named_table.unparsed_identifier = "orders"
    return [_encoded(read), b"\x0a\x80\x80\x80\x80\x08", b"\xff" * 10]


def _fill(message: Any, rng: Random, depth: int) -> None:
    """Set some fields of a message, and of the messages in it."""
    message.SetInParent()
    fields = list(message.DESCRIPTOR.fields)
    for field in rng.sample(fields, min(len(fields), rng.randint(1, _FIELDS_MAX))):
        entry = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.type == _TYPE_MESSAGE and not entry:
            _fill_message(message, field, rng, depth)
        elif entry:
            _fill_map(getattr(message, field.name), field, rng, depth)
        else:
            _fill_value(message, field, rng)


def _fill_message(message: Any, field: Any, rng: Random, depth: int) -> None:
    if depth <= 0:
        return
    value = getattr(message, field.name)
    for each in [value.add() for _ in range(rng.randint(1, 2))] if field.is_repeated else [value]:
        # `Any` contains the bytes of a message of unknown type.
        if each.DESCRIPTOR.full_name != "google.protobuf.Any":
            _fill(each, rng, depth - 1)


def _fill_map(value: Any, field: Any, rng: Random, depth: int) -> None:
    key, item = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    if key.type not in _MAKERS:
        return
    if item.type == _TYPE_MESSAGE:
        _fill(value[_MAKERS[key.type](rng)], rng, depth - 1)
    elif item.type in _MAKERS:
        value[_MAKERS[key.type](rng)] = _MAKERS[item.type](rng)


def _fill_value(message: Any, field: Any, rng: Random) -> None:
    make = _MAKERS.get(field.type)
    if make is None:
        return
    try:
        if field.is_repeated:
            getattr(message, field.name).append(make(rng))
        else:
            setattr(message, field.name, make(rng))
    except ValueError:
        pass  # an enumeration without this number


def _nested(data: bytes, rng: Random) -> bytes:
    """Return a request with a relation nested so deeply that an unbounded decoder overflows."""
    limit = relations_pb2.Relation.DESCRIPTOR.fields_by_name["limit"].number
    inner = _seeds()[0]
    for _ in range(rng.choice((40, 99, 101, NESTING_MAX // 2 - 8, NESTING_MAX, 4 * NESTING_MAX))):
        inner = _field(limit, _field(1, inner))
    plan = base_pb2.ExecutePlanRequest.DESCRIPTOR.fields_by_name["plan"].number
    return data[: rng.choice((0, 0, len(data)))] + _field(plan, _field(1, inner))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(made) + bytes([value])


def _compressed(request: Any, rng: Random) -> bytes:
    """Return a request with a compressed plan: correctly, incorrectly, or far too large."""
    plain = _encoded(request.plan.root)
    if rng.random() < 0.3:
        plain = mutated(plain, [plain], rng)
    elif rng.random() < 0.2:
        plain = b"\0" * (BYTES_MAX * 64)
    packed = zstandard.ZstdCompressor().compress(plain)
    if rng.random() < 0.4:
        packed = mutated(packed, [packed], rng)
    made: Any = base_pb2.ExecutePlanRequest(session_id="s")
    made.plan.compressed_operation.data = packed
    made.plan.compressed_operation.op_type = rng.randint(0, 2)
    made.plan.compressed_operation.compression_codec = rng.choice((0, 1, 1, 1))
    return _encoded(made)


# -- what the gateway does with them ---------------------------------------------------------------


def read_plan(data: bytes) -> str:
    """Return what happens to a request: ``refused``, ``passed on`` or ``rewritten``.

    Raises any error that is not a named one, and `AssertionError` for a plan that still names an
    object that was replaced.
    """
    try:
        request = decode_request(base_pb2.ExecutePlanRequest, data, BYTES_MAX)
    except SparkCondition:
        return "refused"
    _read_texts(request)
    found = find_names(request, resolve_name)
    if not found.read:
        return "passed on"
    bound = bind_names(request, resolve_name, _rows_of, lambda key: ("spark_catalog", "default"))
    left = find_names(bound.message, resolve_name)
    # Names inside SQL texts stay, with relations added; reading a stream is refused later.
    direct = {each for each in found.read if _is_read_directly(bound.message, each)}
    assert not direct, (direct, left)
    try:
        bound.message.SerializeToString()
    except EncodeError:
        return "refused"  # the message lacks a required field, which its own server would report
    return "rewritten"


def _rows_of(key: str) -> Any:
    made = relations_pb2.Relation()
    made.local_relation.schema = f"rows of {key}"
    return made


def _is_read_directly(message: Any, key: str) -> bool:
    """Return whether a plan still reads an object by name, other than as a stream."""
    left = [message]
    while left:
        found = left.pop()
        if found.DESCRIPTOR.full_name == "spark.connect.Relation":
            read = found.read if found.WhichOneof("rel_type") == "read" else None
            if read is not None and read.HasField("named_table") and not read.is_streaming:
                names = find_names(read.named_table, resolve_name).read
                if key in names:
                    return True
        for field, value in found.ListFields():
            if field.message_type is None:
                continue
            if not field.is_repeated:
                left.append(value)
            elif not field.message_type.GetOptions().map_entry:
                left += value
            elif field.message_type.fields_by_name["value"].message_type is not None:
                left += value.values()
    return False


def _read_texts(request: Any) -> None:
    """Read everything that the gateway reads in a request before it rewrites it."""
    statement = statement_of(request.plan)
    relation = request.plan.root
    if request.plan.command.WhichOneof("command_type") == "sql_command":
        relation = relation_of_command(request.plan.command.sql_command)
    direct_read(relation, resolve_name, _SCHEMAS)
    for text in (statement, written_text_of(relation)):
        if text is not None:
            for read in (is_query, needs_no_rows, setting_of, temporary_view_of, dropped_view_of):
                read(text)
