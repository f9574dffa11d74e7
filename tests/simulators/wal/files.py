"""A file system in memory that crashes, fails and forgets, for `actors.wal.files.FileSystem`.

Each file has the bytes that programs see and those that are on disk; each folder the names that are
seen and those that are on disk. `restart` is a crash of the machine: the data on disk remains
(``keep=True``: all data remains, as when only the process dies; with a `Random`, some of the
unsynced data). Every call counts: `crash_at` raises `MachineCrashed` before the n-th call from now
on, or in the middle of it when it writes; `fail_at` raises an `OSError` there instead, once.

A sync that fails drops the changes that it should have made durable: the next one reports success,
while the bytes can still be read until the restart. Linux does so.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from random import Random

from actors.wal.files import OpenFile


class MachineCrashed(BaseException):
    """The machine died in the middle of a call. A `BaseException`, so that no program catches
    it."""


class _Node:
    """One file. Unsynced changes are kept in order, so that a crash may keep some of them."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.kept = bytearray()
        self.changes: list[tuple[int, bytes | None]] = []
        """(offset, bytes) written, or (length, None) for a truncation."""

    def write(self, offset: int, data: bytes) -> None:
        _apply(self.seen, offset, data)
        self.changes.append((offset, data))

    def cut(self, length: int) -> None:
        _apply(self.seen, length, None)
        self.changes.append((length, None))

    def sync(self) -> None:
        for offset, data in self.changes:
            _apply(self.kept, offset, data)
        self.changes.clear()

    def restart(self, keep: bool, rng: Random | None) -> None:
        if keep:
            self.kept = bytearray(self.seen)
        elif rng is not None:
            for offset, data in self.changes:
                if rng.random() < 0.5:
                    _apply(self.kept, offset, data)
        self.seen, self.changes = bytearray(self.kept), []

    def copied(self) -> _Node:
        made = _Node()
        made.seen, made.kept = bytearray(self.seen), bytearray(self.kept)
        made.changes = list(self.changes)
        return made


def _apply(data: bytearray, offset: int, piece: bytes | None) -> None:
    if piece is None:
        data[offset:] = b""
        data += bytes(offset - len(data))
    else:
        data += bytes(max(0, offset + len(piece) - len(data)))
        data[offset : offset + len(piece)] = piece


class _Open:
    def __init__(self, files: MemoryFiles, node: _Node) -> None:
        self._files = files
        self._node = node

    def write_at(self, offset: int, data: bytes) -> None:
        # An interrupted write leaves half of its bytes.
        self._files._call(lambda: self._node.write(offset, data[: len(data) // 2]))
        self._node.write(offset, data)

    def read_at(self, offset: int, size: int) -> bytes:
        self._files._call()
        return bytes(self._node.seen[offset : offset + size])

    def set_length(self, length: int) -> None:
        self._files._call()
        self._node.cut(length)

    def sync(self) -> None:
        self._files._call(self._node.changes.clear)
        self._node.sync()

    def sync_data(self) -> None:
        self.sync()

    def close(self) -> None:
        """Do nothing: closing is no call, it changes no file."""


class MemoryFiles:
    """Files in memory; see the module's docstring. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[Path, dict[str, _Node | None]] = {Path("/"): {}}
        """Folder → its names and their files (None for a folder)."""
        self._kept: dict[Path, dict[str, _Node | None]] = {Path("/"): {}}
        self._crash_in = self._fail_in = 0
        self._number = 0
        self.calls = 0
        """Number of calls so far."""

    def crash_at(self, call: int) -> None:
        """Crash at the n-th call from now on; 1: the next."""
        self._crash_in = call

    def fail_at(self, call: int, number: int = errno.EIO) -> None:
        """Make the n-th call from now on raise `OSError`; later calls succeed."""
        self._fail_in, self._number = call, number

    def restart(self, *, keep: bool = False, rng: Random | None = None) -> None:
        """Restart the machine; files opened before must not be used any more."""
        self._crash_in = self._fail_in = 0
        if keep:
            self._kept = {folder: dict(names) for folder, names in self._seen.items()}
        reached = self._reached(Path("/"))
        self._kept = {folder: self._kept.get(folder, {}) for folder in reached}
        self._seen = {folder: dict(names) for folder, names in self._kept.items()}
        for node in {id(node): node for node in self._nodes()}.values():
            node.restart(keep, rng)

    def copied(self) -> MemoryFiles:
        """Return another file system with the same contents, seen and kept."""
        made = MemoryFiles()
        nodes: dict[int, _Node] = {}

        def copy(node: _Node | None) -> _Node | None:
            if node is None:
                return None
            return nodes.setdefault(id(node), node.copied())

        made._seen = {f: {n: copy(x) for n, x in names.items()} for f, names in self._seen.items()}
        made._kept = {f: {n: copy(x) for n, x in names.items()} for f, names in self._kept.items()}
        return made

    def create(self, path: Path) -> OpenFile:
        """See `Files`."""
        self._call()
        names = self._folder(path.parent)
        node = names.get(path.name)
        if node is None:
            node = names[path.name] = _Node()
        node.cut(0)
        return _Open(self, node)

    def open(self, path: Path) -> OpenFile:
        """See `Files`."""
        self._call()
        return _Open(self, self._node(path))

    def rename(self, old: Path, new: Path) -> None:
        """See `Files`."""
        self._call()
        names = self._folder(old.parent)
        if old.name not in names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))
        self._folder(new.parent)[new.name] = names.pop(old.name)
        if old in self._seen:
            # Kept names are looked up by the folder's path after a restart: move them along.
            self._seen[new] = self._seen.pop(old)
            self._kept[new] = dict(self._kept.get(old, {}))

    def remove(self, path: Path) -> None:
        """See `Files`."""
        self._call()
        self._node(path)
        del self._folder(path.parent)[path.name]

    def make_folder(self, path: Path) -> None:
        """See `Files`."""
        self._call()
        self._folder(path.parent).setdefault(path.name, None)
        self._seen.setdefault(path, {})

    def remove_folder(self, path: Path) -> None:
        """See `Files`."""
        self._call()
        if self._folder(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        del self._folder(path.parent)[path.name], self._seen[path]

    def names(self, folder: Path) -> list[str]:
        """See `Files`."""
        self._call()
        return list(self._folder(folder))

    def sync_folder(self, folder: Path) -> None:
        """See `Files`."""
        self._call()
        self._kept[folder] = dict(self._folder(folder))

    def _call(self, middle: object = None) -> None:
        self.calls += 1
        self._crash_in, self._fail_in = self._crash_in - 1, self._fail_in - 1
        if self._crash_in == 0 or self._fail_in == 0:
            if callable(middle):
                middle()
            if self._crash_in == 0:
                raise MachineCrashed
            raise OSError(self._number, os.strerror(self._number))

    def _folder(self, path: Path) -> dict[str, _Node | None]:
        if path not in self._seen:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._seen[path]

    def _node(self, path: Path) -> _Node:
        node = self._folder(path.parent).get(path.name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node

    def _nodes(self) -> list[_Node]:
        return [
            node for names in self._kept.values() for node in names.values() if node is not None
        ]

    def _reached(self, folder: Path) -> list[Path]:
        found = [folder]
        for name, node in self._kept.get(folder, {}).items():
            if node is None:
                found += self._reached(folder / name)
        return found
