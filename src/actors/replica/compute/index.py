"""One worker's partition of an index, and the registry of all workers' partitions.

Updates are installed in order; a snapshot replaces the contents. `IndexPartition` chooses the next
work, and `perform` and `maintain` do it on a thread: one `perform` at a time, `maintain` beside it.
It is a cache: a new incarnation of the dataflow replaces its contents by a snapshot, in a new
arrangement.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.durable.arrangement.arrangement import Arrangement
from actors.model.protocol.compute import IndexExport
from actors.model.protocol.internal import DataflowMessage, InstallUpdates
from actors.runtime.errors import ResourceClosed
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import Frontier, ObjectId, Time


class IndexInsertion(msgspec.Struct, frozen=True):
    """A queued `InstallUpdates`, and the dataflow to acknowledge it to."""

    install: InstallUpdates
    dataflow: ActorAddress[DataflowMessage]
    attempt: int = 0

    @property
    def since(self) -> Time:
        """Return the time from which the partition is readable after the install."""
        return self.install.upper - 1 if self.install.snapshot else 0


class IndexStatistics(msgspec.Struct, frozen=True, gc=False):
    """Statistics of a partition at one moment; sizes in bytes."""

    id: ObjectId
    rows: int
    """Number of updates, before consolidation."""
    runs: int
    bytes_memory: int
    bytes_mapped: int
    """Size of mapped files, which are in memory only as far as they are read."""


class IndexPartition:
    """The partition of an index, and its queue of installs."""

    def __init__(self, directory: Path, export: IndexExport) -> None:
        self._directory = directory
        self._export = export
        self._waiting: deque[IndexInsertion] = deque()
        self._busy = False
        self._versions = 0
        self._since: Time = 0
        self._begins: Time = 0
        """Time of the latest snapshot, the earliest readable time."""
        self.arrangement: Arrangement | None = None
        self.wants_maintenance = False
        self.closed = False

    def queue(self, insertion: IndexInsertion) -> None:
        """Queue an install; a snapshot replaces those that wait."""
        if insertion.install.snapshot:
            self._waiting.clear()
        self._waiting.append(insertion)

    def next(self) -> IndexInsertion | None:
        """Return the install to perform now, if none is being performed."""
        if self._busy or self.closed or not self._waiting:
            return None
        self._busy = True
        return self._waiting.popleft()

    def perform(self, insertion: IndexInsertion) -> Arrangement:
        """Insert and return the arrangement that serves from now on. Blocks.

        Raise `StorageError` (nothing changed; try again), `InvalidUsage` (the dataflow broke the
        order of times) and `ResourceClosed`.
        """
        arrangement = self.arrangement
        install = insertion.install
        if install.snapshot or arrangement is None:
            # Peeks of the closed arrangement fail with `ResourceClosed`, and wait for the snapshot.
            if arrangement is not None:
                arrangement.close(remove=True)
            self._versions += 1
            arrangement = Arrangement(
                self._directory / str(self._versions), self._export.schema, self._export.key
            )
        try:
            # The dataflow has consolidated the updates.
            arrangement.insert(install.updates, install.upper, consolidated=True)
            if install.snapshot:
                self._begins = max(self._begins, insertion.since)
                # Refuses reads before the snapshot, whose history is not in it.
                arrangement.allow_compaction(self._begins)
        except BaseException:
            if arrangement is not self.arrangement:
                arrangement.close(remove=True)
            raise
        return arrangement

    def done(self, arrangement: Arrangement) -> None:
        """Take over the arrangement of a successful `perform`."""
        self._busy = False
        if self.closed:
            return
        self.arrangement = arrangement
        arrangement.allow_compaction(self._since)
        self.wants_maintenance = True

    def failed(self, insertion: IndexInsertion) -> IndexInsertion | None:
        """Return the insertion to retry after a failed `perform`, unless a snapshot waits."""
        self._busy = False
        if self.closed or any(other.install.snapshot for other in self._waiting):
            return None
        return msgspec.structs.replace(insertion, attempt=insertion.attempt + 1)

    def again(self, insertion: IndexInsertion) -> None:
        """Put a failed insertion back in front, unless a snapshot came meanwhile."""
        if not self._busy and not any(other.install.snapshot for other in self._waiting):
            self._waiting.appendleft(insertion)

    def compact(self, since: Frontier) -> None:
        """Allow compaction up to `since`: no read below it will come."""
        self._since = since
        if self.arrangement is not None:
            self.arrangement.allow_compaction(since)
            self.wants_maintenance = True

    def maintain(self) -> None:
        """Merge runs. Blocks. Raise `StorageError` (nothing changed)."""
        arrangement = self.arrangement
        if arrangement is not None:
            with contextlib.suppress(ResourceClosed):
                arrangement.maintain()

    def statistics(self, id: ObjectId) -> IndexStatistics | None:
        """Return the partition's statistics; None if it has no contents yet."""
        if self.arrangement is None:
            return None
        held = self.arrangement.statistics()
        return IndexStatistics(id, held.rows, held.runs, held.bytes_memory, held.bytes_mapped)

    def close(self) -> None:
        """Close the arrangement and remove its files. Blocks."""
        if self.arrangement is not None:
            self.arrangement.close(remove=True)
        shutil.rmtree(self._directory, ignore_errors=True)


class ClusterPartitions:
    """Registry of the workers' partitions of each index in one cluster, for reads that bypass the
    command order. All its parts run on one event loop.

    A worker registers its partition when it renders an index and removes it when it drops that. The
    contents at a time are immutable, and a partition refuses a time that it cannot serve
    (`Arrangement.view`), so a reader in this process may read at any moment. The registry does not
    tell which rendering of an id an entry is, nor how far each worker has come: see
    `cluster.shortcut`.

    Invariant: an entry is the youngest rendering that the worker has made of that id.
    """

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
