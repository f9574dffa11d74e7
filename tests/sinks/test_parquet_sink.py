"""Parquet files and their manifests: exactly once, and nothing that no manifest names stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sink_house import (  # type: ignore[import-not-found]
    SCHEMA,
    Update,
    bag,
    in_files,
    manifests,
    parquet,
    settings_of,
    updates,
)

from actors.connectors.sinks import parquet as parquet_room
from actors.connectors.sinks import staging
from actors.connectors.sinks.outlets import FolderOutlet
from actors.connectors.sinks.parquet import MANIFESTS, ParquetSink
from actors.connectors.sources.source import SourceUnreachable
from actors.errors import InvalidUsage, StorageError, WriterFenced
from actors.kernel import SystemClock
from actors.plan.schema import TableColumn, TableSchema
from actors.progress import EMPTY

FIRST: list[Update] = [(1, "x", 5, 2), (2, None, 5, 1)]


class Clock(SystemClock):
    """The machine's, with calls inline."""

    async def run_blocking(self, function: Any) -> Any:
        return function()


def sink(folder: Path, token: str = "one", **given: Any) -> ParquetSink:
    made: ParquetSink = parquet(folder, settings_of(folder.parent), Clock(), token, **given)
    return made


async def batch(made: ParquetSink, lower: int, upper: int, *rows: Update) -> None:
    if rows:
        await made.write(updates(rows))
    await made.commit(lower, upper)


def data(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix == ".parquet"}


async def test_changes_and_their_intervals(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    made = sink(folder)
    await made.check(SCHEMA)
    assert not folder.exists()
    assert await made.open(SCHEMA) is None
    await batch(made, 5, 6, *FIRST)
    await batch(made, 6, 9)
    await batch(made, 9, 12, (1, "x", 9, -1), (3, "", 11, 1))
    await made.close()
    assert bag(in_files(folder)) == bag([*FIRST, (1, "x", 9, -1), (3, "", 11, 1)])
    told = [(each.lower, each.upper, each.rows) for each in manifests(folder)]
    assert told == [(None, None, 0), (5, 6, 2), (6, 9, 0), (9, 12, 2)]
    names = pq.read_schema(next(folder.glob("*.parquet"))).names
    assert names == ["a", "b", "_time", "_diff"]
    counts = made.statistics()
    assert (counts.rows_committed, counts.rows_staged, counts.commits) == (4, 0, 3)
    assert counts.bytes_committed == sum((folder / name).stat().st_size for name in data(folder))
    again = sink(folder, "two")
    assert await again.open(SCHEMA) == 12
    await batch(again, 12, EMPTY)
    assert [each.ended for each in manifests(folder)[-2:]] == [False, True]
    assert await sink(folder, "three").open(SCHEMA) == EMPTY


async def test_contents_once(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    made = sink(folder, once=True)
    assert made.once
    assert not made.keeps_times
    assert await made.open(SCHEMA) is None
    await batch(made, 5, EMPTY, *FIRST)
    assert bag(in_files(folder)) == bag([(1, "x"), (1, "x"), (2, None)])
    assert await sink(folder, "two", once=True).open(SCHEMA) == EMPTY


async def test_of_two_writers_one_is_fenced(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    first = sink(folder)
    assert await first.open(SCHEMA) is None
    await batch(first, 5, 6, *FIRST)
    kept = data(folder)
    await first.write(updates([(7, "lost", 6, 1)]))
    second = sink(folder, "two")
    assert await second.open(SCHEMA) == 6
    with pytest.raises(WriterFenced, match="taken over"):
        await first.commit(6, 8)
    assert data(folder) == kept
    await batch(second, 6, 9, (7, "kept", 8, 1))
    assert bag(in_files(folder)) == bag([*FIRST, (7, "kept", 8, 1)])


async def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    first = sink(folder)
    await first.open(SCHEMA)
    await batch(first, 5, 6, *FIRST)
    kept = data(folder)
    await first.write(updates([(9, "y", 6, 1)]))
    assert first._files is not None
    first._files.finish()
    (folder / MANIFESTS / "_one").touch()
    assert data(folder) > kept
    assert await sink(folder, "two").open(SCHEMA) == 6
    assert data(folder) == kept
    assert [name for name in os.listdir(folder / MANIFESTS) if name.startswith("_")] == []
    assert bag(in_files(folder)) == bag(FIRST)


@pytest.mark.parametrize("at", range(1, 9))
async def test_a_failure_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A disk that fails at one operation of a batch, before or after it was done: the batch is
    there whole or not at all, and `open` says which."""
    done = 0

    def trap(real: Any, after: bool) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            nonlocal done
            done += 1
            if done == at and not after:
                raise OSError("no disk")
            result = real(*args, **given)
            if done == at:
                raise OSError("the answer was lost")
            return result

        return call

    for after in (False, True):
        folder = tmp_path / f"p{after}"
        made = sink(folder)
        await made.open(SCHEMA)
        await batch(made, 5, 6, *FIRST)
        done = 0
        with monkeypatch.context() as patch:
            for name in ("link", "fsync"):
                patch.setattr(os, name, trap(getattr(os, name), after))
            failed = False
            try:
                await batch(made, 6, 9, (3, "", 7, 1))
            except SourceUnreachable:
                failed = True
        assert failed or done < at
        await made.close()
        again = sink(folder, "two")
        upper = await again.open(SCHEMA)
        assert upper in ((6, 9) if failed else (9,))
        if upper == 6:
            await batch(again, 6, 9, (3, "", 7, 1))
        assert bag(in_files(folder)) == bag([*FIRST, (3, "", 7, 1)])
        assert data(folder) == {file.path for each in manifests(folder) for file in each.files}


async def test_what_is_there_and_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(InvalidUsage, match="holds other files"):
        await sink(tmp_path / "full").check(SCHEMA)
    ours = sink(tmp_path / "p")
    await ours.open(SCHEMA)
    others = parquet_room.ParquetConfig("p", creation="another")
    theirs = ParquetSink(
        others, FolderOutlet(tmp_path / "p"), "u1", "t", settings_of(tmp_path), Clock()
    )
    with pytest.raises(InvalidUsage, match="what another sink"):
        await theirs.open(SCHEMA)
    with pytest.raises(InvalidUsage, match="of other columns"):
        await sink(tmp_path / "p").open(TableSchema((TableColumn("a", "int"),)))
    with pytest.raises(InvalidUsage, match="of other columns"):
        await sink(tmp_path / "p", once=True).open(SCHEMA)
    (tmp_path / "p" / MANIFESTS / f"{9:020d}.json").write_text("{")
    with pytest.raises(InvalidUsage, match="not the manifest"):
        await sink(tmp_path / "p").open(SCHEMA)


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SourceUnreachable, match="could not"):
        await sink(tmp_path / "file" / "p").open(SCHEMA)


def test_files_of_a_batch_are_known_by_name(tmp_path: Path) -> None:
    """Only what no commit can name goes: not what stands below the upper, nor others' files."""
    older, newer = staging.FolderStaging(tmp_path, "a"), staging.FolderStaging(tmp_path, "b")
    for made, upper in ((older, 7), (newer, 9)):
        place = made.place(upper)
        place.seal(place.create("00001.parquet"))
    (tmp_path / "penstock-notes.parquet").touch()
    (tmp_path / "part-1.parquet").touch()
    newer.remove_orphans(9)
    assert sorted(os.listdir(tmp_path)) == [
        "part-1.parquet",
        f"penstock-{7:020d}-a-1-00001.parquet",
        "penstock-notes.parquet",
    ]
    with pytest.raises(StorageError, match="could not look into"):
        staging.FolderStaging(tmp_path / "gone", "c").remove_orphans(None)
