"""Requests of clients, and bytes that are none."""

from __future__ import annotations

import random
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from plan_makers import read  # type: ignore[import-not-found]
from pyspark.sql.connect.proto import base_pb2, relations_pb2

from actors.doors.connect_gateway.error_status import SparkCondition
from actors.doors.connect_gateway.plan_decoding import (
    FIELDS_MAX,
    NESTING_MAX,
    _is_nested_within,
    decode_request,
)

LIMIT = 1 << 20


def nested(depth: int) -> bytes:
    """An `ExecutePlanRequest` with so many limits above a read, written from the inside."""
    data = read("t").SerializeToString()
    for _ in range(depth):
        limit = _field(1, data)
        data = _field(relations_pb2.Relation.DESCRIPTOR.fields_by_name["limit"].number, limit)
    plan = _field(1, data)
    return _field(base_pb2.ExecutePlanRequest.DESCRIPTOR.fields_by_name["plan"].number, plan)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    made = b""
    while value >= 0x80:
        made += bytes([value & 0x7F | 0x80])
        value >>= 7
    return made + bytes([value])


def depth_of(request: Any) -> int:
    relation, depth = request.plan.root, 0
    while relation.WhichOneof("rel_type") == "limit":
        relation, depth = relation.limit.input, depth + 1
    return depth


@pytest.mark.parametrize("depth", [0, 10, 60, (NESTING_MAX - 5) // 2])
def test_deep_plans_are_decoded(depth: int) -> None:
    request = decode_request(base_pb2.ExecutePlanRequest, nested(depth), LIMIT)
    assert depth_of(request) == depth
    again = decode_request(base_pb2.ExecutePlanRequest, request.SerializeToString(), LIMIT)
    assert again == request


@pytest.mark.parametrize("count", [FIELDS_MAX - 1_000, FIELDS_MAX])
def test_the_fields_of_a_deep_plan_are_bounded(count: int) -> None:
    """To look through all of them takes a while, in which no other client is answered."""
    unknown = _varint(1_000 << 3) + _varint(1)
    data = nested(60) + unknown * count
    if count < FIELDS_MAX:
        assert depth_of(decode_request(base_pb2.ExecutePlanRequest, data, LIMIT)) == 60
    else:
        with pytest.raises(SparkCondition, match="CANNOT_PARSE"):
            decode_request(base_pb2.ExecutePlanRequest, data, LIMIT)


def test_a_field_has_a_number() -> None:
    assert _is_nested_within(base_pb2.Plan.DESCRIPTOR, _varint(9 << 3) + b"\0", 1)
    assert not _is_nested_within(base_pb2.Plan.DESCRIPTOR, bytes(2), 1)


@pytest.mark.parametrize("depth", [NESTING_MAX, 20_000])
def test_plans_that_are_too_deep_are_refused(depth: int) -> None:
    with pytest.raises(SparkCondition, match="CANNOT_PARSE"):
        decode_request(base_pb2.ExecutePlanRequest, nested(depth), LIMIT)


def outcome(data: bytes) -> str:
    """Return "decoded", or the condition with which the bytes were refused."""
    try:
        decode_request(base_pb2.ExecutePlanRequest, data, LIMIT)
    except SparkCondition as error:
        return str(error).partition("]")[0].removeprefix("[")
    return "decoded"


OUTCOMES = {"decoded", "CONNECT_INVALID_PLAN.CANNOT_PARSE"}


@pytest.mark.sampled
def test_bytes_that_are_no_message() -> None:
    seen = set()

    @given(st.binary(max_size=200))
    def decode(data: bytes) -> None:
        seen.add(outcome(data))

    decode()
    assert seen == OUTCOMES


def test_damaged_requests() -> None:
    seen = set()

    @given(st.integers(0, 1 << 30), st.integers(1, 20))
    def decode(seed: int, count: int) -> None:
        rng = random.Random(seed)
        data = bytearray(nested(5))
        for _ in range(count):
            data[rng.randrange(len(data))] = rng.randrange(256)
        seen.add(outcome(bytes(data[: rng.randrange(len(data))])))

    decode()
    assert seen == OUTCOMES


def compressed(message: Any, kind: str) -> bytes:
    request = base_pb2.ExecutePlanRequest()
    packed = request.plan.compressed_operation
    packed.data = zstandard.compress(message.SerializeToString())
    packed.op_type = getattr(base_pb2.Plan.CompressedOperation, f"OP_TYPE_{kind}")
    packed.compression_codec = base_pb2.COMPRESSION_CODEC_ZSTD
    return bytes(request.SerializeToString())


def test_compressed_plans() -> None:
    relation = read("t" * 1000)
    request = decode_request(base_pb2.ExecutePlanRequest, compressed(relation, "RELATION"), LIMIT)
    assert request.plan.root == relation
    plan = base_pb2.Plan()
    plan.command.sql_command.sql = "SELECT 1"
    data = compressed(plan.command, "COMMAND")
    assert decode_request(base_pb2.ExecutePlanRequest, data, LIMIT).plan == plan
    for bad in (
        compressed(relations_pb2.Relation(sql=relations_pb2.SQL(query="x" * LIMIT)), "RELATION"),
        compressed(relation, "UNSPECIFIED"),
        compressed(relation, "RELATION").replace(b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfe"),
    ):
        with pytest.raises(SparkCondition, match="CANNOT_PARSE"):
            decode_request(base_pb2.ExecutePlanRequest, bad, LIMIT)
