"""Writes the files of one copy through a sink's storage: all of them or none.

Theory of operation. A copy's files are in a folder of their own, ``copy-ID-ATTEMPT``, and are not
visible until ``_manifest.json`` next to that folder names them. They are staged like a sink's
files. The manifest is written last, replacing the one that existed at the start
(`SinkStorage.replace`). In a local folder, a lock admits one copy at a time. In a bucket, one of
several wins; the others fail and remove what they have written. The next copy removes the files of
failed copies.

Folders are below `copy_dir`, after ``..`` and symbolic links are resolved. Paths in buckets are at
or below the URLs in `copy_buckets`. Spark does not treat names that start with ``_`` as data.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import anyio
import msgspec
import pyarrow as pa

from actors.connectors.sinks.formats import OutputFiles, check_format
from actors.connectors.sinks.local_folders import local_path
from actors.connectors.sinks.sink_storage import SinkStorage, open_storage
from actors.durable.object_store.bucket_paths import bucket_path, is_bucket
from actors.durable.object_store.bucket_store import (
    GIVE_UP_S,
    PIECE_BYTES,
    PIECES_MAX,
    FetchedObject,
    ObjectVersion,
    run_to_its_end,
)
from actors.model.plan.copy_manifest import MANIFEST, CopyManifest, decode_manifest, encode_manifest
from actors.model.protocol.compute import CopyToExport
from actors.runtime.errors import InvalidUsage, StorageError
from actors.runtime.kernel import ActorClock, RetryLoop
from actors.runtime.progress import ObjectId
from actors.runtime.settings import Settings

R = TypeVar("R")

log = logging.getLogger("penstock.copies")

LOCK: Final = "_lock"
OWN: Final = re.compile(r"copy-[A-Za-z0-9_-]{1,64}")
"""Pattern of a copy's folder name."""
FILE: Final = re.compile(r"\d{5,}\.(parquet|csv|json)|" + re.escape(MANIFEST))
"""Pattern of the file names in a copy's folder."""
FILE_BYTES_MAX: Final = PIECE_BYTES * PIECES_MAX
"""Maximum `file_bytes_max` in a bucket: 70 GiB."""
COLLECTED_MAX: Final = 10_000
"""Maximum number of files in a failed copy's folder that one copy removes."""


class PublishedCopy(msgspec.Struct, frozen=True):
    """A finished copy: its manifest, and the manifest's path."""

    manifest: CopyManifest
    path: str


class CopyOutput:
    """The output files of one attempt at a copy. `attempt` is unique."""

    def __init__(
        self,
        storage: SinkStorage,
        copy: ObjectId,
        attempt: str,
        *,
        overwrite: bool,
        clock: ActorClock,
        settings: Settings,
    ) -> None:
        self._name = f"copy-{copy}-{attempt}"
        if not copy or OWN.fullmatch(self._name) is None:
            raise InvalidUsage(f"invalid copy id {copy!r}: expected letters, digits, - and _")
        self._storage = storage
        self._copy = copy
        self._overwrite = overwrite
        self._clock = clock
        self._settings = settings
        self._staging = storage.staging(self._name)
        self._files: OutputFiles | None = None
        self._replaced: FetchedObject | None = None
        """Manifest that existed at the start; None if there was none."""
        self._begun = False
        """True once `begin` was called, so that `close` has something to clean up."""

    async def run(self, function: Callable[[], R]) -> R:
        """Run a blocking call that writes.

        If cancelled, the call has `GIVE_UP_S` to finish. The copy's files are removed next, and no
        call may create one then.
        """
        try:
            return await run_to_its_end(
                lambda: self._clock.run_blocking(function), self._storage.stopped
            )
        except TimeoutError:
            text = f"could not write {self._storage.where}: the store did not respond"
            raise StorageError(text, determinate=False) from None

    async def begin(self) -> PublishedCopy | None:
        """Prepare to write, or return the finished copy if this copy was written before.

        Raises `InvalidUsage` if the destination contains another copy, `ResourceBusy` and
        `StorageError`.
        """
        self._begun = True
        return await self.run(self._begin)

    def _begin(self) -> PublishedCopy | None:
        locked = self._storage.lock(LOCK)
        self._replaced = self._storage.read(MANIFEST)
        kept: set[str] = set()
        if self._replaced is not None:
            there = self._published(self._replaced)
            old = there.manifest
            # This or another attempt has finished the copy, and its response was lost.
            if old.copy == self._copy:
                return there
            if not self._overwrite:
                raise InvalidUsage(
                    f"{self._storage.where} already contains a copy of {old.object} at "
                    f"{old.as_of}: choose another folder, or overwrite"
                )
            # A copy that is overwritten stays readable until the new manifest is published.
            kept = {Path(file.path).parts[0] for file in old.files}
        # Remove them now, because a failed copy may have filled the disk. Without a lock, only
        # `publish` knows which copies have failed.
        if locked:
            self._remove(self._of_others(kept))
        self._storage.begin(self._name)
        return None

    def open(self, schema: pa.Schema, export: CopyToExport) -> OutputFiles:
        """Return the writer of the copy's files. Its calls block."""
        place = self._staging.files(f"{self._name}/")
        self._files = OutputFiles(place, schema, export.format, export.file_bytes_max)
        return self._files

    async def publish(self, manifest: CopyManifest) -> PublishedCopy:
        """Publish the manifest and return the one that is in place then: this one, or that of
        another attempt at this copy.

        Raises `InvalidUsage` if another copy was published meanwhile, and `StorageError`.
        """
        # Listed before the manifest is written: a copy that has written files by now expects an
        # older manifest and can never publish, so its files are safe to remove. (If somebody
        # deletes the manifest manually in between, such a copy may publish without its files.)
        try:
            others = await self.run(self._of_others)
        except StorageError as error:
            # The copy itself does not fail; the next one finds these files.
            log.warning("copy %s: could not list the files of failed copies: %s", self._copy, error)
            others = {}
        there = await self._commit(manifest)
        if there.manifest == manifest:
            self._staging.committed()
            # After the manifest: until then, readers may use the copy that is overwritten.
            with anyio.move_on_after(GIVE_UP_S):
                await self._collect(others)
        return there

    async def _commit(self, manifest: CopyManifest) -> PublishedCopy:
        data, unknown = encode_manifest(manifest), False
        retry = RetryLoop(self._settings, failures_max=self._settings.copy_request_retries_max)
        while True:
            try:
                found = await self.run(lambda: self._replace(data))
                break
            except StorageError as error:
                if error.determinate and not unknown:
                    raise
                unknown = True
                if not await retry.pause():
                    # The manifest may still appear, and names the files, so they stay.
                    self._staging.committed()
                    raise StorageError(
                        f"could not write {self._storage.where}/{MANIFEST}: it may or may not "
                        "have been written, and the files stay: check whether it exists",
                        determinate=False,
                    ) from error
        there = None if found is None else self._published(found)
        if there is None or there.manifest.copy != self._copy:
            raise InvalidUsage(
                f"another copy was written to {self._storage.where} at the same time: choose "
                "another destination, or overwrite it"
            )
        return there

    def _replace(self, data: bytes) -> FetchedObject | None:
        """Write the manifest; return the one that is in place then."""
        # The temporary file is in the copy's own folder, which is removed if the process dies.
        own = f"{self._name}/{MANIFEST}"
        if self._storage.replace(MANIFEST, data, self._replaced, own):
            return FetchedObject(data, ObjectVersion(None, None))
        return self._storage.read(MANIFEST)

    def _published(self, found: FetchedObject) -> PublishedCopy:
        path = f"{self._storage.where}/{MANIFEST}"
        return PublishedCopy(decode_manifest(found.data, path), path)

    def _of_others(self, kept: Container[str] = ()) -> dict[str, list[str]]:
        """Return the files of other copies, by folder."""
        found: dict[str, list[str]] = {}
        for folder in self._storage.folders():
            if OWN.fullmatch(folder) and folder != self._name and folder not in kept:
                names = self._storage.files(folder, COLLECTED_MAX)
                # A file that is not from a copy stays, and so does its folder.
                found[folder] = [name for name in names if FILE.fullmatch(name)]
        return found

    def _remove(self, found: Mapping[str, list[str]]) -> None:
        for folder, names in found.items():
            self._storage.remove(folder, names)

    async def _collect(self, others: Mapping[str, list[str]]) -> None:
        """Remove the files of failed and overwritten copies. The next copy removes the rest."""
        try:
            await self.run(lambda: self._remove(others))
        except StorageError as error:
            log.warning(
                "copy %s: could not remove the files of failed copies: %s", self._copy, error
            )

    async def close(self) -> None:
        """Remove the files unless they are published, and release the lock. Raises
        `StorageError`."""
        if not self._begun:
            return
        try:
            with anyio.fail_after(GIVE_UP_S):
                await self._clock.run_blocking(self._close)
        except TimeoutError:
            text = f"could not remove {self._storage.where}/{self._name}: the store did not respond"
            raise StorageError(text, determinate=False) from None

    def _close(self) -> None:
        try:
            if self._files is not None:
                self._files.abandon()
            self._staging.remove_staged()
            self._storage.remove(self._name, ())
        finally:
            self._staging.close()
            self._storage.close()


OpenOutput: TypeAlias = Callable[[CopyToExport, ObjectId], CopyOutput]
"""Opens the output of a copy, in a thread. Raises `InvalidUsage`."""


def check_copy(export: CopyToExport) -> None:
    """Raise `InvalidUsage` for errors that can be detected before the copy starts: columns that the
    format cannot represent, files that are too small or too large, and an unsupported destination.
    """
    check_format(export.schema, export)
    if not is_bucket(export.destination):
        local_path(export.destination)
        return
    bucket_path(export.destination)
    if export.file_bytes_max > FILE_BYTES_MAX:
        raise InvalidUsage(
            f"invalid file_bytes_max {export.file_bytes_max}: the limit in a bucket is "
            f"{FILE_BYTES_MAX}"
        )


def copy_storage(destination: str, settings: Settings, spool: Path) -> SinkStorage:
    """Return the storage of a copy's destination. Raises `InvalidUsage`."""
    folder = settings.copy_dir or str(Path(settings.state_dir) / "copies")
    return open_storage(destination, "copy", folder, settings.copy_buckets, spool, settings)


def output_opener(settings: Settings, clock: ActorClock, spool: Path, attempt: str) -> OpenOutput:
    """Return the function that opens outputs of copies. `attempt` must be unique to this
    attempt."""

    def open_output(export: CopyToExport, copy: ObjectId) -> CopyOutput:
        storage = copy_storage(export.destination, settings, spool)
        overwrite = export.overwrite
        return CopyOutput(
            storage, copy, attempt, overwrite=overwrite, clock=clock, settings=settings
        )

    return open_output
