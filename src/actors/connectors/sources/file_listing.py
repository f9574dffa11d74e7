"""Finds the new files of a folder, using a position of bounded size.

Theory of operation. Files are ingested in the order of (modification time, hash of the name). The
position remembers the last `RECENT_MAX` ingested files; the greatest forgotten one is the *low
mark*. A file is new if it is not remembered and greater than the low mark. So a file may appear
with an older time than ingested ones, as long as fewer than `RECENT_MAX` greater files were
ingested; and a time in the future does not affect other files.

Files that are reported and not ingested:
- *late*: at or below the low mark and not remembered, but its inode changed after the last scan.
  (It was renamed into the folder with an old time, or only its owner or mode changed.)
- *changed*: remembered with another time, so it was written again after it was ingested. It is
  reported once, and remembered with its new time from then on.

A forgotten file that is written again cannot be distinguished from a new one. Symbolic links are
followed to files below the allowed folders, but not to folders.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from heapq import nlargest
from typing import Final, NamedTuple

import msgspec

from actors.durable.object_store.bucket_store import ObjectVersion
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import LISTED_FILES

RECENT_MAX: Final = 2_000
HASH_BYTES: Final = 12
_ENTRY: Final = struct.Struct(f">{HASH_BYTES}sq")


class FoundFile(NamedTuple):
    """A file as it was listed. Files are ordered by their first two fields."""

    modified_ns: int
    hash: bytes
    """Hash of the name."""
    name: str
    """Path below the folder."""
    path: str
    """Path with links resolved; the URL for an object in a bucket."""
    size: int
    """Size in bytes."""
    inode_changed_ns: int
    """Time of the inode's last change, which includes renames and changes of the owner."""
    version: ObjectVersion | None = None
    """Version of an object in a bucket, when it was listed."""

    @property
    def key(self) -> tuple[int, bytes]:
        """Return the sort key: modification time and hash of the name."""
        return self.modified_ns, self.hash


class _Written(msgspec.Struct, frozen=True):
    """A position in its JSON form."""

    low_ns: int
    low_hash: bytes
    looked_ns: int
    recent: str
    exports: tuple[str, ...]


class IngestedFiles(NamedTuple):
    """The files ingested so far, as far as the position remembers them."""

    low: tuple[int, bytes] = (-(1 << 63), b"")
    """The low mark: the greatest forgotten file."""
    looked_ns: int = 0
    """Newest inode change seen by the last scan of the folder."""
    recent: Mapping[bytes, int] = {}
    """Modification time by hash of the name."""
    exports: tuple[str, ...] = ()
    """The exports that contain the files."""

    def position(self) -> str:
        """Return the ledger as a source position."""
        entries = b"".join(_ENTRY.pack(name, at) for name, at in self.recent.items())
        recent = base64.b64encode(entries).decode()
        written = _Written(*self.low, self.looked_ns, recent, self.exports)
        return msgspec.json.encode(written).decode()

    @classmethod
    def of(cls, position: str) -> IngestedFiles:
        """Parse the text of a position. Raises `InvalidUsage`."""
        try:
            found = msgspec.json.decode(position, type=_Written)
            entries = dict(_ENTRY.iter_unpack(base64.b64decode(found.recent, validate=True)))
        except (msgspec.DecodeError, ValueError, struct.error) as error:
            raise InvalidUsage(
                f"invalid position of a source of files {position[:100]!r}: {error}"
            ) from None
        return cls((found.low_ns, found.low_hash), found.looked_ns, entries, found.exports)

    def holding(self, exports: tuple[str, ...]) -> IngestedFiles:
        """Return the same ledger, with these exports."""
        return self._replace(exports=exports)

    def verdict(self, file: FoundFile, looked_ns: int) -> str:
        """Return ``new``, ``taken`` (ingested), ``late`` or ``changed``.

        `looked_ns` is the newest inode change seen by the last scan.
        """
        known = self.recent.get(file.hash)
        if known is not None:
            return "taken" if known == file.modified_ns else "changed"
        if file.key > self.low:
            return "new"
        return "late" if file.inode_changed_ns > looked_ns else "taken"

    def plus(self, files: Sequence[FoundFile], looked_ns: int | None = None) -> IngestedFiles:
        """Return the ledger with these files added.

        `looked_ns` is that of the scan that found them; None keeps the current one.
        """
        looked_ns = self.looked_ns if looked_ns is None else looked_ns
        recent = dict(self.recent) | {file.hash: file.modified_ns for file in files}
        low = self.low
        if LISTED_FILES.crossed(len(recent) > RECENT_MAX):
            keys = [(at, name) for name, at in recent.items()]
            kept = nlargest(RECENT_MAX, keys)
            # The low mark never decreases: otherwise a file at or below it would be ingested twice.
            low = max(low, *(set(keys) - set(kept)))
            recent = {name: at for at, name in kept}
        return self._replace(low=low, looked_ns=looked_ns, recent=recent)


class FolderScan(NamedTuple):
    """Result of scanning the folder."""

    new: tuple[FoundFile, ...]
    """New files, in order."""
    """New files, in order."""
    looked_ns: int
    late: tuple[str, ...] = ()
    changed: tuple[FoundFile, ...] = ()
    refused: tuple[str, ...] = ()
    """Links to files outside the allowed folders."""


class ListingScope(NamedTuple):
    """A folder to scan, the folders that links may lead to, and the pattern of file names."""

    folder: str
    roots: tuple[str, ...]
    pattern: str = "*"
    recursive: bool = False


def allowed_roots(settings: Settings) -> tuple[str, ...]:
    """Return the folders below which files may be read, with links resolved."""
    named = settings.source_dirs.split(os.pathsep)
    return tuple(os.path.realpath(root) for root in named if root.strip())


def allowed(path: str, roots: Iterable[str]) -> str:
    """Return the path with links resolved. Raises `InvalidUsage` if it is not below an allowed
    folder."""
    real = os.path.realpath(path)
    if not is_below(real, roots):
        raise InvalidUsage(
            f"{path} is not below a folder that may be read (source_dirs, with links resolved)"
        )
    return real


def is_below(real: str, roots: Iterable[str]) -> bool:
    """Return whether a path without links is one of the folders or below one."""
    return any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots)


def hash_of(name: str) -> bytes:
    """Return the hash under which a name is remembered."""
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=HASH_BYTES).digest()


def scan(place: ListingScope, taken: IngestedFiles, looked_ns: int) -> FolderScan:
    """List the folder and sort its files by verdict. Blocking; raises `OSError`."""
    new: list[FoundFile] = []
    changed: list[FoundFile] = []
    late: list[str] = []
    refused: list[str] = []
    newest = looked_ns
    for file in listed(place, refused):
        newest = max(newest, file.inode_changed_ns)
        verdict = taken.verdict(file, looked_ns)
        if verdict == "new":
            new.append(file)
        elif verdict == "changed":
            changed.append(file)
        elif verdict == "late":
            late.append(file.name)
    return FolderScan(tuple(sorted(new)), newest, tuple(late), tuple(changed), tuple(refused))


def listed(place: ListingScope, refused: list[str]) -> Iterator[FoundFile]:
    """Yield the files of the folder that match the pattern, and add links that may not be followed
    to `refused`.

    Names that start with ``.`` or ``_`` are skipped. Blocking.
    """
    folders = [("", place.folder)]
    while folders:
        below, folder = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name[0] in "._":
                    continue
                name = below + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if place.recursive:
                        folders.append((name + "/", entry.path))
                elif fnmatchcase(entry.name, place.pattern):
                    found = _found(name, entry, place.roots, refused)
                    if found is not None:
                        yield found


def _found(
    name: str, entry: os.DirEntry[str], roots: Iterable[str], refused: list[str]
) -> FoundFile | None:
    path = entry.path
    if entry.is_symlink():
        # The resolved path is checked, and exactly that path is read later.
        path = os.path.realpath(path)
        if not is_below(path, roots):
            refused.append(name)
            return None
    try:
        seen = os.stat(path)
    except FileNotFoundError:
        return None  # it was removed since the listing, or the link is dangling
    if not stat.S_ISREG(seen.st_mode):
        return None
    return FoundFile(seen.st_mtime_ns, hash_of(name), name, path, seen.st_size, seen.st_ctime_ns)


def unchanged(files: Iterable[FoundFile]) -> str | None:
    """Return the path of a file that changed since its listing; None if there is none. Blocking."""
    for file in files:
        try:
            seen = os.stat(file.path)
        except OSError:
            return file.path
        if (seen.st_mtime_ns, seen.st_size) != (file.modified_ns, file.size):
            return file.path
    return None


def first_batch(files: Sequence[FoundFile], files_max: int, bytes_max: int) -> Sequence[FoundFile]:
    """Return as many files as fit the limits, from the first one on, but at least one."""
    count = size = 0
    for file in files[:files_max]:
        size += file.size
        if count and size > bytes_max:
            break
        count += 1
    return files[:count]
