"""The sequencer: gives all commands that change dataflows one total order.

Theory of operation. Worker 0 sends `ProposeCommand` for each command of a client; the sequencer
gives it the next index and sends it to every worker. All workers see the same indices in the same
order, so they render the same dataflows in the same order.

Both halves share the order, whose indices start at 0 and have no gap. Each half has connections of
its own, so a new connection of one drops no proposals of the other.

Flow: ``worker 0 → sequencer → other workers`` waits for room. Worker 0 itself is answered in the
room that its proposal reserved, so the two cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from actors.errors import ConnectionBroken, ResourceClosed
from actors.kernel import Actor, ActorAddress
from actors.protocol.internal import Half, ProposeCommand, SequencedCommand


class CommandOrder:
    """Assigns the indices."""

    def __init__(self) -> None:
        self.next_index = 0
        self.generations: dict[Half, int] = {"compute": 0, "storage": 0}
        self.dropped = 0

    def propose(self, proposal: ProposeCommand) -> SequencedCommand | None:
        """Return the ordered command, or None if its connection was displaced."""
        half = proposal.half
        # A displaced connection's command must never be applied after its successor's.
        if proposal.generation < self.generations[half]:
            self.dropped += 1
            return None
        self.generations[half] = proposal.generation
        ordered = SequencedCommand(self.next_index, proposal.generation, proposal.command)
        self.next_index += 1
        return ordered


class Sequencer(Actor[ProposeCommand]):
    """Sends every ordered command to every worker.

    `workers` may be filled after construction, before the first proposal.
    """

    def __init__(self, workers: Sequence[ActorAddress[Any]]) -> None:
        self._workers = workers
        self._order = CommandOrder()

    async def receive(self, message: ProposeCommand) -> None:
        """Order one command, and send it to all workers."""
        ordered = self._order.propose(message)
        if ordered is None:
            return
        for index, worker in enumerate(self._workers):
            if index == 0:
                worker.reply(ordered)
                continue
            with suppress(ResourceClosed, ConnectionBroken):
                await worker.send(ordered)

    def describe(self) -> str:
        """Return the number of commands ordered and dropped, as text for people."""
        return f"{self._order.next_index} ordered, {self._order.dropped} dropped"
