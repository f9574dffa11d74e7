"""State documents as stored: msgpack with a format version, checked whenever one is read.

An older format lacks fields, which have defaults. It becomes the newest when it is read: so that
a program that knows no newer one never writes over what it does not know.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from actors.errors import Corrupt, StorageError
from actors.persist.shard import FORMAT, TABLES_UPPER, ShardState, TablesUpper, validate

_encoder = msgspec.msgpack.Encoder()
_states = msgspec.msgpack.Decoder(ShardState)
_tables = msgspec.msgpack.Decoder(TablesUpper)


def encode(document: ShardState | TablesUpper) -> bytes:
    """As stored."""
    return _encoder.encode(document)


def decode_shard(key: str, data: bytes) -> ShardState:
    """A stored state. Raises `Corrupt`, `StorageError` (written by a newer version)."""
    try:
        state = _states.decode(data)
    except msgspec.DecodeError as error:
        raise _unreadable(key, data, error) from None
    _check_format(key, state.version)
    validate(state)
    return replace(state, version=FORMAT)


def decode_tables(data: bytes) -> TablesUpper:
    """The stored shared upper. Raises as `decode_shard` does."""
    try:
        tables = _tables.decode(data)
    except msgspec.DecodeError as error:
        raise _unreadable(TABLES_UPPER, data, error) from None
    _check_format(TABLES_UPPER, tables.version)
    return replace(tables, version=FORMAT)


def _unreadable(key: str, data: bytes, error: Exception) -> StorageError:
    """A newer document may not decode as ours at all: its version says more than the failure."""
    try:
        found = msgspec.msgpack.decode(data)
        version = found.get("version") if isinstance(found, dict) else None
    except msgspec.DecodeError:
        version = None
    if isinstance(version, int):
        try:
            _check_format(key, version)
        except StorageError as newer:
            return newer
    return Corrupt(f"document {key} cannot be decoded: {error}", determinate=True)


def _check_format(key: str, version: int) -> None:
    if version > FORMAT:
        raise StorageError(
            f"document {key} has format {version}, this version reads up to {FORMAT}:"
            " use the newer version of the program",
            determinate=True,
        )
