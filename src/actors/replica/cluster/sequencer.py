"""The sequencer: gives all commands that change dataflows one total order.

Theory of operation. Worker 0 is the only proposer. It calls `propose` for each command of a client,
which gives the command the next index and sends it to every worker. All workers see the same
indices in the same order, so they render the same dataflows in the same order.

Both halves share the order, whose indices start at 0 and have no gaps. Each half has its own
connections, so a new connection of one half does not drop proposals of the other.

Flow control: ``worker 0 → other workers`` waits for room. Worker 0 gets its own commands through
its mailbox, in reserved room. So it applies a command only after the messages before it, and cannot
deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from actors.model.protocol.internal import Half, ProposeCommand, SequencedCommand
from actors.runtime.errors import ConnectionBroken, ResourceClosed
from actors.runtime.kernel import ActorAddress


class CommandOrder:
    """Assigns the indices."""

    def __init__(self) -> None:
        self.next_index = 0
        """Index of the next command."""
        self.generations: dict[Half, int] = {"compute": 0, "storage": 0}
        """Generation of the latest proposal of each half."""
        self.dropped = 0
        """Number of proposals dropped because their connection was displaced."""

    def propose(self, proposal: ProposeCommand) -> SequencedCommand | None:
        """Return the command with its index, or None if its connection was displaced."""
        half = proposal.half
        # A command of a displaced connection must never be applied after those of its successor.
        if proposal.generation < self.generations[half]:
            self.dropped += 1
            return None
        self.generations[half] = proposal.generation
        ordered = SequencedCommand(self.next_index, proposal.generation, proposal.command)
        self.next_index += 1
        return ordered


class Sequencer:
    """Sends every ordered command to every worker. Worker 0 owns it; no other actor may call it.

    `workers` may be filled after construction, but before the first proposal.
    """

    def __init__(self, workers: Sequence[ActorAddress[Any]]) -> None:
        self._workers = workers
        self._order = CommandOrder()

    async def propose(self, proposal: ProposeCommand) -> None:
        """Order one command, and send it to all workers."""
        ordered = self._order.propose(proposal)
        if ordered is None:
            return
        own, *others = self._workers
        # Do not apply it in the handler that proposes it: that handler's other effects come first.
        own.reply(ordered)
        for worker in others:
            with suppress(ResourceClosed, ConnectionBroken):
                await worker.send(ordered)
