"""Operations that the gateway answers itself, as Spark Connect executes: a stream of responses that
a client may leave and take up again.

The responses are made by one task, at most `UNSENT_BYTES_MAX` ahead of the client. Of a client that
may take the stream up again, responses are kept until it releases them, at most
`KEPT_BYTES_MAX` of those that were sent; an older one cannot be asked for again.
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
"""`ExecutePlanResponse`s without the ids, the last one with `result_complete`."""


class OperationTags(NamedTuple):
    """The names of an operation in its responses."""

    session_id: str
    server_side_session_id: str
    operation_id: str


class _KeptResponse(NamedTuple):
    response_id: str
    data: bytes


class LocalOperation:
    """One operation."""

    def __init__(
        self,
        names: OperationTags,
        answers: Callable[[], AnswerStream],
        *,
        tags: frozenset[str] = frozenset(),
        reattachable: bool = False,
    ) -> None:
        """Take the operation's source of answers; `run` asks it."""
        self.names = names
        self.tags = tags
        self._answers = answers
        self._reattachable = reattachable
        self._kept: deque[_KeptResponse] = deque()
        self._kept_bytes = 0
        self._first = 0
        """Number of the first response that is kept."""
        self._sent = 0
        """Number of the first response that no client was sent."""
        self._dropped_id = ""
        """Id of the last response that is not kept any more."""
        self._changed = anyio.Event()
        self._scope = anyio.CancelScope()
        self._error: PenstockError | None = None
        self._fault: Exception | None = None
        self.ended = False
        """True if no more responses are made."""

    @property
    def is_repeatable(self) -> bool:
        """True if it failed and surely changed nothing, so that its client may begin it again."""
        failed = self.ended and self._error is not None and self._error.determinate
        # What was cancelled may have been carried out by then.
        return failed and not self._scope.cancel_called

    # -- making --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Make the responses, until the last. Raises nothing: `stream` raises the error."""
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
        # A fault of this program fails this operation alone, and not the gateway.
        except Exception as error:  # noqa: BLE001
            self._fault = error
        finally:
            self.ended = True
            self._tell()

    def cancel(self, error: PenstockError | None = None) -> bool:
        """End the operation with an error. Return whether it had not ended yet."""
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
        """Wait while a client has too much to take."""
        while self._unsent_bytes() > UNSENT_BYTES_MAX:
            await self._changed.wait()

    def _unsent_bytes(self) -> int:
        # Few are kept, as each is large: counting them costs less than keeping a second sum right.
        left = self._sent - self._first
        return sum(len(each.data) for number, each in enumerate(self._kept) if number >= left)

    # -- sending -------------------------------------------------------------------------------

    async def stream(self, after: str = "") -> AsyncGenerator[bytes, None]:
        """Yield the responses behind the one with the id `after` (empty: all), then raise the
        operation's error. Raises `SparkCondition` if that one is not known."""
        number = self._number_after(after)
        while True:
            # All that is there without waiting: a fast client is not woken for each response.
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
        """Drop the responses up to and including this one; none if it is not kept."""
        if any(each.response_id == response_id for each in self._kept):
            while self._drop_first() != response_id:
                pass
            self._tell()

    def _trim(self) -> None:
        """Drop sent responses that need not, or must not, be kept."""
        # A client that cannot come back has no use for what it was sent.
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
        """Wake all who wait for a change."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
