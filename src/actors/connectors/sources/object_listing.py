"""Finds the new objects in a bucket, using a position of bounded size. Pure.

Theory of operation. As with files (`file_listing`), objects are ingested in the order of (time of
the last write, hash of the name). The position remembers the last `RECENT_MAX` ingested objects,
each with a tag of its size and version; the greatest forgotten one is the *low mark*. An object is
new if it is not remembered and greater than the low mark.

Objects that are reported and not ingested:
- *changed*: remembered with another tag, so it was written again after it was ingested. It is
  reported once, and remembered with its new time from then on. (If it was written again with the
  same bytes, only its new time is remembered.)
- *late*: at or below the low mark, and never ingested. A store may date an object at the start of a
  long upload.

Invariant: a reader that ingests objects in order never moves the low mark beyond an object that was
listed and is not ingested yet, because no forgotten object is greater than the last ingested one.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from heapq import heappush, heappushpop, nlargest
from typing import Final, NamedTuple

import msgspec

from actors.connectors.sources.file_listing import HASH_BYTES, FoundFile, hash_of
from actors.durable.object_store.bucket_store import ListedObject
from actors.runtime.errors import InvalidUsage
from actors.runtime.threshold_probes import LISTED_FILES

RECENT_MAX: Final = 2_000
PENDING_MAX: Final = 10_000
"""Maximum number of new objects that one scan returns, in order. The next scan finds those after
them."""
TAG_BYTES: Final = 4
_ENTRY: Final = struct.Struct(f">{HASH_BYTES}sq{TAG_BYTES}s")


class _Written(msgspec.Struct, frozen=True):
    """A position in its JSON form."""

    low_ns: int
    low_hash: bytes
    forgotten: int
    objects: str
    exports: tuple[str, ...]


class IngestedObjects(NamedTuple):
    """The objects ingested so far, as far as the position remembers them."""

    low: tuple[int, bytes] = (-(1 << 63), b"")
    """The low mark: the greatest forgotten object."""
    forgotten: int = 0
    """Number of ingested objects at or below the low mark. More objects there means that some are
    late."""
    recent: Mapping[bytes, tuple[int, bytes]] = {}
    """Time of the last write and tag, by hash of the name."""
    exports: tuple[str, ...] = ()
    """The exports that contain the objects."""

    def position(self) -> str:
        """Return the ledger as a source position."""
        entries = b"".join(_ENTRY.pack(name, at, tag) for name, (at, tag) in self.recent.items())
        objects = base64.b64encode(entries).decode()
        written = _Written(*self.low, self.forgotten, objects, self.exports)
        return msgspec.json.encode(written).decode()

    @classmethod
    def of(cls, position: str) -> IngestedObjects:
        """Parse the text of a position. Raises `InvalidUsage`."""
        try:
            found = msgspec.json.decode(position, type=_Written)
            entries = _ENTRY.iter_unpack(base64.b64decode(found.objects, validate=True))
            recent = {name: (at, tag) for name, at, tag in entries}
        except (msgspec.DecodeError, ValueError, struct.error) as error:
            raise InvalidUsage(
                f"invalid position of a source of objects {position[:100]!r}: {error}"
            ) from None
        return cls((found.low_ns, found.low_hash), found.forgotten, recent, found.exports)

    def holding(self, exports: tuple[str, ...]) -> IngestedObjects:
        """Return the same ledger, with these exports."""
        return self._replace(exports=exports)

    def verdict(self, file: FoundFile) -> str:
        """Return ``new``, ``taken`` (ingested), ``touched`` (the same contents with another time),
        ``changed``, or ``old`` (forgotten or late)."""
        known = self.recent.get(file.hash)
        if known is None:
            return "new" if file.key > self.low else "old"
        if known[1] != tag_of(file):
            return "changed"
        return "taken" if known[0] == file.modified_ns else "touched"

    def plus(self, files: Sequence[FoundFile]) -> IngestedObjects:
        """Return the ledger with these objects added."""
        added = {file.hash: (file.modified_ns, tag_of(file)) for file in files}
        recent, low, forgotten = dict(self.recent) | added, self.low, self.forgotten
        if LISTED_FILES.crossed(len(recent) > RECENT_MAX):
            keys = [(at, name) for name, (at, _) in recent.items()]
            kept = {name for _, name in nlargest(RECENT_MAX, keys)}
            low = max(low, *(key for key in keys if key[1] not in kept))
            forgotten += len(recent) - len(kept)
            recent = {name: known for name, known in recent.items() if name in kept}
        return self._replace(low=low, forgotten=forgotten, recent=recent)


def tag_of(file: FoundFile) -> bytes:
    """Return a short hash that differs between two versions of an object."""
    version = file.version
    named = [file.size] if version is None else [file.size, version.e_tag, version.version]
    if version is None or (version.e_tag is None and version.version is None):
        named.append(file.modified_ns)  # the store does not provide versions
    return hashlib.blake2b(msgspec.json.encode(named), digest_size=TAG_BYTES).digest()


class BucketListing(NamedTuple):
    """Result of scanning a bucket."""

    new: tuple[FoundFile, ...]
    """New objects in order, at most `PENDING_MAX`."""
    behind: int
    """Number of new objects beyond `new`."""
    behind_bytes: int
    newest: str
    """Name of the last new object; "" if there is none."""
    changed: tuple[FoundFile, ...]
    late: int
    """Number of late objects."""
    taken: IngestedObjects
    """The ledger, updated by this scan."""


class BucketScan:
    """Sorts the listed objects of one scan, page by page, in bounded memory."""

    def __init__(self, taken: IngestedObjects) -> None:
        self._taken = taken
        self._new: list[_Reversed] = []
        """Heap of the first new objects; its first element is the greatest of them."""
        # Number and bytes of all new objects, and the last one.
        self._count = 0
        self._bytes = 0
        self._last: FoundFile | None = None
        # Number of objects at or below the low mark.
        self._old = 0
        # Objects that were written again, with other or with the same contents.
        self._changed: list[FoundFile] = []
        self._touched: list[FoundFile] = []

    def see(self, files: Iterable[FoundFile]) -> None:
        """Process another page of listed objects."""
        for file in files:
            verdict = self._taken.verdict(file)
            if verdict == "new":
                self._count += 1
                self._bytes += file.size
                if self._last is None or file > self._last:
                    self._last = file
                if len(self._new) < PENDING_MAX:
                    heappush(self._new, _Reversed(file))
                else:
                    heappushpop(self._new, _Reversed(file))
            elif verdict == "changed":
                self._changed.append(file)
            elif verdict == "touched":
                self._touched.append(file)
            elif verdict == "old":
                self._old += 1

    def done(self) -> BucketListing:
        """Return the result after the last page."""
        new = tuple(sorted(each.file for each in self._new))
        # A late object cannot be distinguished from a forgotten one, but they can be counted: at
        # most `forgotten` objects at or below the low mark were ingested. A removed object may hide
        # a late one.
        late = max(0, self._old - self._taken.forgotten)
        taken = self._taken._replace(forgotten=self._old)
        return BucketListing(
            new,
            self._count - len(new),
            self._bytes - sum(file.size for file in new),
            "" if self._last is None else self._last.name,
            tuple(self._changed),
            late,
            taken.plus([*self._changed, *self._touched]),
        )


class _Reversed:
    """A file that sorts in reverse order, for a max-heap."""

    __slots__ = ("file",)

    def __init__(self, file: FoundFile) -> None:
        self.file = file

    def __lt__(self, other: _Reversed) -> bool:
        return self.file.key > other.file.key


def data_objects(
    url: str, prefix: str, pattern: str, recursive: bool, objects: Iterable[ListedObject]
) -> Iterator[FoundFile]:
    """Yield the objects below a prefix that contain data. (The prefix is ``""`` or ends with
    ``/``.)

    They match the pattern, no part of their name starts with ``.`` or ``_``, and they are not
    empty, because tools create empty objects to represent folders. `url` is that of the bucket.
    """
    for each in objects:
        name = each.key[len(prefix) :]
        parts = name.split("/")
        if (
            not each.key.startswith(prefix)
            or not each.size
            or any(part[:1] in ("", ".", "_") for part in parts)
            or (len(parts) > 1 and not recursive)
            or not fnmatchcase(parts[-1], pattern)
        ):
            continue
        yield FoundFile(
            each.modified_ns,
            hash_of(name),
            name,
            f"{url}/{each.key}",
            each.size,
            each.modified_ns,
            each.version,
        )
