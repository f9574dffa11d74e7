"""Decodes small documents of a service: msgpack with a `format` field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from actors.runtime.errors import CorruptData, StateDirectoryError

T = TypeVar("T")


class _Format(msgspec.Struct, frozen=True):
    """The field of a document that every version can read."""

    format: int


def decode_document(key: str, data: bytes, kind: type[T], *, what: str, format: int) -> T:
    """Decode a document. `what` names it in errors, and `format` is the newest format known.

    Raises `StateDirectoryError` for a newer format, and `CorruptData`.
    """
    try:
        # Check the format first, so that a document of another version is not reported as corrupt.
        found = msgspec.msgpack.decode(data, type=_Format).format
        if found > format:
            raise StateDirectoryError(
                f"{what} has format {found}; this version supports up to {format}: use the version "
                "that wrote it, or a newer one"
            )
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"consensus key {key!r}: {error}", determinate=True) from None
