"""Sets that arrive while a commit is under way wait, and then share the next transaction.

One task at a time, the leader, takes the lock and commits what has gathered: so many sets, and so
many bytes, its own first. Then it wakes all whose sets those were, and the first of the rest leads.
After a group of several the next leader lets all others that can go on come first: so writers that
keep step share a commit, and a lone one does not wait.
Each set is judged by itself and in the order of arrival; a mismatch of one does not touch the
others, but an error of the transaction is everybody's. The leader's commit is shielded: that its
caller was cancelled does not concern the others. A caller that is cancelled while its set still
waits takes it back; later its outcome is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio
import anyio.lowlevel

from actors.errors import StorageError
from actors.kernel.flag import Flag
from actors.persist.location import Cas, check_ops
from actors.threshold_probes import GROUP_COMMIT

BYTES_MAX: Final = 16 * 1024 * 1024
"""Of one transaction; a larger set goes alone."""


class Pending:
    """One caller's set, and its answer."""

    def __init__(self, ops: Sequence[Cas]) -> None:
        self.ops = ops
        self.answer: bool | StorageError | None = None
        self.woken = Flag()
        """Once it is answered, or its caller is to lead."""

    @property
    def bytes(self) -> int:
        """Of its documents."""
        return sum(len(op.data or b"") for op in self.ops)


class GroupCommit:
    """The queue before one connection. `commit` fills in the answers of a group, and does not
    raise; `check` raises when the store is closed. Both run under `lock`."""

    def __init__(
        self,
        lock: anyio.Lock,
        check: Callable[[], None],
        commit: Callable[[Sequence[Pending]], Awaitable[None]],
    ) -> None:
        self._lock = lock
        self._check = check
        self._commit = commit
        self._queue: deque[Pending] = deque()
        self._leader: Pending | None = None
        """The first of the queue, or of the group under way; None: there is neither."""
        self._several = False
        """Whether there were others with the last one."""

    async def set(self, ops: Sequence[Cas]) -> bool:
        """As `Consensus.compare_and_set`. Raises what `check` raises, `InvalidUsage`,
        `StorageError`."""
        check_ops(ops)
        pending = Pending(ops)
        self._queue.append(pending)
        if self._leader is None:
            self._leader = pending
        try:
            if self._leader is not pending:
                await pending.woken.wait()
            if self._leader is pending:
                if self._several:  # the others of the last group are about to come again
                    await anyio.lowlevel.checkpoint()
                async with self._lock:
                    self._check()
                    group = self._gathered()
                    self._several = len(group) > 1
                    await self._lead(group)
        finally:
            if pending.answer is None and pending in self._queue:
                self._queue.remove(pending)
            if self._leader is pending:
                self._appoint()
        if isinstance(pending.answer, StorageError):
            raise pending.answer
        assert pending.answer is not None, "who leads is in its group, who is woken is answered"
        return pending.answer

    def _appoint(self) -> None:
        self._leader = self._queue[0] if self._queue else None
        if self._leader is not None:
            self._leader.woken.set()

    def _gathered(self) -> list[Pending]:
        group, size = [self._queue.popleft()], 0
        size = group[0].bytes
        while self._queue and len(group) < GROUP_COMMIT.limit:
            size += self._queue[0].bytes
            if size > BYTES_MAX:
                break
            group.append(self._queue.popleft())
        GROUP_COMMIT.crossed(bool(self._queue))
        return group

    async def _lead(self, group: Sequence[Pending]) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._commit(group)
            finally:
                for pending in group:
                    if pending.answer is None:  # a bug of `commit`, which goes to the leader
                        pending.answer = StorageError(
                            "the set's outcome is lost", determinate=False
                        )
                    pending.woken.set()


def fail(group: Sequence[Pending], failure: StorageError) -> None:
    """The same failure for all: one object a caller, as each raise adds to its traceback."""
    for pending in group:
        pending.answer = type(failure)(str(failure), determinate=failure.determinate)
