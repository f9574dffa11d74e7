"""What lies in a folder that somebody else may be changing."""

from __future__ import annotations

import os
from pathlib import Path


def files_below(folder: Path, suffix: str = "") -> list[Path]:
    """The files at any depth whose names end so, sorted; none, where there is no folder.

    For a folder that a running service writes to: `Path.rglob` raises if a folder goes while it
    looks there, `os.walk` passes over it.
    """
    found = (
        Path(place) / name
        for place, _, names in os.walk(folder)
        for name in names
        if name.endswith(suffix)
    )
    return sorted(found)
