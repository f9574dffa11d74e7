"""Group commit: sets that arrive during a commit wait, and then share the next transaction.

One task at a time, the leader, takes the lock and commits the queue up to a number and size, its
own set first. Then it wakes the others in its group, and the first of the remaining sets becomes
the leader. Sets are evaluated individually and in the order of arrival. A mismatch of one does not
affect the others, but an error of the transaction fails all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio
import anyio.lowlevel

from actors.durable.persist.location import CompareAndSet, check_ops
from actors.runtime.errors import StorageError
from actors.runtime.kernel.mailbox import LatchedFlag

SETS_MAX = 256
"""Maximum number of sets in one transaction; others wait for the next."""
BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum size of one transaction. A larger set gets a transaction of its own."""


class PendingSet:
    """One caller's set, and its answer."""

    def __init__(self, ops: Sequence[CompareAndSet]) -> None:
        self.ops = ops
        self.answer: bool | StorageError | None = None
        """Outcome of the set; None while it is pending."""
        self.woken = LatchedFlag()
        """Set once there is an answer, or once its caller becomes the leader."""

    @property
    def bytes(self) -> int:
        """Return the total size of its documents."""
        return sum(len(op.data or b"") for op in self.ops)


class ConsensusGroupCommit:
    """The queue in front of one connection.

    `commit` fills in the answers of a group and does not raise. `check` raises if the store is
    closed. Both run under `lock`.
    """

    def __init__(
        self,
        lock: anyio.Lock,
        check: Callable[[], None],
        commit: Callable[[Sequence[PendingSet]], Awaitable[None]],
    ) -> None:
        self._lock = lock
        self._check = check
        self._commit = commit
        self._queue: deque[PendingSet] = deque()
        """Sets that wait for a transaction, in order."""
        self._leader: PendingSet | None = None
        """The first set of the queue or of the group in progress; None if there is neither."""
        self._several = False
        """True if the last group had more than one set."""

    async def set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Queue a set, commit or await its group, and return the answer as
        `ConsensusStore.compare_and_set` does. Raises what `check` raises, `InvalidUsage` and
        `StorageError`."""
        check_ops(ops)
        pending = PendingSet(ops)
        self._queue.append(pending)
        if self._leader is None:
            self._leader = pending
        try:
            if self._leader is not pending:
                await pending.woken.wait()
            if self._leader is pending:
                if self._several:
                    # Writers of the last group are about to come again: let them join this one. A
                    # lone writer does not wait.
                    await anyio.lowlevel.checkpoint()
                async with self._lock:
                    self._check()
                    group = self._gathered()
                    self._several = len(group) > 1
                    await self._lead(group)
        finally:
            # A caller that is cancelled while queued withdraws its set. Later, the set's outcome is
            # unknown.
            if pending.answer is None and pending in self._queue:
                self._queue.remove(pending)
            if self._leader is pending:
                self._appoint()
        if isinstance(pending.answer, StorageError):
            raise pending.answer
        assert pending.answer is not None, "a leader is in its group, a woken caller has an answer"
        return pending.answer

    def _appoint(self) -> None:
        self._leader = self._queue[0] if self._queue else None
        if self._leader is not None:
            self._leader.woken.set()

    def _gathered(self) -> list[PendingSet]:
        group, size = [self._queue.popleft()], 0
        size = group[0].bytes
        while self._queue and len(group) < SETS_MAX:
            size += self._queue[0].bytes
            if size > BYTES_MAX:
                break
            group.append(self._queue.popleft())
        return group

    async def _lead(self, group: Sequence[PendingSet]) -> None:
        # Cancelling the leader must not fail the other sets.
        with anyio.CancelScope(shield=True):
            try:
                await self._commit(group)
            finally:
                for pending in group:
                    if (
                        pending.answer is None
                    ):  # `commit` raised, which is a bug; the leader reports it
                        pending.answer = StorageError(
                            "the outcome of the set is unknown", determinate=False
                        )
                    pending.woken.set()


def fail(group: Sequence[PendingSet], failure: StorageError) -> None:
    """Set the same failure for all, as one object per caller, because raising adds to its
    traceback."""
    for pending in group:
        pending.answer = type(failure)(str(failure), determinate=failure.determinate)
