"""Measures the disk space that the running jobs of an engine take: answers, spilled rows,
exchanges."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from actors.engine.spark.engine_start import CHILD_FOLDER, OUT_FOLDER

WATCH_SECONDS: Final = 1.0
PARTS_SUFFIX: Final = ".parts"
"""Suffix of a folder into which an answer is being written."""


def folder_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder. Files that disappear meanwhile are not
    counted."""
    count = 0
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        count += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
    return count


def running_bytes(scratch: Path) -> int:
    """Return the disk space that an engine's running jobs take below its folder. Complete answers,
    which wait for their clients, are not counted."""
    unfinished = scratch.joinpath(OUT_FOLDER).glob(f"*{PARTS_SUFFIX}")
    return sum(map(folder_bytes, (scratch / CHILD_FOLDER, *unfinished)))


def disk_refusal(used: int, bytes_max: int) -> str:
    """Return why the running queries must be canceled; "" if they take no more than `bytes_max`.

    >>> disk_refusal(10, 10)
    ''
    """
    if used <= bytes_max:
        return ""
    return (
        f"the running queries take {used} bytes of disk for answers and spilled rows"
        f" (query_disk_bytes_max = {bytes_max}): request fewer rows, or join and sort fewer"
    )
