"""A copy that fails, is canceled or killed, anywhere: whole, or not there at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import anyio
import msgspec
import pytest
from copying_house import (  # type: ignore[import-not-found]
    copied,
    described,
    left_behind,
    manifest_of,
    output_in,
    read,
    three_files,
)
from dataflow_house import (  # type: ignore[import-not-found]
    NUMBERS,
    shard,
    surroundings,
    table,
    write,
)

from actors.connectors.sinks.sink_storage import FolderSinkStorage
from actors.connectors.sinks.staging import FolderStaging, SinkStaging
from actors.durable.object_store.bucket_store import FetchedObject
from actors.model.plan.copy_manifest import MANIFEST
from actors.runtime.errors import InvalidUsage, PenstockError, ResourceBusy, StorageError, StoreFull


class TrapStaging(FolderStaging):
    """Tells the trap of every file."""

    def __init__(self, trap: Trap, token: str) -> None:
        super().__init__(trap.folder, token, trap.stopped)
        self.trap = trap

    def create(self, name: str) -> IO[bytes]:
        self.trap.step()
        return super().create(name)

    def seal(self, file: IO[bytes]) -> None:
        self.trap.step()
        super().seal(file)
        self.trap.step()

    def remove_staged(self) -> None:
        if not self.trap.dead:
            super().remove_staged()


class Trap(FolderSinkStorage):
    """Fails at the operation of that number, as a disk or a kill does."""

    def __init__(self, folder: Path, at: int, error: BaseException) -> None:
        super().__init__(folder)
        self.at, self.error, self.done = at, error, 0
        self.dead = False

    def step(self) -> None:
        self.done += 1
        if self.done == self.at:
            raise self.error

    def staging(self, token: str) -> SinkStaging:
        return TrapStaging(self, token)

    def replace(
        self, name: str, data: bytes, expected: FetchedObject | None, temporary: str
    ) -> bool:
        self.step()
        return super().replace(name, data, expected, temporary)


async def test_a_copy_that_fails_anywhere_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "copies" / "out"
    async with surroundings() as (_, persist):
        description = await three_files(persist)
        steps = 0
        for at in range(1, 100):
            error: PenstockError = StoreFull(f"full at {at}", determinate=True)
            trap = Trap(folder, at, error)
            try:
                done = await copied(persist, tmp_path, description, storage=trap)
            except StoreFull:
                assert left_behind(tmp_path) == [], at
                continue
            steps = at
            assert done.files == len(manifest_of(tmp_path).files) >= 3
            break
        # Every file was made, synced and named, and the manifest as well, with a fault at each.
        assert steps == 3 * done.files + 2


async def test_a_copy_that_is_canceled_anywhere_leaves_nothing(tmp_path: Path) -> None:
    async with surroundings() as (_, persist):
        description = await three_files(persist)
        for at in range(1, 100):
            scope = anyio.CancelScope()

            class Canceling(Trap):
                def step(self) -> None:
                    self.done += 1
                    if self.done == self.at:
                        scope.cancel()  # noqa: B023

            trap = Canceling(tmp_path / "copies" / "out", at, StoreFull("", determinate=True))
            with scope:
                await copied(persist, tmp_path, description, storage=trap)
            if scope.cancelled_caught:
                assert left_behind(tmp_path) == [], at
                continue
            # The manifest was being put in its place: too late, and the copy is whole.
            assert len(read(tmp_path, NUMBERS)) == 3_000
            break
        assert at > 9


class Killed(BaseException):
    """The process is gone: nothing of it runs on."""


async def test_what_a_killed_copy_left_is_never_mistaken(tmp_path: Path) -> None:
    """No manifest names it; the next copy removes it, and nothing else."""
    folder = tmp_path / "copies" / "out"
    async with surroundings() as (_, persist):
        description = await three_files(persist)
        for at in range(1, 100):

            class Dying(Trap):
                def step(self) -> None:
                    self.done += 1
                    if self.done >= self.at and MANIFEST not in left_behind(tmp_path):
                        self.dead = True
                        raise Killed

                def remove(self, folder: str, files: Sequence[str]) -> None:
                    if not self.dead:
                        super().remove(folder, files)

            dying = Dying(folder, at, Killed())
            try:
                await copied(persist, tmp_path, description, storage=dying)
            except Killed:
                assert MANIFEST not in left_behind(tmp_path)
            else:
                break
            others = folder / "copy-mine"
            others.mkdir(exist_ok=True)
            (others / "notes.txt").write_text("not a copy's")
            after = msgspec.structs.replace(description, id=f"t{at + 1}")
            await copied(persist, tmp_path, after)
            assert len(read(tmp_path, NUMBERS)) == 3_000
            names = {name.partition("/")[0] for name in left_behind(tmp_path)}
            assert names == {MANIFEST, f"copy-t{at + 1}-1", "copy-mine"}
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        assert at > 9


async def test_a_copy_that_is_there_is_refused_or_replaced_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "copies" / "out"
    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1)))
        await write(persist, "numbers", 9, table(NUMBERS, (2, 7, 1)))
        await copied(persist, tmp_path, described(NUMBERS, id="a"))
        with pytest.raises(InvalidUsage, match="already contains a copy of numbers at 4"):
            await copied(persist, tmp_path, described(NUMBERS, id="b", as_of=8))
        assert read(tmp_path, NUMBERS) == [(1,)]
        later = described(NUMBERS, id="b", as_of=8, overwrite=True)
        full = StoreFull("full", determinate=True)
        trap = Trap(folder, 4, full)
        with pytest.raises(StoreFull):
            await copied(persist, tmp_path, later, storage=trap)
        assert read(tmp_path, NUMBERS) == [(1,)]
        await copied(persist, tmp_path, later)
        assert sorted(read(tmp_path, NUMBERS)) == [(1,), (2,)]
        names = {name.partition("/")[0] for name in left_behind(tmp_path)}
        assert names == {MANIFEST, "copy-b-1"}


async def test_a_copy_is_not_done_twice(tmp_path: Path) -> None:
    """Its answer was lost with a connection: what is there says that it was done."""
    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 3)))
        first = await copied(persist, tmp_path, described(NUMBERS))
        path = tmp_path / "copies" / "out" / manifest_of(tmp_path).files[0].path
        before = path.stat().st_mtime_ns
        assert await copied(persist, tmp_path, described(NUMBERS)) == first
        assert path.stat().st_mtime_ns == before


async def test_two_copies_do_not_write_to_one_folder(tmp_path: Path) -> None:
    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1)))
        other = output_in(FolderSinkStorage(tmp_path / "copies" / "out"), "other")
        assert await other.begin() is None
        with pytest.raises(ResourceBusy):
            await copied(persist, tmp_path, described(NUMBERS))
        assert left_behind(tmp_path) == ["copy-other-1"]
        await other.close()
        await copied(persist, tmp_path, described(NUMBERS))
        assert read(tmp_path, NUMBERS) == [(1,)]


async def test_a_folder_that_is_none_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "out").write_text("a file")
    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1)))
        with pytest.raises(StorageError):
            await copied(persist, tmp_path, described(NUMBERS))
        (tmp_path / "copies" / "theirs").mkdir()
        (tmp_path / "copies" / "theirs" / MANIFEST).write_text("{}")
        with pytest.raises(InvalidUsage, match="not the manifest of a copy"):
            await copied(persist, tmp_path, described(NUMBERS, destination="theirs"))


async def test_files_are_synced_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of what a power cut may take: bytes, names, manifest, its name."""
    done: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        done.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        done.append(f"rename {old.name}")
        real_rename(old, new)

    async with surroundings() as (_, persist):
        await shard(persist, "numbers", NUMBERS)
        await write(persist, "numbers", 5, table(NUMBERS, (1, 2, 1)))
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed)
        await copied(persist, tmp_path, described(NUMBERS, format="csv"))
    assert done[done.index("sync 00001.csv") :] == [
        "sync 00001.csv",
        "sync copy-t1-1",
        f"sync {MANIFEST}",
        f"rename {MANIFEST}",
        "sync out",
    ]
