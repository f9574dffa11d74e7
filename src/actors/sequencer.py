"""The sequencer: the one total order of everything that renders, changes or drops a dataflow.

Theory of operation. Whoever has a command to be ordered (worker 0 for a client's commands)
sends `Propose`; the sequencer gives it the next index and sends it to every worker. All workers
see the same indices in the same order, so they render the same dataflows in the same order.

Rules (`Order`, pure): both halves are in one order, whose indices start at 0 and have no gap. A
proposal of a generation older than the newest seen of the same half is dropped and counted:
commands of a displaced connection are never applied after its successor's. Each half has
connections of its own, so the one's displacement drops nothing of the other's.

Flow: ``worker 0 → sequencer → other workers`` waits for room. Worker 0 itself is answered in the
room that its proposal reserved, so the two cannot block each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from actors.errors import Broken, Closed
from actors.kernel import Actor, Address
from actors.protocol.internal import Half, Propose, Sequenced


class Order:
    """Gives out indices."""

    def __init__(self) -> None:
        self.next_index = 0
        self.generations: dict[Half, int] = {"compute": 0, "storage": 0}
        self.dropped = 0

    def propose(self, proposal: Propose) -> Sequenced | None:
        """The ordered command, or None when its connection was displaced."""
        half = proposal.half
        if proposal.generation < self.generations[half]:
            self.dropped += 1
            return None
        self.generations[half] = proposal.generation
        ordered = Sequenced(self.next_index, proposal.generation, proposal.command)
        self.next_index += 1
        return ordered


class Sequencer(Actor[Propose]):
    """Sends every ordered command to every worker.

    `workers` may be filled after construction, before the first proposal.
    """

    def __init__(self, workers: Sequence[Address[Any]]) -> None:
        self._workers = workers
        self._order = Order()

    async def receive(self, message: Propose) -> None:
        """Orders one command."""
        ordered = self._order.propose(message)
        if ordered is None:
            return
        for index, worker in enumerate(self._workers):
            if index == 0:
                worker.reply(ordered)
                continue
            with suppress(Closed, Broken):
                await worker.send(ordered)

    def describe(self) -> str:
        """How far the order has come."""
        return f"{self._order.next_index} ordered, {self._order.dropped} dropped"
