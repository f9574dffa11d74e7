"""The manifest of a copy: what `copy-to` wrote, and `copy-from` reads again. Pure."""

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
    """One file of a copy; `path` lies below the folder of its manifest."""

    path: str
    rows: int
    bytes: int


class CopyManifest(msgspec.Struct, frozen=True):
    """Lists the files of a whole copy. Paths lie below the manifest's own folder."""

    version: int
    copy: ObjectId
    """Id of this copy and no other."""
    object: str
    as_of: Time
    format: str
    schema: tuple[TableColumn, ...]
    rows: int
    bytes: int
    files: tuple[WrittenFile, ...]


def encode_manifest(manifest: CopyManifest) -> bytes:
    """Return the manifest as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode_manifest(text: bytes, path: str) -> CopyManifest:
    """Return the manifest that `path` holds. Raises `InvalidUsage` for what is none."""
    try:
        return msgspec.json.decode(text, type=CopyManifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidUsage(f"{path} is not the manifest of a copy: choose another folder") from None
