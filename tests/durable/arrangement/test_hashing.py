"""The key hash: equal values hash alike, in every form in which they come; and for ever."""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from actors.durable.arrangement.hashing import (
    ERROR_HASH,
    NULL_HASH,
    check_key_type,
    hash_columns,
    key_hashes,
)
from actors.model.plan.schema import DIFF, ERROR, TIME, arrow_type
from actors.runtime.errors import InvalidUsage


def hashes(values: list[Any], kind: str | pa.DataType) -> list[int]:
    arrow = arrow_type(kind) if isinstance(kind, str) else kind
    column = pa.chunked_array([pa.array(values, arrow)])
    return [int(value) for value in hash_columns([column], len(values))]


# Pinned: partitions and files of one release must fit the next.
GOLDEN: list[tuple[str, Any, int]] = [
    ("bigint", 1, 0x5E41_AB08_7439_611E),
    ("bigint", -7, 0x1549_C43B_1B38_1C21),
    ("double", 0.5, 0xFDFA_3DAA_1829_D96F),
    ("string", "", 0xA706_DD2F_4D19_7E6F),
    ("string", "penstock", 0xABC8_91CF_338A_4F2C),
    ("decimal(10,2)", decimal.Decimal("-12.34"), 0x8399_38EF_71A8_AE47),
    ("boolean", True, 0x5E41_AB08_7439_611E),
    ("bigint", None, 0xF725_441D_87A5_FE5E),
    ("array<int>", [1, 2], 0x5772_8FCF_31DD_6ECA),
]


@pytest.mark.parametrize(("kind", "value", "pinned"), GOLDEN)
def test_hashes_never_change(kind: str, value: Any, pinned: int) -> None:
    assert hashes([value], kind) == [pinned]


def test_integers_of_every_width_agree() -> None:
    kinds = ("tinyint", "smallint", "int", "bigint")
    assert len({hashes([-5], kind)[0] for kind in kinds}) == 1


def test_floats_have_one_zero_and_one_nan() -> None:
    other_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_1234))[0]
    assert math.isnan(other_nan)
    for kind in ("double", "float"):
        assert len(set(hashes([0.0, -0.0], kind))) == 1
        assert len(set(hashes([math.nan, other_nan], kind))) == 1
    assert hashes([0.5, math.nan], "double") == hashes([0.5, math.nan], "float")


def test_trailing_spaces_do_not_count_because_char_pads() -> None:
    assert hashes(["a", "a  "], "string")[0] == hashes(["a  "], "string")[0]
    assert len(set(hashes([b"a", b"a "], "binary"))) == 2


def test_different_values_differ() -> None:
    cases: dict[str, list[Any]] = {
        "bigint": list(range(-500, 500)),
        "double": [index / 7 for index in range(-500, 500)],
        "string": ["", "\0", "\0\0", "ab", "ba", "abc", *map(str, range(1000))],
        "binary": [b"", b"\0", b"\0\0", b" ", b"  "],
        "decimal(38,0)": [decimal.Decimal(10) ** power for power in range(38)]
        + [-(decimal.Decimal(10) ** power) for power in range(38)],
        "date": [datetime.date(2013, 1, 1) + datetime.timedelta(days) for days in range(400)],
        "array<string>": [[], [""], ["a", "b"], ["b", "a"], ["ab"], [None], ["a", None], None],
        "struct<a:int,b:int>": [{"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": None, "b": None}, None],
    }
    for kind, values in cases.items():
        assert len(set(hashes([*values], kind))) == len(values), kind


def test_the_order_of_columns_counts_and_null_is_a_value() -> None:
    one, two = pa.chunked_array([[1, None]]), pa.chunked_array([[2, 2]])
    forward, backward = hash_columns([one, two], 2), hash_columns([two, one], 2)
    assert len({*map(int, forward), *map(int, backward)}) == 4
    assert hashes([None], "bigint") == hashes([None], "string") == hashes([None], pa.null())
    assert int(NULL_HASH) not in hashes([None, 0], "bigint")  # mixed like any other


def test_slices_chunks_and_dictionaries_change_nothing() -> None:
    values: dict[str, list[Any]] = {
        "string": ["a", None, "", "longer text", "b"] * 7,
        "bigint": [1, None, 3, 4, 5] * 7,
        "boolean": [True, None, False, True, True] * 7,
        "double": [1.5, None, -0.0, 2.0, math.inf] * 7,
        "decimal(12,2)": [decimal.Decimal("1.25"), None, decimal.Decimal(3), None, None] * 7,
        "timestamp": [datetime.datetime(2013, 1, day, tzinfo=datetime.UTC) for day in range(1, 30)],
        "array<int>": [[1, 2], None, [], [None], [3]] * 7,
        "struct<a:int,b:string>": [{"a": 1, "b": "x"}, None, {"a": None, "b": ""}] * 10,
    }
    for kind, whole in values.items():
        expected = hashes(whole, kind)
        array = pa.array([whole[0], *whole, whole[0]], arrow_type(kind))
        sliced = array.slice(1, len(whole))
        chunked = pa.chunked_array([sliced.slice(0, 3), sliced.slice(3, 0), sliced.slice(3)])
        assert hash_columns([chunked], len(whole)).tolist() == expected, kind
    encoded = pa.array(values["string"]).dictionary_encode()
    assert hash_columns([pa.chunked_array([encoded])], 35).tolist() == hashes(
        values["string"], "string"
    )
    large = pa.array(values["string"], pa.large_string())
    assert hash_columns([pa.chunked_array([large])], 35).tolist() == hashes(
        values["string"], "string"
    )


def test_long_strings_and_many_bytes_hash_as_they_do_alone() -> None:
    texts = ["x" * length for length in (0, 1, 300_000, 900_000, 5, 1_500_000, 7)] * 2
    assert hashes(texts, "string") == [hashes([text], "string")[0] for text in texts]


def test_hashes_are_spread_evenly() -> None:
    for values in (range(10_000), range(0, 10_000_000, 1000)):
        column = pa.chunked_array([pa.array(values, pa.int64())])
        counts = np.bincount((hash_columns([column], 10_000) % np.uint64(5)).astype(int))
        assert counts.min() > 1_800


def test_updates_of_errors_share_one_hash() -> None:
    table = pa.table(
        {"a": [1, None, None], TIME: [1, 1, 1], DIFF: [1, 1, 1], ERROR: [None, "boom", None]},
        schema=pa.schema(
            [("a", pa.int64()), (TIME, pa.int64()), (DIFF, pa.int64()), (ERROR, pa.string())]
        ),
    )
    found = key_hashes(table, ("a",))
    assert [value == ERROR_HASH for value in found] == [False, True, False]


def test_empty_columns_and_no_columns() -> None:
    assert hash_columns([], 3).tolist() == [0, 0, 0]
    for kind in ("string", "bigint", "decimal(10,2)", "array<string>", "boolean"):
        assert hashes([], kind) == []
        empty = pa.chunked_array([], arrow_type(kind))
        assert len(hash_columns([empty], 0)) == 0


def test_maps_are_no_keys() -> None:
    for kind in ("map<string,int>", "array<map<string,int>>", "struct<a:map<int,int>>"):
        with pytest.raises(InvalidUsage, match="maps cannot be compared"):
            check_key_type("m", arrow_type(kind))
    check_key_type("a", arrow_type("array<struct<a:int,b:string>>"))
