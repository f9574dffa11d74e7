"""One worker's partition of an index: installs in order, a snapshot in place of what was.

`IndexPartition` decides what to do next and does it when told (`perform`, `maintain`: blocking,
in a thread; one `perform` at a time, `maintain` beside it). It is a cache: a new incarnation of
the dataflow replaces its contents by a snapshot, in a new arrangement.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from pathlib import Path

import msgspec

from actors.arrangement.arrangement import Arrangement
from actors.errors import Closed
from actors.kernel import Address
from actors.progress import Frontier, ObjectId, Time
from actors.protocol.compute import IndexExport
from actors.protocol.internal import DataflowMessage, Install


class Insertion(msgspec.Struct, frozen=True):
    """An `Install` on its way in, and whom to tell when it is done."""

    install: Install
    dataflow: Address[DataflowMessage]
    attempt: int = 0

    @property
    def since(self) -> Time:
        """The time from which the partition can be read after it."""
        return self.install.upper - 1 if self.install.snapshot else 0


class IndexStatistics(msgspec.Struct, frozen=True, gc=False):
    """A partition at one moment; sizes in bytes."""

    id: ObjectId
    rows: int
    """Updates held, before consolidation."""
    runs: int
    bytes_memory: int
    bytes_mapped: int
    """Of files: in memory only as far as they are being read."""


class IndexPartition:
    """The partition and what waits to go into it."""

    def __init__(self, directory: Path, export: IndexExport) -> None:
        self._directory = directory
        self._export = export
        self._waiting: deque[Insertion] = deque()
        self._busy = False
        self._versions = 0
        self._since: Time = 0
        self._begins: Time = 0
        """The latest snapshot's time: nothing before it was ever told again."""
        self.arrangement: Arrangement | None = None
        self.wants_maintenance = False
        self.closed = False

    def queue(self, insertion: Insertion) -> None:
        """Takes an install; a snapshot makes those that still wait pointless."""
        if insertion.install.snapshot:
            self._waiting.clear()
        self._waiting.append(insertion)

    def next(self) -> Insertion | None:
        """The install to perform now, if none is being performed."""
        if self._busy or self.closed or not self._waiting:
            return None
        self._busy = True
        return self._waiting.popleft()

    def perform(self, insertion: Insertion) -> Arrangement:
        """Blocking: inserts; the arrangement that now serves.

        Raises `StorageError` (nothing changed; do it again), `InvalidUsage` (the dataflow
        broke the order of times) and `Closed`.
        """
        arrangement = self.arrangement
        install = insertion.install
        if install.snapshot or arrangement is None:
            if arrangement is not None:
                arrangement.close(remove=True)
            self._versions += 1
            arrangement = Arrangement(
                self._directory / str(self._versions), self._export.schema, self._export.key
            )
        try:
            # A dataflow sums up what it installs.
            arrangement.insert(install.updates, install.upper, consolidated=True)
            if install.snapshot:
                self._begins = max(self._begins, insertion.since)
                arrangement.allow_compaction(self._begins)  # what was before is not in it
        except BaseException:
            if arrangement is not self.arrangement:
                arrangement.close(remove=True)
            raise
        return arrangement

    def done(self, arrangement: Arrangement) -> None:
        """`perform` succeeded."""
        self._busy = False
        if self.closed:
            return
        self.arrangement = arrangement
        arrangement.allow_compaction(self._since)
        self.wants_maintenance = True

    def failed(self, insertion: Insertion) -> Insertion | None:
        """`perform` failed: the insertion to try again, unless a snapshot waits already."""
        self._busy = False
        if self.closed or any(other.install.snapshot for other in self._waiting):
            return None
        return msgspec.structs.replace(insertion, attempt=insertion.attempt + 1)

    def again(self, insertion: Insertion) -> None:
        """Puts a failed insertion back in front, unless a snapshot came meanwhile."""
        if not self._busy and not any(other.install.snapshot for other in self._waiting):
            self._waiting.appendleft(insertion)

    def compact(self, since: Frontier) -> None:
        """Reads below `since` will not come any more."""
        self._since = since
        if self.arrangement is not None:
            self.arrangement.allow_compaction(since)
            self.wants_maintenance = True

    def maintain(self) -> None:
        """Blocking: merges runs. Raises `StorageError` (everything is as it was)."""
        arrangement = self.arrangement
        if arrangement is not None:
            with contextlib.suppress(Closed):
                arrangement.maintain()

    def statistics(self, id: ObjectId) -> IndexStatistics | None:
        """What it holds; None: nothing yet."""
        if self.arrangement is None:
            return None
        held = self.arrangement.statistics()
        return IndexStatistics(id, held.rows, held.runs, held.bytes_memory, held.bytes_mapped)

    def close(self) -> None:
        """Blocking: forgets everything and removes the files."""
        if self.arrangement is not None:
            self.arrangement.close(remove=True)
        shutil.rmtree(self._directory, ignore_errors=True)
