"""The interface of sources: connectors that read an external system's changes, with positions.

Theory of operation. The caller (the ingest task) asks for one thing after another (`next`); a
source reads ahead no further than one answer, which bounds the bytes in flight. A source knows
nothing of times and shards: the caller gives everything up to a `PositionMark` one time, and makes
contents, position and that time durable in one append. So the position at which a source is opened
is always the one up to which everything, and nothing more, is in the shards.

Rules:
- rows between two marks belong to one instant: the changes of one external transaction come before
  one mark. A mark may stand for several transactions, never for a part of one;
- after `open(position)` a source gives exactly what comes after that position, once and in order,
  however often it was restarted;
- positions are texts that only the source reads (JSON, at most `POSITION_BYTES_MAX`); they tell
  all that a later `open` needs, also which exports were filled already;
- an export may be opened with further columns at its end (`describe_added`). Rows that were given
  before have NULL in them, until the source gives their values as changes, all before one mark; a
  source whose external system does not keep such rows leaves them NULL;
- rows of an export that was added later come only before the mark that fills it, or after that;
- where the external system does not tell old rows, `SourceUpserts` and `ExportTruncated` are given:
  the caller finds the old rows in its own contents (`connectors.ingest.contents` computes the
  changes). Order within one export counts, also between these and `SourceRows`: rows given since
  the last mark are among those that are replaced or removed;
- `taken` is called when a position is durable here; only then may the external system forget what
  comes before it;
- an error that waiting may cure (`SourceUnreachable`) ends the source: it is reopened, with
  backoff. A lasting error of one export (a column was dropped, a value cannot be held) is
  `ExportFailed`: that export fails, the others go on;
- nothing blocks the event loop; every wait can be cancelled; `close` is always called.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, Self, TypeAlias, get_args, get_origin

import msgspec
import pyarrow as pa

from actors.model.plan.jobs import Answer, Job
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import (
    CorruptData,
    EngineUnavailable,
    InvalidUsage,
    PenstockError,
    StorageError,
    StoreFull,
    WriterFenced,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings

# The context that the service gives its sources: the clock, the settings, a folder, the engine


RunJob: TypeAlias = Callable[[Job], Awaitable[Answer]]
"""Runs a job of the engine. Raises the executor's errors; a cancelled caller cancels the job."""


async def no_engine(job: Job) -> Answer:
    """Refuse every job, in a service without Spark. Raises `EngineUnavailable`."""
    raise EngineUnavailable(f"{type(job).__name__}: this service was started without an engine")


class ConnectorContext(NamedTuple):
    """All that a source needs besides its configuration."""

    clock: ActorClock
    settings: Settings
    scratch: Path
    """Folder for files that need not survive the process; it may not exist yet."""
    run_job: RunJob = no_engine
    id: str = ""
    """Id of the source, for the names of its external resources."""


def hint_of(error: Exception) -> str:
    """Return what to do about an error that has ended a source or sink; "" if its text says it, or
    nobody can do anything."""
    match error:
        case SourceUnreachable():
            return error.hint
        case WriterFenced():
            return "it is opened again at what is durable"
        case StoreFull():
            return "free space in the store that holds the service's shards: it is tried again"
        case CorruptData():
            return (
                "the service's own store is damaged: penstock shard inspect tells more, restore it"
            )
        case StorageError():
            return "look at the store that holds the service's shards: it is tried again"
        case PenstockError():
            return ""
    return "this was not foreseen: the service's log holds more"


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a source; each kind has its own, with its name as the tag."""

    def check(self) -> None:
        """Raise `InvalidUsage` naming the option that does not fit."""

    def with_token(self, token: str) -> Self:
        """Return the options of a new source; `token` names its external resources."""
        return self

    def external_resource(self, id: str) -> str:
        """Return the name of the external resource to remove with the source; "" if none is
        ours."""
        return ""


def choices_hint(kind: type[msgspec.Struct], error: str) -> str:
    """Return the values of the option that an error of msgspec names, if it is one of a few; ""
    for every other error.

    >>> class Config(msgspec.Struct):
    ...     mode: Literal["once", "always"]
    >>> choices_hint(Config, "Invalid enum value 'x' - at `$.mode`")
    ': mode is once or always'
    """
    for field in msgspec.structs.fields(kind):
        if f"`$.{field.name}`" in error and get_origin(field.type) is Literal:
            return f": {field.name} is {' or '.join(map(str, get_args(field.type)))}"
    return ""


CONFIGURATION_BYTES_MAX: Final = 4 * 1024 * 1024
"""Length of a configuration as JSON: what it decodes to is many times as large."""


def check_configuration(data: bytes | str) -> None:
    """Raise `InvalidUsage` for a user's configuration that is too long to be decoded."""
    if len(data) > CONFIGURATION_BYTES_MAX:
        raise InvalidUsage(
            f"a configuration of {len(data)} bytes: at most {CONFIGURATION_BYTES_MAX}"
        )


POSITION_BYTES_MAX: Final = 64 * 1024
OP: Final = "__op"
KEPT: Final = "__kept"


class SourceUnreachable(PenstockError):
    """The external system cannot be reached or read just now. `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class SourceExport(msgspec.Struct, frozen=True):
    """One table that a source gives: its external name and its columns here."""

    name: str
    schema: TableSchema
    is_new: bool = False
    """Set by the caller of `open` to have it filled, also where the position names it: nothing of
    it was given yet, or it was dropped and added again."""
    asked_as: str = ""
    """Spelling of the name in the request to `describe`, where it differs."""
    table: str = ""
    """Default name of its table here; "": the last part of `name`."""
    refused: str = ""
    """Reason why it cannot be ingested, and what to do; "": it can. Only where `describe` was asked
    for all exports: one that is named and cannot be ingested is an error."""


class SourceRows(msgspec.Struct, frozen=True):
    """Changes of one export: the columns of its schema, then `plan.schema.DIFF` (int64, not 0). A
    piece of bounded size."""

    export: str
    updates: pa.Table
    snapshot: bool = False
    """True for first contents, not changes; for statistics."""


class SourceUpserts(msgspec.Struct, frozen=True):
    """Changes of an export with a key, without old rows. In order; a key may have several rows, the
    last one holds. A piece of bounded size, like `SourceRows`.

    The columns of the schema; `OP` (int8, one of `UpsertOp`); and, only where values are not told
    because they stay as they are, `KEPT` (list of int16: places of such columns in the schema,
    whose values are NULL here; NULL: none)."""

    export: str
    changes: pa.Table


class UpsertOp(enum.IntEnum):
    """Operation of a row of `SourceUpserts` on its key."""

    DELETED = 0
    """The key's row is deleted; all columns but the key's are NULL."""
    UPDATED = 1
    """The row replaces the key's row."""
    INSERTED = 2
    """The key had no row before: no lookup is needed."""
    MOVED = 3
    """`INSERTED`, but kept values are those of the row that the change right before it (`DELETED`,
    of another key) removed."""


class ExportTruncated(msgspec.Struct, frozen=True):
    """All rows of an export are deleted: those in its shard, and those given before."""

    export: str


class RowsWithdrawn(msgspec.Struct, frozen=True):
    """The `SourceRows` of an export since the last mark do not count; others may follow. For
    exports without upserts."""

    export: str


class PositionMark(msgspec.Struct, frozen=True):
    """A position of everything given so far."""

    position: str
    outside_ms: int | None = None
    """Commit time in the external system (Unix ms); None: unknown. For lag and statistics."""
    messages: int = 0
    """External changes since the last mark, for statistics."""
    filled: tuple[str, ...] = ()
    """Exports whose first contents are complete with this mark. The first mark of a source that was
    opened at None fills all, named or not; an export that was added later is not readable
    before."""


class ExportFailed(msgspec.Struct, frozen=True):
    """An export fails from the next mark on; the others go on."""

    export: str
    error: str
    hint: str = ""


class SourceIdle(msgspec.Struct, frozen=True):
    """No data just now; the next call waits for some."""


Given: TypeAlias = (
    SourceRows
    | SourceUpserts
    | ExportTruncated
    | RowsWithdrawn
    | PositionMark
    | ExportFailed
    | SourceIdle
)


class SourceLag(msgspec.Struct, frozen=True):
    """Distance of the external system from the rows given, for people."""

    known: str = ""
    """Newest known position of the external system."""
    bytes_behind: int | None = None
    snapshot_rows_known: int | None = None
    """Estimated number of rows of the first contents."""
    snapshot_rows_staged: int = 0
    ms_behind: int | None = None
    """Time since the newest commit given; 0 when nothing is known to be missing."""
    notes: tuple[str, ...] = ()
    """Warnings, with what to do: nothing has failed yet."""


class SourceConnector(Protocol):
    """The connector of one kind. Made from its configuration by `sources.kinds`."""

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """Return the exports of the external system (`wanted` None: all, those that cannot be
        ingested with their `refused`), or exactly those named, each without the columns to leave
        out. Checks all that can be checked before anything is created. Raises `InvalidUsage` (what
        is wrong, and what to do in the external system), `SourceUnreachable`."""
        ...

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """Return these further columns of an export that is ingested, as they are called there; it
        may be opened with them at its end from then on. Raises `InvalidUsage` (what is wrong, and
        what to do), `SourceUnreachable`."""
        ...

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """Begin after a position; None: from the very beginning. Exports that the position does not
        name, and those with `is_new`, are filled. Raises `SourceUnreachable`, `InvalidUsage`."""
        ...

    async def next(self) -> Given:
        """Return the next rows or event; may return `SourceIdle` before it waits. Raises
        `SourceUnreachable`."""
        ...

    async def taken(self, position: str) -> None:
        """Acknowledge a position, one of a mark given, that is durable here. Called in order, not
        for every mark. Raises `SourceUnreachable`."""
        ...

    def lag(self) -> SourceLag:
        """Return the last known lag; never waits."""
        ...

    async def close(self) -> None:
        """Free its connections and files; may be called twice. External resources (a slot) stay."""
        ...

    async def forget(self) -> None:
        """Remove the external resources of a dropped source. Called instead of `open`, or after
        `close`. Raises `SourceUnreachable`."""
        ...
