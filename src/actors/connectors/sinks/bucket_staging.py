"""Files in a bucket for a sink's next commit. Blocking; raises `StorageError`.

Names are as in folders (`staging`). Files that begin with ``_`` are temporary, and stay on the
local disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from actors.connectors.sinks.formats import FilePlace
from actors.connectors.sinks.staging import as_storage_errors, is_orphan, staged_name
from actors.object_store.bucket_calls import BucketCalls
from actors.progress import Frontier


class BucketStaging:
    """Staged files in a bucket. See `Staging`."""

    def __init__(
        self, calls: Callable[[], BucketCalls], where: str, spool: Path, token: str
    ) -> None:
        """Make a staging area. `spool`: a folder for this one alone, made and removed by it."""
        self._calls = calls
        self._where = where
        self._spool = spool
        self._token = token
        self._places = 0
        self._staged: list[str] = []
        self._open: list[IO[bytes]] = []

    def place(self, upper: Frontier | None, kind: str = "") -> FilePlace:
        """See `Staging`."""
        self._places += 1
        name = staged_name(upper, self._token, self._places, kind)
        return _Going(self, name)

    def create(self, name: str) -> IO[bytes]:
        """Open a new file on the local disk."""
        with as_storage_errors(f"write {self._spool / name}"):
            self._spool.mkdir(parents=True, exist_ok=True)
            file: IO[bytes] = (self._spool / name).open("xb", buffering=0)
        self._open.append(file)
        return file

    def seal(self, file: IO[bytes]) -> None:
        """Upload the complete file, unless it is temporary."""
        path = Path(file.name)
        with as_storage_errors(f"write {path}"):
            file.close()
            self._open.remove(file)
            size = path.stat().st_size
        if path.name.startswith("_"):
            return
        self._staged.append(path.name)
        self._calls().upload(path.name, path, size)
        with as_storage_errors(f"remove {path}"):
            # At once, so that the disk holds no more than the files being written.
            path.unlink()

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """See `Staging`."""
        if name.startswith("_"):
            with as_storage_errors(f"read {self._spool / name}"):
                yield self._spool / name
            return
        with as_storage_errors(f"read {self._where}/{name}"), self._calls().reader(name) as file:
            yield file

    def remove(self, name: str) -> None:
        """See `Staging`."""
        if name.startswith("_"):
            with as_storage_errors(f"remove {self._spool / name}"):
                (self._spool / name).unlink(missing_ok=True)
            return
        self._calls().delete([name])
        if name in self._staged:
            self._staged.remove(name)

    def remove_staged(self) -> None:
        """See `Staging`."""
        self.close()
        self._calls().delete(self._staged)
        self._staged.clear()

    def close(self) -> None:
        """See `Staging`."""
        for file in self._open:
            with suppress(OSError):
                file.close()
        self._open.clear()
        shutil.rmtree(self._spool, ignore_errors=True)

    def committed(self) -> None:
        """See `Staging`."""
        self._staged.clear()

    def remove_orphans(self, upper: Frontier | None) -> None:
        """See `Staging`. Names sort by upper, so they are listed from the frontier on."""
        for page in self._calls().names(after=f"penstock-{upper or 0:020d}"):
            names = [name for name in page if "/" not in name]
            orphans = [name for name in names if is_orphan(name, upper)]
            if orphans:
                self._calls().delete(orphans)
            # Keys come in order: after this one there are no names of ours.
            if len(orphans) < len(page) and page[-1] > "penstock-~":
                return


class _Going:
    """A `FilePlace`: new files of a batch."""

    def __init__(self, staging: BucketStaging, prefix: str) -> None:
        self._staging = staging
        self._prefix = prefix

    def create(self, name: str) -> IO[bytes]:
        """See `FilePlace`."""
        return self._staging.create(self.path(name))

    def seal(self, file: IO[bytes]) -> None:
        """See `FilePlace`."""
        self._staging.seal(file)

    def path(self, name: str) -> str:
        """See `FilePlace`."""
        return f"{self._prefix}-{name}"
