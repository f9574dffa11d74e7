"""What a source is: it reads changes outside, and says at which position it stands.

Theory of operation. A source is asked for one thing after another (`next`): it reads ahead no
further than one answer, so who asks bounds the bytes in flight. It knows nothing of times and
shards: whoever drives it (the ingest task) gives everything up to a `Mark` one time, and makes
contents, positions and that time durable together, in one set. So the position that a source is
opened with is always the one up to which everything, and nothing more, is in the shards.

Rules:
- rows between two marks belong to one instant: what one transaction did outside stands before
  one mark. A mark may stand for several instants outside, never for half of one;
- after `open(position)` a source gives exactly what comes after that position, however often and
  wherever it was stopped: once, and in the order of the outside;
- positions are texts that only the source reads (JSON, at most `POSITION_BYTES_MAX`); they tell
  all that a later `open` needs, also which exports were filled already;
- of an export that was added later, rows come only before the mark that fills it, or after that;
- of what the outside tells without old rows, `Upserts` and `Truncated` are given: whoever drives
  the source finds the old rows in what it holds itself (`sources.upserts` computes the changes).
  Order within one export counts, also between these and `Rows`: what was given since the last
  mark belongs to what is replaced or emptied;
- `taken` is called when a position is durable here, and only then may the outside forget what
  lies before it;
- an error that goes away by waiting (`Unreachable`) ends the source: it is opened again, with
  backoff. An error that stays with one export (a column was dropped, a value cannot be held) is
  `ExportFailed`: that export ends with an error, the others go on;
- nothing blocks the event loop; every wait can be cancelled; `close` is called in any case.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec
import pyarrow as pa

from actors.errors import PenstockError
from actors.plan.schema import Schema

POSITION_BYTES_MAX: Final = 64 * 1024
OP: Final = "__op"
KEPT: Final = "__kept"


class Unreachable(PenstockError):
    """The outside cannot be reached or read just now, and why. `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Export(msgspec.Struct, frozen=True):
    """One table that a source gives: its name outside and its columns here."""

    name: str
    schema: Schema
    is_new: bool = False
    """Nothing of it was ever given, or it went and came again: it is filled, also where the
    position names it. Told by whoever opens the source."""
    asked_as: str = ""
    """How `describe` was asked for it, where that is another spelling of its name."""
    table: str = ""
    """Bare name, which its table gets unless another is wanted; empty: the last part of `name`."""
    refused: str = ""
    """Reason why it cannot be taken, and what to do; empty: it can. Only where `describe` was
    asked for all: what is named and cannot be taken is an error."""


class Rows(msgspec.Struct, frozen=True):
    """Changes of one export: the columns of its schema, then `plan.schema.DIFF` (int64, not 0).
    A piece of bounded size; what belongs together may come in many."""

    export: str
    updates: pa.Table
    snapshot: bool = False
    """First contents, not a change; for statistics."""


class Upserts(msgspec.Struct, frozen=True):
    """Changes of an export with a key, whose old rows the outside does not tell. In order; a key
    may stand in several rows, the last one holds. A piece of bounded size, like `Rows`.

    The columns of the schema; `OP` (int8, one of `Op`); and, only where values are not told
    because they stay as they are, `KEPT` (list of int16: places of such columns in the schema,
    whose values are NULL here; NULL: none)."""

    export: str
    changes: pa.Table


class Op(enum.IntEnum):
    """What a row of `Upserts` says of its key."""

    DELETED = 0
    """Nothing stands there from now on; all columns but the key's are NULL."""
    UPDATED = 1
    """The row replaces the one that stood there."""
    INSERTED = 2
    """Nothing stood there before: nobody needs to look."""
    MOVED = 3
    """As `INSERTED`, but what it keeps was in the row that the change right before it (`DELETED`,
    of another key) took away."""


class Truncated(msgspec.Struct, frozen=True):
    """All rows of an export are gone: those that stand in its shard, and those given before."""

    export: str


class Mark(msgspec.Struct, frozen=True):
    """Everything given so far stands at this position."""

    position: str
    outside_ms: int | None = None
    """When the outside committed it (Unix time); None: not known. For lag and statistics."""
    messages: int = 0
    """Changes outside since the last mark, for statistics."""
    filled: tuple[str, ...] = ()
    """Exports whose first contents are whole with this mark. With the first mark of a source that
    was opened at None all are, named or not; one that was added later is not readable before."""


class ExportFailed(msgspec.Struct, frozen=True):
    """One export can go on no further, from the next mark on; the others do."""

    export: str
    error: str
    hint: str = ""


class Idle(msgspec.Struct, frozen=True):
    """Nothing is there just now; asking again waits for something."""


Given: TypeAlias = Rows | Upserts | Truncated | Mark | ExportFailed | Idle


class Lag(msgspec.Struct, frozen=True):
    """How far the outside is ahead of what was given, for people."""

    known: str = ""
    """The newest position known outside."""
    bytes_behind: int | None = None
    snapshot_rows_known: int | None = None
    """Of the first contents: how many there are, about."""
    snapshot_rows_staged: int = 0
    ms_behind: int | None = None
    """Between the newest commit given and now; 0 when nothing is known to be missing."""
    notes: tuple[str, ...] = ()
    """What people should know, and what to do about it: nothing has failed yet."""


class Source(Protocol):
    """One kind's implementation. Made from its configuration by `sources.kinds`."""

    async def describe(self, wanted: Mapping[str, Sequence[str]] | None) -> tuple[Export, ...]:
        """Return the exports that there are outside (`wanted` None: all, those that cannot be
        taken with their `refused`), or exactly those named, each with the columns to leave out.
        Checks all that can be checked before anything is made. Raises `InvalidUsage` (what is
        wrong, and what to do outside), `Unreachable`."""
        ...

    async def open(self, exports: Sequence[Export], position: str | None) -> None:
        """Begins after a position; None: from the very beginning. `exports` may be more than
        those of the position: the new ones are filled, and those that say `is_new`. Raises
        `Unreachable`, `InvalidUsage`."""
        ...

    async def next(self) -> Given:
        """What comes next; waits while there is nothing, and may say `Idle` first. Raises
        `Unreachable`."""
        ...

    async def taken(self, position: str) -> None:
        """That position, one of a mark given, is durable here. Called in order, not for every
        mark. Raises `Unreachable`."""
        ...

    def lag(self) -> Lag:
        """What it last learnt; never waits."""
        ...

    async def close(self) -> None:
        """Frees what it holds; twice is fine. What the outside keeps for it (a slot) stays."""
        ...

    async def forget(self) -> None:
        """The source is dropped for good: removes what the outside keeps for it. Instead of
        `open`, or after `close`. Raises `Unreachable`."""
        ...
