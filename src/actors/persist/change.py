"""Types of a change of documents: its inputs, its outcome, and its record of attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from actors.errors import PenstockError, StorageError, UnknownObject
from actors.persist.shard import ShardState, TablesUpper
from actors.progress import ShardId

R = TypeVar("R")

ATTEMPTS_MAX = 8
"""Bound of attempts of one change with an indeterminate failure, and of reading back after it."""


class ShardDocuments(msgspec.Struct, frozen=True):
    """Holds the documents that a change reads; an absent shard is None."""

    shards: Mapping[ShardId, ShardState | None]
    tables: TablesUpper
    uncertain: bool = False
    """True if an earlier attempt of this change failed indeterminately: these documents may contain
    it."""

    def shard(self, shard: ShardId) -> ShardState:
        """Return the state of a shard. Raises `UnknownObject`."""
        state = self.shards[shard]
        if state is None:
            raise UnknownObject(f"no shard {shard}")
        return state


class ChangeOutcome(Generic[R]):
    """Holds the new documents (None: deleted) and the answer to the caller. Without documents
    nothing is written."""

    def __init__(
        self,
        result: R,
        shards: Mapping[ShardId, ShardState | None] | None = None,
        tables: TablesUpper | None = None,
        *,
        floored: bool = False,
    ) -> None:
        """Take the result; `floored`: it is right only while the tables' upper is as it was
        read."""
        self.result = result
        self.shards = dict(shards or {})
        self.tables = tables
        self.floored = floored

    @property
    def writes(self) -> bool:
        """Return whether any document changes."""
        return bool(self.shards) or self.tables is not None


Change = Callable[[ShardDocuments], ChangeOutcome[R]]


class SeqnoMismatch(PenstockError):
    """Internal to this package: an extra key was not at its expected seqno."""


class ChangeAttempts:
    """Counts the failed attempts of one change."""

    def __init__(self, fresh: bool) -> None:
        self.uncertain = False
        """True if an attempt failed indeterminately."""
        self.fresh = fresh
        """True if the documents were read within the call, or no other process writes them."""
        self.failures = 0
        """Attempts that failed indeterminately."""
        self.late = 0
        """Attempts that lost the compare-and-set to another process."""

    def failed(self, names: Sequence[ShardId], error: StorageError) -> None:
        """Count an indeterminate failure. Raises `StorageError` when it was the last attempt."""
        self.failures += 1
        # Indeterminate: any of the attempts may have landed.
        if self.failures == ATTEMPTS_MAX:
            raise StorageError(
                f"gave up after {ATTEMPTS_MAX} attempts to change {', '.join(names)}: the store"
                f" fails: {error}",
                determinate=False,
            ) from error
