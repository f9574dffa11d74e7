"""Few rows are encoded value by value, to the very bytes that columns at once give."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from actors.model.pgwire.row_encoding import FEW_ROWS_MAX, RowEncoder, encode_few

VALUES: dict[pa.DataType, st.SearchStrategy[object]] = {
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.int8(): st.integers(-128, 127),
    pa.float64(): st.floats() | st.integers(-1000, 1000).map(lambda each: each / 8),
    pa.float32(): st.floats(width=32),
    pa.string(): st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): st.datetimes(),
}


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES, key=str)), min_size=1, max_size=4))
    count = draw(st.integers(0, FEW_ROWS_MAX + 1))
    columns = [
        pa.array(draw(st.lists(st.none() | VALUES[kind], min_size=count, max_size=count)), kind)
        for kind in kinds
    ]
    return pa.RecordBatch.from_arrays(columns, names=[f"c{n}" for n in range(len(kinds))])


@given(batches(), st.data())
def test_they_are_the_same_bytes(batch: pa.RecordBatch, data: st.DataObject) -> None:
    formats = tuple(data.draw(st.sampled_from((0, 1))) for _ in range(batch.num_columns))
    alone = RowEncoder(formats).encode(batch)
    # Beside so many others they are encoded by columns.
    others = [batch] * (FEW_ROWS_MAX // max(batch.num_rows, 1) + 1)
    together = pa.Table.from_batches(others).combine_chunks()
    many = RowEncoder(formats).encode(together.to_batches()[0]) if batch.num_rows else alone
    assert len(alone) == batch.num_rows
    for row in range(batch.num_rows):
        assert bytes(alone.rows(row, row + 1)) == bytes(many.rows(row, row + 1))


def test_plain_rows_are_encoded_here() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, None], "b": ["x", ""], "c": [0.5, -8.0]})
    assert encode_few(batch, (0, 0, 0)) is not None
    assert encode_few(batch, (1, 1, 1)) is not None
    large = pa.RecordBatch.from_pydict({"a": list(range(FEW_ROWS_MAX + 1))})
    assert encode_few(large, (0,)) is None
