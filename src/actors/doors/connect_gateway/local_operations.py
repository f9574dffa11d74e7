"""Operations that the gateway executes itself, by the rules of Spark Connect.

An operation is a stream of responses, which a client may leave and reattach to. A task produces the
responses, at most `UNSENT_BYTES_MAX` ahead of the client. For a client that may reattach, responses
are kept until it releases them. Of those already sent, at most `KEPT_BYTES_MAX` are kept; older
ones can no longer be requested.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, NamedTuple, TypeAlias

import anyio

from actors.doors.connect_gateway.error_status import operation_canceled, position_missing
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.runtime.errors import PenstockError

UNSENT_BYTES_MAX: Final = 8 * 1024 * 1024
KEPT_BYTES_MAX: Final = 16 * 1024 * 1024

AnswerStream: TypeAlias = AsyncGenerator[ProtoMessage, None]
"""Yields `ExecutePlanResponse` messages without ids; the last one has `result_complete`."""


class OperationTags(NamedTuple):
    """The ids that an operation puts into its responses."""

    session_id: str
    server_side_session_id: str
    operation_id: str


class _KeptResponse(NamedTuple):
    response_id: str
    data: bytes


class LocalOperation:
    """One operation: produces, keeps and streams its responses."""

    def __init__(
        self,
        names: OperationTags,
        answers: Callable[[], AnswerStream],
        *,
        tags: frozenset[str] = frozenset(),
        reattachable: bool = False,
    ) -> None:
        """Set up an operation, whose responses `answers` yields once `run` is called."""
        self.names = names
        self.tags = tags
        self._answers = answers
        self._reattachable = reattachable
        self._kept: deque[_KeptResponse] = deque()
        """The responses that may still be sent or requested again."""
        self._kept_bytes = 0
        """The total size of the kept responses."""
        self._first = 0
        """The number of the first kept response."""
        self._sent = 0
        """The number of the first response that was never sent."""
        self._dropped_id = ""
        """The id of the last response that was dropped."""
        self._changed = anyio.Event()
        """Set, and replaced, when responses were added or dropped, or the operation ended."""
        self._scope = anyio.CancelScope()
        self._error: PenstockError | None = None
        """The error with which the operation failed or was canceled."""
        self._fault: Exception | None = None
        """An internal error with which the operation failed."""
        self.ended = False
        """True once all responses were produced."""

    @property
    def is_repeatable(self) -> bool:
        """Return whether the operation failed without having changed anything, so that its client
        may repeat it."""
        failed = self.ended and self._error is not None and self._error.determinate
        # A canceled operation may already have been executed.
        return failed and not self._scope.cancel_called

    # -- producing -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Produce all responses. Never raises: `stream` raises the operation's error."""
        try:
            with self._scope:
                async with aclosing(self._answers()) as answers:
                    async for answer in answers:
                        self._keep(answer)
                        await self._wait_for_room()
            if self._scope.cancelled_caught and self._error is None:
                self._error = operation_canceled()
        except PenstockError as error:
            self._error = error
        # An internal error fails only this operation, not the gateway.
        except Exception as error:  # noqa: BLE001
            self._fault = error
        finally:
            self.ended = True
            self._tell()

    def cancel(self, error: PenstockError | None = None) -> bool:
        """End the operation with an error. Return False if it had already ended."""
        if self.ended:
            return False
        self._error = error or operation_canceled()
        self._scope.cancel()
        return True

    def _keep(self, answer: ProtoMessage) -> None:
        names = self.names
        answer.session_id = names.session_id
        answer.server_side_session_id = names.server_side_session_id
        answer.operation_id = names.operation_id
        answer.response_id = str(uuid.uuid4())
        made = _KeptResponse(answer.response_id, answer.SerializeToString())
        self._kept.append(made)
        self._kept_bytes += len(made.data)
        self._tell()

    async def _wait_for_room(self) -> None:
        """Wait while too many bytes are unsent."""
        while self._unsent_bytes() > UNSENT_BYTES_MAX:
            await self._changed.wait()

    def _unsent_bytes(self) -> int:
        # Few, large responses are kept, so summing their sizes is cheaper than tracking the sum.
        left = self._sent - self._first
        return sum(len(each.data) for number, each in enumerate(self._kept) if number >= left)

    # -- sending -------------------------------------------------------------------------------

    async def stream(self, after: str = "") -> AsyncGenerator[bytes, None]:
        """Yield the responses after the one with the id `after` ("": all), then raise the
        operation's error. Raises `SparkCondition` if that response is unknown."""
        number = self._number_after(after)
        while True:
            # Yield all available responses before waiting, to avoid a wake-up for each of them.
            while number < self._first + len(self._kept):
                if number < self._first:
                    raise position_missing(after)
                response = self._kept[number - self._first]
                number += 1
                self._sent = max(self._sent, number)
                self._trim()
                yield response.data
            if self.ended:
                break
            await self._changed.wait()
        if self._fault is not None:
            raise self._fault
        if self._error is not None:
            raise self._error

    def _number_after(self, after: str) -> int:
        if after in ("", self._dropped_id):
            if not after and self._first:
                raise position_missing("of the first response")
            return self._first
        for number, each in enumerate(self._kept, self._first):
            if each.response_id == after:
                return number + 1
        raise position_missing(after)

    def release_until(self, response_id: str) -> None:
        """Drop the responses up to and including this one, if it is kept."""
        if any(each.response_id == response_id for each in self._kept):
            while self._drop_first() != response_id:
                pass
            self._tell()

    def _trim(self) -> None:
        """Drop sent responses that are not needed, or exceed the limit."""
        # A client that cannot reattach does not need the responses that it was sent.
        bytes_max = KEPT_BYTES_MAX + UNSENT_BYTES_MAX if self._reattachable else 0
        while self._kept and self._first < self._sent and self._kept_bytes > bytes_max:
            self._drop_first()
        self._tell()

    def _drop_first(self) -> str:
        dropped = self._kept.popleft()
        self._kept_bytes -= len(dropped.data)
        self._first += 1
        self._sent = max(self._sent, self._first)
        self._dropped_id = dropped.response_id
        return dropped.response_id

    def _tell(self) -> None:
        """Wake all tasks that wait for a change."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
