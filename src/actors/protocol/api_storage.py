"""Requests of the Python client about sources and sinks, and their answers; part of `api`.

The configuration of a source or sink is defined by its kind (`sources.kinds`, `sinks.kinds`): here
it is a kind and bytes. New fields last, with defaults.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.progress import Frontier, Time
from actors.protocol.storage import ObjectStatistics


class SourceTable(msgspec.Struct, frozen=True, gc=False):
    """One table that a source is to fill: its external name and its name in this service (empty:
    the same, or the source's own name if it has one table only)."""

    outside: str
    name: str = ""
    exclude: tuple[str, ...] = ()
    """Columns to leave out."""


class CreateSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a source and the tables that it fills; `tables` None: all that the external system
    has. Answered when it is in the catalog; its first contents come after that."""

    request: int
    name: str
    kind: str
    configuration: bytes
    tables: tuple[SourceTable, ...] | None = None
    retain_history_ms: int | None = None
    traceparent: str | None = None


class AlterSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Adds tables to a source. `Drop` removes a table."""

    request: int
    name: str
    add: tuple[SourceTable, ...]
    traceparent: str | None = None


class DropSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops a source and its tables; refused with `ObjectInUse` while others depend on them."""

    request: int
    name: str
    traceparent: str | None = None


class CreateSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a sink that writes the contents of the object `on` and their changes."""

    request: int
    name: str
    on: str
    kind: str
    configuration: bytes
    traceparent: str | None = None


class DropSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops a sink; the data that it has written stay."""

    request: int
    name: str
    traceparent: str | None = None


class ListSources(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All sources, or all sinks, with their health and statistics."""

    request: int
    sinks: bool = False


class ForgetSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Gives up the external resources of dropped sources of that name: their removal is no longer
    tried, and they are no longer listed. `Done` names them."""

    request: int
    name: str


class CopyFromFiles(msgspec.Struct, frozen=True, gc=False, tag="CopyFrom"):
    """Copies files into a table, all their rows at one time, or none. `path`: a file or a folder
    below the service's `source_dirs`. Answered by `CopyFromProgress` where it is wanted, then by
    `CopiedFrom`."""

    request: int
    table: str
    path: str
    format: Literal["parquet", "csv", "json"]
    columns: tuple[str, ...] = ()
    """Columns of the table that the files have; none: all."""
    options: dict[str, str] = {}
    """Options of Spark's reader for this format."""
    pattern: str = "*"
    recursive: bool = False
    uuid: str = ""
    """Idempotency token: a copy that was done is not repeated, but answered as it was."""
    progress: bool = False
    """True if `CopyFromProgress` is wanted."""


class CopyFromProgress(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Progress of a copy from files; `rows` are those in parts. Files count when they were read
    whole."""

    request: int
    state: str
    files_done: int = 0
    files: int = 0
    bytes_done: int = 0
    bytes: int = 0
    rows: int = 0


class CopiedFrom(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy is durable: all its rows, at `time`."""

    request: int
    rows: int
    time: Time
    repeated: bool = False
    """True if an earlier request with the same uuid made the copy."""


class ObjectHealth(msgspec.Struct, frozen=True, gc=False):
    """Health of a source, a table of it, or a sink."""

    status: str
    """starting, running, paused (no replica is connected), stalled, ceased; dropped: a dropped
    source whose external resource is not removed yet."""
    error: str = ""
    hint: str = ""
    since_ms: int = 0
    """Time of the last change of status (Unix time)."""


class SourceTableStatus(msgspec.Struct, frozen=True, gc=False):
    """A table that a source fills."""

    name: str
    outside: str
    health: ObjectHealth
    upper: Frontier


class SourceStatus(msgspec.Struct, frozen=True, gc=False):
    """One source, or one sink (which has no tables)."""

    name: str
    kind: str
    health: ObjectHealth
    upper: Frontier
    statistics: ObjectStatistics | None = None
    """Statistics as last reported; None: none yet."""
    tables: tuple[SourceTableStatus, ...] = ()
    on: str = ""
    """Object that a sink writes."""
    failed: ObjectHealth | None = None
    """Health at the last stall since the service started."""


class SourceReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ListSources`."""

    request: int
    time: Time
    sources: tuple[SourceStatus, ...]
