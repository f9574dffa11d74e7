"""Streams of one row without Arrow, and short streams at once: always what Arrow would say."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.doors.client.rows import encode_keys
from actors.model.plan.one_row import form_of
from actors.model.plan.updates import from_ipc, to_ipc
from actors.replica.compute.peeks import one_key
from actors.runtime.errors import MalformedFrame

KINDS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint64()]
NAMES = ["id", "k", "a much longer name of a column"]


def bounds(kind: pa.DataType) -> tuple[int, int]:
    if pa.types.is_signed_integer(kind):
        return -(1 << (kind.bit_width - 1)), (1 << (kind.bit_width - 1)) - 1
    return 0, (1 << kind.bit_width) - 1


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[pa.DataType], list[int], list[int]]:
    """Types, and two rows of them."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    first = [draw(st.integers(*bounds(kind))) for kind in kinds]
    return kinds, first, [draw(st.integers(*bounds(kind))) for kind in kinds]


def stream(kinds: list[pa.DataType], values: list[Any]) -> bytes:
    columns = [pa.array([value], kind) for kind, value in zip(kinds, values, strict=True)]
    return to_ipc(pa.table(columns, names=NAMES[: len(kinds)]))


@given(rows())
def test_a_form_reads_and_writes_what_arrow_does(
    case: tuple[list[pa.DataType], list[int], list[int]],
) -> None:
    kinds, first, second = case
    form = form_of(stream(kinds, first))
    assert form is not None
    assert form.types == tuple(kinds)
    for values in (first, second):
        assert form.read(stream(kinds, values)) == tuple(values)
        assert form.write(tuple(values)) == stream(kinds, values)


@given(rows(), st.data())
def test_a_stream_that_differs_elsewhere_is_not_of_the_form(
    case: tuple[list[pa.DataType], list[int], list[int]], data: st.DataObject
) -> None:
    kinds, first, _ = case
    whole = stream(kinds, first)
    form = form_of(whole)
    assert form is not None
    places = {at + n for at, code in form.values for n in range(code.size)}
    at = data.draw(st.sampled_from([n for n in range(len(whole)) if n not in places]))
    changed = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    assert form.read(changed) is None
    assert form.read(whole[:-1]) is None


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"a": pa.array([None], pa.int64())}),
        pa.table({"a": ["x"]}),
        pa.table({"a": [True]}),
        pa.table({"a": [1.5]}),
        pa.table({"a": [1, 2]}),
        pa.table({"a": pa.array([], pa.int64())}),
        pa.concat_tables([pa.table({"a": [1]}), pa.table({"a": [2]})]),
    ],
)
def test_other_streams_have_no_form(table: pa.Table) -> None:
    assert form_of(to_ipc(table)) is None


def test_what_is_no_stream_has_no_form_and_a_value_that_does_not_fit_no_stream() -> None:
    assert form_of(b"") is None
    assert form_of(b"\xff" * 64) is None
    form = form_of(stream([pa.int8()], [1]))
    assert form is not None
    assert form.write((200,)) is None


def test_keys_of_integers_are_sent_and_read_as_by_arrow() -> None:
    for value in (7, -1, 2**63 - 1):
        data, names = encode_keys("t", {"id": value, "k": 3})
        assert names == ("id", "k")
        assert data is not None
        assert from_ipc(data).to_pylist() == [{"id": value, "k": 3}]
        for _ in range(2):  # the second time by the form of the first
            found = one_key(names, (pa.int64(), pa.int64()), data)
            assert found is not None
            assert found.values == (value, 3)
        assert one_key(names, (pa.int32(), pa.int64()), data) is None, "another type is cast first"


# -- short streams ---------------------------------------------------------------------------------

DICTIONARY = pa.array(["a", "b", "a"]).dictionary_encode()
TABLES = [
    pa.table({"a": [1, 2, None], "b": ["x", None, "z"], "c": [[1], [], None]}),
    pa.table({"a": pa.array([], pa.string())}),
    pa.table({"a": [{"x": 1, "y": ["q"]}]}),
    pa.table({"d": DICTIONARY}),
    pa.table({"s": pa.StructArray.from_arrays([DICTIONARY], ["d"])}),
    pa.table({"l": pa.ListArray.from_arrays([0, 3], DICTIONARY)}),
    pa.concat_tables([pa.table({"a": [1]}), pa.table({"a": [2]})]),
    pa.table({"a": [1]}).replace_schema_metadata({"k": "v"}),
]


def by_arrow(data: bytes) -> pa.Table | None:
    try:
        return pa.ipc.open_stream(data).read_all()
    except (pa.ArrowException, EOFError, OSError, ValueError):
        return None


@pytest.mark.parametrize("table", TABLES)
def test_a_short_stream_is_read_as_arrow_reads_it(table: pa.Table) -> None:
    found = from_ipc(to_ipc(table))
    assert found.equals(table, check_metadata=True)
    found.validate(full=True)


@given(st.sampled_from(TABLES), st.data())
def test_a_stream_that_is_cut_or_followed_is_read_as_arrow_reads_it(
    table: pa.Table, data: st.DataObject
) -> None:
    whole = to_ipc(table)
    cut = data.draw(st.integers(0, len(whole)))
    tail = data.draw(st.sampled_from([b"", whole, whole[-8:], bytes(8)]))
    given_ = whole[:cut] + tail
    wanted = by_arrow(given_)
    if wanted is None:
        with pytest.raises(MalformedFrame):
            from_ipc(given_)
    else:
        assert from_ipc(given_).equals(wanted)


def test_what_arrow_does_not_implement_is_a_malformed_frame() -> None:
    table = pa.table({"a": [1, 2, None], "b": ["x", None, "z"], "c": [[1], [], None]})
    whole = to_ipc(table)
    with pytest.raises(MalformedFrame, match="not an Arrow IPC stream"):
        from_ipc(whole[:256] + whole)
