"""Peeks that a connection over a wire answers itself, without the workers. Pure.

A peek of one key usually asks for rows that are there already: the index is sealed beyond the
peek's time in every worker, and each has its partition in this process's memory. The way through
adapter, order and workers would bring the same rows later: it takes 1.6 times as long
(`bench/peeks.py`, peek_key_replica_p50). So the end of the connection in the replica's process
reads them, if the messages of that end show that the workers would answer the same. Otherwise the
peek is sent. A controller in the same process reads the partitions itself
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
"""Limit of one answer."""


class _Index(msgspec.Struct):
    """One index of the client."""

    allowed: Frontier
    """Frontier of allowed compaction: the client reads nothing below it."""
    sealed: Frontier = 0
    """Upper in every worker, as reported to the client."""


class PeekShortcut:
    """State of the client's indexes, as seen by one end of a connection."""

    def __init__(self, partitions: ClusterPartitions, limits: ConnectionLimits) -> None:
        self._partitions = partitions
        self._limits = limits
        self._indexes: dict[ObjectId, _Index] = {}

    def heard(self, command: Command) -> None:
        """Note a command of the client that is passed on; it keeps the rules."""
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
        """Note frontiers that all workers have reported to this connection."""
        # Workers report what they rendered for this client: the id is its own index.
        index = self._indexes.get(frontiers.id)
        if index is not None and frontiers.write is not None:
            index.sealed = frontiers.write

    def answer(self, peek: Peek) -> PeekRows | None:
        """Return the answer if the rows are there already; None: send the peek to the workers."""
        target = peek.target
        if not isinstance(target, IndexTarget):
            return None
        index = self._indexes.get(target.id)
        # The client's own index, not compacted beyond the time, and sealed beyond it in all
        # workers.
        if index is None or not index.allowed <= peek.time < index.sealed:
            return None
        arrangements = self._partitions.readable(target.id)
        # A partition has an error, is closed, or begins later.
        if arrangements is None:
            return None
        try:
            # Small, since no worker's window bounds these answers.
            limit = min(ANSWER_BYTES_MAX, self._limits.inline_bytes(len(arrangements)))
            views = [each.view(peek.time + 1) for each in arrangements]
            return one_key_answer(arrangements[0], views, peek, limit)
        except PenstockError:
            return None  # the workers find the same error, and report it
