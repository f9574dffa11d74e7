"""The interface of sources: connectors that read an external system's changes, with positions.

Theory of operation. The caller (the ingest task) asks for one item after another (`next`). A source
reads ahead no further than one answer, which bounds the bytes in flight. It knows nothing of times
and shards: the caller assigns one time to everything up to a `PositionMark`, and makes contents,
position and time durable in one append. So a source is always opened at the position up to which
everything, and nothing more, is in the shards.

Rules:
- Rows between two marks belong to one instant: all changes of an external transaction come before
  the same mark. A mark may cover several transactions, but never part of one.
- After `open(position)`, a source returns exactly what comes after that position, once and in
  order, no matter how often it was restarted.
- Positions are texts that only the source interprets (JSON, at most `POSITION_BYTES_MAX`). They
  contain everything that a later `open` needs, including which exports are filled.
- An export may be opened with additional columns at its end (`describe_added`). They are NULL in
  earlier rows until the source returns their values as changes, all before one mark. If the
  external system does not keep such rows, they stay NULL.
- Rows of an export that was added later come only before the mark that fills it, or after that.
- If the external system does not provide old rows, the source returns `SourceUpserts` and
  `ExportTruncated`, and the caller finds the old rows in its own contents
  (`connectors.ingest.contents` computes the changes). Order within one export matters, also between
  these and `SourceRows`: rows returned since the last mark are among those replaced or removed.
- `taken` is called once a position is durable. Only then may the external system discard what comes
  before it.
- An error that may go away on its own (`SourceUnreachable`) ends the source, and it is reopened
  with backoff. A permanent error of one export (a dropped column, a value that cannot be
  represented) is `ExportFailed`: that export fails, and the others continue.
- Nothing blocks the event loop, every wait can be cancelled, and `close` is always called.
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

# The context that the service gives its sources: the clock, the settings, a folder and the engine.


RunJob: TypeAlias = Callable[[Job], Awaitable[Answer]]
"""Runs a job on the engine. Raises the executor's errors. Cancelling the caller cancels the job."""


async def no_engine(job: Job) -> Answer:
    """Refuse every job, in a service without Spark. Raises `EngineUnavailable`."""
    raise EngineUnavailable(
        f"cannot run {type(job).__name__}: this service was started without an engine"
    )


class ConnectorContext(NamedTuple):
    """Everything that a source needs in addition to its configuration."""

    clock: ActorClock
    settings: Settings
    scratch: Path
    """Folder for files that need not survive the process. It may not exist yet."""
    run_job: RunJob = no_engine
    id: str = ""
    """Id of the source, used in the names of its external resources."""


def hint_of(error: Exception) -> str:
    """Return what to do about an error that ended a source or sink; "" if its text says so already
    or nothing can be done."""
    match error:
        case SourceUnreachable():
            return error.hint
        case WriterFenced():
            return "the service will reopen it at its durable position"
        case StoreFull():
            return "free space in the store that holds the service's shards; the service will retry"
        case CorruptData():
            return (
                "the service's own store is damaged: run penstock shard inspect for details, and "
                "restore it"
            )
        case StorageError():
            return "check the store that holds the service's shards; the service will retry"
        case PenstockError():
            return ""
    return "this is an unexpected error: see the service's log for details"


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a source. Each kind has its own class, tagged with its name."""

    def check(self) -> None:
        """Raise `InvalidUsage`, which names the invalid option."""

    def with_token(self, token: str) -> Self:
        """Return these options for a new source. `token` makes the names of its external resources
        unique."""
        return self

    def external_resource(self, id: str) -> str:
        """Return the name of the external resource to remove with the source; "" if there is
        none."""
        return ""


def choices_hint(kind: type[msgspec.Struct], error: str) -> str:
    """Return the allowed values of the option that an error of msgspec names; "" if it is not an
    option with few values.

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
"""Maximum length of a configuration as JSON. Its decoded form takes many times as much memory."""


def check_configuration(data: bytes | str) -> None:
    """Raise `InvalidUsage` for a user's configuration that is too long to be decoded."""
    if len(data) > CONFIGURATION_BYTES_MAX:
        raise InvalidUsage(
            f"configuration too long: {len(data)} bytes (limit {CONFIGURATION_BYTES_MAX})"
        )


POSITION_BYTES_MAX: Final = 64 * 1024
OP: Final = "__op"
KEPT: Final = "__kept"


class SourceUnreachable(PenstockError):
    """The external system cannot be reached or read at the moment. `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class SourceExport(msgspec.Struct, frozen=True):
    """One table of a source: its external name and its local columns."""

    name: str
    schema: TableSchema
    is_new: bool = False
    """Set by the caller of `open` to have the export filled, even if the position names it, because
    it has no rows yet or was dropped and added again."""
    asked_as: str = ""
    """The name as spelled in the request to `describe`, where it differs."""
    table: str = ""
    """Default name of its local table; "": the last part of `name`."""
    refused: str = ""
    """Why it cannot be ingested, and what to do; "" if it can. Only set if `describe` was asked for
    all exports; for a named export, it raises an error instead."""


class SourceRows(msgspec.Struct, frozen=True):
    """Changes of one export: the columns of its schema, followed by `plan.schema.DIFF` (int64, not
    0). A piece of bounded size."""

    export: str
    updates: pa.Table
    snapshot: bool = False
    """True for first contents, False for changes. Used for statistics."""


class SourceUpserts(msgspec.Struct, frozen=True):
    """Changes of an export with a key, without the old rows.

    They are in order: a key may have several rows, of which the last one counts. A piece of bounded
    size, like `SourceRows`. It has the columns of the schema and `OP` (int8, a `UpsertOp`). If some
    values are missing because they did not change, it also has `KEPT`: a list of int16 with the
    positions of those columns in the schema, whose values are NULL here; NULL if there are none.
    """

    export: str
    changes: pa.Table


class UpsertOp(enum.IntEnum):
    """Operation of a row of `SourceUpserts` on its key."""

    DELETED = 0
    """The key's row is deleted. All columns except the key are NULL."""
    UPDATED = 1
    """The row replaces the key's row."""
    INSERTED = 2
    """The key had no row before, so no lookup is needed."""
    MOVED = 3
    """`INSERTED`, but kept values come from the row that the previous change (`DELETED`, of another
    key) removed."""


class ExportTruncated(msgspec.Struct, frozen=True):
    """All rows of an export are deleted: those in its shard and those returned before."""

    export: str


class RowsWithdrawn(msgspec.Struct, frozen=True):
    """Discard the `SourceRows` of an export since the last mark; others may follow. Only for
    exports without upserts."""

    export: str


class PositionMark(msgspec.Struct, frozen=True):
    """The position after everything returned so far."""

    position: str
    outside_ms: int | None = None
    """Commit time in the external system (Unix ms), for lag and statistics; None if unknown."""
    messages: int = 0
    """Number of external changes since the last mark, for statistics."""
    filled: tuple[str, ...] = ()
    """Exports whose first contents are complete with this mark. The first mark of a source that was
    opened at None fills all exports, named or not. An export that was added later cannot be read
    before."""


class ExportFailed(msgspec.Struct, frozen=True):
    """An export fails from the next mark on. The others continue."""

    export: str
    error: str
    hint: str = ""


class SourceIdle(msgspec.Struct, frozen=True):
    """There is no data at the moment; the next call waits for some."""


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
    """How far the returned rows are behind the external system, for display."""

    known: str = ""
    """Newest known position of the external system."""
    bytes_behind: int | None = None
    """Bytes of the external log that were not returned yet; None if unknown."""
    snapshot_rows_known: int | None = None
    """Estimated number of rows in the first contents; None if unknown."""
    snapshot_rows_staged: int = 0
    """Number of those rows returned so far."""
    ms_behind: int | None = None
    """Time since the newest commit returned; 0 if nothing is known to be missing; None if
    unknown."""
    notes: tuple[str, ...] = ()
    """Warnings and what to do about them. Nothing has failed yet."""


class SourceConnector(Protocol):
    """The connector of one kind of source. `sources.kinds` makes it from its configuration."""

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """Return the exports of the external system.

        If `wanted` is None, return all, those that cannot be ingested with the reason in `refused`.
        Otherwise return exactly those named, each without the columns to leave out. Checks
        everything that can be checked before anything is created. Raises `InvalidUsage` (what is
        wrong, and what to do in the external system) and `SourceUnreachable`.
        """
        ...

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """Return columns to add to an ingested export, as the external system names them.

        From then on, the export may be opened with these columns at its end. Raises `InvalidUsage`
        (what is wrong, and what to do) and `SourceUnreachable`.
        """
        ...

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """Start after a position; None starts at the very beginning.

        Exports that the position does not name, and those with `is_new`, are filled. Raises
        `SourceUnreachable` and `InvalidUsage`.
        """
        ...

    async def next(self) -> Given:
        """Return the next rows or event. May return `SourceIdle` before it waits. Raises
        `SourceUnreachable`."""
        ...

    async def taken(self, position: str) -> None:
        """Acknowledge that the position of a mark is durable. Called in order, but not for every
        mark. Raises `SourceUnreachable`."""
        ...

    def lag(self) -> SourceLag:
        """Return the last known lag. Never waits."""
        ...

    async def close(self) -> None:
        """Close connections and files. May be called twice. External resources (a slot) stay."""
        ...

    async def forget(self) -> None:
        """Remove the external resources of a dropped source. Called instead of `open`, or after
        `close`. Raises `SourceUnreachable`."""
        ...
