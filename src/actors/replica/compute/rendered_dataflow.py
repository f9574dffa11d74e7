"""State of one dataflow that a worker has rendered, and the frontiers to report for it.

Reported frontiers never go back. None is reported twice, below the `as_of`, or after the empty one.
An index's write and output frontiers are those of this worker's own partition. A subscribe and a
copy report no frontiers.
"""

from __future__ import annotations

import msgspec

from actors.model.protocol.compute import (
    CopyToExport,
    DataflowDescription,
    Frontiers,
    IndexExport,
    StatusResponse,
    SubscribeExport,
)
from actors.model.protocol.internal import DataflowProgress
from actors.runtime.progress import EMPTY, Frontier, ObjectId, Time, is_empty


class RenderedDataflow(msgspec.Struct):
    """A dataflow that runs under a render number."""

    number: int
    description: DataflowDescription
    allowed: Frontier
    """Frontier up to which compaction is allowed. External readers read at or above it."""
    scheduled: bool = False
    """True once the client has scheduled the dataflow."""
    compacted: Frontier = 0
    """Index: the since to which this worker's partition was compacted."""
    sealed: Frontier = 0
    """Index: the upper of this worker's partition. A new incarnation may set it back."""
    since: Time = 0
    """Index: as_of of the snapshot with which this worker's partition started."""
    write: Frontier = 0
    """Frontier up to which the output is known to be durable."""
    input: Frontier = 0
    """Frontier up to which all inputs are described."""
    output: Frontier = 0
    """Frontier up to which the output is installed."""
    emitted: Frontier = 0
    """Subscribe: upper of the last batch."""
    answered: bool = False
    """Copy: True once its response has been sent."""
    status: StatusResponse | None = None
    """Last status that the dataflow reported."""
    reported: Frontiers | None = None
    """Frontiers reported to the current client; None: none yet."""

    @property
    def id(self) -> ObjectId:
        """Return the id of the export."""
        return self.description.id

    @property
    def is_index(self) -> bool:
        """Return whether the dataflow maintains an index, spread over the workers."""
        return isinstance(self.description.export, IndexExport)

    @property
    def is_subscribe(self) -> bool:
        """Return whether the dataflow streams changes to one client."""
        return isinstance(self.description.export, SubscribeExport)

    @property
    def is_copy(self) -> bool:
        """Return whether the dataflow copies its contents into files once."""
        return isinstance(self.description.export, CopyToExport)

    def progressed(self, progress: DataflowProgress) -> None:
        """Advance the frontiers to those that the dataflow reported."""
        self.input = max(self.input, progress.input)
        if not self.is_index:
            self.write = max(self.write, progress.write)
            self.output = max(self.output, progress.output)

    def seal(self, upper: Frontier, since: Time) -> None:
        """Set the interval of times that this worker's partition can serve."""
        # `sealed` may go back with a new snapshot; the reported frontiers may not.
        self.sealed = upper
        self.since = max(self.since, since)
        self.write = self.output = max(self.write, upper)

    def news(self) -> Frontiers | None:
        """Return the frontiers that the current client does not know yet, and record them as
        reported."""
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
        """Return the empty frontiers to report once the dropped dataflow has stopped; None if there
        are none."""
        if self.is_subscribe or self.is_copy:
            return None
        known = self.reported or Frontiers(self.id)
        kinds = ("write", "input", "output")
        left = {kind: EMPTY for kind in kinds if not _ended(getattr(known, kind))}
        return Frontiers(self.id, **left) if left else None


def _ended(known: Frontier | None) -> bool:
    return known is not None and is_empty(known)


def _advance(known: Frontier | None, new: Frontier, as_of: Time) -> Frontier | None:
    """Return the frontier to report if it is beyond `known` and not below the `as_of`, else
    None."""
    return new if new > (known or 0) and new >= as_of else None
