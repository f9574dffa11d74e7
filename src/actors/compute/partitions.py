"""Registry of the workers' partitions of each index, for reads that bypass the command order.

Theory of operation. A worker registers its partition when it renders an index and removes it when
it drops that. The contents at a time are immutable, and a partition refuses a time that it cannot
serve (`Arrangement.view`), so a reader in this process may read at any moment. The registry does
not tell which rendering of an id an entry is, nor how far each worker has come: see
`cluster.shortcut`.

Invariant: an entry is the youngest rendering that the worker has made of that id.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.arrangement.arrangement import Arrangement
from actors.compute.index import IndexPartition
from actors.progress import ObjectId


class ClusterPartitions:
    """Registry of one cluster; all its parts run on one event loop."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._held: dict[ObjectId, list[IndexPartition | None]] = {}

    def put(self, id: ObjectId, worker: int, partition: IndexPartition) -> None:
        """Register a worker's partition, in place of its earlier one."""
        self._held.setdefault(id, [None] * self._workers)[worker] = partition

    def take(self, id: ObjectId, worker: int, partition: IndexPartition) -> None:
        """Remove a worker's partition, unless a younger rendering has replaced it."""
        held = self._held.get(id)
        # A younger rendering may have taken the place before the drop of this one.
        if held is not None and held[worker] is partition:
            held[worker] = None
            if not any(held):
                del self._held[id]

    def readable(self, id: ObjectId) -> Sequence[Arrangement] | None:
        """Return all workers' parts of an index, by worker; None if one of them is not readable."""
        found = []
        for partition in self._held.get(id, ()):
            if partition is None or partition.arrangement is None:
                return None
            found.append(partition.arrangement)
        return found or None
