"""Local folders that clients name, and durable writes into them.

A name is a path or a ``file:`` URL, and must lie below a folder that a setting allows, wherever
``..`` and symbolic links lead. All of it blocks; errors of the operating system are raised as
`StorageError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from actors.durable.object_store.folder_calls import sync_folder, write_file
from actors.runtime.errors import InvalidUsage, storage_error
from actors.runtime.settings import without_user

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def local_path(destination: str) -> str:
    """Return the path of a destination. Raises `InvalidUsage` unless it is a local folder."""
    found = _SCHEME.match(destination)
    scheme = "" if found is None else found[0][:-1].lower()
    path = destination
    if scheme == "file":
        url = urlsplit(destination)
        if url.netloc not in ("", "localhost") or url.query or url.fragment:
            raise InvalidUsage(f"{destination!r}: write a file URL as file:///path")
        path = unquote(url.path)
    elif scheme:
        raise InvalidUsage(
            f"{without_user(destination)!r}: files go to a local folder, given as a path or file: "
            f"URL; {scheme}: is not supported"
        )
    if not path.strip() or "\0" in path:
        raise InvalidUsage(f"{destination!r} names no folder")
    return path


def allowed(destination: str, below: str, what: str, setting: str) -> Path:
    """Return the folder that a destination names, which must be below the folder `below`. Raises
    `InvalidUsage` (`what` is not written elsewhere, as `setting` says). Follows links in the file
    system."""
    place = Path(below)
    try:
        root = place.resolve()
        folder = (place / local_path(destination)).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise InvalidUsage(f"{destination!r} cannot be looked up: {error}") from None
    if root not in folder.parents:
        raise InvalidUsage(
            f"{destination!r} means {folder}: {what} are written into folders below {root} "
            f"only ({setting})"
        )
    return folder


def write_atomically(
    path: Path, data: bytes, temporary: Path, put: Callable[[Path, Path], None]
) -> bool:
    """Write a file whole or not at all, durable on return; `put` (`os.link`, `os.rename`) gives it
    its name. Return False when `put` finds a file of that name: it stays. `temporary` must lie in
    the same file system."""
    try:
        write_file(temporary, data, os.O_TRUNC, shared=True)
        try:
            put(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(f"write {path}", error) from error
    sync_names(path.parent)
    return True


def sync_names(folder: Path) -> None:
    """Make the names in a folder durable."""
    try:
        sync_folder(folder)
    except OSError as error:
        # Indeterminate: the file is there, but may not survive a power cut.
        raise storage_error(f"sync {folder}", error, determinate=False) from error
