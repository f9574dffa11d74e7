"""Encodes state documents: msgpack with a format version and a checksum, compressed.

A document is in a small envelope with its crc32 and the envelope's version. So any damaged byte is
detected, and a program older than checksums sees that it is too old. Documents without an envelope
are older, and are read as they are.

Limits on a document's size count its uncompressed bytes, because that is what each change encodes
and keeps in memory. Older formats lack fields, which have defaults.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from actors.durable.persist.part_lists import without_parts
from actors.durable.persist.shard import FORMAT, TABLES_UPPER, ShardState, TablesUpper, shard_key
from actors.durable.persist.shard_invariants import validate
from actors.runtime.errors import CorruptData, StorageError

SEALED: Final = 2
"""Version of documents with a checksum, whatever the format of their contents."""
PACKED: Final = 3
"""Version of documents that are also compressed: the length, followed by LZ4."""

_LENGTH_BYTES: Final = 4
_LZ4_RATIO_MAX: Final = 255
_LZ4: Final = pa.Codec("lz4_raw")
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError)
"""Errors caused by damaged bytes; the latter where text is expected."""


class _Sealed(msgspec.Struct, frozen=True):
    version: int
    checksum: int
    """crc32 of `document`, compressed or not."""
    document: bytes


_sealed = msgspec.msgpack.Decoder(_Sealed)
_encoder = msgspec.msgpack.Encoder()
_states = msgspec.msgpack.Decoder(ShardState)
_tables = msgspec.msgpack.Decoder(TablesUpper)


def encode(document: ShardState | TablesUpper) -> bytes:
    """Encode a document for the store, without the parts that lists describe."""
    return encode_sized(document)[0]


def encode_sized(document: ShardState | TablesUpper) -> tuple[bytes, int]:
    """Encode a document for the store. Return it with its uncompressed size."""
    if isinstance(document, ShardState):
        document = without_parts(document)
    data = _encoder.encode(document)
    return sealed(data), len(data)


def sealed(data: bytes) -> bytes:
    """Wrap a document in the envelope with its checksum."""
    # Documents repeat field names and columns. LZ4 reduces these to a tenth, in less time than a
    # store takes to write the rest.
    packed = len(data).to_bytes(_LENGTH_BYTES, "little") + _LZ4.compress(data, asbytes=True)
    return _encoder.encode(_Sealed(PACKED, zlib.crc32(packed), packed))


def size_of(data: bytes) -> int:
    """Return the uncompressed size of a stored document, which must have been decoded before."""
    try:
        outer = _sealed.decode(data)
    except _UNDECODABLE:
        return len(data)
    return _length(outer.document) if outer.version == PACKED else len(outer.document)


def _length(data: bytes) -> int:
    return int.from_bytes(data[:_LENGTH_BYTES], "little")


def decode_shard(key: str, data: bytes) -> ShardState:
    """Decode a state. It is whole once its part lists are read (`part_lists.py`). Raises
    `CorruptData`, and `StorageError` if a newer version wrote it."""
    data = unsealed(key, data)
    try:
        state = _states.decode(data)
    except _UNDECODABLE as error:
        raise _unreadable(key, data, error) from None
    _check_format(key, state.version)
    _check_own(key, state)
    validate(state)
    # An older state is converted to the newest format here. A program that does not know that
    # format then refuses it, and never drops fields that it does not know.
    return replace(state, version=FORMAT)


def decode_tables(data: bytes) -> TablesUpper:
    """Decode the tables' shared upper. Raises the same errors as `decode_shard`."""
    data = unsealed(TABLES_UPPER, data)
    try:
        tables = _tables.decode(data)
    except _UNDECODABLE as error:
        raise _unreadable(TABLES_UPPER, data, error) from None
    _check_format(TABLES_UPPER, tables.version)
    return replace(tables, version=FORMAT)


def unsealed(key: str, data: bytes) -> bytes:
    """Verify the envelope and return the document. `key` is for errors. Raises `CorruptData`, and
    `StorageError` if a newer version wrote it."""
    try:
        outer = _sealed.decode(data)
    except _UNDECODABLE:
        # Either older than envelopes, or so damaged that it cannot be decoded as a document either.
        return data
    _check_format(key, outer.version, PACKED)
    found = zlib.crc32(outer.document)
    if found != outer.checksum or outer.version < SEALED:
        raise CorruptData(
            f"document {key}: {len(outer.document)} bytes with crc32 {found:08x}, expected crc32 "
            f"{outer.checksum:08x}; restore the stores from a backup",
            determinate=True,
        )
    return outer.document if outer.version == SEALED else _unpacked(key, outer.document)


def _unpacked(key: str, data: bytes) -> bytes:
    length = _length(data)
    # Checked before a buffer of that length is allocated.
    if length > len(data) * _LZ4_RATIO_MAX:
        raise CorruptData(
            f"document {key}: {len(data)} compressed bytes cannot contain {length}",
            determinate=True,
        )
    try:
        return bytes(_LZ4.decompress(data[_LENGTH_BYTES:], length, asbytes=True))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptData(f"cannot decompress document {key}: {error}", determinate=True) from None


def _check_own(key: str, state: ShardState) -> None:
    """Raise `CorruptData` unless the document and all its parts belong to the shard."""
    strange = sorted(name for name in state.own_keys() if not name.startswith(f"{state.id}/"))
    if shard_key(state.id) != key or strange:
        whose = f"the parts {', '.join(strange[:3])}" if strange else f"shard {state.id}"
        raise CorruptData(
            f"document {key} names {whose}: it is damaged, or belongs to another shard",
            determinate=True,
        )


def _unreadable(key: str, data: bytes, error: Exception) -> StorageError:
    """Return the error for a document that cannot be decoded."""
    try:
        found = msgspec.msgpack.decode(data)
        version = found.get("version") if isinstance(found, dict) else None
    except _UNDECODABLE:
        version = None
    # A newer document may not decode as ours at all; its version says more than the failure.
    if isinstance(version, int):
        try:
            _check_format(key, version, max(FORMAT, SEALED))
        except StorageError as newer:
            return newer
    return CorruptData(f"cannot decode document {key}: {error}", determinate=True)


def _check_format(key: str, version: int, newest: int = FORMAT) -> None:
    if version > newest:
        raise StorageError(
            f"document {key} has format {version}, this version supports up to {newest}: use a "
            "newer version of Penstock",
            determinate=True,
        )
