"""Peeks that an end of a connection answers itself, as no order could change the answer. Pure.

Theory of operation. A peek of one key of an index usually asks for what is there already: the
index is sealed beyond the peek's time in every worker, and each has its partition in the memory of
this process. The way through adapter, sequencer and workers and back would order such a peek
among the commands, and all it would bring is the same rows later. So whoever has an end of the
connection in this process (its actor, for a client over a wire; the client itself, for a local
one) reads them there (`compute.peeks.all_at_once`), under conditions that it can judge by what has
gone through that end alone:

- the client has created the index here, has not dropped it, and the peek's time is not below what
  it has allowed to be forgotten. So the workers would not refuse the peek;
- no other client has taken the connection's place, as far as the workers can know;
- all workers have told *this* connection that the index is sealed beyond the peek's time. They
  tell that of what they have rendered for this client, so what they hold under the id since then
  is the client's own index, or, for a moment, that of a dataflow which it has started again;
- no partition holds an error, is closed, or begins later than the peek's time.

Everything else (`answer` gives None) goes the long way, which knows what to say.

Rules: an answer given here is the one that the workers would have given; it is small, since no
worker's window bounds it. What an index's snapshot leaves out cannot be read (`compute.index`). A
peek with a context is not answered here: its way is to be seen.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.cluster.partitioned import Limits
from actors.compute.partitions import Partitions
from actors.compute.peeks import all_at_once
from actors.errors import PenstockError
from actors.progress import Frontier, ObjectId, is_empty
from actors.protocol.compute import (
    AllowCompaction,
    Command,
    CreateDataflow,
    Frontiers,
    IndexExport,
    IndexTarget,
    Peek,
    PeekRows,
)

ANSWER_BYTES_MAX: Final = 64 * 1024
"""Of one answer."""


class _Index(msgspec.Struct):
    """One index of the client's."""

    allowed: Frontier
    """The client reads nothing below it."""
    sealed: Frontier = 0
    """In every worker, as the client was told."""


class Shortcut:
    """What one end of a connection knows of its client's indexes."""

    def __init__(self, partitions: Partitions, limits: Limits) -> None:
        self._partitions = partitions
        self._limits = limits
        self._indexes: dict[ObjectId, _Index] = {}

    def heard(self, command: Command) -> None:
        """A command of the client, which keeps the rules, is passed on."""
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

    def told(self, frontiers: Frontiers) -> None:
        """All workers have said so, to this connection."""
        index = self._indexes.get(frontiers.id)
        if index is not None and frontiers.write is not None:
            index.sealed = frontiers.write

    def answer(self, peek: Peek) -> PeekRows | None:
        """The answer, where it is there already."""
        target = peek.target
        if not isinstance(target, IndexTarget) or peek.traceparent is not None:
            return None
        index = self._indexes.get(target.id)
        if index is None or not index.allowed <= peek.time < index.sealed:
            return None
        arrangements = self._partitions.readable(target.id)
        if arrangements is None:
            return None
        try:
            limit = min(ANSWER_BYTES_MAX, self._limits.inline_bytes(len(arrangements)))
            return all_at_once(arrangements, peek, limit)
        except PenstockError:
            return None  # the long way finds the same, and says so
