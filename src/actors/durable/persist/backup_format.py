"""The format of backups of all durable state, and where their parts are.

A *target* is a folder or bucket. It stores any number of backups, which share blobs:

| key in the target | contents |
|---|---|
| ``parts/SHARD/NAME`` | a blob of the service, under its own key; written once, never changed |
| ``backups/NAME/documents`` | all documents at one instant, with their seqnos |
| ``backups/NAME/blobs`` | key, size and crc32 of every blob that those documents name |
| ``backups/NAME/manifest.json`` | written last; without it there is no backup of that name |

The documents at one instant are what a crashed service would leave, because every change of several
documents is one compare-and-set. So a restored service continues as after a crash at that instant.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self, TypeVar
from urllib.parse import quote

import msgspec

from actors.durable.persist.documents import sealed, unsealed
from actors.durable.persist.location import BlobStore, VersionedData, check_name
from actors.durable.persist.store_urls import open_blob
from actors.runtime.errors import CorruptData, InvalidUsage, StorageError
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings, without_user

FORMAT: Final = 1
"""Version of the layout and the manifest."""
DOCUMENTS: Final = "documents"
BLOBS: Final = "blobs"
MANIFEST: Final = "manifest.json"

S = TypeVar("S")


class SavedBlob(msgspec.Struct, frozen=True):
    """A blob: its key, size and checksum."""

    key: str
    bytes: int
    crc32: int


class SavedDocument(msgspec.Struct, frozen=True):
    """A document of the consensus store."""

    key: str
    seqno: int
    data: bytes


class BackupManifest(msgspec.Struct, frozen=True):
    """Describes one backup: when it was taken, and its files."""

    format: int
    name: str
    taken_ms: int
    """Wall clock when the documents were read, in ms since the epoch."""
    documents: SavedBlob
    blobs: SavedBlob
    document_count: int
    blob_count: int
    blob_bytes: int


_manifests = msgspec.json.Decoder(BackupManifest)


def sorted_documents(found: Iterable[tuple[str, VersionedData]]) -> list[SavedDocument]:
    """Return documents in the form and order in which a backup stores them."""
    return [
        SavedDocument(key, head.seqno, head.data)
        for key, head in sorted(found, key=lambda each: each[0])
    ]


def check_bytes(blob: SavedBlob, data: bytes | None, where: str) -> bytes:
    """Return the bytes if they match their description. Raises `CorruptData`."""
    if data is None:
        raise CorruptData(f"{where} lists {blob.key}, which is missing", determinate=True)
    found = zlib.crc32(data)
    if len(data) != blob.bytes or found != blob.crc32:
        raise CorruptData(
            f"{where}: {blob.key} has {len(data)} bytes with crc32 {found:08x}, expected "
            f"{blob.bytes} bytes with {blob.crc32:08x}",
            determinate=True,
        )
    return data


def decode_manifest(key: str, data: bytes) -> BackupManifest:
    """Decode a manifest. Raises `CorruptData`, and `StorageError` for a newer format."""
    try:
        found = _manifests.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptData(f"cannot decode {key}: {error}", determinate=True) from None
    if found.format > FORMAT:
        raise StorageError(
            f"{key} has format {found.format}, this version supports up to {FORMAT}: use a "
            "newer version of Penstock",
            determinate=True,
        )
    return found


class BackupTarget(msgspec.Struct, frozen=True):
    """A folder or bucket that contains backups."""

    parts: BlobStore
    backups: BlobStore
    shown: str
    """Its name for display."""

    @classmethod
    async def open(
        cls, target: str, settings: Settings, clock: ActorClock, *, existing: bool = False
    ) -> Self:
        """Open a target: a path, or the URL of a blob store. With `existing`, it must exist. Raises
        `InvalidUsage` and `StorageError`."""
        url, folder = _url_of(target)
        # Opening would create the folder.
        if existing and folder and not await clock.run_blocking((folder / "backups").is_dir):
            raise InvalidUsage(
                f"{target} contains no backups: give the target that was passed to `backup`"
            )
        # Not exclusive, because another process may write its own blobs there.
        parts = await open_blob(url, settings, clock, exclusive=False, below="parts")
        backups = await open_blob(url, settings, clock, exclusive=False, below="backups")
        return cls(parts, backups, without_user(target))

    async def manifests(self) -> list[BackupManifest]:
        """Return the manifests of all complete backups, oldest first. Raises `StorageError`."""
        found = []
        for info in await self.backups.list_keys():
            if not info.key.endswith(f"/{MANIFEST}"):
                continue
            data = await self.backups.get(info.key)
            if data is not None:  # otherwise another process has removed it meanwhile
                found.append(decode_manifest(f"{self.shown}: {info.key}", data))
        return sorted(found, key=lambda manifest: (manifest.taken_ms, manifest.name))

    async def find(self, name: str | None) -> BackupManifest:
        """Return the manifest of a backup; None stands for the latest. Raises `InvalidUsage`."""
        found = await self.manifests()
        if not found:
            raise InvalidUsage(f"{self.shown} does not contain a complete backup")
        if name is None:
            return found[-1]
        for manifest in found:
            if manifest.name == name:
                return manifest
        names = ", ".join(manifest.name for manifest in found[-8:])
        raise InvalidUsage(f"{self.shown} does not contain backup {name!r} (latest: {names})")

    async def read_documents(self, manifest: BackupManifest) -> list[SavedDocument]:
        """Return a backup's documents. Raises `CorruptData` and `StorageError`."""
        return await self._read(manifest.documents, list[SavedDocument])

    async def read_blobs(self, manifest: BackupManifest) -> list[SavedBlob]:
        """Return the descriptions of a backup's blobs. Raises `CorruptData` and `StorageError`."""
        return await self._read(manifest.blobs, list[SavedBlob])

    async def _read(self, blob: SavedBlob, kind: type[S]) -> S:
        data = check_bytes(blob, await self.backups.get(blob.key), self.shown)
        try:
            return msgspec.msgpack.decode(unsealed(blob.key, data), type=kind)
        except msgspec.DecodeError as error:
            raise CorruptData(f"cannot decode {blob.key}: {error}", determinate=True) from None

    async def finish(
        self,
        name: str,
        taken_ms: int,
        documents: Sequence[SavedDocument],
        blobs: Sequence[SavedBlob],
    ) -> BackupManifest:
        """Complete a backup whose blobs are all in the target; the manifest is written last. Raises
        `StorageError`."""
        check_name(name)
        manifest = BackupManifest(
            format=FORMAT,
            name=name,
            taken_ms=taken_ms,
            documents=await self._write(f"{name}/{DOCUMENTS}", documents),
            blobs=await self._write(f"{name}/{BLOBS}", blobs),
            document_count=len(documents),
            blob_count=len(blobs),
            blob_bytes=sum(blob.bytes for blob in blobs),
        )
        shown = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        await self.backups.set(f"{name}/{MANIFEST}", shown + b"\n")
        return manifest

    async def _write(self, key: str, rows: Sequence[SavedDocument | SavedBlob]) -> SavedBlob:
        data = sealed(msgspec.msgpack.encode(rows))
        await self.backups.set(key, data)
        return SavedBlob(key, len(data), zlib.crc32(data))

    async def keep_newest(self, count: int) -> int:
        """Remove all complete backups except the newest `count`, remains of interrupted ones, and
        blobs that no backup names. Return the number of removed blobs.

        No other backup to the target may be running. Raises `StorageError`.
        """
        manifests = await self.manifests()
        kept = manifests[-count:]
        # Remove manifests first, so that an interruption never leaves a manifest without its blobs.
        for manifest in manifests[:-count]:
            await self.backups.delete(f"{manifest.name}/{MANIFEST}")
        names = {manifest.name for manifest in kept}
        for info in await self.backups.list_keys():
            if info.key.partition("/")[0] not in names:
                await self.backups.delete(info.key)
        needed = {blob.key for manifest in kept for blob in await self.read_blobs(manifest)}
        gone = [info.key for info in await self.parts.list_keys() if info.key not in needed]
        for key in gone:
            await self.parts.delete(key)
        return len(gone)


def _url_of(target: str) -> tuple[str, Path | None]:
    """Return the URL of a target, and its folder if it is named by a path."""
    if "://" in target or target.startswith(("file:", "mem:")):
        return target, None
    folder = Path(target).absolute()
    return f"file:{quote(str(folder))}", folder
