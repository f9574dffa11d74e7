"""The rules of one client's conversation with all workers of a half. Pure.

A conversation checks the client's commands and splits them over the workers, merges the workers'
responses (`partitioned`), and decides which responses to acknowledge. For a client over a socket it
runs in a `ClusterConnection`; for a client in this process it runs in the client itself
(`client.LocalClient`).

Acknowledgements are batched. Each worker allows a limited number of responses and bytes in flight
(`CoalescingOutbox`). Responses that were sent are acknowledged in batches of at most a quarter of
that window. At least three quarters of each window are therefore open or really in flight, and no
worker waits for an acknowledgement that is being withheld here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from actors.channel_adapter import FromClient, FromWorker, ManyFromWorker, ResponsesAcked
from actors.model.protocol.compute import (
    Command,
    CommandBatch,
    CopyToResponse,
    CreateInstance,
    Frontiers,
    Hello,
    InitializationComplete,
    Peek,
    PeekResponse,
    ScheduleDataflow,
    SubscribeResponse,
)
from actors.model.protocol.internal import AnyResponse
from actors.replica.cluster.partitioned import (
    ConnectionLimits,
    PartitionedHalf,
    PartitionedState,
    StoragePartitioned,
)
from actors.replica.cluster.rules import CommandRules, StageRules
from actors.replica.cluster.shortcut import PeekShortcut
from actors.replica.cluster.storage_rules import StorageCommandRules
from actors.replica.compute.index import ClusterPartitions
from actors.replica.compute.outbox import response_bytes
from actors.runtime.errors import PenstockError
from actors.runtime.settings import Settings
from actors.runtime.spans import accept_context, span_below
from actors.runtime.telemetry import CONNECTION_COMMAND, split_context

log = logging.getLogger("penstock.cluster")

BATCH_COMMANDS_MAX: Final = 256
"""Maximum number of commands that are passed on together."""
DIRECT_ANSWERS_MAX: Final = 64
"""Maximum number of peeks answered in one turn of the connection; each takes well under a
millisecond."""


class AcknowledgementWindow:
    """Responses that were sent but not acknowledged yet, by worker.

    `messages_max` and `bytes_max` are the limits of a worker's window.
    """

    def __init__(self, workers: int, messages_max: int, bytes_max: int) -> None:
        self._messages = max(1, messages_max // 4)
        self._bytes = max(1, bytes_max // 4)
        self._left: list[list[int]] = [[] for _ in range(workers)]
        """Serials to acknowledge, by worker."""
        self._left_bytes = [0] * workers
        """Size of these responses, by worker."""
        self._due: set[int] = set()
        """Workers whose responses should be acknowledged now."""

    def note_sent(self, worker: int, serial: int, response: AnyResponse) -> None:
        """Record that a response was sent, or that nothing was sent for it.

        Serial 0 means that no acknowledgement is due.
        """
        # No worker counts a response that the connection itself produced.
        if not serial:
            return
        serials = self._left[worker]
        serials.append(serial)
        self._left_bytes[worker] += response_bytes(response)
        if (
            len(serials) >= self._messages
            or self._left_bytes[worker] >= self._bytes
            # A dataflow or copy waits for the acknowledgement of its batch, so send it immediately.
            or isinstance(response, SubscribeResponse | CopyToResponse)
        ):
            self._due.add(worker)

    def take_due(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the (worker, serials) to acknowledge now, and clear them."""
        if not self._due:
            return []
        left = [(worker, tuple(self._left[worker])) for worker in sorted(self._due)]
        for worker, _ in left:
            self._left[worker] = []
            self._left_bytes[worker] = 0
        self._due.clear()
        return left


PendingResponse: TypeAlias = tuple[Any, int, int]
"""A merged response, with the worker and the serial of the response that completed it."""


class RoutedCommand(NamedTuple):
    """A message for the adapter of worker `part`, and the trace context in which it is sent."""

    part: int
    message: Any
    traceparent: str | None = None


class ClientConversation:
    """The conversation of one client.

    `failed` is the reason why it must end; no command is routed after that.
    """

    def __init__(
        self,
        opening: Sequence[Any],
        rules: StageRules,
        parts: PartitionedHalf[Any, Any],
        acks: AcknowledgementWindow,
    ) -> None:
        """Create the conversation. `opening` contains the client's first commands, starting with
        Hello."""
        self.nonce = opening[0].nonce
        self.failed: PenstockError | None = None
        """Violation that ended the conversation, or None."""
        self._opening = opening
        self._rules: StageRules | None = rules
        self._parts = parts
        self._acks = acks
        self._queue: deque[PendingResponse] = deque()
        """Complete responses that have not been taken yet."""

    @property
    def parts(self) -> range:
        """Return the numbers of the workers to whose adapters commands go."""
        return self._parts.addressed

    @property
    def waiting(self) -> int:
        """Return the number of complete responses that have not been taken yet."""
        return len(self._queue)

    def open(self) -> list[RoutedCommand]:
        """Return the messages for the client's first commands, which it has already given."""
        return self.route(self._opening)

    def trust(self) -> None:
        """Stop checking commands: the client is in this process and checks them itself."""
        self._rules = None

    def route(self, commands: Sequence[Any], *, answer: bool = False) -> list[RoutedCommand]:
        """Return the messages to send to the adapters.

        With `answer`, answer peeks here where possible. If a command breaks a rule, the commands
        before it are routed and `failed` is set.
        """
        routed: list[RoutedCommand] = []
        for each in commands:
            command, traceparent = split_context(each)
            try:
                if self._rules is not None:
                    self._rules.check(command)
            except PenstockError as error:
                self.failed = error
                break
            self._route(command, traceparent, routed, answer=answer)
        self._flush(routed)
        return routed

    def _route(
        self, command: Any, traceparent: str | None, routed: list[RoutedCommand], *, answer: bool
    ) -> None:
        """Add the messages for one command that follows the rules."""
        raise NotImplementedError

    def _flush(self, routed: list[RoutedCommand]) -> None:
        """Add the messages that `_route` has held back."""

    def _merged(self, merged: Any) -> None:
        """Update the state with a merged response."""

    def absorb(self, message: FromWorker | ManyFromWorker) -> None:
        """Merge responses of a worker. Complete ones can then be taken."""
        worker = message.worker
        # This is a late response to a displaced client.
        if message.nonce != self.nonce:
            return
        if isinstance(message, ManyFromWorker):
            responses: Sequence[tuple[int, Any]] = message.responses
        else:
            responses = ((message.serial, message.response),)
        for serial, response in responses:
            try:
                merged = self._merge(worker, response)
            except PenstockError as error:
                log.error("client %s: %s", self.nonce, error)
                self.failed = error
                return
            # Acknowledge immediately, except a response that completes a merged one: that must
            # first be sent.
            if merged is None:
                self._acks.note_sent(worker, serial, response)
            else:
                self._queue.append((merged, worker, serial))

    def _merge(self, worker: int, response: Any) -> Any:
        """Return the merged response that this one completes, or None."""
        parts = self._parts
        merged = parts.absorb(worker, response)
        # Do this before the response is sent: the client may reuse the ids immediately afterwards.
        if self._rules is not None:
            for id in parts.ended:
                self._rules.ended(id)
        parts.ended.clear()
        if merged is not None:
            self._merged(merged)
        return merged

    def take(self, count_max: int) -> list[PendingResponse]:
        """Remove and return up to `count_max` complete responses."""
        return [self._queue.popleft() for _ in range(min(count_max, len(self._queue)))]

    def note_sent(self, sent: Sequence[PendingResponse]) -> None:
        """Record that responses were sent to the client."""
        for response, worker, serial in sent:
            self._acks.note_sent(worker, serial, response)

    def acknowledgements(self) -> list[RoutedCommand]:
        """Return the acknowledgements that are due now."""
        return [
            RoutedCommand(worker, ResponsesAcked(self.nonce, serials))
            for worker, serials in self._acks.take_due()
        ]


class ComputeConversation(ClientConversation):
    """A conversation with the compute half. Commands that arrive together are sent as one
    message."""

    def __init__(
        self,
        hello: Hello,
        instance: CreateInstance,
        workers: int,
        limits: ConnectionLimits,
        partitions: ClusterPartitions,
        settings: Settings,
    ) -> None:
        acks = AcknowledgementWindow(
            workers, settings.responses_in_flight_max, settings.subscribe_inflight_bytes_max
        )
        rules = CommandRules(running_instance(settings), settings)
        super().__init__((hello, instance), rules, PartitionedState(workers, limits), acks)
        self.shortcut = PeekShortcut(partitions, limits)
        self._complete = False
        """True once the client has sent InitializationComplete."""
        self._batch: list[Command] = []
        """Commands to be passed on together. They may accumulate before InitializationComplete,
        when nothing takes effect; after it, each call passes them on."""

    def _route(
        self, command: Any, traceparent: str | None, routed: list[RoutedCommand], *, answer: bool
    ) -> None:
        if isinstance(command, InitializationComplete):
            self._complete = True
        # A traced peek goes to the workers, so that its spans show that path.
        if answer and traceparent is None and self._try_answer(command):
            return
        self.shortcut.note_command(command)
        if isinstance(command, Peek | ScheduleDataflow) and traceparent is not None:
            self._traced(command, traceparent, routed)
        else:
            self._command(command, routed)

    def _flush(self, routed: list[RoutedCommand]) -> None:
        # Commands before one that breaks a rule were accepted, so they are passed on too.
        if self._complete or self.failed is not None:
            self._send_batch(routed)

    def _try_answer(self, peek: Command) -> bool:
        """Answer a peek here if its rows are available, and return whether it was answered."""
        if not isinstance(peek, Peek):
            return False
        # No worker's window bounds these answers, so the queue must.
        if len(self._queue) >= DIRECT_ANSWERS_MAX or not self._complete:
            return False
        rows = self.shortcut.answer(peek)
        if rows is None:
            return False
        self._answered(peek.uuid)
        self._queue.append((PeekResponse(peek.uuid, rows), 0, 0))
        return True

    def _command(
        self, command: Command, routed: list[RoutedCommand], traceparent: str | None = None
    ) -> None:
        for part, split in self._parts.split(command):
            # Hello goes alone: the worker changes its client with it, before it proposes it.
            if isinstance(split, Hello):
                routed.append(RoutedCommand(part, FromClient(self.nonce, split), traceparent))
            else:
                self._batch.append(split)
        if len(self._batch) >= BATCH_COMMANDS_MAX:
            self._send_batch(routed, traceparent)

    def _traced(
        self, command: Peek | ScheduleDataflow, traceparent: str, routed: list[RoutedCommand]
    ) -> None:
        """Pass on a command with a trace context. A sampled command is sent alone, so that its
        spans show only its own path."""
        parent = accept_context(traceparent)
        if parent is None:
            self._command(command, routed)
            return
        if self._complete:
            self._send_batch(routed)
        with span_below(parent, CONNECTION_COMMAND) as opened:
            if opened is not None:
                if isinstance(command, Peek):
                    opened.describe(self.nonce, command.uuid, command.target.id)
                else:
                    opened.describe(self.nonce, "", command.id)
                parent = opened.traceparent
        self._command(command, routed, parent)
        if self._complete:
            self._send_batch(routed, parent)

    def _send_batch(self, routed: list[RoutedCommand], traceparent: str | None = None) -> None:
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        command = batch[0] if len(batch) == 1 else CommandBatch(tuple(batch))
        routed.append(RoutedCommand(0, FromClient(self.nonce, command), traceparent))

    def _merged(self, merged: Any) -> None:
        if isinstance(merged, PeekResponse):
            self._answered(merged.uuid)
        elif isinstance(merged, Frontiers):
            self.shortcut.note(merged)

    def _answered(self, uuid: str) -> None:
        if isinstance(self._rules, CommandRules):
            self._rules.answered(uuid)


class StorageConversation(ClientConversation):
    """A conversation with the storage half: every worker gets every command, one at a time."""

    def __init__(self, hello: Hello, workers: int, settings: Settings) -> None:
        # A window of one: each response is acknowledged as soon as it was sent.
        acks = AcknowledgementWindow(workers, 1, 1)
        super().__init__((hello,), StorageCommandRules(settings), StoragePartitioned(workers), acks)

    def _route(
        self, command: Any, traceparent: str | None, routed: list[RoutedCommand], *, answer: bool
    ) -> None:
        # Commands of this half are not traced, and none of them is a peek.
        routed += (
            RoutedCommand(part, FromClient(self.nonce, split))
            for part, split in self._parts.split(command)
        )


def running_instance(settings: Settings) -> CreateInstance:
    """Return the instance that a cluster with these settings runs."""
    return CreateInstance(settings.workers, expiration_ms=settings.expiration_ms)
