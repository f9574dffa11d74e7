"""Arrow streams of others: what they decode to is bounded before it is decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from actors.model.plan.ipc_bounds import DECODED_BYTES_MAX
from actors.model.plan.updates import from_ipc
from actors.runtime.errors import MalformedFrame

MORE = DECODED_BYTES_MAX + (1 << 20)
TEXT = "x" * 1024 * 1024


def stream(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def repeated(rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([TEXT]))


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"a": [1, 2, None], "b": ["x", None, "z"]}),
        pa.table({"a": pa.array(["x", "y", "x"]).dictionary_encode()}),
        pa.table({"a": pa.array(["x", "y" * 40, None], pa.string_view())}),
        pa.table({"a": pa.RunEndEncodedArray.from_arrays([2, 5], ["x", "y"])}),
        pa.table({"a": pa.array([[1], [2, 3]], pa.list_view(pa.int64()))}),
        pa.table({"a": pa.nulls(1000)}),
        pa.table({"a": pa.array([{"b": ["x"]}, None])}),
        pa.table({}),
    ],
)
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("times", [1, 2000])
def test_what_is_small_comes_as_it_is(table: pa.Table, compression: Any, times: int) -> None:
    whole = pa.concat_tables([table] * times).combine_chunks()
    found = from_ipc(stream(whole, compression))
    assert found.equals(whole)
    found.validate(full=True)


def views(count: int) -> pa.Array:
    """Views of one text, many times."""
    one = pa.array([TEXT], pa.string_view())
    view = np.frombuffer(one.buffers()[1], np.uint8)
    many = pa.py_buffer(np.tile(view, count).tobytes())
    buffers = [None, many, one.buffers()[2]]
    try:
        return pa.Array.from_buffers(pa.string_view(), count, buffers)
    except ValueError:
        # Older versions of PyArrow make no views of buffers.
        return pa.array([TEXT] * count, pa.string_view())


BOMBS: dict[str, tuple[pa.Table, str | None]] = {
    "zstd": (pa.table({"a": pa.array(np.zeros(MORE // 8, np.int64))}), "zstd"),
    "lz4": (pa.table({"a": pa.array(np.zeros(MORE // 8, np.int64))}), "lz4"),
    "dictionary": (pa.table({"a": repeated(300)}), None),
    "dictionary within a struct": (
        pa.table({"a": pa.StructArray.from_arrays([repeated(300)], names=["b"])}),
        None,
    ),
    "dictionary within a list": (
        pa.table({"a": pa.ListArray.from_arrays([0, 300], repeated(300))}),
        None,
    ),
    "runs": (pa.table({"a": pa.RunEndEncodedArray.from_arrays([1 << 30], [1])}), None),
    "runs of texts": (pa.table({"a": pa.RunEndEncodedArray.from_arrays([300], [TEXT])}), None),
    "views": (pa.table({"a": views(300)}), None),
    "lists that share their values": (
        pa.table(
            {
                "a": pa.ListViewArray.from_arrays(
                    pa.array(np.zeros(300, np.int32)),
                    pa.array(np.full(300, 1 << 16, np.int32)),
                    pa.array(np.zeros(1 << 16, np.int64)),
                )
            }
        ),
        None,
    ),
    "rows without bytes": (pa.table({"a": pa.nulls(1 << 30)}), None),
    "batches without bytes": (
        pa.Table.from_batches([pa.record_batch({"a": pa.nulls(1 << 15)})] * 2000),
        None,
    ),
    "structs without fields": (
        pa.table({"a": pa.Array.from_buffers(pa.struct([]), 1 << 30, [None])}),
        None,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_nothing_of_it_is_made(name: str) -> None:
    table, compression = BOMBS[name]
    data = stream(table, compression)
    before = pa.total_allocated_bytes()
    with pytest.raises(MalformedFrame, match=r"limit|cannot contain"):
        from_ipc(data)
    assert pa.total_allocated_bytes() <= before + len(data)


def test_an_announcement_of_less_than_nothing_is_refused() -> None:
    data = bytearray(stream(pa.table({"a": pa.array(np.zeros(50_000, np.int64))}), "zstd"))
    place = data.index((400_000).to_bytes(8, "little"))
    data[place : place + 8] = (-5).to_bytes(8, "little", signed=True)
    with pytest.raises(MalformedFrame):
        from_ipc(bytes(data))


@pytest.mark.parametrize("length", range(0, 600, 7))
def test_a_stream_that_is_cut_off_is_refused(length: int) -> None:
    data = stream(pa.table({"a": pa.array(["x"] * 50)}), "zstd")
    with pytest.raises(MalformedFrame):
        from_ipc(data[: min(length, len(data) - 20)])
