"""Columns of texts and of binary values, read whole: as each value alone is read."""

from __future__ import annotations

import math
import struct
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.pgwire.column_parsing import (
    ColumnError,
    Rounding,
    parse_binary_column,
    parse_text_column,
)
from actors.model.pgwire.encoded_values import PAD_BYTES
from actors.model.pgwire.sqlstate import InvalidClientData
from actors.model.pgwire.value_parsing import parse_array

PLAIN = st.lists(st.sampled_from(["1", "22", "null", "a b", " c", ""])).map(
    lambda words: "{" + ",".join(words) + "}"
)


def texts(*values: str | None) -> pa.Array:
    return pa.array([None if each is None else each.encode() for each in values], pa.large_binary())


def read_alone(text: str) -> list[str | None] | str:
    """The elements of an array, or the text of the error."""
    try:
        return parse_array(text)
    except InvalidClientData as error:
        return str(error)


@given(st.lists(st.none() | PLAIN | st.text('{}",\\ N1a', max_size=8), max_size=6))
def test_a_column_of_arrays_is_each_of_its_values(values: list[str | None]) -> None:
    wanted = [None if text is None else read_alone(text) for text in values]
    wrong = next((at for at, each in enumerate(wanted) if isinstance(each, str)), None)
    if wrong is not None:
        with pytest.raises(ColumnError) as caught:
            parse_text_column(texts(*values), pa.list_(pa.string()))
        assert (caught.value.row, str(caught.value.error)) == (wrong, wanted[wrong])
        return
    found = parse_text_column(texts(*values), pa.list_(pa.string()))
    found.validate(full=True)
    assert found.to_pylist() == wanted


@pytest.mark.parametrize("array", ["{1,2,3}", '{1,"2",3}'])
def test_elements_of_an_array_are_bounded(array: str) -> None:
    kind = pa.list_(pa.int32())
    assert parse_text_column(texts(array), kind, elements_max=3).to_pylist() == [[1, 2, 3]]
    with pytest.raises(ColumnError, match="at most 2 elements") as caught:
        parse_text_column(texts("{}", array), kind, elements_max=2)
    assert (caught.value.row, caught.value.shown) == (1, array)


def test_the_element_that_is_no_value_is_shown_with_its_row() -> None:
    column = texts("{1}", None, "{}", "{2,x,y}", "{z}")
    with pytest.raises(ColumnError, match='type integer: "x"') as caught:
        parse_text_column(column, pa.list_(pa.int32()))
    assert (caught.value.row, caught.value.shown) == (3, "x")


@pytest.mark.parametrize("kind", [pa.decimal128(5, 2), pa.decimal128(38, 18)])
def test_rounding_is_as_it_is_asked_for(kind: pa.DataType) -> None:
    long = "1.5" + "0" * 3_000
    for rounding in Rounding:
        assert parse_text_column(texts(long), kind, rounding=rounding).to_pylist() == [
            Decimal("1.5")
        ]
    rounds = {Rounding.ALL} if kind.precision == 38 else {Rounding.ALL, Rounding.DECLARED}
    for rounding in Rounding:
        column = texts("0", "1.5" + "0" * 20 + "1")
        if rounding in rounds:
            found = parse_text_column(column, kind, rounding=rounding)
            assert found.to_pylist() == [Decimal(0), Decimal("1.5")]
            continue
        with pytest.raises(ColumnError, match="does not fit") as caught:
            parse_text_column(column, kind, rounding=rounding)
        assert caught.value.row == 1


def test_all_nan_in_binary_are_one() -> None:
    """A row that is deleted by its text must equal the one that was copied in binary."""
    other = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    data = struct.pack(">dd", other, 1.5) + bytes(PAD_BYTES)
    places, lengths = np.array([0, 8, 8]), np.array([8, 8, -1])
    found = parse_binary_column(np.frombuffer(data, np.uint8), places, lengths, pa.float64())
    assert math.isnan(other)
    assert found.to_pylist()[1:] == [1.5, None]
    assert found.slice(0, 1).to_numpy().tobytes() == np.array([np.nan]).tobytes()
