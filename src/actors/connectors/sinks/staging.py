"""Stages files for a sink's next commit, in a folder or a bucket. Blocking; raises `StorageError`.

A file's name starts with the durable upper at the time of writing, so that orphans (files that no
commit has named or can name in the future) are recognized by their names alone. Names of files that
are not data start with ``_``; a sink in a bucket keeps such files temporarily on the local disk.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import IO, Any, Final, Protocol

from actors.connectors.sinks.formats import OutputLocation
from actors.durable.object_store.bucket_calls import BucketCalls
from actors.durable.object_store.bucket_store import UploadStopped
from actors.durable.object_store.file_modes import PRIVATE_FOLDER, share_file
from actors.durable.object_store.folder_calls import sync_folder
from actors.runtime.errors import storage_error
from actors.runtime.progress import Frontier

_NAME: Final = re.compile(r"_?penstock-(\d{20})-.*\.parquet")


class SinkStaging(Protocol):
    """Uncommitted files of one writer."""

    def place(self, upper: Frontier | None, kind: str = "") -> OutputLocation:
        """Return the location for files of a batch that starts at `upper`. A `kind` of ``_`` is for
        temporary files of the writer."""
        ...

    def files(self, prefix: str) -> OutputLocation:
        """Return the location for files whose names start with `prefix`."""
        ...

    def reading(self, name: str) -> AbstractContextManager[Any]:
        """Open a file with this name for `pyarrow.parquet`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file that will not be committed."""
        ...

    def remove_staged(self) -> None:
        """Remove all files that no commit will name."""
        ...

    def close(self) -> None:
        """Close files that were not sealed."""
        ...

    def committed(self) -> None:
        """Forget all staged files, because a commit names them."""
        ...

    def remove_orphans(self, upper: Frontier | None) -> None:
        """Remove files of earlier writers that no commit has named. These writers can no longer
        commit."""
        ...


def staged_name(upper: Frontier | None, token: str, places: int, kind: str = "") -> str:
    """Return the prefix of the file names of one location."""
    return f"{kind}penstock-{upper or 0:020d}-{token}-{places}-"


def is_orphan(name: str, upper: Frontier | None) -> bool:
    """Return whether a file is an orphan, given that everything below `upper` is committed."""
    found = _NAME.fullmatch(name)
    # Temporary files (``_``) are in no commit, whatever their upper.
    return found is not None and (upper is None or int(found[1]) >= upper or name[0] == "_")


class _FileStaging:
    """Names staged files, and remembers those that are open or not committed."""

    _shared = False
    """True if others read the files, so that they need shared permissions."""

    def __init__(self, token: str, stopped: Event | None) -> None:
        self._token = token
        self._stopped = stopped or Event()
        self._places = 0
        """Number of locations returned so far; makes names unique."""
        self._staged: list[str] = []
        """Names of files that are not committed."""
        self._open: list[IO[bytes]] = []
        """Files that are not sealed."""

    def place(self, upper: Frontier | None, kind: str = "") -> StagedFiles:
        """Return the location for files of a batch that starts at `upper`."""
        self._places += 1
        return self.files(staged_name(upper, self._token, self._places, kind))

    def files(self, prefix: str) -> StagedFiles:
        """Return the location for files whose names start with `prefix`."""
        return StagedFiles(self, prefix)

    def create(self, name: str) -> IO[bytes]:
        """Open a new file. It is valid once it is sealed."""
        # After a stop the files are being removed, so no call may create another one.
        if self._stopped.is_set():
            raise UploadStopped
        path = self._path(name)
        with as_storage_errors(f"write {path}"):
            file: IO[bytes] = path.open("xb", buffering=0)
            if self._shared:
                share_file(file.fileno())
        self._open.append(file)
        return file

    def _path(self, name: str) -> Path:
        raise NotImplementedError

    def seal(self, file: IO[bytes]) -> None:
        """Make a complete file durable."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files that were not sealed."""
        for file in self._open:
            with suppress(OSError):
                file.close()
        self._open.clear()

    def committed(self) -> None:
        """Forget all staged files, because a commit names them."""
        self._staged.clear()


class FolderStaging(_FileStaging):
    """Stages files in the folder, or in folders in it; implements `SinkStaging`."""

    _shared = True

    def __init__(self, folder: Path, token: str, stopped: Event | None = None) -> None:
        super().__init__(token, stopped)
        self._folder = folder

    def _path(self, name: str) -> Path:
        # Recorded before it is created, so that it is removed in any case.
        self._staged.append(name)
        return self._folder / name

    def seal(self, file: IO[bytes]) -> None:
        """Sync a complete file and its folder, and close it."""
        with as_storage_errors(f"write {file.name}"):
            os.fsync(file.fileno())
            file.close()
            self._open.remove(file)
            # The file and its name must be durable before a commit names it.
            sync_folder(Path(file.name).parent)

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Yield the path of a file for reading."""
        with as_storage_errors(f"read {self._folder / name}"):
            yield self._folder / name

    def remove(self, name: str) -> None:
        """Remove a file that will not be committed."""
        with as_storage_errors(f"remove {self._folder / name}"):
            (self._folder / name).unlink(missing_ok=True)
        if name in self._staged:
            self._staged.remove(name)

    def remove_staged(self) -> None:
        """Remove all files that no commit will name."""
        self.close()
        for name in list(self._staged):
            self.remove(name)

    def remove_orphans(self, upper: Frontier | None) -> None:
        """Remove files of earlier writers that no commit has named."""
        with as_storage_errors(f"look into {self._folder}"):
            # A list, because the loop removes entries.
            for entry in list(os.scandir(self._folder)):
                if is_orphan(entry.name, upper):
                    Path(entry.path).unlink(missing_ok=True)


class StagedFiles:
    """An `OutputLocation` for new files whose names start with `prefix`."""

    def __init__(self, staging: _FileStaging, prefix: str) -> None:
        self._staging = staging
        self._prefix = prefix

    def create(self, name: str) -> IO[bytes]:
        """Open a new file with the prefix."""
        return self._staging.create(self.path(name))

    def seal(self, file: IO[bytes]) -> None:
        """Make a complete file durable."""
        self._staging.seal(file)

    def path(self, name: str) -> str:
        """Return the file's path with the prefix."""
        return f"{self._prefix}{name}"


@contextmanager
def as_storage_errors(what: str) -> Iterator[None]:
    """Raise operating system errors in the block as `StorageError`."""
    try:
        yield
    except OSError as error:
        raise storage_error(what, error) from error


class BucketStaging(_FileStaging):
    """Stages files for a bucket: writes them to the local disk, then uploads them. Implements
    `SinkStaging`."""

    def __init__(
        self,
        calls: Callable[[], BucketCalls],
        where: str,
        spool: Path,
        token: str,
        stopped: Event | None = None,
    ) -> None:
        """Make a staging area. `spool` is a folder for this one alone, which it creates and
        removes."""
        super().__init__(token, stopped)
        self._calls = calls
        self._where = where
        self._spool = spool

    def _path(self, name: str) -> Path:
        path = self._spool / name
        with as_storage_errors(f"make {path.parent}"):
            path.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        return path

    def seal(self, file: IO[bytes]) -> None:
        """Upload a complete file, unless it is temporary."""
        path = Path(file.name)
        with as_storage_errors(f"write {path}"):
            file.close()
            self._open.remove(file)
            size = path.stat().st_size
        if path.name.startswith("_"):
            return
        name = str(path.relative_to(self._spool))
        # Recorded before the upload, because a failed upload may have created the object.
        self._staged.append(name)
        self._calls().upload(name, path, size, self._stopped)
        with as_storage_errors(f"remove {path}"):
            # Removed immediately, so that the disk contains only the files being written.
            path.unlink()

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Open an object, or a temporary file on the local disk, for reading."""
        if name.startswith("_"):
            with as_storage_errors(f"read {self._spool / name}"):
                yield self._spool / name
            return
        with as_storage_errors(f"read {self._where}/{name}"), self._calls().reader(name) as file:
            yield file

    def remove(self, name: str) -> None:
        """Delete an object or a temporary file that will not be committed."""
        if name.startswith("_"):
            with as_storage_errors(f"remove {self._spool / name}"):
                (self._spool / name).unlink(missing_ok=True)
            return
        self._calls().delete([name])
        if name in self._staged:
            self._staged.remove(name)

    def remove_staged(self) -> None:
        """Delete all objects that no commit will name."""
        self.close()
        self._calls().delete(self._staged)
        self._staged.clear()

    def close(self) -> None:
        """Close files that were not sealed, and remove the local folder."""
        super().close()
        shutil.rmtree(self._spool, ignore_errors=True)

    def remove_orphans(self, upper: Frontier | None) -> None:
        """Delete objects of earlier writers that no commit has named. Names sort by upper, so they
        are listed from the frontier on."""
        for page in self._calls().names(after=f"penstock-{upper or 0:020d}"):
            names = [name for name in page if "/" not in name]
            orphans = [name for name in names if is_orphan(name, upper)]
            if orphans:
                self._calls().delete(orphans)
            # Keys are listed in order; there are no names of ours after this page.
            if len(orphans) < len(page) and page[-1] > "penstock-~":
                return
