"""What a worker knows of one dataflow it has rendered, and which frontiers are news.

Rules: frontiers never go back; none is reported below the `as_of` or twice; nothing follows the
empty one. An index's write and output frontiers are those of this worker's own partition; a
subscribe and a copy report none.
"""

from __future__ import annotations

import msgspec

from actors.progress import EMPTY, Frontier, ObjectId, Time, is_empty
from actors.protocol.compute import (
    CopyToExport,
    DataflowDescription,
    Frontiers,
    IndexExport,
    Status,
    SubscribeExport,
)
from actors.protocol.internal import DataflowProgress, DataflowStatus


class Rendered(msgspec.Struct):
    """One dataflow that runs under a render number."""

    number: int
    description: DataflowDescription
    allowed: Frontier
    """External readers need nothing below it."""
    scheduled: bool = False
    compacted: Frontier = 0
    """An index: what its partition was told."""
    sealed: Frontier = 0
    """An index: upper of this worker's partition. A fresh incarnation may set it back."""
    since: Time = 0
    """An index: as_of of the snapshot that its partition began with."""
    write: Frontier = 0
    input: Frontier = 0
    output: Frontier = 0
    emitted: Frontier = 0
    """A subscribe: upper of the last batch."""
    answered: bool = False
    """A copy: its one answer was given."""
    status: Status | None = None
    reported: Frontiers | None = None
    """What the present client knows."""

    @property
    def id(self) -> ObjectId:
        """Id of the export."""
        return self.description.id

    @property
    def is_index(self) -> bool:
        """Whether it is an arrangement spread over the workers."""
        return isinstance(self.description.export, IndexExport)

    @property
    def is_subscribe(self) -> bool:
        """Whether it streams to one client."""
        return isinstance(self.description.export, SubscribeExport)

    @property
    def is_copy(self) -> bool:
        """Whether it writes files once."""
        return isinstance(self.description.export, CopyToExport)

    def progressed(self, progress: DataflowProgress) -> None:
        """Takes over what the dataflow says."""
        self.input = max(self.input, progress.input)
        if not self.is_index:
            self.write = max(self.write, progress.write)
            self.output = max(self.output, progress.output)

    def seal(self, upper: Frontier, since: Time) -> None:
        """This worker's partition is complete below `upper`; nothing below `since` is in it."""
        self.sealed = upper
        self.since = max(self.since, since)
        self.write = self.output = max(self.write, upper)

    def news(self) -> Frontiers | None:
        """What the present client does not know yet; it is taken as told."""
        if self.is_subscribe or self.is_copy:
            return None
        as_of = self.description.as_of
        known = self.reported or Frontiers(self.id, 0, 0, 0)
        new = Frontiers(
            self.id,
            _advance(known.write, self.write, as_of),
            _advance(known.input, self.input, as_of),
            _advance(known.output, self.output, as_of),
        )
        if new.write is None and new.input is None and new.output is None:
            return None
        self.reported = Frontiers(
            self.id,
            known.write if new.write is None else new.write,
            known.input if new.input is None else new.input,
            known.output if new.output is None else new.output,
        )
        return new

    def end(self) -> Frontiers | None:
        """What is left to tell when it has been dropped and has stopped."""
        if self.is_subscribe or self.is_copy:
            return None
        known = self.reported or Frontiers(self.id)
        kinds = ("write", "input", "output")
        left = {kind: EMPTY for kind in kinds if not _ended(getattr(known, kind))}
        return Frontiers(self.id, **left) if left else None

    def show(self, seen: DataflowStatus) -> Status:
        """The dataflow's word about itself, as the client gets it."""
        self.status = Status(
            self.id,
            seen.state,
            seen.text,
            seen.hi,
            seen.rows_in,
            seen.rows_out,
            seen.step_ms,
            seen.spark_ms,
            seen.steps,
            seen.rows_read,
            seen.prepared,
            seen.recomputed,
            seen.rejected,
            seen.parts_read,
            seen.parts_total,
            seen.bytes_read,
            seen.bytes_total,
        )
        return self.status


def _ended(known: Frontier | None) -> bool:
    return known is not None and is_empty(known)


def _advance(known: Frontier | None, new: Frontier, as_of: Time) -> Frontier | None:
    """The frontier to report: strictly beyond what is known, and not below the `as_of`."""
    return new if new > (known or 0) and new >= as_of else None
