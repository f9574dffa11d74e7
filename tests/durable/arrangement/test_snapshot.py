"""Reading at one moment: every row once, with its sum, whatever the runs are like."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.durable.arrangement import Arrangement, ArrangementLimits
from actors.durable.arrangement.hashing import hash_columns, hash_values
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from suite_lanes import examples  # type: ignore[import-not-found]

SCHEMA = TableSchema(
    (TableColumn("k", "bigint"), TableColumn("s", "string"), TableColumn("v", "double"))
)
TINY = ArrangementLimits(
    memory_run_bytes_max=600, memory_bytes_max=1200, memory_runs_max=3, block_bytes=400
)
KEYS: list[tuple[str, ...]] = [("k",), ("s", "k"), ()]


def table(updates: list[tuple[Any, ...]]) -> pa.Table:
    """(k, s, v, time, diff, error) each."""
    schema = SCHEMA.arrow_updates().append(pa.field(ERROR, pa.string()))
    columns = list(zip(*updates, strict=True)) or [()] * 6
    arrays = [pa.array(values, kind) for values, kind in zip(columns, schema.types, strict=True)]
    found = pa.table(arrays, schema=schema)
    return found if found[ERROR].null_count < found.num_rows else found.drop_columns([ERROR])


def expected(updates: list[tuple[Any, ...]], before: int) -> tuple[Any, Any]:
    rows: Counter[Any] = Counter()
    errors: Counter[str] = Counter()
    for k, s, v, time, diff, error in updates:
        if time < before:
            if error is None:
                rows[repr((k, s, v))] += diff
            else:
                errors[error] += diff
    return (
        {row: diff for row, diff in rows.items() if diff},
        {text: diff for text, diff in errors.items() if diff},
    )


def read(batches: Any) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for batch in batches:
        assert batch.schema.names == [*SCHEMA.names, DIFF]
        for row in batch.to_pylist():
            diff = row.pop(DIFF)
            key = repr(tuple(row.values()))
            assert key not in found, "a row came twice"
            assert diff != 0
            found[key] = diff
    return found


VALUES = st.tuples(
    st.sampled_from([None, 0, 1, 2, -3, 2**62]),
    st.sampled_from([None, "", "a", "a ", "größer"]),
    st.sampled_from([None, 0.0, -0.0, 1.5]),
)
UPDATES = st.lists(
    st.tuples(VALUES, st.integers(-1, 2).filter(bool), st.sampled_from([None] * 9 + ["boom"])),
    max_size=12,
)


@given(
    st.lists(st.tuples(UPDATES, st.integers(1, 2), st.booleans()), max_size=8),
    st.sampled_from(KEYS),
    st.integers(0, 20),
)
@settings(max_examples=examples(150), deadline=None)
def test_rows_of_any_runs_equal_a_list(
    inserts: list[tuple[Any, int, bool]], key: tuple[str, ...], since: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        made = Arrangement(Path(place), SCHEMA, key, TINY)
        updates: list[tuple[Any, ...]] = []
        for drawn, steps, compacts in inserts:
            lower = int(made.upper)
            new = [
                (*(values if error is None else (None, None, None)), lower, diff, error)
                for values, diff, error in drawn
            ]
            # Summed up, as a dataflow installs them.
            sums: Counter[tuple[Any, ...]] = Counter()
            for *row, diff, error in new:
                sums[(*map(repr, row), error)] += diff
            known = steps == 2
            if known:
                first = {(*map(repr, row), error): (*row, error) for *row, _, error in new}
                new = [
                    (*first[name][:-1], diff, first[name][-1])
                    for name, diff in sums.items()
                    if diff
                ]
            made.insert(table(new), lower + steps, consolidated=known)
            updates += new
            if compacts:
                made.allow_compaction(min(since, int(made.upper)))
                made.maintain()
        for before in {int(made.upper), max(0, int(made.upper) - 2)}:
            if made.since and before <= made.since:
                continue
            view = made.view(before)
            rows, errors = expected(updates, before)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("actors.durable.arrangement.snapshot.SLICE_ROWS", 5)
                assert read(view.rows()) == rows
            held = view.errors()
            assert dict(zip(*held.to_pydict().values(), strict=True)) == errors
            if key:
                some = [None, 1, 2]
                columns = [pa.chunked_array([pa.array(some, pa.int64())])]
                columns = [pa.chunked_array([pa.array([None, "a", "b"])]), *columns][-len(key) :]
                hashes = np.unique(hash_columns(columns, 3))
                found = read(view.rows(hashes))
                assert found.items() <= rows.items()
                wanted = list(zip(*(c.to_pylist() for c in columns), strict=True))
                for k, s, v in {u[:3] for u in updates if u[5] is None}:
                    named = tuple({"k": k, "s": s}[name] for name in key)
                    if named in wanted and repr((k, s, v)) in rows:
                        assert repr((k, s, v)) in found
        made.close()


def test_a_run_that_is_the_answer_is_not_copied(tmp_path: Path) -> None:
    made = Arrangement(tmp_path, SCHEMA, ("k",))
    rows = [(number, "x", 0.5, 3, 1, None) for number in range(1000)]
    made.insert(table(rows), 4)
    (block,) = made.view(4).runs[0].blocks
    (batch,) = made.view(4).rows()
    address = batch.column("v").buffers()[1].address
    assert address == block.rows.column("v").buffers()[1].address
    # Few changes beside it: only the slices that they touch are.
    made.insert(table([(5, "x", 0.5, 5, -1, None)]), 6)
    assert sum(batch.num_rows for batch in made.view(6).rows()) == 999
    assert sum(batch.num_rows for batch in made.view(4).rows()) == 1000


def test_duplicates_that_nobody_summed_are_summed(tmp_path: Path) -> None:
    made = Arrangement(tmp_path, SCHEMA, ("k",))
    made.insert(table([(1, "x", 0.5, 3, 1, None), (1, "x", 0.5, 3, 1, None)]), 4)
    assert not made.view(4).runs[0].consolidated
    assert read(made.view(4).rows()) == {"(1, 'x', 0.5)": 2}


def test_a_view_outlives_its_arrangement(tmp_path: Path) -> None:
    made = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    made.insert(table([(n, "x", None, 3, 1, None) for n in range(200)]), 4)
    view = made.view(4)
    assert view.runs[0].path is not None
    made.close(remove=True)
    assert len(read(view.rows())) == 200


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.text(max_size=300),
        ),
        max_size=4,
    )
)
@settings(max_examples=examples(300))
def test_one_row_hashes_as_columns_do(row: list[Any]) -> None:
    columns = [pa.chunked_array([pa.array([value])]) for value in row]
    alone = hash_values(row)
    if alone is None:
        assert any(isinstance(value, str) and len(value.encode()) > 256 for value in row)
    else:
        assert alone == int(hash_columns(columns, 1)[0])


def test_a_long_text_is_not_hashed_alone() -> None:
    assert hash_values(["x" * 256]) == int(hash_columns([pa.chunked_array([["x" * 256]])], 1)[0])
    assert hash_values(["x" * 257]) is None


def test_times_after_the_moment_do_not_count(tmp_path: Path) -> None:
    made = Arrangement(tmp_path, SCHEMA, ("k",))
    made.insert(table([(1, "x", 0.5, t, 1, None) for t in range(5)]), 5)
    assert TIME not in next(made.view(3).rows()).schema.names
    assert read(made.view(3).rows()) == {"(1, 'x', 0.5)": 3}


def test_rows_that_meet_are_summed_together_over_the_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.durable.arrangement.snapshot.SLICE_ROWS", 100)
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",))
    rows = [(k, "s", 1.0, 1, 1, None) for k in range(2000)]
    gone = [(k, "s", 1.0, 2, -1, None) for k in range(0, 2000, 50)]
    changed = [(k, "t", 1.0, 2, 1, None) for k in range(0, 2000, 100)]
    arrangement.insert(table(rows), 2, consolidated=True)
    arrangement.insert(table(gone + changed), 3, consolidated=True)
    batches = list(arrangement.view(3).rows())
    assert read(batches) == expected(rows + gone + changed, 3)[0]
    # About 20 slices, each with a changed row or two: all of those come in a batch of their own.
    assert sum("t" in batch.column("s").to_pylist() for batch in batches) == 1
    assert len(batches) > 15
    everything = [(k, "s", 1.0, 3, -1, None) for k in range(2000) if k % 50]
    arrangement.insert(table(everything), 4, consolidated=True)
    left = list(arrangement.view(4).rows())
    assert read(left) == {repr((k, "t", 1.0)): 1 for k in range(0, 2000, 100)}
    assert max(batch.num_rows for batch in left) <= 200, "what is gathered is bounded"
