"""What a change of documents sees, what it wants, and how it has fared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from actors.errors import PenstockError, StorageError, UnknownObject
from actors.persist.shard import ShardState, TablesUpper
from actors.progress import ShardId

R = TypeVar("R")

ATTEMPTS_MAX = 8
"""Of one change whose outcome is open, and of reading it back."""


class Documents(msgspec.Struct, frozen=True):
    """What a change sees; an absent shard is None."""

    shards: Mapping[ShardId, ShardState | None]
    tables: TablesUpper
    uncertain: bool = False
    """Whether an earlier attempt of this change failed in a way that leaves its outcome open: it
    may be in these documents."""

    def shard(self, shard: ShardId) -> ShardState:
        """Raises `UnknownObject`."""
        state = self.shards[shard]
        if state is None:
            raise UnknownObject(f"no shard {shard}")
        return state


class Outcome(Generic[R]):
    """What a change wants: documents that become something else (None: deleted), and the
    answer to its caller. Without documents nothing is written."""

    def __init__(
        self,
        result: R,
        shards: Mapping[ShardId, ShardState | None] | None = None,
        tables: TablesUpper | None = None,
        *,
        floored: bool = False,
    ) -> None:
        """`floored`: it is right only while the tables' upper is what it saw."""
        self.result = result
        self.shards = dict(shards or {})
        self.tables = tables
        self.floored = floored

    @property
    def writes(self) -> bool:
        """Whether anything changes."""
        return bool(self.shards) or self.tables is not None


Change = Callable[[Documents], Outcome[R]]


class Mismatch(PenstockError):
    """Inside this room: an extra key was not at its expected seqno."""


class Tries:
    """How one change has fared so far."""

    def __init__(self, fresh: bool) -> None:
        self.uncertain = False
        """Whether an attempt failed in a way that leaves its outcome open."""
        self.fresh = fresh
        """Whether the documents were read within the call, or nobody else writes them."""
        self.failures = 0
        """Attempts whose outcome was open."""
        self.late = 0
        """Attempts that met what another process had changed."""

    def failed(self, names: Sequence[ShardId], error: StorageError) -> None:
        """One more. Raises `StorageError` when it was the last."""
        self.failures += 1
        if self.failures == ATTEMPTS_MAX:
            raise StorageError(
                f"gave up after {ATTEMPTS_MAX} attempts to change {', '.join(names)}: the store"
                f" fails: {error}",
                determinate=False,
            ) from error
