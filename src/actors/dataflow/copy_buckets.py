"""Writes copies into buckets: whole or not at all, without a lock and without a clock.

Theory of operation. As in a folder, a copy's files lie below a prefix of their own,
``copy-ID-ATTEMPT/``, and mean nothing until ``_manifest.json`` beside it names them. Each file is
written to local scratch first, uploaded when it is sealed (`settle`), and removed there. The
manifest is written last, by one conditional request. Of copies to one place that run at the same
time one wins, and the others fail and remove what they have written. Files of failed copies are
removed after the manifest of the next successful one.

Places lie at or below the URLs in `copy_buckets`, and never at a bucket's root.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import anyio

from actors.connectors.sinks.formats import check_format
from actors.connectors.sinks.outlets import local_path
from actors.dataflow.copy_places import (
    FILE,
    OWN,
    BlockingRunner,
    CopyDestination,
    FolderCopy,
    OnThreads,
    OpenPlace,
    PublishedCopy,
    place_of,
)
from actors.errors import InvalidUsage, StorageError
from actors.kernel import RetryLoop
from actors.object_store.bucket_paths import BucketPath, allowed_bucket, bucket_path, is_bucket
from actors.object_store.bucket_store import (
    GIVE_UP_S,
    PIECE_BYTES,
    PIECES_MAX,
    BucketStore,
    FetchedObject,
    ObjectVersion,
    Opener,
)
from actors.persist.location import storage_error
from actors.plan.copy_manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    CopyManifest,
    decode_manifest,
    encode_manifest,
)
from actors.progress import ObjectId
from actors.protocol.compute import CopyToExport
from actors.settings import Settings

log = logging.getLogger("penstock.dataflow")

FILE_BYTES_MAX: Final = PIECE_BYTES * PIECES_MAX
"""Largest allowed `file_bytes_max`: 70 GiB."""
COLLECTED_MAX: Final = 10_000
"""Largest number of files of failed copies that one copy removes."""


def bucket_place(destination: str, settings: Settings) -> BucketPath:
    """Return the place that a destination names. Raise `InvalidUsage` if it may not be written."""
    place = bucket_path(destination)
    if not place.path:
        raise InvalidUsage(f"{destination!r} is a whole bucket: name a path in it")
    return allowed_bucket(destination, settings.copy_buckets, "copy_buckets", "write")


class BucketCopy:
    """Files of a copy at one place in a bucket: a `CopyDestination` place.

    `attempt` is unique to this attempt at the copy.
    """

    def __init__(
        self,
        place: BucketPath,
        open_store: Callable[[], BucketStore],
        copy: ObjectId,
        attempt: str,
        *,
        overwrite: bool,
        spool: Path,
        run: BlockingRunner,
        settings: Settings,
    ) -> None:
        self._name = f"copy-{copy}-{attempt}"
        if OWN.fullmatch(self._name) is None:
            raise InvalidUsage(f"{copy!r} does not name a copy: letters, digits, - and _ do")
        self._place = place
        self._open_store = open_store
        self._opened: BucketStore | None = None
        self._copy = copy
        self._overwrite = overwrite
        self._spool = spool
        self._run = run
        self._settings = settings
        self._files: list[IO[bytes]] = []
        self._sealed: list[str] = []
        self._expected: ObjectVersion | None = None
        self._written = False
        """True if `abandon` must remove files from the bucket."""

    async def begin(self) -> PublishedCopy | None:
        """See `CopyDestination`."""
        # On a thread, since opening the store reads certificates.
        self._opened = await self._run(self._open_store)
        found = await self._found()
        if found is None:
            return None
        manifest = decode_manifest(found.data, f"{self._place}/{MANIFEST}")
        # This or another attempt finished the copy before, and its response was lost.
        if manifest.copy == self._copy:
            return PublishedCopy(manifest, self._manifest_path)
        if not self._overwrite:
            raise InvalidUsage(
                f"{self._place} holds a copy of {manifest.object} at {manifest.as_of} already: "
                "choose another place, or overwrite"
            )
        self._expected = found.version
        return None

    def create(self, name: str) -> IO[bytes]:
        """See `FilePlace`."""
        try:
            self._spool.mkdir(parents=True, exist_ok=True)
            file: IO[bytes] = (self._spool / name).open("xb", buffering=0)
        except OSError as error:
            raise storage_error(f"write {self._spool}", error) from error
        self._files.append(file)
        return file

    def seal(self, file: IO[bytes]) -> None:
        """See `FilePlace`."""
        file.close()
        self._files.remove(file)
        self._sealed.append(Path(file.name).name)

    def path(self, name: str) -> str:
        """See `FilePlace`."""
        return f"{self._name}/{name}"

    async def settle(self) -> None:
        """See `CopyDestination`."""
        while self._sealed:
            name = self._sealed[0]
            local, key = self._spool / name, f"{self._place.prefix}/{self.path(name)}"
            size = await self._run(lambda: local.stat().st_size)  # noqa: B023
            # Set before the upload: a failed upload may have left the file in the bucket.
            self._written = True
            if size <= PIECE_BYTES:
                await self._store.put(key, await self._run(local.read_bytes))
            else:
                await self._store.upload(key, local, size)
            await self._run(local.unlink)
            self._sealed.pop(0)

    async def publish(self, manifest: CopyManifest) -> PublishedCopy:
        """See `CopyDestination`."""
        # Listed before the manifest is written: a copy that wrote files by then expects an older
        # version of the manifest and can never publish, so its files are safe to remove. (If
        # somebody deletes the manifest by hand meanwhile, such a copy may publish without its
        # files.)
        left = await self._left_by_others()
        there = await self._write(manifest)
        if there.manifest == manifest:
            self._written = False
            with anyio.move_on_after(GIVE_UP_S):
                await self._collect(left)
        return there

    async def _write(self, manifest: CopyManifest) -> PublishedCopy:
        """Return the manifest that is in place at the end: this one, or another attempt's at this
        copy."""
        data, unknown = encode_manifest(manifest), False
        retry = RetryLoop(self._settings, failures_max=self._settings.copy_request_retries_max)
        while True:
            try:
                # Compare-and-set: the manifest must still have the version seen when the copy
                # began.
                if await self._store.put_if(self._key, data, self._expected):
                    return PublishedCopy(manifest, self._manifest_path)
            except StorageError as error:
                if error.determinate and not unknown:
                    raise
                unknown = True
            try:
                found = await self._found()
                version = None if found is None else found.version
                if found is not None and version != self._expected:
                    there = decode_manifest(found.data, self._manifest_path)
                    if there.copy == self._copy:
                        return PublishedCopy(there, self._manifest_path)
                    raise InvalidUsage(
                        f"another copy was written to {self._place} meanwhile: choose another "
                        "place, or overwrite it"
                    )
            except StorageError:
                pass  # still indeterminate: write again
            if not await retry.pause():
                break
        # The write is indeterminate: a manifest that names the files may still appear, so they
        # stay.
        self._written = self._written and not unknown
        raise StorageError(
            f"could not write {self._manifest_path}"
            + (": it may be there, or come to be, and its files are; look" if unknown else ""),
            determinate=not unknown,
        )

    async def _left_by_others(self) -> list[str]:
        """Return the files of other copies."""
        keys: list[str] = []
        try:
            for name in await self._store.folders(self._place.prefix):
                if OWN.fullmatch(name) and name != self._name and len(keys) < COLLECTED_MAX:
                    folder = f"{self._place.prefix}/{name}"
                    found = await self._store.keys(folder, COLLECTED_MAX - len(keys))
                    keys += [key for key in found if FILE.fullmatch(key.removeprefix(folder + "/"))]
        # The copy does not fail by this: the next copy collects these files.
        except StorageError as error:
            log.warning("copy %s: what others left is not known: %s", self._copy, error)
        return keys

    async def _collect(self, keys: list[str]) -> None:
        """Remove files of failed copies; the next copy to this place removes the rest."""
        try:
            await self._store.delete(keys)
        except StorageError as error:
            log.warning("copy %s: what others left was not removed: %s", self._copy, error)

    async def abandon(self) -> None:
        """See `CopyDestination`."""
        await self._run(self._remove_spool)
        if not self._written:
            return
        try:
            with anyio.fail_after(GIVE_UP_S):
                folder = f"{self._place.prefix}/{self._name}"
                while keys := await self._store.keys(folder, COLLECTED_MAX):
                    await self._store.delete(keys)
        except TimeoutError:
            text = f"could not remove {self._place}/{self._name}: the store did not answer"
            raise StorageError(text, determinate=False) from None

    def _remove_spool(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()
        self._sealed.clear()
        with suppress(OSError):
            shutil.rmtree(self._spool, ignore_errors=True)

    async def _found(self) -> FetchedObject | None:
        return await self._store.get(self._key, MANIFEST_BYTES_MAX)

    @property
    def _store(self) -> BucketStore:
        assert self._opened is not None, "it was begun"
        return self._opened

    @property
    def _key(self) -> str:
        return f"{self._place.prefix}/{MANIFEST}"

    @property
    def _manifest_path(self) -> str:
        return f"{self._place}/{MANIFEST}"


# -- Opens the destination of a copy: a local folder, or a place in a bucket -----------------------


def check_copy(export: CopyToExport) -> None:
    """Raise `InvalidUsage` for errors that can be seen before the copy begins.

    These are columns that the format cannot hold, files too small or too large, and a destination
    of an unknown kind.
    """
    check_format(export.schema, export)
    if not is_bucket(export.destination):
        local_path(export.destination)
        return
    bucket_path(export.destination)
    if export.file_bytes_max > FILE_BYTES_MAX:
        raise InvalidUsage(
            f"file_bytes_max = {export.file_bytes_max}: in a bucket it may be {FILE_BYTES_MAX}"
        )


def destinations(
    settings: Settings,
    run: BlockingRunner,
    spool: Path,
    attempt: str,
    opened: Opener = BucketStore.open,
) -> OpenPlace:
    """Return the function that opens a copy's destination.

    Args:
        settings: Settings with the folders and buckets that may be written.
        run: Runs blocking calls.
        spool: Folder for files before they are uploaded to a bucket.
        attempt: Name that no other attempt at a copy has.
        opened: Opens a bucket's store.
    """

    def open_place(destination: str, id_: ObjectId, overwrite: bool) -> CopyDestination:
        if not is_bucket(destination):
            return OnThreads(
                lambda: FolderCopy(place_of(destination, settings), id_, overwrite=overwrite), run
            )
        place = bucket_place(destination, settings)
        return BucketCopy(
            place,
            lambda: opened(place.kind, place.bucket, settings),
            id_,
            attempt,
            overwrite=overwrite,
            spool=spool,
            run=run,
            settings=settings,
        )

    return open_place
