"""The manifest of a copy, which `copy-to` writes and `copy-from` can read. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from actors.model.plan.schema import TableColumn
from actors.runtime.errors import InvalidUsage
from actors.runtime.progress import ObjectId, Time

MANIFEST: Final = "_manifest.json"
MANIFEST_BYTES_MAX: Final = 64 << 20
VERSION: Final = 1
"""Version of the manifest's format."""


class WrittenFile(msgspec.Struct, frozen=True):
    """One file of a copy. `path` is relative to the folder of the manifest."""

    path: str
    rows: int
    bytes: int


class CopyManifest(msgspec.Struct, frozen=True):
    """Lists the files of a complete copy. Their paths are relative to the folder of the
    manifest."""

    version: int
    copy: ObjectId
    """Unique id of this copy."""
    object: str
    as_of: Time
    format: str
    schema: tuple[TableColumn, ...]
    rows: int
    bytes: int
    files: tuple[WrittenFile, ...]


def encode_manifest(manifest: CopyManifest) -> bytes:
    """Encode the manifest as readable JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode_manifest(text: bytes, path: str) -> CopyManifest:
    """Decode the manifest read from `path`. Raises `InvalidUsage` if it is not a manifest."""
    try:
        return msgspec.json.decode(text, type=CopyManifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidUsage(f"{path} is not the manifest of a copy: choose another folder") from None
