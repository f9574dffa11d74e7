"""State documents as stored: msgpack with a format version and a checksum, checked whenever one is
read.

A document stands within a small one that has its crc32, and the version of that form: a damaged
byte is found, wherever it lies, and a program of before there were checksums sees that it is too
old. What such a program wrote is read as it is.

An older format lacks fields, which have defaults. It becomes the newest when it is read: so that
a program that knows no newer one never writes over what it does not know.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec
from msgspec.structs import replace

from actors.errors import Corrupt, StorageError
from actors.persist.invariants import validate
from actors.persist.part_lists import without_parts
from actors.persist.shard import FORMAT, TABLES_UPPER, ShardState, TablesUpper, shard_key

SEALED: Final = 2
"""Version of documents with a checksum, whatever the format of what they hold."""
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError)
"""What damaged bytes end in; the latter where text is meant."""


class _Sealed(msgspec.Struct, frozen=True):
    version: int
    checksum: int
    """crc32 of the document."""
    document: bytes


_sealed = msgspec.msgpack.Decoder(_Sealed)
_encoder = msgspec.msgpack.Encoder()
_states = msgspec.msgpack.Decoder(ShardState)
_tables = msgspec.msgpack.Decoder(TablesUpper)


def encode(document: ShardState | TablesUpper) -> bytes:
    """As stored: without the parts that lists describe."""
    if isinstance(document, ShardState):
        document = without_parts(document)
    return sealed(_encoder.encode(document))


def sealed(data: bytes) -> bytes:
    """Any document, within the one that has its checksum."""
    return _encoder.encode(_Sealed(SEALED, zlib.crc32(data), data))


def decode_shard(key: str, data: bytes) -> ShardState:
    """A stored state, whole once its lists of parts were read (`part_lists.py`). Raises `Corrupt`,
    `StorageError` (written by a newer version)."""
    data = unsealed(key, data)
    try:
        state = _states.decode(data)
    except _UNDECODABLE as error:
        raise _unreadable(key, data, error) from None
    _check_format(key, state.version)
    _check_own(key, state)
    validate(state)
    return replace(state, version=FORMAT)


def decode_tables(data: bytes) -> TablesUpper:
    """The stored shared upper. Raises as `decode_shard` does."""
    data = unsealed(TABLES_UPPER, data)
    try:
        tables = _tables.decode(data)
    except _UNDECODABLE as error:
        raise _unreadable(TABLES_UPPER, data, error) from None
    _check_format(TABLES_UPPER, tables.version)
    return replace(tables, version=FORMAT)


def unsealed(key: str, data: bytes) -> bytes:
    """What `sealed` was given, found to be what was written; `key` is for errors. What does not
    stand within a document with a checksum is older, or so damaged that it is no document either.
    Raises `Corrupt`, `StorageError` (written by a newer version)."""
    try:
        outer = _sealed.decode(data)
    except _UNDECODABLE:
        return data
    _check_format(key, outer.version, SEALED)
    found = zlib.crc32(outer.document)
    if found != outer.checksum or outer.version < SEALED:
        raise Corrupt(
            f"document {key}: {len(outer.document)} bytes with crc32 {found:08x}, written were"
            f" bytes with {outer.checksum:08x}; restore the stores from a copy",
            determinate=True,
        )
    return outer.document


def _check_own(key: str, state: ShardState) -> None:
    """It is the shard's, and so are its parts."""
    strange = sorted(name for name in state.own_keys() if not name.startswith(f"{state.id}/"))
    if shard_key(state.id) != key or strange:
        whose = f"the parts {', '.join(strange[:3])}" if strange else f"shard {state.id}"
        raise Corrupt(
            f"document {key} names {whose}: it is another shard's, or damaged", determinate=True
        )


def _unreadable(key: str, data: bytes, error: Exception) -> StorageError:
    """A newer document may not decode as ours at all: its version says more than the failure."""
    try:
        found = msgspec.msgpack.decode(data)
        version = found.get("version") if isinstance(found, dict) else None
    except _UNDECODABLE:
        version = None
    if isinstance(version, int):
        try:
            _check_format(key, version, max(FORMAT, SEALED))
        except StorageError as newer:
            return newer
    return Corrupt(f"document {key} cannot be decoded: {error}", determinate=True)


def _check_format(key: str, version: int, newest: int = FORMAT) -> None:
    if version > newest:
        raise StorageError(
            f"document {key} has format {version}, this version reads up to {newest}:"
            " use the newer version of the program",
            determinate=True,
        )
