"""Where the workers' partitions of each index are, for reads that need no order.

Theory of operation. A worker puts its partition here when it renders an index and takes it back
when it drops that. What a partition holds at a time is immutable, and it refuses a time that it
cannot answer for (`Arrangement.view`), so whoever shares the process may read at any moment. What
it may *not* know from here is whose rendering of an id this is, and whether every worker has come
as far: `cluster.shortcut` says how a connection knows.

Invariant: an entry is the youngest rendering that the worker has made of that id.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.arrangement.arrangement import Arrangement
from actors.compute.index import IndexPartition
from actors.progress import ObjectId


class Partitions:
    """Of one cluster; all parts run on one event loop."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._held: dict[ObjectId, list[IndexPartition | None]] = {}

    def put(self, id: ObjectId, worker: int, partition: IndexPartition) -> None:
        """A worker has rendered the index; it takes the place of what that worker had before."""
        self._held.setdefault(id, [None] * self._workers)[worker] = partition

    def take(self, id: ObjectId, worker: int, partition: IndexPartition) -> None:
        """A worker has dropped that rendering; a younger one stays."""
        held = self._held.get(id)
        if held is not None and held[worker] is partition:
            held[worker] = None
            if not any(held):
                del self._held[id]

    def readable(self, id: ObjectId) -> Sequence[Arrangement] | None:
        """All workers' parts of an index, by worker; None: one of them has nothing to read."""
        found = []
        for partition in self._held.get(id, ()):
            if partition is None or partition.arrangement is None:
                return None
            found.append(partition.arrangement)
        return found or None
