"""Parts as bytes: every type, errors, splitting, versions, and a byte that flipped."""

from __future__ import annotations

import datetime
import io
import zlib
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.durable.persist.parts import VERSION, EncodedPart, decode, encode
from actors.durable.persist.shard import PLACED
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.runtime.errors import CorruptData, InvalidUsage, StorageError, TypeMismatch
from suite_lanes import examples  # type: ignore[import-not-found]

NOON = datetime.datetime(2013, 1, 1, 12, 0, 0, 1)  # noqa: DTZ001 - timestamp_ntz
KINDS = (
    "boolean tinyint int bigint float double decimal(12,2) string binary date timestamp"
    " timestamp_ntz array<string> struct<a:int,b:string> map<string,int> void"
)
WIDE = TableSchema(tuple(TableColumn(f"c{i}", kind) for i, kind in enumerate(KINDS.split())))
ROW: list[Any] = [True, -1, 2, 3, 0.5, -0.0, Decimal("1.50"), "ü", b"\0", NOON.date()]
ROW += [NOON.replace(tzinfo=datetime.UTC), NOON, ["x", None], {"a": 1, "b": None}]
ROW += [[("k", 1)], None]
NARROW = TableSchema((TableColumn("a", "bigint"), TableColumn("b", "string")))


def narrow(times: list[int], text: str = "x") -> pa.Table:
    count = len(times)
    return pa.table(
        {
            "a": pa.array(range(count), pa.int64()),
            "b": pa.array([text] * count, pa.string()),
            TIME: pa.array(times, pa.int64()),
            DIFF: pa.array([1] * count, pa.int64()),
        }
    )


def encoded(
    table: pa.Table, schema: TableSchema = NARROW, inline: int = 0, target: int = 1 << 20
) -> list[EncodedPart]:
    return list(encode(table, schema, inline_bytes_max=inline, bytes_target=target))


def data_of(piece: EncodedPart) -> bytes:
    data = piece.part.inline if piece.blob is None else piece.blob
    assert data is not None
    return data


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_every_type_comes_back(inline: int) -> None:
    rows = [ROW, [None] * len(ROW)]
    columns = [
        pa.array([row[index] for row in rows], field.type)
        for index, field in enumerate(WIDE.arrow())
    ]
    table = pa.table(
        [*columns, pa.array([4, 7], pa.int64()), pa.array([1, -1], pa.int64())],
        names=[*WIDE.names, TIME, DIFF],
    )
    (piece,) = encoded(table, WIDE, inline)
    assert (piece.blob is None) == bool(inline)
    part = piece.part
    assert (part.rows, part.time_min, part.time_max, part.has_errors) == (2, 4, 7, False)
    assert decode(part, data_of(piece), WIDE).equals(table)


def test_errors_come_back_and_an_empty_error_column_does_not() -> None:
    table = narrow([1, 2]).append_column(ERROR, pa.array(["bad", None], pa.string()))
    (piece,) = encoded(table)
    assert piece.part.has_errors
    assert decode(piece.part, data_of(piece), NARROW).equals(table)
    (piece,) = encoded(table.slice(1))
    assert not piece.part.has_errors
    assert ERROR not in decode(piece.part, data_of(piece), NARROW).column_names


def test_rows_are_sorted_by_time_and_split_at_the_target() -> None:
    times = [n * 7919 % 1000 for n in range(1000)]
    pieces = encoded(narrow(times, "x" * 100), target=20_000)
    assert len(pieces) > 5
    parts = [piece.part for piece in pieces]
    assert all(one.time_max <= other.time_min for one, other in pairwise(parts))
    back = pa.concat_tables(decode(p.part, data_of(p), NARROW) for p in pieces)
    assert back[TIME].to_pylist() == sorted(times)
    assert sorted(back["a"].to_pylist()) == list(range(1000))
    assert encoded(narrow([])) == []


def test_small_updates_are_inline_large_ones_are_not() -> None:
    assert encoded(narrow([1]), inline=4096)[0].blob is None
    assert encoded(narrow(list(range(1000))), inline=4096)[0].blob is not None


def test_columns_are_taken_by_name_and_cast() -> None:
    table = narrow([1]).select([DIFF, "b", TIME, "a"])
    table = table.set_column(3, "a", pa.array([5], pa.int32()))
    (piece,) = encoded(table)
    assert decode(piece.part, data_of(piece), NARROW).schema.names == ["a", "b", TIME, DIFF]
    with pytest.raises(InvalidUsage, match="lack columns b"):
        encoded(narrow([1]).drop_columns(["b"]))
    with pytest.raises(TypeMismatch, match="do not fit"):
        encoded(narrow([1]).set_column(0, "a", pa.array(["x"], pa.string())))
    with pytest.raises(InvalidUsage, match="have no __time"):
        encoded(narrow([1]).set_column(2, TIME, pa.array([None], pa.int64())))


@pytest.mark.parametrize("inline", [0, 1 << 20])
@settings(max_examples=examples(50), deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(inline: int, place: float, bit: int) -> None:
    (piece,) = encoded(narrow([1, 2, 3]), inline=inline)
    data = bytearray(data_of(piece))
    data[int(place * len(data))] ^= 1 << bit
    with pytest.raises(CorruptData, match="crc32"):
        decode(piece.part, bytes(data), NARROW)
    with pytest.raises(CorruptData, match="bytes"):
        decode(piece.part, bytes(data[:-1]), NARROW)


def test_bytes_that_were_never_a_part() -> None:
    (piece,) = encoded(narrow([1]))
    junk = b"PAR1 but not really"
    part = replace(piece.part, bytes=len(junk), checksum=zlib.crc32(junk))
    with pytest.raises(CorruptData, match="does not contain the columns"):
        decode(part, junk, NARROW)
    other = TableSchema((TableColumn("z", "bigint"),))
    with pytest.raises(CorruptData, match="does not contain the columns"):
        decode(piece.part, data_of(piece), other)
    with pytest.raises(CorruptData, match="contains 1 rows, expected 2"):
        decode(replace(piece.part, rows=2), data_of(piece), NARROW)


def test_a_part_of_a_newer_version_is_refused() -> None:
    (piece,) = encoded(narrow([1]))
    with pytest.raises(StorageError, match=f"format {PLACED + 1}"):
        decode(replace(piece.part, version=PLACED + 1), data_of(piece), NARROW)
    marks = pq.read_schema(io.BytesIO(data_of(piece))).metadata
    assert marks[b"penstock.part"] == str(VERSION).encode()
