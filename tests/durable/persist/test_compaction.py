"""Which batches are merged, and merging with more data than memory."""

from __future__ import annotations

import errno
import math
import threading
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from actors.durable.persist import compaction
from actors.durable.persist.compaction import (
    BATCH_BYTES_MIN,
    UpdateMerger,
    choose_batches,
    choose_ranges,
    concat_to_size,
    consolidate_by_hash,
    row_hashes,
    sort_by_key,
    worth_reclaiming,
)
from actors.durable.persist.shard import BatchPart, NewShard, ShardBatch, ShardState, created
from actors.durable.persist.statistics import ColumnStatistics
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.model.plan.updates import consolidate
from actors.runtime.errors import StorageError, StoreFull

SCHEMA = TableSchema((TableColumn("a", "bigint"), TableColumn("b", "string")))


def shard_of(sizes: list[int], inline: bool = False) -> ShardState:
    state = created(NewShard("s", SCHEMA), "w", 1)
    data = b"" if inline else None
    batches = tuple(
        ShardBatch(
            i, i + 1, (BatchPart("" if inline else f"s/{i}", 1, size, 0, data, False, i, i, 1),)
        )
        for i, size in enumerate(sizes)
    )
    return replace(state, batches=batches, upper=len(sizes))


def sizes_after(sizes: list[int], most: int) -> tuple[list[int], int]:
    """Batch sizes after one compaction, and how much it rewrote."""
    chosen = choose_batches(shard_of(sizes), most, 1 << 40)
    if chosen is None:
        return sizes, 0
    count = len(chosen[0])
    rewritten = sum(sizes[-count:])
    return [*sizes[:-count], rewritten], rewritten


def test_batches_stay_few_and_each_update_is_rewritten_a_logarithmic_number_of_times() -> None:
    sizes: list[int] = []
    written = 0
    unit = BATCH_BYTES_MIN
    for _ in range(20_000):
        sizes.append(unit)
        sizes, rewritten = sizes_after(sizes, 24)
        written += rewritten
        assert len(sizes) <= 24
    assert written / (20_000 * unit) < 2 * math.log2(20_000 / 12)


def test_nothing_to_do() -> None:
    assert choose_batches(shard_of([100] * 24), 24, 1 << 20) is None
    assert choose_batches(shard_of([]), 1, 1) is None


def test_a_document_over_its_budget_goes_to_a_blob() -> None:
    chosen = choose_batches(shard_of([1000] * 5, inline=True), 24, 4000)
    assert chosen is not None
    assert len(chosen[0]) == 5
    assert chosen[1]


def aged(parts: list[tuple[int, int, int, bool]], since: int, *, key: str = "s/") -> ShardState:
    """A shard of one batch for each (bytes, first time, last time, whether it retracts)."""
    made = [
        BatchPart(f"{key}{i}" if key else "", 1, size, 0, None, False, low, high, 1, retracts)
        for i, (size, low, high, retracts) in enumerate(parts)
    ]
    batches = tuple(ShardBatch(i, i + 1, (part,)) for i, part in enumerate(made))
    return replace(shard_of([]), batches=batches, upper=max(len(made), since + 1), since=since)


@pytest.mark.parametrize(
    ("parts", "since", "wanted"),
    [
        ([(90, 0, 10, False), (10, 11, 20, True)], 21, True),
        ([(90, 0, 10, False), (10, 11, 20, True)], 20, False),  # somebody may read it at 19
        ([(91, 0, 10, False), (9, 11, 20, True)], 21, False),
        ([(90, 0, 10, False), (10, 11, 20, False)], 21, False),
        ([(10, 0, 20, True)], 21, True),
        ([(10, 20, 20, True)], 21, False),  # merged before: retractions without rows stay
        ([], 5, False),
    ],
)
def test_all_is_merged_where_much_was_retracted_long_ago(
    parts: list[tuple[int, int, int, bool]], since: int, wanted: bool
) -> None:
    state = aged(parts, since)
    if parts:
        last = replace(state.batches[-1], upper=state.upper)
        state = replace(state, batches=(*state.batches[:-1], last))
    assert worth_reclaiming(state) is wanted
    inline = aged(parts, since, key="")
    assert not worth_reclaiming(inline), "no blob is freed"


def table(rows: list[tuple[int | None, str | None, int, int]]) -> pa.Table:
    kinds = [pa.int64(), pa.string(), pa.int64(), pa.int64()]
    columns = list(zip(*rows, strict=True)) or [()] * 4
    arrays = [pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)]
    return pa.table(arrays, names=["a", "b", TIME, DIFF])


@pytest.mark.parametrize("spills", [False, True])
def test_merging_sums_equal_rows_with_and_without_files(spills: bool, tmp_path: Path) -> None:
    scratch = tmp_path / "spill"
    merger = UpdateMerger(
        SCHEMA,
        to=50,
        rows=20_000,
        errors=False,
        bytes_max=50_000 if spills else 1 << 30,
        scratch=scratch,
    )
    expected: Counter[tuple[int, str, int]] = Counter()
    for number in range(10):
        rows = [
            (n, str(n % 7), (n * 31 + number) % 100, 1 if (n + number) % 3 else -2)
            for n in range(number * 100, number * 100 + 2000)
        ]
        for a, b, time, diff in rows:
            expected[(a, b, max(50, time))] += diff
        merger.add(table(rows))  # type: ignore[arg-type]
    assert scratch.exists() is spills
    found: Counter[tuple[int, str, int]] = Counter()
    biggest = 0
    for merged in iter(merger.take, None):
        biggest = max(biggest, merged.nbytes)
        for a, b, time, diff in zip(*[c.to_pylist() for c in merged.columns], strict=True):
            assert (a, b, time) not in found, "equal rows meet"
            assert diff != 0
            found[(a, b, time)] = diff
    assert found == {key: diff for key, diff in expected.items() if diff}
    if spills:
        assert biggest < 50_000
    merger.close()
    assert not scratch.exists()


def test_what_outlives_its_caller_finds_the_merger_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "spill"
    merger = UpdateMerger(SCHEMA, to=1, rows=90, errors=False, bytes_max=100, scratch=scratch)
    rows = table([(n, str(n), 0, 1) for n in range(30)])
    merger.add(rows)
    inside, goes_on = threading.Event(), threading.Event()

    def slow(given: pa.Table) -> object:
        inside.set()
        assert goes_on.wait(100)
        return row_hashes(given)

    monkeypatch.setattr(compaction, "row_hashes", slow)
    failed: list[BaseException] = []

    def add() -> None:
        try:
            merger.add(rows)
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    adding, closing = threading.Thread(target=add), threading.Thread(target=merger.close)
    adding.start()
    assert inside.wait(100)
    closing.start()
    assert scratch.exists(), "what is being written stays until it is"
    goes_on.set()
    adding.join()
    closing.join()
    merger.add(rows)
    assert merger.take() is None
    assert failed == []
    assert not scratch.exists()


def test_a_disk_that_fails_a_merge_is_told_of_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not raised here is missing in what is merged."""
    rows = table([(n, str(n), 0, 1) for n in range(30)])
    right, scratch = compaction._write, tmp_path / "spill"

    def started() -> UpdateMerger:
        return UpdateMerger(SCHEMA, to=1, rows=90, errors=False, bytes_max=100, scratch=scratch)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    scratch.write_text("in the way")
    with pytest.raises(StorageError, match="could not spill to"):
        started().add(rows)
    scratch.unlink()
    monkeypatch.setattr(compaction, "_write", full)
    merger = started()
    with pytest.raises(StoreFull, match="spill to"):
        merger.add(rows)
    merger.close()
    monkeypatch.setattr(compaction, "_write", right)
    merger = started()
    merger.add(rows)
    monkeypatch.setattr(compaction, "_write", full)
    with pytest.raises(StoreFull, match="spill to"):
        merger.add(rows)
    merger.close()
    monkeypatch.setattr(compaction, "_write", right)
    merger = started()
    merger.add(rows)
    min(scratch.iterdir()).unlink()
    with pytest.raises(StorageError, match="could not read back"):
        merger.take()
    merger.close()
    assert not scratch.exists()


def test_errors_meet_parts_without_errors() -> None:
    merger = UpdateMerger(SCHEMA, to=5, rows=3, errors=True, bytes_max=1 << 20, scratch=None)
    merger.add(table([(1, "x", 2, 1)]))
    bad = table([(None, None, 3, 1)]).append_column(ERROR, pa.array(["bad"], pa.string()))
    merger.add(bad)
    (merged,) = iter(merger.take, None)
    assert sorted(merged[ERROR].to_pylist(), key=str) == [None, "bad"]
    merger.add(bad.set_column(3, DIFF, pa.array([-1], pa.int64())))
    (merged,) = iter(merger.take, None)
    assert merged[ERROR].to_pylist() == [None]


def test_equal_rows_have_equal_hashes_whatever_their_chunks() -> None:
    columns = {
        "i": pa.array([1, None, 3, 1, None], pa.int32()),
        "f": pa.array([0.0, -0.0, math.nan, 0.0, -0.0], pa.float64()),
        "g": pa.array([0.5, None, 1.0, 0.5, None], pa.float32()),
        "s": pa.array(["x", None, "z", "x", None], pa.string()),
        "d": pa.array([Decimal("1.5"), None, Decimal("2.0"), Decimal("1.5"), None]),
        "y": pa.array([b"x", None, b"z", b"x", None], pa.binary()),
        "t": pa.array([True, None, False, True, None], pa.bool_()),
        "z": pa.array([1, None, 3, 1, None], pa.timestamp("us", tz="UTC")),
        "e": pa.array([1, None, 3, 1, None], pa.date32()),
        "l": pa.array([["x"], None, ["z"], ["x"], None], pa.list_(pa.string())),
        "n": pa.nulls(5),
    }
    whole = pa.table(columns)
    for rows in (whole, *(whole.select([name]) for name in columns)):
        hashes = row_hashes(rows)
        assert hashes[0] == hashes[3]
        assert hashes[1] == hashes[4]
        pieces = pa.concat_tables([rows.slice(2, 2), rows.slice(0, 1)])
        assert np.array_equal(row_hashes(pieces), hashes[[2, 3, 0]])
    assert len(set(row_hashes(whole).tolist())) == 3
    assert len(row_hashes(whole.slice(0, 0))) == 0


def test_hashes_spread() -> None:
    rows = pa.table({"a": pa.array(range(10_000), pa.int64())})
    counts = np.bincount((row_hashes(rows) % np.uint64(16)).astype(np.int64), minlength=16)
    assert counts.min() > 400
    assert counts.max() < 900


def test_summing_is_consolidating() -> None:
    random = np.random.default_rng(5)
    for rows in (0, 1, 2, 50, 40_000):
        spread = max(1, rows // 2)
        many = pa.table(
            {
                "a": pa.array(random.integers(0, spread, rows)),
                "b": pa.array([None if n % 11 == 0 else str(n % 3) for n in range(rows)]),
                TIME: pa.array(random.integers(0, 2, rows)),
                DIFF: pa.array(random.integers(-1, 2, rows)),
            }
        )
        given, wanted = sorted_rows(consolidate_by_hash(many)), sorted_rows(consolidate(many))
        assert given == wanted
        assert consolidate_by_hash(many).schema == many.schema


def sorted_rows(updates: pa.Table) -> list[tuple[object, ...]]:
    return sorted(zip(*[c.to_pylist() for c in updates.columns], strict=True), key=repr)


def test_rows_that_equal_no_other_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 50_000
    text = [f"{n:08d}{'x' * 200}" for n in range(count)]
    rows = pa.table(
        {
            "a": pa.array(range(count)),
            "b": pa.array(text),
            TIME: pa.array([3] * count),
            DIFF: pa.array([1] * count),
        }
    )
    assert consolidate_by_hash(rows) is rows
    twice = pa.concat_tables([rows, rows.slice(10, 5)])
    grouped: list[int] = []

    def counted(updates: pa.Table) -> pa.Table:
        grouped.append(updates.num_rows)
        return consolidate(updates)

    monkeypatch.setattr(compaction, "consolidate", counted)
    found = consolidate_by_hash(twice)
    assert grouped == [10]
    assert found.num_rows == count
    assert Counter(found[DIFF].to_pylist()) == {1: count - 5, 2: 5}


KEYED = TableSchema(SCHEMA.columns, ("a",))


def keyed(first: int, count: int, step: int = 1) -> tuple[BatchPart, pa.Table]:
    """Rows with keys from `first` on, and their description."""
    keys = [first + step * number for number in range(count)]
    rows: list[tuple[int | None, str | None, int, int]] = [(key, "x" * 20, 1, 1) for key in keys]
    known = (ColumnStatistics("a", 0, keys[0], keys[-1]),)
    return BatchPart("s/x", count, 1, 0, None, False, 1, 1, 1, statistics=known), table(rows)


def merge(given: list[tuple[BatchPart, pa.Table]], scratch: Path, bytes_max: int) -> list[pa.Table]:
    merger = UpdateMerger(
        KEYED,
        to=5,
        rows=sum(part.rows for part, _ in given),
        errors=False,
        bytes_max=bytes_max,
        scratch=scratch,
        parts=[part for part, _ in given],
    )
    for _, rows in given:
        merger.add(rows)
    found = list(iter(merger.take, None))
    merger.close()
    assert not scratch.exists()
    return found


@pytest.mark.parametrize("spread", [False, True])
def test_a_large_merge_of_keyed_rows_gives_ranges_that_lie_apart(
    spread: bool, tmp_path: Path
) -> None:
    # Each part a stretch of the keys, or every part some of all.
    given = [keyed(n, 1000, 8) if spread else keyed(n * 1000, 1000) for n in range(8)]
    found = merge(given, tmp_path / "spill", 60_000)
    assert len(found) >= 4
    assert sum(merged.num_rows for merged in found) == 8000
    bounds = []
    for merged in found:
        keys = merged["a"].to_pylist()
        assert keys == sorted(keys)
        assert merged.nbytes <= 3 * 60_000
        bounds.append((keys[0], keys[-1]))
    assert all(high < low for (_, high), (low, _) in pairwise(bounds))


def test_what_comes_out_of_files_fills_parts() -> None:
    tables = [table([(n, "x" * 20, 1, 1)] * rows) for n, rows in enumerate((10, 10, 5, 40, 3, 3))]
    a_row = tables[0].nbytes // 10
    found = list(concat_to_size(iter(tables), 25 * a_row))
    assert [each.num_rows for each in found] == [25, 40, 6]
    assert pa.concat_tables(found).equals(pa.concat_tables(tables)), "in their order"
    assert [each.num_rows for each in concat_to_size(iter(tables), 0)] == [10, 10, 5, 40, 3, 3]


def test_a_range_that_is_far_too_large_is_cut_again(tmp_path: Path) -> None:
    # Bounds that say nothing about where the values lie: nearly all are small.
    part, _ = keyed(0, 2)
    part = replace(part, rows=1000, statistics=(ColumnStatistics("a", 0, 0, 1 << 40),))
    given = []
    for place in range(9):
        rows: list[tuple[int | None, str | None, int, int]] = [
            (None, "y", 1, 1),
            (1 << 40, "z", 1, 1),
        ]
        rows += [(n % 500, f"{place} {n}", 1, 1) for n in range(900)]
        given.append((part, table(rows)))
    found = merge(given, tmp_path / "spill", 20_000)
    assert max(merged.nbytes for merged in found) <= 3 * 20_000
    total = pa.concat_tables(found)
    assert total.num_rows == 9 * 900 + 2, "equal rows meet"
    assert sum(total[DIFF].to_pylist()) == 9 * 902


def test_rows_are_sorted_by_time_and_then_by_the_key() -> None:
    rows: list[tuple[int | None, str | None, int, int]] = [
        (3, "c", 7, 1),
        (None, "n", 9, 1),
        (1, "b", 9, 1),
        (2, "a", 7, 1),
    ]
    order = [(2, 7), (3, 7), (1, 9), (None, 9)]
    found = sort_by_key(table(rows), KEYED)
    assert list(zip(found["a"].to_pylist(), found[TIME].to_pylist(), strict=True)) == order
    assert sort_by_key(table(rows), SCHEMA).equals(table(rows))


def test_where_nothing_tells_there_are_no_ranges() -> None:
    part, _ = keyed(0, 10)
    assert choose_ranges(SCHEMA, [part], 4) is None
    assert choose_ranges(KEYED, [replace(part, statistics=())], 4) is None
    assert choose_ranges(KEYED, [part], 1) is None
    assert choose_ranges(TableSchema(SCHEMA.columns, ("b",)), [part], 4) is None
    one = replace(part, statistics=(ColumnStatistics("a", 0, 5, 5),))
    assert choose_ranges(KEYED, [one], 4) is None
    far = replace(part, statistics=(ColumnStatistics("a", 0, -(1 << 63), (1 << 63) - 1),))
    found = choose_ranges(KEYED, [far], 4)
    assert found is not None
    assert found.count == 4
