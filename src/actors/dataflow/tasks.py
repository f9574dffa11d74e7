"""Sends a dataflow's commands to the listen and fetch tasks of its current incarnation.

Commands go down and may wait for room; answers come up in reserved room, so the wait ends.
"""

from __future__ import annotations

from actors.dataflow.gather import PartInterval
from actors.errors import ConnectionBroken, ResourceClosed
from actors.kernel import ActorAddress
from actors.protocol.internal import FetchMessage, FetchPart, ListenMessage, SourceStarted


class TaskAddresses:
    """Addresses of the tasks, as workers report them."""

    def __init__(self, sources: int, workers: int) -> None:
        self._sources = sources
        self._workers = workers
        self._listens: dict[int, ActorAddress[ListenMessage]] = {}
        self._fetches: dict[int, dict[int, ActorAddress[FetchMessage]]] = {}
        self._turns = [0] * sources
        """Counters for each source, since sources that are asked alternately must not share one."""

    def clear(self) -> None:
        """Forget the tasks of the earlier incarnation."""
        self._listens.clear()
        self._fetches.clear()

    def started(self, message: SourceStarted) -> bool:
        """Note a worker's task; return whether all tasks run."""
        self._fetches.setdefault(message.source, {})[message.worker] = message.fetch
        if message.listen is not None:
            self._listens[message.source] = message.listen
        return all(
            source in self._listens and len(self._fetches.get(source, ())) == self._workers
            for source in range(self._sources)
        )

    async def tell(self, source: int, message: ListenMessage) -> None:
        """Send a message to the source's listen task."""
        listen = self._listens.get(source)
        if listen is None:
            return
        try:
            await listen.send(message)
        except (ResourceClosed, ConnectionBroken):
            return  # no error: a new incarnation has its own tasks, and a shutdown needs none

    async def ask(self, source: int, piece: PartInterval) -> None:
        """Ask the source's fetch tasks in turn. Raise `ResourceClosed` or `ConnectionBroken`."""
        self._turns[source] += 1
        fetches = self._fetches[source]
        await fetches[self._turns[source] % len(fetches)].send(FetchPart(piece.time, piece.part))
