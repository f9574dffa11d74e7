"""The listen and fetch tasks of one incarnation's sources, and how a dataflow talks to them.

Commands go down and may wait for room; answers come up in reserved room: so the wait ends. A
task that has stopped is no error here: a new incarnation has its own, and a stop of the whole
takes the dataflow with it.
"""

from __future__ import annotations

from actors.dataflow.gather import Piece
from actors.errors import Broken, Closed
from actors.kernel import Address
from actors.protocol.internal import Fetch, FetchMessage, ListenMessage, SourceStarted


class Tasks:
    """Addresses, as workers report them."""

    def __init__(self, sources: int, workers: int) -> None:
        self._sources = sources
        self._workers = workers
        self._listens: dict[int, Address[ListenMessage]] = {}
        self._fetches: dict[int, dict[int, Address[FetchMessage]]] = {}
        self._turns = [0] * sources
        """Of each source: sources that are asked for alternately must not share one."""

    def clear(self) -> None:
        """A new incarnation: other tasks."""
        self._listens.clear()
        self._fetches.clear()

    def started(self, message: SourceStarted) -> bool:
        """Notes a worker's task; whether all run now."""
        self._fetches.setdefault(message.source, {})[message.worker] = message.fetch
        if message.listen is not None:
            self._listens[message.source] = message.listen
        return all(
            source in self._listens and len(self._fetches.get(source, ())) == self._workers
            for source in range(self._sources)
        )

    async def tell(self, source: int, message: ListenMessage) -> None:
        """To the source's listen task."""
        listen = self._listens.get(source)
        if listen is None:
            return
        try:
            await listen.send(message)
        except (Closed, Broken):
            return

    async def ask(self, source: int, piece: Piece) -> None:
        """To the source's fetch tasks in turn. Raises `Closed` or `Broken`."""
        self._turns[source] += 1
        fetches = self._fetches[source]
        await fetches[self._turns[source] % len(fetches)].send(Fetch(piece.time, piece.part))
