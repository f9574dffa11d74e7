"""Opens the destination of a copy: a local folder, or a place in a bucket."""

from __future__ import annotations

from pathlib import Path

from actors.connectors.sinks.folders import local_path
from actors.connectors.sinks.formats import check_format
from actors.dataflow.copy_buckets import FILE_BYTES_MAX, BucketCopy, bucket_place
from actors.dataflow.copy_places import (
    BlockingRunner,
    CopyDestination,
    FolderCopy,
    OnThreads,
    OpenPlace,
    place_of,
)
from actors.errors import InvalidUsage
from actors.object_store.bucket_paths import bucket_path, is_bucket
from actors.object_store.bucket_store import BucketStore, Opener
from actors.progress import ObjectId
from actors.protocol.compute import CopyToExport
from actors.settings import Settings


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
