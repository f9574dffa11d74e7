"""Delta Lake tables: exactly once, whoever else commits, and whatever rows come and go."""

from __future__ import annotations

import datetime
import itertools
import os
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from sink_house import (  # type: ignore[import-not-found]
    FIRST,
    KEYED,
    SCHEMA,
    InlineClock,
    Update,
    bag,
    batch,
    contents,
    delta,
    expanded,
    in_table,
    settings_of,
    updates,
    upper_of_table,
)

from actors.connectors.sinks import staging
from actors.connectors.sinks.delta import DeltaSink
from actors.connectors.sources.source import SourceUnreachable
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, WriterFenced
from suite_lanes import examples  # type: ignore[import-not-found]


def sink(folder: Path, mode: str, token: str = "one") -> DeltaSink:
    made: DeltaSink = delta(folder, mode, settings_of(folder.parent), InlineClock(), token)
    return made


async def begun(folder: Path, mode: str, schema: TableSchema = SCHEMA) -> DeltaSink:
    made = sink(folder, mode)
    assert await made.open(schema) is None
    return made


async def test_changes_are_appended_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    made = await begun(folder, "changes")
    await batch(made, 5, 6, *FIRST)
    await batch(made, 6, 9)
    await batch(made, 9, 12, (1, "x", 9, -1), (3, "", 11, 1))
    assert bag(in_table(folder)) == bag([*FIRST, (1, "x", 9, -1), (3, "", 11, 1)])
    assert upper_of_table(folder) == 12
    told = made.statistics()
    assert (told.rows_committed, told.rows_staged, told.commits) == (4, 0, 3)
    sizes = [path.stat().st_size for path in folder.glob("*.parquet")]
    assert told.bytes_committed == sum(sizes)
    await made.close()
    names = [field.name for field in pa.schema(DeltaTable(folder).schema().to_arrow())]
    assert names == ["a", "b", "_time", "_diff"]
    assert await sink(folder, "changes", "two").open(SCHEMA) == 12


async def test_contents_are_what_the_changes_sum_up_to(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    made = await begun(folder, "current")
    await batch(made, 5, 6, *FIRST)
    assert bag(in_table(folder)) == bag([(1, "x"), (1, "x"), (2, None)])
    await batch(made, 6, 9, (1, "x", 8, -1), (2, None, 8, -1), (3, "", 8, 1))
    assert bag(in_table(folder)) == bag([(1, "x"), (3, "")])
    await batch(made, 9, 10, (1, "x", 9, -1), (3, "", 9, -1))
    assert in_table(folder) == []
    assert upper_of_table(folder) == 10


ROW = st.tuples(st.sampled_from([None, 0, 1, 2]), st.sampled_from([None, "", "x"]))


@example_settings(max_examples=examples(25))
@given(
    st.lists(st.dictionaries(ROW, st.integers(0, 3), max_size=6), min_size=1, max_size=6),
    st.booleans(),
    st.integers(1, 3),
)
async def test_any_bag_after_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    bags: list[dict[Any, int]],
    reopened: bool,
    small_max: int,
) -> None:
    folder = tmp_path_factory.mktemp("sinks") / "t"
    made = await begun(folder, "current")
    before: dict[Any, int] = {}
    patch = pytest.MonkeyPatch()
    patch.setattr("actors.connectors.sinks.delta_rewrite.SMALL_FILES_MAX", small_max)
    patch.setattr("actors.connectors.sinks.delta_rewrite.HELD_BYTES_MAX", 30)
    with patch.context():
        for time, wanted in enumerate(bags):
            keys = {*before, *wanted}
            changed = {key: wanted.get(key, 0) - before.get(key, 0) for key in keys}
            for key, diff in changed.items():
                if diff:
                    await made.write(updates([(*key, time, diff)]))
            await made.commit(time, time + 1)
            before = wanted
            rows = [key for key, count in wanted.items() for _ in range(count)]
            assert bag(in_table(folder)) == bag(rows)
            if reopened:
                await made.close()
                made = sink(folder, "current", f"token{time}")
                assert await made.open(SCHEMA) == time + 1
    patch.undo()
    named = {Path(uri).name for uri in DeltaTable(folder).file_uris()}
    assert len(named) <= small_max + 2
    assert not [name for name in os.listdir(folder) if name.startswith("_pen")]


async def test_keys_with_every_type_of_value(tmp_path: Path) -> None:
    schema = TableSchema(
        (
            TableColumn("k", "double"),
            TableColumn("i", "tinyint"),
            TableColumn("n", "decimal(38,2)"),
            TableColumn("when", "timestamp"),
            TableColumn("local", "timestamp_ntz"),
            TableColumn("day", "date"),
            TableColumn("raw", "binary"),
            TableColumn("yes", "boolean"),
            TableColumn("list", "array<struct<x:int,y:string>>"),
            TableColumn("map", "map<string,double>"),
            TableColumn("f", "float"),
        ),
        ("k",),
    )
    nan = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
    when = datetime.datetime(1800, 1, 1, tzinfo=datetime.UTC)
    rest = (
        7,
        None,
        when,
        datetime.datetime(9999, 1, 1),  # noqa: DTZ001 - has no zone
        datetime.date(1, 1, 1),
        b"\0",
        True,
        [{"x": None, "y": "q"}, None],
        [("k", float("inf"))],
        -0.0,
    )
    folder = tmp_path / "t"
    made = await begun(folder, "current", schema)
    keys = [0.0, -0.0, float("nan"), nan, 1.5]
    await batch(made, 0, 1, *[(key, *rest, 0, 1) for key in keys], schema=schema)
    assert len(in_table(folder)) == 5
    DeltaTable(folder).optimize.z_order(["i"])
    await batch(
        made, 1, 2, (-0.0, *rest, 1, -1), (nan, *rest, 1, -1), (9.0, *rest, 1, 1), schema=schema
    )
    left = [struct.pack("<d", row[0]).hex() for row in in_table(folder)]
    wanted = [struct.pack("<d", key).hex() for key in (0.0, float("nan"), 1.5, 9.0)]
    assert sorted(left) == sorted(wanted)


async def test_of_two_writers_one_is_fenced(tmp_path: Path) -> None:
    for mode in ("changes", "current"):
        folder = tmp_path / mode
        first = await begun(folder, mode)
        await batch(first, 5, 6, *FIRST)
        await first.write(updates([(7, "lost", 6, 1)]))
        second = sink(folder, mode, "two")
        assert await second.open(SCHEMA) == 6
        with pytest.raises(WriterFenced, match="taken over"):
            await first.commit(6, 8)
        await batch(second, 6, 9, (7, "kept", 8, 1))
        assert [row[1] for row in in_table(folder) if row[0] == 7] == ["kept"]
        names = [path.name for path in folder.glob("*.parquet")]
        assert not [name for name in names if "-one-2-" in name]


async def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    for mode in ("changes", "current"):
        folder = tmp_path / mode
        first = await begun(folder, mode)
        await batch(first, 5, 6, *FIRST)
        kept = {path.name for path in folder.glob("*.parquet")}
        await first.write(updates([(1, "x", 6, -1), (9, "y", 6, 1)]))
        assert first._files is not None
        first._files.finish()
        assert {path.name for path in folder.glob("*.parquet")} > kept
        assert await sink(folder, mode, "two").open(SCHEMA) == 6
        assert {path.name for path in folder.glob("*.parquet")} == kept


async def test_others_move_rows_and_append(tmp_path: Path) -> None:
    """OPTIMIZE between what a commit looked at and the commit, in both modes; rows of others."""
    for mode in ("changes", "current"):
        folder = tmp_path / mode
        made = await begun(folder, mode)
        await batch(made, 5, 6, *FIRST)
        await batch(made, 6, 7, (4, "w", 6, 1))
        DeltaTable(folder).optimize.compact()
        assert len(DeltaTable(folder).file_uris()) == 1
        await batch(made, 7, 8, (1, "x", 7, -1))
        DeltaTable(folder).vacuum(0, dry_run=False, enforce_retention_duration=False)
        await batch(made, 8, 9, (5, "v", 8, 1))
        assert upper_of_table(folder) == 9
    assert bag(in_table(folder)) == bag([(1, "x"), (2, None), (4, "w"), (5, "v")])
    folder = tmp_path / "changes"
    foreign = pa.Table.from_pylist([{"a": 0, "b": "o", "_time": 0, "_diff": 1}])
    write_deltalake(folder, foreign, mode="append")
    made = sink(folder, "changes", "two")
    assert await made.open(SCHEMA) == 9
    await batch(made, 9, 10)
    assert upper_of_table(folder) == 10
    assert (0, "o", 0, 1) in in_table(folder)


async def test_contents_that_others_change_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    made = await begun(folder, "current")
    await batch(made, 5, 6, *FIRST)
    write_deltalake(folder, pa.Table.from_pylist([{"a": 0, "b": "o"}]), mode="append")
    await made.write(updates([(8, "y", 6, 1)]))
    with pytest.raises(InvalidUsage, match=r"version 3 \(WRITE\)"):
        await made.commit(6, 7)
    assert upper_of_table(folder) == 6
    assert 8 not in [row[0] for row in in_table(folder)]
    with pytest.raises(InvalidUsage, match="changed by another"):
        await sink(folder, "current", "two").open(SCHEMA)


async def test_a_row_that_is_not_there_cannot_go(tmp_path: Path) -> None:
    made = await begun(tmp_path / "t", "current")
    await batch(made, 5, 6, *FIRST)
    await made.write(updates([(2, None, 6, -2)]))
    with pytest.raises(InvalidUsage, match="lacks 1 rows"):
        await made.commit(6, 7)
    assert upper_of_table(tmp_path / "t") == 6


async def test_a_table_that_no_longer_fits(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    made = await begun(folder, "changes")
    await batch(made, 5, 6, *FIRST)
    DeltaTable(folder).alter.add_columns([Field("c", PrimitiveType("long"))])
    with pytest.raises(InvalidUsage, match="its columns are"):
        await made.commit(6, 7)
    folder = tmp_path / "u"
    made = await begun(folder, "changes")
    DeltaTable(folder).alter.add_constraint({"few": "a < 100"})
    with pytest.raises(InvalidUsage, match="few"):
        await made.commit(6, 7)


async def test_what_is_there_and_not_ours_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    write_deltalake(foreign, pa.Table.from_pylist([{"a": 1, "b": "x"}]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for folder, text in ((foreign, "did not create"), (tmp_path / "full", "contains other files")):
        with pytest.raises(InvalidUsage, match=text):
            await sink(folder, "current").check(SCHEMA)
        with pytest.raises(InvalidUsage, match=text):
            await sink(folder, "current").open(SCHEMA)
    await begun(tmp_path / "ours", "changes")
    with pytest.raises(InvalidUsage, match="its columns are"):
        await sink(tmp_path / "ours", "current").check(SCHEMA)
    await sink(tmp_path / "ours", "changes").check(SCHEMA)
    await sink(tmp_path / "new", "changes").check(SCHEMA)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (TableSchema((TableColumn("a", "void"),)), "void"),
        (TableSchema((TableColumn("a", "int"), TableColumn("A", "int"))), "differ only in case"),
        (TableSchema((TableColumn("a b", "int"),)), "'a b'"),
        (TableSchema((TableColumn("_time", "int"),)), "adds a column"),
        (TableSchema((TableColumn("s", "array<struct<x:int,X:int>>"),)), "differ only in case"),
        (TableSchema((TableColumn("s", "map<string,void>"),)), "void"),
        (TableSchema(()), "no column"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
async def test_columns_that_a_table_cannot_hold(
    tmp_path: Path, schema: TableSchema, text: str
) -> None:
    with pytest.raises(InvalidUsage, match=text):
        await sink(tmp_path / "t", "changes").check(schema)
    assert not (tmp_path / "t").exists()


async def test_a_log_cleaned_up_past_us(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    made = await begun(folder, "current")
    await batch(made, 5, 6, *FIRST)
    table = DeltaTable(folder)
    for number in range(3):
        table.alter.set_table_properties(
            {"delta.logRetentionDuration": f"interval {number + 1} days"}
        )
    table.create_checkpoint()
    for version in range(4):
        (folder / "_delta_log" / f"{version:020d}.json").unlink()
    with pytest.raises(InvalidUsage, match="no longer contains"):
        await sink(folder, "current", "two").open(SCHEMA)


async def test_the_frontier_outlives_checkpoints_and_clean_up(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    made = await begun(folder, "changes")
    for time in range(5):
        await batch(made, time, time + 1, (time, "x", time, 1))
    DeltaTable(folder).create_checkpoint()
    for version in range(5):
        (folder / "_delta_log" / f"{version:020d}.json").unlink()
    again = sink(folder, "changes", "two")
    assert await again.open(SCHEMA) == 5
    await batch(again, 5, 6, (5, "x", 5, 1))
    assert [row[0] for row in sorted(in_table(folder))] == [0, 1, 2, 3, 4, 5]


async def test_a_commit_that_comes_to_pass_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library says that it failed, and it did not: it counts; or it did: nothing is there."""
    folder = tmp_path / "t"
    made = await begun(folder, "changes")
    real = DeltaTable.create_write_transaction

    def late(self: DeltaTable, *args: Any, **given: Any) -> None:
        real(self, *args, **given)
        raise OSError("the answer was lost")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", late)
    await batch(made, 5, 6, *FIRST)

    def never(self: DeltaTable, *args: Any, **given: Any) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", never)
    await made.write(updates([(3, "", 6, 1)]))
    with pytest.raises(SourceUnreachable, match="no disk"):
        await made.commit(6, 7)
    monkeypatch.undo()
    again = sink(folder, "changes", "two")
    assert await again.open(SCHEMA) == 6
    await batch(again, 6, 7, (3, "", 6, 1))
    assert bag(in_table(folder)) == bag([*FIRST, (3, "", 6, 1)])


@pytest.mark.parametrize("at", range(1, 15))
async def test_a_failure_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Syncs, the commit itself, and looking at the log: each fails, before or after it was done.
    The batch is there whole or not at all, and `open` says which."""
    done = 0

    def trap(real: Any, after: bool) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            nonlocal done
            done += 1
            mine = done == at
            if mine and not after:
                raise OSError("no disk")
            result = real(*args, **given)
            if mine:
                raise OSError("the answer was lost")
            return result

        return call

    later: list[Update] = [(1, "x", 6, -1), (3, "", 7, 1)]
    for mode, after in itertools.product(("changes", "current"), (False, True)):
        folder = tmp_path / f"{mode}{after}"
        made = await begun(folder, mode)
        await batch(made, 5, 6, *FIRST)
        done = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", trap(os.fsync, after))
            for name in ("create_write_transaction", "update_incremental"):
                patch.setattr(DeltaTable, name, trap(getattr(DeltaTable, name), after))
            failed = False
            try:
                await batch(made, 6, 9, *later)
            except SourceUnreachable:
                failed = True
        await made.close()
        again = sink(folder, mode, "two")
        upper = await again.open(SCHEMA)
        assert upper in ((6, 9) if failed else (9,))
        if upper == 6:
            await batch(again, 6, 9, *later)
        found = in_table(folder)
        if mode == "changes":
            assert bag(found) == bag([*FIRST, *later])
        else:
            assert bag(found) == bag([(1, "x"), (2, None), (3, "")])
        named = {Path(uri).name for uri in DeltaTable(folder).file_uris()}
        there = {path.name for path in folder.glob("*.parquet")}
        assert named <= there
        assert not [name for name in there - named if f"-{6:020d}-" in name]


async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "t"
    made = await begun(folder, "changes")
    await batch(made, 5, 6, *FIRST)

    def full(self: staging.FolderStaging, name: str) -> Any:
        file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - it goes on being
        self._open.append(file)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(staging.FolderStaging, "create", full)
        with pytest.raises(SourceUnreachable, match="No space left"):
            await batch(made, 6, 9, (3, "", 7, 1))
    await made.close()
    again = sink(folder, "changes", "two")
    assert await again.open(SCHEMA) == 6


async def test_old_files_of_contents_go_after_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    clock = InlineClock()
    made = delta(folder, "current", settings_of(tmp_path), clock, "one")
    made._retain_hours = 0
    await made.open(SCHEMA)
    await batch(made, 5, 6, *FIRST)
    clock.ahead_ms = 3_600_001
    await batch(made, 6, 7, (1, "x", 6, -2))
    there = {path.name for path in folder.glob("*.parquet")}
    assert there == {Path(uri).name for uri in DeltaTable(folder).file_uris()}
    await batch(made, 7, 8, (4, "z", 7, 1))
    assert bag(in_table(folder)) == bag([(2, None), (4, "z")])


async def test_many_small_files_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.connectors.sinks.delta_rewrite.SMALL_FILES_MAX", 3)
    made = await begun(tmp_path / "t", "current")
    sizes = []
    for time in range(6):
        await batch(made, time, time + 1, (time, "x", time, 1))
        sizes.append(len(DeltaTable(tmp_path / "t").file_uris()))
    assert sizes == [1, 2, 3, 4, 2, 3]
    assert bag(in_table(tmp_path / "t")) == bag([(time, "x") for time in range(6)])


async def test_readers_pass_files_over_by_their_bounds(tmp_path: Path) -> None:
    made = await begun(tmp_path / "t", "changes")
    await batch(made, 5, 6, *FIRST)
    (row,) = pa.table(DeltaTable(tmp_path / "t").get_add_actions(flatten=True)).to_pylist()
    assert (row["num_records"], row["min._time"], row["max.a"]) == (2, 5, 2)
    assert row["null_count.a"] == 0


async def test_keyed_rows_change_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    made = await begun(folder, "current", KEYED)
    rows = [(key, f"v{key}", 0, 1) for key in range(100)]
    await batch(made, 0, 1, *rows, schema=KEYED)
    changes = [(key, f"v{key}", 1, -1) for key in range(0, 100, 7)]
    changes += [(key, "new", 1, 1) for key in range(0, 100, 7)]
    await batch(made, 1, 2, *changes, schema=KEYED)
    assert expanded(bag(in_table(folder))) == expanded(contents([*rows, *changes]))


def test_the_library_is_not_asked_to_retry() -> None:
    """What the log is looked through for relies on it."""
    assert CommitProperties(max_commit_retries=0).max_commit_retries == 0
