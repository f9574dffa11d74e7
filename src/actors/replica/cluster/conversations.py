"""The rules of one client's conversation with all workers of a half. Pure.

A conversation checks the client's commands and splits them over the workers, merges their responses
(`partitioned`), and says which responses are to be acknowledged. It runs in a `ClusterConnection`
for a client over a socket, and in the client itself if that is in this process
(`client.LocalClient`).

Acknowledgements are batched. Each worker allows only so many responses, and so many bytes, in
flight (`CoalescingOutbox`). Responses that have left are acknowledged in batches of at most a
quarter of that window. So at least three quarters of each window are open or truly in flight: no
worker waits for an acknowledgement that is withheld here.
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

LOT_MAX: Final = 256
"""Limit of commands that are passed on together."""
AT_ONCE_MAX: Final = 64
"""Limit of peeks that are answered in one turn of the connection; each takes far below a
millisecond."""


class AcknowledgementWindow:
    """Responses that have left and are not acknowledged yet, by worker. `messages_max` and
    `bytes_max` are those of a worker's window."""

    def __init__(self, workers: int, messages_max: int, bytes_max: int) -> None:
        self._messages = max(1, messages_max // 4)
        self._bytes = max(1, bytes_max // 4)
        self._left: list[list[int]] = [[] for _ in range(workers)]
        self._left_bytes = [0] * workers
        self._due: set[int] = set()

    def left(self, worker: int, serial: int, response: AnyResponse) -> None:
        """Note that a response has left, or that nothing was sent for it. Serial 0: no
        acknowledgement is due."""
        # No worker counts a response that the connection answered itself.
        if not serial:
            return
        serials = self._left[worker]
        serials.append(serial)
        self._left_bytes[worker] += response_bytes(response)
        if (
            len(serials) >= self._messages
            or self._left_bytes[worker] >= self._bytes
            # A dataflow or copy waits for the acknowledgement of its batch: it is sent at once.
            or isinstance(response, SubscribeResponse | CopyToResponse)
        ):
            self._due.add(worker)

    def due(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return and forget the (worker, serials) to be acknowledged now."""
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
    """A message for the adapter of worker `part`, and the trace context that it travels in."""

    part: int
    message: Any
    traceparent: str | None = None


class ClientConversation:
    """One client's conversation. `failed` is the reason for which it must end; nothing is routed
    after it."""

    def __init__(
        self,
        opening: Sequence[Any],
        rules: StageRules,
        parts: PartitionedHalf[Any, Any],
        acks: AcknowledgementWindow,
    ) -> None:
        """`opening`: the client's first commands, of which the Hello is the first."""
        self.nonce = opening[0].nonce
        self.failed: PenstockError | None = None
        self._opening = opening
        self._rules: StageRules | None = rules
        self._parts = parts
        self._acks = acks
        self._queue: deque[PendingResponse] = deque()

    @property
    def parts(self) -> range:
        """Return the numbers of the workers to whose adapters commands go."""
        return self._parts.addressed

    @property
    def waiting(self) -> int:
        """Return the number of complete responses that were not taken."""
        return len(self._queue)

    def open(self) -> list[RoutedCommand]:
        """Return the client's first commands, which it has given already."""
        return self.route(self._opening)

    def trust(self) -> None:
        """Check no more commands: the client is in this process and checks them itself."""
        self._rules = None

    def route(self, commands: Sequence[Any], *, answer: bool = False) -> list[RoutedCommand]:
        """Return the messages for the adapters. `answer`: answer peeks here if that is possible.
        Commands before one that breaks a rule are routed, and `failed` is set."""
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
        """Add the messages of one command that keeps the rules."""
        raise NotImplementedError

    def _flush(self, routed: list[RoutedCommand]) -> None:
        """Add what `_route` has held back."""

    def _merged(self, merged: Any) -> None:
        """Note a merged response."""

    def absorb(self, message: FromWorker | ManyFromWorker) -> None:
        """Merge responses of a worker; those that are complete can be taken."""
        worker = message.worker
        # A late response to a displaced client.
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
            # Acknowledged at once; a response that completes a merged one only when that was sent.
            if merged is None:
                self._acks.left(worker, serial, response)
            else:
                self._queue.append((merged, worker, serial))

    def _merge(self, worker: int, response: Any) -> Any:
        """Return the merged response that this one completes, or None."""
        parts = self._parts
        merged = parts.absorb(worker, response)
        # Ordered before the response leaves: the client may reuse the ids at once.
        if self._rules is not None:
            for id in parts.ended:
                self._rules.ended(id)
        parts.ended.clear()
        if merged is not None:
            self._merged(merged)
        return merged

    def take(self, count_max: int) -> list[PendingResponse]:
        """Return and remove the first complete responses."""
        return [self._queue.popleft() for _ in range(min(count_max, len(self._queue)))]

    def left(self, sent: Sequence[PendingResponse]) -> None:
        """Note responses that the client has got."""
        for response, worker, serial in sent:
            self._acks.left(worker, serial, response)

    def acknowledgements(self) -> list[RoutedCommand]:
        """Return the acknowledgements that are due now."""
        return [
            RoutedCommand(worker, ResponsesAcked(self.nonce, serials))
            for worker, serials in self._acks.due()
        ]


class ComputeConversation(ClientConversation):
    """A conversation with the compute half. Commands ready together travel as one."""

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
        self._lot: list[Command] = []
        """Commands to be passed on together. Before InitializationComplete nothing takes effect, so
        they may collect; afterwards each call passes them on."""

    def _route(
        self, command: Any, traceparent: str | None, routed: list[RoutedCommand], *, answer: bool
    ) -> None:
        if isinstance(command, InitializationComplete):
            self._complete = True
        # A traced peek takes the long way, so that its spans show it.
        if answer and traceparent is None and self._answers(command):
            return
        self.shortcut.heard(command)
        if isinstance(command, Peek | ScheduleDataflow) and traceparent is not None:
            self._traced(command, traceparent, routed)
        else:
            self._command(command, routed)

    def _flush(self, routed: list[RoutedCommand]) -> None:
        # Commands before one that breaks a rule have been given, so they are passed on, too.
        if self._complete or self.failed is not None:
            self._pass_on(routed)

    def _answers(self, peek: Command) -> bool:
        """Answer a peek here, if its rows are there; return whether it was answered."""
        if not isinstance(peek, Peek):
            return False
        # No worker's window bounds these answers, so the queue must.
        if len(self._queue) >= AT_ONCE_MAX or not self._complete:
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
                self._lot.append(split)
        if len(self._lot) >= LOT_MAX:
            self._pass_on(routed, traceparent)

    def _traced(
        self, command: Peek | ScheduleDataflow, traceparent: str, routed: list[RoutedCommand]
    ) -> None:
        """Pass on a command with a trace context; a sampled one goes alone, so that its spans show
        its own way."""
        parent = accept_context(traceparent)
        if parent is None:
            self._command(command, routed)
            return
        if self._complete:
            self._pass_on(routed)
        with span_below(parent, CONNECTION_COMMAND) as opened:
            if opened is not None:
                if isinstance(command, Peek):
                    opened.describe(self.nonce, command.uuid, command.target.id)
                else:
                    opened.describe(self.nonce, "", command.id)
                parent = opened.traceparent
        self._command(command, routed, parent)
        if self._complete:
            self._pass_on(routed, parent)

    def _pass_on(self, routed: list[RoutedCommand], traceparent: str | None = None) -> None:
        if not self._lot:
            return
        lot, self._lot = self._lot, []
        command = lot[0] if len(lot) == 1 else CommandBatch(tuple(lot))
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
    """A conversation with the storage half: every command goes to every worker, one by one."""

    def __init__(self, hello: Hello, workers: int, settings: Settings) -> None:
        # A window of one: each response is acknowledged as soon as it has left.
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
