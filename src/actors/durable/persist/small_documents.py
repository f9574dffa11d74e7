"""Small documents of one service: msgpack, with the format that they are in as a field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from actors.runtime.errors import CorruptData, StateDirectoryError

T = TypeVar("T")


class _Format(msgspec.Struct, frozen=True):
    """The part of a document that every version can read."""

    format: int


def decode_document(key: str, data: bytes, kind: type[T], *, what: str, format: int) -> T:
    """Return a decoded document; `what` names it in errors, and `format` is the newest one known.
    Raises `StateDirectoryError` for a newer format, `CorruptData`."""
    try:
        # The format first: a document of another version is refused by name, not as corrupt.
        found = msgspec.msgpack.decode(data, type=_Format).format
        if found > format:
            raise StateDirectoryError(
                f"{what} has format {found}; this version knows {format}: use the version that "
                "wrote it, or a newer one"
            )
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"consensus key {key!r}: {error}", determinate=True) from None
