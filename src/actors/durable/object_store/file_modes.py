"""Modes of files: what the service keeps is its user's alone, what it writes for others is not.

Theory of operation. The commands run within `private_umask`, so that every file of the process is
private, also those that libraries and Spark make. What is durable is made with explicit modes
besides, since the package may be used in a process with any umask. Copies and sinks write for
others: they undo the umask for each file and folder (`share_file`, `make_shared_folder`), up to the
one that the process was started with.
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
"""The umask that the process was started with, within `private_umask`."""


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
    """Open a file for `open(opener=…)`; a new one is private."""
    return os.open(path, flags, PRIVATE_FILE)


def share_file(descriptor: int, mode: int = 0o666) -> None:
    """Give a new file for others the mode that it would have without `private_umask`."""
    if _outer_umask is not None:
        os.fchmod(descriptor, mode & ~_outer_umask)


def make_shared_folder(path: Path) -> None:
    """Make a folder for others, and those above it, unless they exist. Raises OSError."""
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
    """Log a warning if others may use a folder of ours, as releases before made them."""
    mode = folder.stat().st_mode
    if mode & _OTHERS:
        log.warning(
            "others than its owner may use %s (mode %03o): chmod -R go= %s",
            folder,
            mode & 0o777,
            folder,
        )
