"""Blocking calls that make files, and their names in a local folder, durable."""

from __future__ import annotations

import os
from pathlib import Path

from actors.durable.object_store.file_modes import PRIVATE_FILE, share_file


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable. Raises OSError."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(
    path: Path, data: bytes, flags: int, *, durable: bool = True, shared: bool = False
) -> None:
    """Write a file's bytes, by default durable on return. Its name is not yet durable.

    `flags` are additional flags of `os.open`, such as `os.O_EXCL`. The file is private unless
    `shared`. Raises OSError.
    """
    mode = 0o666 if shared else PRIVATE_FILE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, mode)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        if shared:
            share_file(descriptor)
        view = memoryview(data)
        # A raw file may accept only part of the data, for example on a disk that is almost full.
        while view:
            view = view[file.write(view) :]
        if durable:
            os.fsync(file.fileno())
