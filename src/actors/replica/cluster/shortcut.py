"""Peeks that a connection over a socket answers itself, without the workers. Pure.

A peek of one key usually asks for rows that are already available: every worker has sealed the
index beyond the peek's time, and its partition is in this process's memory. Going through the
adapter, the command order and the workers would return the same rows, but takes 1.6 times as long
(`bench/peeks.py`, peek_key_replica_p50). So the end of the connection in the replica's process
reads the rows itself, if the messages it has seen show that the workers would answer the same.
Otherwise it passes the peek on. A controller in the same process reads the partitions directly
(`control/controller/reads/memory_reads.py`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.model.protocol.compute import (
    AllowCompaction,
    Command,
    CreateDataflow,
    Frontiers,
    IndexExport,
    IndexTarget,
    Peek,
    PeekRows,
)
from actors.replica.cluster.partitioned import ConnectionLimits
from actors.replica.compute.index import ClusterPartitions
from actors.replica.compute.peeks import one_key_answer
from actors.runtime.errors import PenstockError
from actors.runtime.progress import Frontier, ObjectId, is_empty

ANSWER_BYTES_MAX: Final = 64 * 1024
"""Maximum size of an answer in bytes."""


class _Index(msgspec.Struct):
    """One index of the client."""

    allowed: Frontier
    """Frontier up to which compaction is allowed; the client does not read below it."""
    sealed: Frontier = 0
    """Upper in every worker, as reported to the client."""


class PeekShortcut:
    """Tracks the client's indexes as one end of a connection sees them."""

    def __init__(self, partitions: ClusterPartitions, limits: ConnectionLimits) -> None:
        self._partitions = partitions
        self._limits = limits
        self._indexes: dict[ObjectId, _Index] = {}
        """Indexes that the client has created and not dropped, by id."""

    def note_command(self, command: Command) -> None:
        """Record a command of the client that was passed on and follows the rules."""
        match command:
            case CreateDataflow(dataflow):
                if isinstance(dataflow.export, IndexExport):
                    self._indexes[dataflow.id] = _Index(dataflow.as_of)
            case AllowCompaction(id, frontier):
                index = self._indexes.get(id)
                if index is None:
                    return
                if is_empty(frontier):
                    del self._indexes[id]
                else:
                    index.allowed = max(index.allowed, frontier)

    def note(self, frontiers: Frontiers) -> None:
        """Record frontiers that all workers have reported to this connection."""
        # Workers report what they rendered for this client, so the id is the client's own index.
        index = self._indexes.get(frontiers.id)
        if index is not None and frontiers.write is not None:
            index.sealed = frontiers.write

    def answer(self, peek: Peek) -> PeekRows | None:
        """Return the answer if the rows are available here; None: send the peek to the workers."""
        target = peek.target
        if not isinstance(target, IndexTarget):
            return None
        index = self._indexes.get(target.id)
        # It must be the client's own index, not compacted beyond the peek's time, and sealed beyond
        # it in all workers.
        if index is None or not index.allowed <= peek.time < index.sealed:
            return None
        arrangements = self._partitions.readable(target.id)
        # A partition is in error, closed, or starts at a later time.
        if arrangements is None:
            return None
        try:
            # Keep it small, because no worker's window bounds these answers.
            limit = min(ANSWER_BYTES_MAX, self._limits.inline_bytes(len(arrangements)))
            views = [each.view(peek.time + 1) for each in arrangements]
            return one_key_answer(arrangements[0], views, peek, limit)
        except PenstockError:
            return None  # the workers will find and report the same error
