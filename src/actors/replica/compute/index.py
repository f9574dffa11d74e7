"""One worker's partition of an index, and the registry of all workers' partitions.

Updates are installed in order; a snapshot replaces the contents. `IndexPartition` chooses the next
piece of work. `perform` and `maintain` do it on a thread: one `perform` at a time, with `maintain`
possibly alongside. A partition is a cache: a new incarnation of the dataflow replaces its contents
with a snapshot in a new arrangement.
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
    """A queued `InstallUpdates`, and the dataflow that gets the acknowledgement."""

    install: InstallUpdates
    dataflow: ActorAddress[DataflowMessage]
    attempt: int = 0

    @property
    def since(self) -> Time:
        """Return the time from which the partition is readable after this insertion (0:
        unchanged)."""
        return self.install.upper - 1 if self.install.snapshot else 0


class IndexStatistics(msgspec.Struct, frozen=True, gc=False):
    """Statistics of a partition at one moment; sizes in bytes."""

    id: ObjectId
    rows: int
    """Number of updates, before consolidation."""
    runs: int
    bytes_memory: int
    bytes_mapped: int
    """Size of mapped files. Only the parts that were read are in memory."""


class IndexPartition:
    """One worker's partition of an index, with its queue of insertions."""

    def __init__(self, directory: Path, export: IndexExport) -> None:
        self._directory = directory
        self._export = export
        self._waiting: deque[IndexInsertion] = deque()
        """Insertions to perform, in order."""
        self._busy = False
        """True while an insertion is performed."""
        self._versions = 0
        """Number of arrangements made so far; it names the next one's directory."""
        self._since: Time = 0
        """Time up to which compaction is allowed."""
        self._snapshot_time: Time = 0
        """Time of the latest snapshot, which is the earliest readable time."""
        self.arrangement: Arrangement | None = None
        """Current contents; None until the first insertion."""
        self.wants_maintenance = False
        """True if runs may need merging: set by insertions and compactions, cleared by the
        worker."""
        self.closed = False
        """True once the index is dropped; no insertion is started or adopted after that."""

    def queue(self, insertion: IndexInsertion) -> None:
        """Queue an insertion. A snapshot replaces all waiting insertions."""
        if insertion.install.snapshot:
            self._waiting.clear()
        self._waiting.append(insertion)

    def next(self) -> IndexInsertion | None:
        """Return the insertion to perform now, or None if one is in progress or none is waiting."""
        if self._busy or self.closed or not self._waiting:
            return None
        self._busy = True
        return self._waiting.popleft()

    def perform(self, insertion: IndexInsertion) -> Arrangement:
        """Insert the updates, and return the arrangement that holds the contents from now on.
        Blocks.

        Raise `StorageError` if nothing changed and the call can be repeated, `InvalidUsage` if the
        dataflow broke the order of times, and `ResourceClosed`.
        """
        arrangement = self.arrangement
        install = insertion.install
        if install.snapshot or arrangement is None:
            # Peeks of the closed arrangement fail with `ResourceClosed` and then wait for the
            # snapshot.
            if arrangement is not None:
                arrangement.close(remove=True)
            self._versions += 1
            arrangement = Arrangement(
                self._directory / str(self._versions), self._export.schema, self._export.key
            )
        try:
            # The dataflow has already consolidated the updates.
            arrangement.insert(install.updates, install.upper, consolidated=True)
            if install.snapshot:
                self._snapshot_time = max(self._snapshot_time, insertion.since)
                # Refuse reads from before the snapshot, because it does not contain their history.
                arrangement.allow_compaction(self._snapshot_time)
        except BaseException:
            if arrangement is not self.arrangement:
                arrangement.close(remove=True)
            raise
        return arrangement

    def done(self, arrangement: Arrangement) -> None:
        """Adopt the arrangement that a successful `perform` returned."""
        self._busy = False
        if self.closed:
            return
        self.arrangement = arrangement
        arrangement.allow_compaction(self._since)
        self.wants_maintenance = True

    def failed(self, insertion: IndexInsertion) -> IndexInsertion | None:
        """Return the insertion to retry after a failed `perform`, or None if a snapshot replaces
        it."""
        self._busy = False
        if self.closed or any(other.install.snapshot for other in self._waiting):
            return None
        return msgspec.structs.replace(insertion, attempt=insertion.attempt + 1)

    def again(self, insertion: IndexInsertion) -> None:
        """Put a failed insertion back at the front, unless a snapshot has arrived meanwhile."""
        if not self._busy and not any(other.install.snapshot for other in self._waiting):
            self._waiting.appendleft(insertion)

    def compact(self, since: Frontier) -> None:
        """Allow compaction up to `since`. No later read is below it."""
        self._since = since
        if self.arrangement is not None:
            self.arrangement.allow_compaction(since)
            self.wants_maintenance = True

    def maintain(self) -> None:
        """Merge runs. Blocks. Raise `StorageError` if nothing changed."""
        arrangement = self.arrangement
        if arrangement is not None:
            with contextlib.suppress(ResourceClosed):
                arrangement.maintain()

    def statistics(self, id: ObjectId) -> IndexStatistics | None:
        """Return the partition's statistics, or None if it has no contents yet."""
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
    """Registry of all workers' partitions of each index in one cluster.

    It serves reads that bypass the command order. All parts of a cluster run on one event loop.

    A worker registers its partition when it renders an index and removes it when it drops the
    index. The contents at a time are immutable, and a partition refuses a time that it cannot serve
    (`Arrangement.view`), so a reader in this process may read at any moment. The registry does not
    know which rendering of an id an entry belongs to, nor how far each worker has come:
    `cluster.shortcut` tracks that.

    Invariant: an entry is the latest rendering that the worker has made of that id.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._held: dict[ObjectId, list[IndexPartition | None]] = {}
        """Partition of each worker, by index."""

    def put(self, id: ObjectId, worker: int, partition: IndexPartition) -> None:
        """Register a worker's partition, replacing an earlier one."""
        self._held.setdefault(id, [None] * self._workers)[worker] = partition

    def take(self, id: ObjectId, worker: int, partition: IndexPartition) -> None:
        """Remove a worker's partition, unless a later rendering has replaced it."""
        held = self._held.get(id)
        # A later rendering may have registered before this one was dropped.
        if held is not None and held[worker] is partition:
            held[worker] = None
            if not any(held):
                del self._held[id]

    def readable(self, id: ObjectId) -> Sequence[Arrangement] | None:
        """Return the arrangements of all workers, in order, or None if one of them is not
        readable."""
        found = []
        for partition in self._held.get(id, ()):
            if partition is None or partition.arrangement is None:
                return None
            found.append(partition.arrangement)
        return found or None
