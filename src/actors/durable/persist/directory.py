"""The state directory: used by one process at a time, with a known format.

It contains ``LOCK``, ``FORMAT``, ``consensus.db`` (with SQLite's two companion files), ``blob/``
and ``scratch/``. While a backup is being restored into it, it also contains ``RESTORING``, and no
service may use it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Final

from actors.durable.object_store.file_modes import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    private_opener,
    warn_if_open,
)
from actors.durable.object_store.folder_calls import sync_folder, write_file
from actors.runtime.errors import StateDirectoryError

FORMAT: Final = 1
_LOCK: Final = "LOCK"
_FORMAT: Final = "FORMAT"
_CONSENSUS: Final = "consensus.db"
_RESTORING: Final = "RESTORING"


class StateDirectory:
    """A state directory that this process owns until `close`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        """Descriptor of the locked file; -1 if this process does not hold the lock."""

    @property
    def consensus(self) -> Path:
        """Return the path of the SQLite file."""
        return self.path / _CONSENSUS

    @property
    def blobs(self) -> Path:
        """Return the folder with all blobs."""
        return self.path / "blob"

    @property
    def scratch(self) -> Path:
        """Return the folder for temporary files, which is emptied at each start."""
        return self.path / "scratch" / "persist"

    @classmethod
    def open(cls, path: Path, *, restoring: bool = False) -> StateDirectory:
        """Create the directory if needed, and lock it. Blocking.

        With `restoring`, it must be empty or contain an interrupted restore (`finish_restore`).
        Raises `StateDirectoryError` if it is in use, has a newer format, is damaged or not
        writable.
        """
        path = path.absolute()
        try:
            path.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            warn_if_open(path)
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        except OSError as error:
            raise StateDirectoryError(
                f"cannot use the state directory {path}: {error.strerror}; make it writable for "
                "this user, or choose another one with --state-dir"
            ) from error
        try:
            _lock(path, descriptor)
            directory = cls(path, descriptor)
            directory._check_restore(restoring)
            # Check the format before anything in the directory is touched, so that a newer one is
            # left alone.
            directory._check_format()
            shutil.rmtree(directory.scratch, ignore_errors=True)
            directory.scratch.parent.mkdir(PRIVATE_FOLDER, exist_ok=True)
            directory.scratch.mkdir(PRIVATE_FOLDER, exist_ok=True)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise StateDirectoryError(
                    f"cannot use the state directory {path}: {error}; make it writable for this"
                    " user, or free space"
                ) from error
            raise
        return directory

    def check_whole(self) -> None:
        """Raise `StateDirectoryError` if a restore into the directory has not finished.
        Blocking."""
        if (self.path / _RESTORING).exists():
            raise StateDirectoryError(
                f"a restore into {self.path} has not finished: unless it is still running, run "
                "`penstock restore` again, which resumes where it stopped"
            )

    def _check_restore(self, restoring: bool) -> None:
        if not restoring:
            self.check_whole()
            return
        mark = self.path / _RESTORING
        if mark.exists():
            return
        found = sorted(each.name for each in self.path.iterdir() if each.name != _LOCK)
        if found:
            raise StateDirectoryError(
                f"{self.path} is not empty, it contains {', '.join(found[:4])}: restore into a "
                "folder that does not exist yet"
            )
        write_file(mark, b"", os.O_CREAT)
        sync_folder(self.path)

    def finish_restore(self) -> None:
        """Allow services to use the directory, once the whole backup is in it. Blocking."""
        (self.path / _RESTORING).unlink(missing_ok=True)
        sync_folder(self.path)

    def _check_format(self) -> None:
        file = self.path / _FORMAT
        if not file.exists():
            if self.consensus.exists():
                raise StateDirectoryError(
                    f"the state directory {self.path} has lost its {_FORMAT} file; restore it from "
                    "a backup"
                )
            # Written and synced before any other file, so a directory with data but without a
            # format is damaged.
            temporary = self.path / f"{_FORMAT}.new"
            with open(temporary, "w", opener=private_opener) as written:
                written.write(f"{FORMAT}\n")
                written.flush()
                os.fsync(written.fileno())
            temporary.rename(file)
            sync_folder(self.path)
            sync_folder(self.path.parent)
            return
        text = file.read_text(errors="replace").strip()
        if not text.isdecimal():
            raise StateDirectoryError(
                f"{file} contains {text[:40]!r}, not a number: restore the state directory from a "
                "backup"
            )
        if int(text) > FORMAT:
            raise StateDirectoryError(
                f"the state directory {self.path} has format {text}, this version supports up to "
                f"{FORMAT}: use a newer version of Penstock, or another directory"
            )

    def close(self) -> None:
        """Release the lock. Blocking."""
        # The lock file stays: if it were removed, two processes could lock two files of the same
        # name.
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lock(path: Path, descriptor: int) -> None:
    try:
        # The kernel releases a `flock` however the process ends, so there are no stale locks.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        raise StateDirectoryError(
            f"the state directory {path} is in use by process {owner or 'unknown'}; stop it, or "
            "choose another directory with --state-dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
