"""Opens the place that a path or URL names: a folder, or a place in a bucket."""

from __future__ import annotations

from actors.connectors.sources.bucket_place import BucketPlace
from actors.connectors.sources.file_places import FilesPlace, FolderPlace
from actors.connectors.sources.surroundings import ConnectorContext
from actors.object_store.bucket_paths import is_bucket
from actors.object_store.bucket_store import BucketStore, Opener


def open_place(
    path: str,
    pattern: str,
    recursive: bool,
    around: ConnectorContext,
    opened: Opener = BucketStore.open,
) -> FilesPlace:
    """Return the place. Raises `InvalidUsage` for a bucket that may not be read; a folder is looked
    up when it is first used."""
    if is_bucket(path):
        return BucketPlace(path, pattern, recursive, around, opened)
    return FolderPlace(path, pattern, recursive, around)
