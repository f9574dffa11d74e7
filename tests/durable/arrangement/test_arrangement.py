"""Arrangement: its rules, its files, its costs, and threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.durable.arrangement import Arrangement, ArrangementLimits, partition, run
from actors.durable.arrangement.merge import merge_from
from actors.model.plan.schema import DIFF, ERROR, TIME, TableColumn, TableSchema
from actors.model.plan.updates import consolidate
from actors.runtime.errors import (
    InvalidUsage,
    ReadBelowSince,
    ResourceClosed,
    StorageError,
    StoreFull,
)
from actors.runtime.progress import EMPTY

SCHEMA = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "string")))
TINY = ArrangementLimits(
    memory_run_bytes_max=2_000, memory_bytes_max=4_000, memory_runs_max=2, block_bytes=2_000
)


def updates(*rows: tuple[int | None, str | None, int, int]) -> pa.Table:
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * 4
    return pa.table(
        [pa.array(values, kind) for values, kind in zip(columns, TYPES, strict=True)],
        schema=SCHEMA.arrow_updates(),
    )


TYPES = SCHEMA.arrow_updates().types


def many(count: int, time: int, diff: int = 1, first: int = 0) -> pa.Table:
    return updates(*((first + n, f"value {n}", time, diff) for n in range(count)))


def keys(*values: int | None) -> pa.Table:
    return pa.table({"anything": pa.array(values, pa.int64())})


def rows(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=str)


def files(directory: Path) -> int:
    return len(list(directory.iterdir()))


# -- rules ----------------------------------------------------------------------------------------


def test_times_are_kept_and_before_is_exclusive(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",))
    arrangement.insert(updates((1, "a", 3, 1), (1, "a", 5, -1), (2, "b", 5, 1)), 6)
    assert arrangement.lookup(keys(1), 6)[TIME].to_pylist() == [3, 5]
    assert arrangement.lookup(keys(1), 5)[TIME].to_pylist() == [3]
    assert arrangement.lookup(keys(1), 3).num_rows == 0
    assert arrangement.lookup(keys(9), 6).schema == SCHEMA.arrow_updates()
    assert arrangement.lookup(keys(), 6).num_rows == 0
    assert arrangement.scan(6).num_rows == 3


def test_what_breaks_a_rule_is_refused_with_its_operands(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match=r"key column z does not exist .available: k, v"):
        Arrangement(tmp_path, SCHEMA, ("z",))
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",))
    arrangement.insert(updates((1, "a", 3, 1)), 6)
    with pytest.raises(
        InvalidUsage, match=r"cannot insert up to \[5\]: the arrangement's upper is already \[6\]"
    ):
        arrangement.insert(updates(), 5)
    for time in (5, 9):
        with pytest.raises(InvalidUsage, match=r"are not in \[6, 9\)"):
            arrangement.insert(updates((1, "a", time, 1)), 9)
    with pytest.raises(InvalidUsage, match=r"contents before 7 are not complete.*upper is \[6\]"):
        arrangement.lookup(keys(1), 7)
    with pytest.raises(InvalidUsage, match="got 2 key columns"):
        arrangement.lookup(updates((1, "a", 3, 1)).select(["k", "v"]), 6)
    with pytest.raises(InvalidUsage, match="expected at least 1"):
        partition(updates(), ("k",), 0)
    arrangement.allow_compaction(4)
    arrangement.allow_compaction(2)
    assert arrangement.since == 4
    with pytest.raises(ReadBelowSince, match="since is 4"):
        arrangement.scan(4)
    assert arrangement.scan(5).num_rows == 1


def test_inserted_empties_move_only_the_upper(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",))
    for upper in (3, 3, 9, EMPTY):
        arrangement.insert(updates(), upper)
        assert arrangement.upper == upper
    assert arrangement.statistics().runs == 0
    assert files(tmp_path) == 0


def test_a_filling_comes_in_pieces_and_shows_with_the_first_insert(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    arrangement.allow_compaction(4)
    for piece in range(5):
        arrangement.fill(many(60, piece, first=piece * 60))
    arrangement.fill(updates())
    with pytest.raises(InvalidUsage, match="not complete"):
        arrangement.scan(5)
    arrangement.insert(updates(), 6)
    assert arrangement.scan(6).num_rows == 300
    assert set(arrangement.scan(5)[TIME].to_pylist()) == {4}
    assert arrangement.lookup(keys(77), 6).num_rows == 1
    with pytest.raises(InvalidUsage, match="already has inserts"):
        arrangement.fill(many(1, 2))


def test_a_key_in_several_tables_is_looked_up_once(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",))
    arrangement.insert(many(50, 1), 2)
    as_int = pa.table({"i": pa.array([3, 4, 3], pa.int32())})
    found = arrangement.lookup_all([keys(3, None), as_int, keys(3, 5)], 2)
    assert sorted(found["k"].to_pylist()) == [3, 4, 5]
    assert arrangement.statistics().rows_read == 3
    assert arrangement.lookup_all([], 2).num_rows == 0
    # One table that cannot be narrowed makes all of it a scan.
    doubles = pa.table({"d": pa.array([1.0], pa.float64())})
    assert arrangement.lookup_all([keys(3), doubles], 2).num_rows == 50
    with pytest.raises(InvalidUsage, match="got 2 key columns"):
        arrangement.lookup_all([keys(3), pa.table({"a": [1], "b": [2]})], 2)


def test_merging_is_due_until_it_is_done(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",))
    assert not arrangement.merge_due()
    for time in range(4):
        arrangement.insert(many(10, time), time + 1)
    assert arrangement.merge_due()
    arrangement.maintain()
    assert not arrangement.merge_due()
    arrangement.allow_compaction(3)
    assert arrangement.merge_due(), "times could be advanced"
    arrangement.maintain()
    assert not arrangement.merge_due()


def test_a_lookup_reports_every_error_update(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    arrangement.insert(many(200, 0), 1)
    failed = updates((None, None, 1, 1)).append_column(ERROR, pa.array(["division by zero"]))
    arrangement.insert(failed, 2)
    for _ in range(2):
        found = arrangement.lookup(keys(7), 2)
        assert found[ERROR].to_pylist().count("division by zero") == 1
        assert "value 7" in found["v"].to_pylist()
        assert ERROR not in arrangement.lookup(keys(7), 1).column_names
        arrangement.insert(many(300, 2, first=1000), 3) if arrangement.upper == 2 else None
        arrangement.maintain()
    retraction = pa.concat_tables([failed]).set_column(2, TIME, pa.array([3], pa.int64()))
    retraction = retraction.set_column(3, DIFF, pa.array([-1], pa.int64()))
    arrangement.insert(retraction, 4)
    arrangement.insert(many(600, 4, first=2000), 5)
    arrangement.allow_compaction(4)
    arrangement.maintain()
    assert arrangement.statistics().runs == 1
    assert ERROR not in arrangement.lookup(keys(7), 5).column_names
    assert ERROR not in arrangement.scan(5).column_names


def test_keys_that_compare_by_a_rounding_conversion_make_a_scan(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",))
    arrangement.insert(many(10, 0), 1)
    as_text = pa.table({"k": ["7"]})
    assert arrangement.lookup(as_text, 1).num_rows == 10
    assert Arrangement(tmp_path, SCHEMA, ()).lookup(pa.table({}), 0).num_rows == 0


def test_columns_may_come_in_other_widths_and_orders(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",))
    table = pa.table({DIFF: [1], "v": pa.array(["x"], pa.large_string()), "k": [1], TIME: [0]})
    arrangement.insert(table.set_column(2, "k", pa.array([1], pa.int8())), 1)
    assert arrangement.scan(1).schema == SCHEMA.arrow_updates()
    assert arrangement.lookup(keys(1), 1)["v"].to_pylist() == ["x"]


# -- runs and files -------------------------------------------------------------------------------


def test_the_oldest_run_too_small_for_what_follows_is_merged_with_it() -> None:
    assert merge_from([]) == 0
    assert merge_from([5]) == 1
    assert merge_from([100, 20, 5]) == 3
    assert merge_from([100, 20, 20]) == 1
    assert merge_from([100, 20, 5, 5]) == 2
    assert merge_from([10, 20, 5]) == 0
    assert merge_from([100, 90, 9, 1]) == 0


def test_runs_stay_few_and_memory_bounded_whatever_comes(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    for time in range(300):
        arrangement.insert(many(1 + time % 7, time, first=time), time + 1)
        assert arrangement.statistics().bytes_memory <= TINY.memory_bytes_max
        if time % 20 == 0:
            arrangement.maintain()
            statistics = arrangement.statistics()
            assert statistics.runs <= statistics.rows.bit_length() + 1
            mapped = [part for part in arrangement._state.runs if part.path is not None]
            assert files(tmp_path) == len(mapped)  # merged files are gone
    assert arrangement.scan(300).num_rows == sum(1 + time % 7 for time in range(300))


def test_compaction_to_since_cancels_history(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    for time in range(0, 100, 2):
        arrangement.insert(many(20, time), time + 1)
        arrangement.insert(many(20, time + 1, diff=-1), time + 2)
    arrangement.maintain()
    assert arrangement.statistics().rows == 2000
    arrangement.allow_compaction(99)
    arrangement.maintain()
    assert arrangement.statistics().rows == 0
    assert arrangement.scan(100).num_rows == 0
    assert files(tmp_path) == 0


def test_a_snapshot_at_one_time_is_not_rewritten_when_since_moves(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    arrangement.insert(many(2000, 7), 8)
    before = list(tmp_path.iterdir())
    arrangement.insert(updates(), 100)
    for since in (7, 50, 99):
        arrangement.allow_compaction(since)
        arrangement.maintain()
    assert list(tmp_path.iterdir()) == before


def test_a_fresh_arrangement_is_empty_whatever_the_directory_held(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("not ours")
    first = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    first.insert(many(500, 0), 1)
    assert files(tmp_path) == 2
    second = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    assert second.upper == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert first.scan(1).num_rows == 500  # its mapping is still good


def test_tables_read_survive_merges_and_the_close(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    arrangement.insert(many(500, 0), 1)
    seen = arrangement.scan(1)
    expected = rows(seen)
    arrangement.insert(many(600, 1, first=9000), 2)
    arrangement.maintain()
    arrangement.close()
    assert files(tmp_path) == 0
    assert rows(seen) == expected
    for use in (
        lambda: arrangement.scan(1),
        lambda: arrangement.lookup(keys(1), 1),
        lambda: arrangement.insert(updates(), 9),
    ):
        with pytest.raises(ResourceClosed):
            use()
    arrangement.maintain()  # nothing left to do
    arrangement.close()


def test_a_full_disk_leaves_the_arrangement_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    arrangement.insert(many(500, 0), 1)
    arrangement.insert(many(500, 1, first=9000), 2)
    before, held = arrangement.statistics(), files(tmp_path)

    def full(code: int) -> Any:
        def new_file(*_: Any) -> Any:
            raise OSError(code, "injected")

        return new_file

    with monkeypatch.context() as patch:
        patch.setattr(pa.ipc, "new_file", full(errno.ENOSPC))
        with pytest.raises(StoreFull, match="no space left to write the arrangement run"):
            arrangement.insert(many(500, 2), 3)
        with pytest.raises(StoreFull):
            arrangement.maintain()
        patch.setattr(pa.ipc, "new_file", full(errno.EIO))
        with pytest.raises(StorageError, match="injected"):
            arrangement.maintain()
    assert (arrangement.statistics(), files(tmp_path), arrangement.upper) == (before, held, 2)
    arrangement.maintain()
    assert arrangement.statistics().runs == 1
    assert arrangement.scan(2).num_rows == 1000


# -- cost -----------------------------------------------------------------------------------------


def test_a_lookup_reads_what_its_keys_match_and_no_more(tmp_path: Path) -> None:
    wanted = keys(*range(0, 1000, 10))
    read = []
    for count in (2_000, 20_000, 200_000):
        arrangement = Arrangement(tmp_path / str(count), SCHEMA, ("k",))
        numbers = pa.array(range(count), pa.int64())
        table = pa.table(
            [numbers, numbers.cast(pa.string()), pa.repeat(0, count), pa.repeat(1, count)],
            schema=SCHEMA.arrow_updates(),
        )
        arrangement.insert(table, 1)
        assert arrangement.lookup(wanted, 1).num_rows == 100
        read.append(arrangement.statistics().rows_read)
    assert read == [100, 100, 100]


def test_a_merge_writes_bounded_blocks(tmp_path: Path) -> None:
    limits = ArrangementLimits(memory_run_bytes_max=1_000, block_bytes=20_000)
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), limits)
    arrangement.insert(many(3000, 0), 1)
    arrangement.insert(many(3000, 1, first=1500), 2)
    arrangement.maintain()
    (merged,) = arrangement._state.runs
    assert 8 <= len(merged.blocks) <= 40
    assert max(block.rows.nbytes for block in merged.blocks) < 60_000
    assert arrangement.lookup(keys(*range(1500, 3000)), 2).num_rows == 3000


# -- threads --------------------------------------------------------------------------------------


@contextmanager
def during_a_merge(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrangement]:
    """An arrangement of two runs that a thread merges, and goes on with when this ends."""
    arrangement = Arrangement(place, SCHEMA, ("k",), TINY)
    arrangement.insert(many(500, 0), 1)
    arrangement.insert(many(500, 1, first=1000), 2)
    inside, go_on = threading.Event(), threading.Event()
    real = run.as_batch

    def gated(table: pa.Table) -> pa.RecordBatch:
        inside.set()
        assert go_on.wait(200)
        return real(table)

    monkeypatch.setattr("actors.durable.arrangement.merge.as_batch", gated)
    merging = threading.Thread(target=arrangement.maintain)
    merging.start()
    assert inside.wait(200)
    yield arrangement
    go_on.set()
    merging.join()


def test_an_insert_during_a_merge_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with during_a_merge(tmp_path, monkeypatch) as arrangement:
        for time in range(2, 8):
            arrangement.insert(many(3, time, first=time * 10_000), time + 1)
            assert arrangement.scan(time + 1).num_rows == 1000 + 3 * (time - 1)
    assert arrangement.scan(8).num_rows == 1018
    assert arrangement.lookup(keys(70_001), 8)["v"].to_pylist() == ["value 1"]


def test_a_close_during_a_merge_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with during_a_merge(tmp_path, monkeypatch) as arrangement:
        arrangement.close()
    assert files(tmp_path) == 0


def test_readers_beside_a_writer_and_maintenance_see_one_moment(tmp_path: Path) -> None:
    arrangement = Arrangement(tmp_path, SCHEMA, ("k",), TINY)
    done = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not done.is_set():
            upper = arrangement.upper
            if upper <= arrangement.since:
                continue
            try:
                found = consolidate(arrangement.lookup(keys(5), upper).drop_columns([TIME]))
            except ReadBelowSince:
                continue
            # At every upper exactly one version of key 5 is there, the newest.
            if found["v"].to_pylist() != [f"version {upper - 1}"]:
                wrong.append(f"at {upper}: {found.to_pylist()}")

    def tend() -> None:
        while not done.is_set():
            arrangement.maintain()

    arrangement.insert(updates((5, "version 0", 0, 1)), 1)
    threads = [threading.Thread(target=target) for target in (read, read, tend)]
    for thread in threads:
        thread.start()
    for time in range(1, 150):
        arrangement.insert(
            updates(
                (5, f"version {time - 1}", time, -1),
                (5, f"version {time}", time, 1),
                *((1000 + time * 10 + n, "filler", time, 1) for n in range(10)),
            ),
            time + 1,
        )
        arrangement.allow_compaction(max(0, time - 5))
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_partitions_fill_arrangements_that_find_their_keys(tmp_path: Path) -> None:
    parts = partition(many(1000, 0), ("k",), 3)
    found = 0
    for index, part in enumerate(parts):
        assert 200 < part.num_rows < 500
        arrangement = Arrangement(tmp_path / str(index), SCHEMA, ("k",))
        arrangement.insert(part, 1)
        found += arrangement.lookup(keys(*range(0, 1000, 100)), 1).num_rows
    assert found == 10
    assert partition(updates(), ("k",), 2)[1].num_rows == 0
