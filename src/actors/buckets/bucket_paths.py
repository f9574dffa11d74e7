"""What the URL of a bucket means, and which of them a setting allows. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from actors.errors import InvalidUsage
from actors.settings import BUCKET_URL, without_user

BUCKETS: Final = ("s3", "gs", "az")
"""Schemes of URLs that name buckets."""
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class BucketPath(msgspec.Struct, frozen=True):
    """A place in a bucket."""

    kind: str
    bucket: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        return "/".join((f"{self.kind}://{self.bucket}", *self.path))

    @property
    def prefix(self) -> str:
        """As keys begin."""
        return "/".join(self.path)

    def key(self, name: str) -> str:
        """Of what has that name below it."""
        return "/".join((*self.path, name))

    def allows(self, other: BucketPath) -> bool:
        """Whether the other one is the same, or below."""
        same = (self.kind, self.bucket) == (other.kind, other.bucket)
        return same and other.path[: len(self.path)] == self.path


def is_bucket(destination: str) -> bool:
    """Whether a destination is meant to be a bucket."""
    found = _SCHEME.match(destination)
    return found is not None and found[0][:-1].lower() in BUCKETS


def bucket_path(url: str) -> BucketPath:
    """What a URL means. Raises `InvalidUsage`."""
    found = BUCKET_URL.fullmatch(url)
    if found is None:
        raise InvalidUsage(
            f"{without_user(url)!r}: write a bucket as s3://bucket/path, gs://bucket/path or "
            "az://container/path, with letters, digits and . _ = @ + , - in the path"
        )
    path = tuple(each for each in found["path"].split("/") if each)
    return BucketPath(found["kind"], found["bucket"], path)


def allowed_bucket(url: str, urls: Sequence[str], setting: str, verb: str) -> BucketPath:
    """The place that a URL names, at or below one of `urls`. Raises `InvalidUsage` where the
    service may not `verb`, as `setting` says."""
    place = bucket_path(url)
    if not any(bucket_path(each).allows(place) for each in urls):
        given = ", ".join(urls) or "none"
        raise InvalidUsage(
            f"{url!r}: the service may {verb} at and below these buckets only: {given} ({setting})"
        )
    return place
