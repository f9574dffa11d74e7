"""A disk that is full, or refuses, at any call of the operating system: one named error, nothing
half written, and the same works as soon as there is room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from persist_world import (  # type: ignore[import-not-found]
    SCHEMA,
    TINY,
    add,
    contents,
    updates,
)

from actors.durable.persist import NewShard, PersistClient
from actors.runtime.errors import StorageError, StoreFull
from actors.runtime.kernel import SystemClock

CALLS = ("open", "write", "fsync", "rename", "mkdir")


class _File:
    """An unbuffered file whose writes are calls, too."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file = file
        self._disk = disk

    def write(self, data: Any) -> int:
        self._disk.called("write")
        # Half of it: as a disk does that fills up, and as any file may.
        written: int = self._file.write(data[: max(1, len(data) // 2)])
        return written

    def fileno(self) -> int:
        found: int = self._file.fileno()
        return found

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Disk:
    """Counts calls; the one of number `at` (from 1) fails."""

    def __init__(self, at: int, error: int) -> None:
        self.at = at
        self.error = error
        self.calls: list[str] = []
        self.renamed = False

    def called(self, what: str) -> None:
        self.calls.append(what)
        if len(self.calls) == self.at:
            raise OSError(self.error, os.strerror(self.error))


@contextmanager
def failing(at: int, error: int) -> Iterator[Disk]:
    """The calls that `blob_file` makes."""
    disk = Disk(at, error)
    real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "fdopen")}
    mkdir = Path.mkdir

    def counted(name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            disk.called(name)
            found = real[name](*args, **more)
            disk.renamed = disk.renamed or name == "rename"
            return found

        return call

    def made(self: Path, *args: Any, **more: Any) -> None:
        disk.called("mkdir")
        mkdir(self, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fsync", "rename"):
            patch.setattr(os, name, counted(name))
        patch.setattr(os, "fdopen", lambda *a, **m: _File(real["fdopen"](*a, **m), disk))
        patch.setattr(Path, "mkdir", made)
        yield disk


async def opened(place: Path) -> PersistClient:
    client = await PersistClient.open(place, replace(TINY, batches_per_shard_max=2), SystemClock())
    if not await client.list_shards():
        await client.create_shards([NewShard("s", SCHEMA, holds={"h": 0})])
    return client


def temporaries(place: Path) -> list[Path]:
    return [path for path in place.rglob(".tmp/*") if path.is_file()]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EACCES, StorageError),
        (errno.EROFS, StorageError),
        (errno.EIO, StorageError),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
async def test_any_call_of_a_write_may_fail(
    tmp_path: Path, error: int, kind: type[StorageError]
) -> None:
    client = await opened(tmp_path)
    seen: set[str] = set()
    at = 0
    while True:
        at += 1
        with failing(at, error) as disk:
            try:
                parts = await client.write_parts("s", updates((1, 0, 1), (2, 0, 1)))
            except StorageError as failed:
                caught = failed
            else:
                break
        seen.add(disk.calls[-1])
        assert type(caught) is kind, (at, caught)
        assert temporaries(tmp_path) == [], at
        assert caught.determinate is not disk.renamed, (at, disk.calls)
        keys = [info.key for info in await client._parts._blob.list_keys()]
        assert keys == [], (at, keys)
    assert seen == set(CALLS)
    await client.discard_parts(parts)
    await add(client, "s", 1, (1, 0, 1))
    assert await contents(await client.open_reader("s", "r"), client, 0) == [(1, 1)]
    await client.close()


async def test_a_full_disk_stops_compaction_and_nothing_else(tmp_path: Path) -> None:
    client = await opened(tmp_path)
    for upper in range(1, 5):
        await add(client, "s", upper, (upper, upper - 1, 1))
    before = (await client.state("s")).batches
    reader = await client.open_reader("s", "r")
    wanted = [(1, 1), (2, 1), (3, 1), (4, 1)]
    with failing(1, errno.ENOSPC), pytest.raises(StoreFull):
        await client.maintain("s")
    assert (await client.state("s")).batches == before
    assert await contents(reader, client, 3) == wanted
    await reader.close()
    await client.maintain("s")
    assert len((await client.state("s")).batches) <= 2
    assert await contents(await client.open_reader("s", "r"), client, 3) == wanted
    await client.close()
