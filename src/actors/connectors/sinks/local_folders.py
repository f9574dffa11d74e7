"""Local folders that clients name, and durable writes into them.

A name is a path or a ``file:`` URL. It must be below a folder that a setting allows, after ``..``
and symbolic links are resolved. Everything here blocks. Errors of the operating system are raised
as `StorageError`.
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
            raise InvalidUsage(f"invalid file URL {destination!r}: expected file:///path")
        path = unquote(url.path)
    elif scheme:
        raise InvalidUsage(
            f"invalid destination {without_user(destination)!r}: expected a local path or a file: "
            f"URL; {scheme}: is not supported"
        )
    if not path.strip() or "\0" in path:
        raise InvalidUsage(f"invalid destination {destination!r}: expected a folder")
    return path


def allowed(destination: str, below: str, what: str, setting: str) -> Path:
    """Return the folder that a destination names, with links resolved. It must be below the folder
    `below`.

    `what` names the files, and `setting` the setting that allows the folder, in the `InvalidUsage`
    that is raised otherwise.
    """
    place = Path(below)
    try:
        root = place.resolve()
        folder = (place / local_path(destination)).resolve()
    except (OSError, RuntimeError) as error:  # a cycle of links
        raise InvalidUsage(f"cannot resolve {destination!r}: {error}") from None
    if root not in folder.parents:
        raise InvalidUsage(
            f"{destination!r} resolves to {folder}: {what} may only be written below {root} "
            f"({setting})"
        )
    return folder


def write_atomically(
    path: Path, data: bytes, temporary: Path, put: Callable[[Path, Path], None]
) -> bool:
    """Write a file completely or not at all. It is durable on return.

    `put` (`os.link` or `os.rename`) gives the file its name. Return False if `put` finds an
    existing file, which stays. `temporary` must be in the same file system.
    """
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
    """Make the names of files in a folder durable."""
    try:
        sync_folder(folder)
    except OSError as error:
        # Indeterminate: the file exists, but may not survive a power failure.
        raise storage_error(f"sync {folder}", error, determinate=False) from error
