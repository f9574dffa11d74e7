"""Parses bucket URLs, and checks them against those that a setting allows. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import BUCKET_URL, without_user

BUCKETS: Final = ("s3", "gs", "az")
"""URL schemes of buckets."""
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class BucketPath(msgspec.Struct, frozen=True):
    """A path in a bucket."""

    kind: str
    bucket: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return "/".join((f"{self.kind}://{self.bucket}", *self.path))

    @property
    def prefix(self) -> str:
        """Return the prefix of all keys below the path."""
        return "/".join(self.path)

    def key(self, name: str) -> str:
        """Return the key of the object `name` below the path."""
        return "/".join((*self.path, name))

    def allows(self, other: BucketPath) -> bool:
        """Return whether `other` is the same path, or below it."""
        same = (self.kind, self.bucket) == (other.kind, other.bucket)
        # By path segments: ``a/b`` does not allow ``a/bc``.
        return same and other.path[: len(self.path)] == self.path


def is_bucket(destination: str) -> bool:
    """Return whether a destination is the URL of a bucket."""
    found = _SCHEME.match(destination)
    return found is not None and found[0][:-1].lower() in BUCKETS


def bucket_path(url: str) -> BucketPath:
    """Parse a bucket URL. Raises `InvalidUsage`."""
    found = BUCKET_URL.fullmatch(url)
    if found is None:
        raise InvalidUsage(
            f"invalid bucket URL {without_user(url)!r}: expected s3://bucket/path, "
            "gs://bucket/path or az://container/path, with letters, digits and . _ = @ + , - in "
            "the path"
        )
    path = tuple(each for each in found["path"].split("/") if each)
    return BucketPath(found["kind"], found["bucket"], path)


def allowed_bucket(url: str, urls: Sequence[str], setting: str, verb: str) -> BucketPath:
    """Parse a URL, and check that it is at or below one of `urls`.

    Raises `InvalidUsage`, which names the `setting` and what the service may not do (`verb`).
    """
    # Parsed first, because the pattern excludes ``..`` and escapes.
    place = bucket_path(url)
    if not any(bucket_path(each).allows(place) for each in urls):
        given = ", ".join(urls) or "none"
        raise InvalidUsage(
            f"cannot {verb} {url!r}: allowed are only URLs at or below {given} ({setting})"
        )
    return place
