"""File modes: the service's own files are private to its user, files for others are not.

Theory of operation. The commands run inside `private_umask`, so every file of the process is
private, including those that libraries and Spark create. Durable files are also created with
explicit modes, because the package may be used in a process with any umask. Copies and sinks write
for others: for each file and folder they restore the permissions that the process's original umask
allows (`share_file`, `make_shared_folder`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

PRIVATE_FILE: Final = 0o600
PRIVATE_FOLDER: Final = 0o700
_OTHERS: Final = 0o077
_outer_umask: int | None = None
"""The umask with which the process was started, inside `private_umask`; None outside."""


@contextmanager
def private_umask() -> Iterator[None]:
    """Make all files of this process private while the block runs."""
    global _outer_umask
    before = os.umask(_OTHERS)
    outer, _outer_umask = _outer_umask, before if _outer_umask is None else _outer_umask
    try:
        yield
    finally:
        _outer_umask = outer
        os.umask(before)


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open(opener=…)`. A new file is private."""
    return os.open(path, flags, PRIVATE_FILE)


def share_file(descriptor: int, mode: int = 0o666) -> None:
    """Give a new file for others the mode that it would have without `private_umask`."""
    if _outer_umask is not None:
        os.fchmod(descriptor, mode & ~_outer_umask)


def make_shared_folder(path: Path) -> None:
    """Create a folder for others, and its parents, unless they exist. Raises OSError."""
    try:
        path.mkdir()
    except FileNotFoundError:
        make_shared_folder(path.parent)
        path.mkdir(exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    if _outer_umask is not None:
        path.chmod(0o777 & ~_outer_umask)


def warn_if_open(folder: Path) -> None:
    """Log a warning if others may access a folder of ours, as earlier releases created them."""
    mode = folder.stat().st_mode
    if mode & _OTHERS:
        log.warning(
            "other users may access %s (mode %03o): chmod -R go= %s",
            folder,
            mode & 0o777,
            folder,
        )
