"""The control file: all state of an acceptor except the log, in Neon's format.

Format, all integers little-endian: magic u32, version u32, the body, and the CRC-32C of everything
before it, u32. The body is a fixed sequence: ids as 32 hexadecimal digits after a u64 count,
sequences after a u64 count, an option after a byte 0 or 1. Version 9 lacks the membership and the
time of creation, and has the (always empty) peers after the LSNs.

`FileControl` maintains the file: a new one is written next to it and flushed, renamed over it, and
the folder is flushed. So there is a complete file at every moment, and `state` is on disk.
"""

from __future__ import annotations

import struct
from pathlib import Path
from struct import Struct
from typing import Final

import google_crc32c

from actors.runtime.errors import CorruptData, InvalidUsage, StorageError, storage_error
from actors.wal.acceptor_stores import ControlState
from actors.wal.files import FileSystem, OperatingSystemFiles
from actors.wal.messages import ConfigMember, MembershipConfig, TermEntry

CONTROL_NAME: Final = "safekeeper.control"
PARTIAL_NAME: Final = "safekeeper.control.partial"
MAGIC: Final = 0xCAFECEEF
VERSION: Final = 10
VERSION_WITHOUT_MEMBERS: Final = 9
CONTROL_BYTES_MAX: Final = 1 << 24
"""Room for a million entries of history; the files of acceptors are far smaller."""

_U8, _U16, _U32, _U64 = Struct("<B"), Struct("<H"), Struct("<I"), Struct("<Q")
_HEX: Final = frozenset(b"0123456789abcdef")
_LSNS: Final = (
    "timeline_start_lsn",
    "local_start_lsn",
    "commit_lsn",
    "backup_lsn",
    "peer_horizon_lsn",
    "remote_consistent_lsn",
)
_MEMBER_BYTES_MIN: Final = 8 + 8 + 2
_ENTRY_BYTES: Final = 16


def encode(state: ControlState) -> bytes:
    """Return the bytes of the complete file. Raise `InvalidUsage` for a state that the format
    cannot hold."""
    # Use version 9 while there is no membership, so that older acceptors can read the file.
    members = state.membership.generation != 0
    parts = [
        _U32.pack(MAGIC),
        _U32.pack(VERSION if members else VERSION_WITHOUT_MEMBERS),
        _hex(state.tenant),
        _hex(state.timeline),
    ]
    try:
        if members:
            parts += [_U32.pack(state.membership.generation), _members(state.membership.members)]
            new = state.membership.new_members
            parts += [_U8.pack(1), _members(new)] if new else [_U8.pack(0)]
        parts += [_U64.pack(state.term), _U64.pack(len(state.history))]
        parts += [_U64.pack(entry.term) + _U64.pack(entry.lsn) for entry in state.history]
        parts += [_U32.pack(state.pg_version), _U64.pack(state.system_id)]
        parts += [_U32.pack(state.segment_bytes), _hex(state.proposer_id.hex())]
        parts += [_U64.pack(getattr(state, name)) for name in _LSNS]
        if not members:
            parts.append(_U64.pack(0))  # peers
        parts += [_U64.pack(0), _U32.pack(0)]  # no partially uploaded segments; not evicted
        if members:
            seconds, ms = divmod(state.created_at_ms, 1000)
            parts += [_U64.pack(seconds), _U32.pack(ms * 1_000_000)]
    except struct.error as error:  # a number is out of its field's range
        raise InvalidUsage(f"a control file cannot hold this state: {error}: {state}") from None
    body = b"".join(parts)
    return body + _U32.pack(google_crc32c.value(body))


def decode(data: bytes) -> ControlState:
    """Return the state in a file's bytes. Raise `CorruptData`."""
    if len(data) < 12 or _U32.unpack_from(data)[0] != MAGIC:
        raise _corrupt(f"its {len(data)} bytes do not start with {MAGIC:08X}")
    (wanted,) = _U32.unpack_from(data, len(data) - 4)
    if (crc := google_crc32c.value(data[:-4])) != wanted:
        raise _corrupt(f"the CRC of its {len(data)} bytes is {crc:08X}, not {wanted:08X}")
    return _Body(data[:-4]).state()


def _corrupt(why: str) -> CorruptData:
    return CorruptData(
        f"the control file is corrupt: {why}; restore it, or remove the timeline and"
        " let its peers fill it again",
        determinate=True,
    )


def _hex(text: str) -> bytes:
    data = text.encode()
    if len(data) != 32 or not _HEX.issuperset(data):
        raise InvalidUsage(f"invalid id {text!r}: expected 32 lower-case hexadecimal digits")
    return _U64.pack(32) + data


def _members(members: tuple[ConfigMember, ...]) -> bytes:
    parts = [_U64.pack(len(members))]
    for member in members:
        host = member.host.encode()
        parts += [_U64.pack(member.node_id), _U64.pack(len(host)), host, _U16.pack(member.port)]
    return b"".join(parts)


class _Body:
    """Parses what `encode` wrote. Each method takes its bytes or raises `CorruptData`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 4
        """Position of the next byte to read, after the magic."""

    def state(self) -> ControlState:
        version = self._number(_U32)
        if version not in (VERSION, VERSION_WITHOUT_MEMBERS):
            raise _corrupt(f"its version is {version}, not {VERSION} or {VERSION_WITHOUT_MEMBERS}")
        tenant, timeline = self._hex(), self._hex()
        membership = self._membership() if version == VERSION else MembershipConfig()
        term = self._number(_U64)
        history = tuple(
            TermEntry(self._number(_U64), self._number(_U64))
            for _ in range(self._count(_ENTRY_BYTES))
        )
        pg_version, system_id = self._number(_U32), self._number(_U64)
        segment_bytes, proposer = self._number(_U32), self._hex()
        lsns = {name: self._number(_U64) for name in _LSNS}
        if version == VERSION_WITHOUT_MEMBERS:
            self._expect_zero(_U64, "peers")
        self._expect_zero(_U64, "partially uploaded segments")
        self._expect_zero(_U32, "an eviction")
        created = self._created() if version == VERSION else 0
        if self._at != len(self._data):
            raise _corrupt(f"{len(self._data) - self._at} bytes too long")
        return ControlState(
            tenant=tenant,
            timeline=timeline,
            membership=membership,
            term=term,
            history=history,
            pg_version=pg_version,
            system_id=system_id,
            segment_bytes=segment_bytes,
            proposer_id=bytes.fromhex(proposer),
            created_at_ms=created,
            **lsns,
        )

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise _corrupt(f"expected {size} bytes at {self._at} of {len(self._data)}")
        self._at += size
        return self._data[self._at - size : self._at]

    def _number(self, kind: Struct) -> int:
        number: int = kind.unpack(self._take(kind.size))[0]
        return number

    def _count(self, each_bytes_min: int) -> int:
        """Read the length of a sequence, and check that there is room for it."""
        count = self._number(_U64)
        if count * each_bytes_min > len(self._data) - self._at:
            raise _corrupt(f"no room for {count} items at {self._at} of {len(self._data)} bytes")
        return count

    def _hex(self) -> str:
        size, data = self._number(_U64), self._take(32)
        if size != 32 or not _HEX.issuperset(data):
            raise _corrupt(f"invalid id {data!r} of {size} digits")
        return data.decode()

    def _expect_zero(self, kind: Struct, what: str) -> None:
        # The format supports partial uploads and evictions, but this acceptor does not, and
        # ignoring them would be wrong.
        if count := self._number(kind):
            raise _corrupt(f"it has {what} ({count}), which this acceptor does not support")

    def _membership(self) -> MembershipConfig:
        generation, members = self._number(_U32), self._members()
        option = self._number(_U8)
        if option > 1 or not generation:
            raise _corrupt(f"invalid option {option} in generation {generation}")
        return MembershipConfig(generation, members, self._members() if option else ())

    def _members(self) -> tuple[ConfigMember, ...]:
        return tuple(self._member() for _ in range(self._count(_MEMBER_BYTES_MIN)))

    def _member(self) -> ConfigMember:
        node_id, host = self._number(_U64), self._take(self._number(_U64))
        try:
            return ConfigMember(node_id, host.decode(), self._number(_U16))
        except UnicodeDecodeError as error:
            raise _corrupt(f"invalid host name {host!r}: {error}") from None

    def _created(self) -> int:
        seconds, ns = self._number(_U64), self._number(_U32)
        return seconds * 1000 + ns // 1_000_000


class FileControl:
    """The control file of one folder: an `acceptor_stores.ControlStore`."""

    def __init__(self, folder: Path, state: ControlState, files: FileSystem) -> None:
        self._folder = folder
        self._state = state
        """State on disk."""
        self._files = files
        self._broken = ""
        """Error text once the file must be opened again, or ""."""

    @classmethod
    def open(cls, folder: Path, files: FileSystem | None = None) -> FileControl:
        """Open the control file of a folder. Raise `CorruptData`, or `StorageError` if it cannot be
        read."""
        files = files or OperatingSystemFiles()
        place = folder / CONTROL_NAME
        try:
            file = files.open(place)
            try:
                data = file.read_at(0, CONTROL_BYTES_MAX + 1)
                # Its writer may have died before it was on disk. Flush it before anything relies on
                # a state that the next crash could undo.
                file.sync()
            finally:
                file.close()
            files.sync_folder(folder)
        except OSError as error:
            raise storage_error(f"read the control file {place}", error) from error
        if len(data) > CONTROL_BYTES_MAX:
            raise _corrupt(f"more than {CONTROL_BYTES_MAX} bytes")
        return cls(folder, decode(data), files)

    @classmethod
    def create(
        cls, folder: Path, state: ControlState, files: FileSystem | None = None
    ) -> FileControl:
        """Create a control file in a folder that has none. Raise `InvalidUsage` or
        `StorageError`."""
        files = files or OperatingSystemFiles()
        try:
            names = files.names(folder)
        except OSError as error:
            raise storage_error(f"list {folder}", error) from error
        if CONTROL_NAME in names:
            raise InvalidUsage(f"{folder} already has a control file: open it")
        made = cls(folder, state, files)
        made._replace(state)
        return made

    @property
    def state(self) -> ControlState:
        """Return the state on disk."""
        return self._state

    def persist(self, state: ControlState) -> None:
        """Replace the state atomically. It is on disk when this returns.

        Raise `StorageError`. After one that is not `determinate`, the file must be opened again.
        """
        if self._broken:
            raise StorageError(self._broken, determinate=True)
        self._replace(state)

    def _replace(self, state: ControlState) -> None:
        data = encode(state)
        if len(data) > CONTROL_BYTES_MAX:
            raise InvalidUsage(
                f"control file too large: {len(data)} bytes, with {len(state.history)} entries of"
                f" history (limit {CONTROL_BYTES_MAX})"
            )
        partial, renaming = self._folder / PARTIAL_NAME, False
        try:
            file = self._files.create(partial)
            try:
                file.write_at(0, data)
                file.sync()
            finally:
                file.close()
            # Set it before the call, because a rename that fails may still have happened.
            renaming = True
            self._files.rename(partial, self._folder / CONTROL_NAME)
            self._files.sync_folder(self._folder)
        except OSError as error:
            # After a failed rename either file may be on disk. Before it, the old file is intact.
            if renaming:
                self._broken = f"the control file of {self._folder} must be opened again: {error}"
            what = f"replace the control file of {self._folder}"
            raise storage_error(what, error, determinate=not renaming) from error
        self._state = state


def create_timeline(
    folder: Path, state: ControlState, files: FileSystem | None = None
) -> FileControl:
    """Create a timeline's folder with its control file.

    The folder is completed under a temporary name and then renamed, so a crash leaves either all of
    it or a folder ``….temp`` that the next attempt removes. The parent folder must exist. Raise
    `InvalidUsage` if the timeline exists, and `StorageError`.
    """
    files = files or OperatingSystemFiles()
    temporary = folder.with_name(f"{folder.name}.temp")
    renaming = False
    try:
        names = files.names(folder.parent)
        if folder.name in names:
            raise InvalidUsage(f"{folder} already exists: open it")
        # A crash before the rename has left it. No acceptor has ever served it.
        if temporary.name in names:
            for name in files.names(temporary):
                files.remove(temporary / name)
            files.remove_folder(temporary)
        files.make_folder(temporary)
        made = FileControl.create(temporary, state, files)
        renaming = True
        files.rename(temporary, folder)
        files.sync_folder(folder.parent)
    except OSError as error:
        raise storage_error(f"make {folder}", error, determinate=not renaming) from error
    made._folder = folder
    return made
