"""Requests of the Python client about sources and sinks, and their answers; part of `api`.

What a source or sink is configured with is its kind's own (`sources.kinds`, `sinks.kinds`): here
it is a kind and bytes. New fields last, with defaults.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.progress import Frontier, Time
from actors.protocol.storage import Statistics


class SourceTable(msgspec.Struct, frozen=True, gc=False):
    """One table that a source is to fill: its name outside and here (empty: the same, or the
    source's own name where it has but one)."""

    outside: str
    name: str = ""
    exclude: tuple[str, ...] = ()
    """Columns to leave out."""


class CreateSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Makes a source and the tables that it fills; `tables` None: all that are there outside.
    Answered when it is in the catalog; its first contents come after that."""

    request: int
    name: str
    kind: str
    configuration: bytes
    tables: tuple[SourceTable, ...] | None = None
    retain_history_ms: int | None = None
    traceparent: str | None = None


class AlterSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Adds tables to a source. One is taken out by dropping it."""

    request: int
    name: str
    add: tuple[SourceTable, ...]
    traceparent: str | None = None


class DropSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops a source and its tables; refused with `ObjectInUse` while others stand on them."""

    request: int
    name: str
    traceparent: str | None = None


class CreateSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Makes a sink that writes what the object `on` holds and how it changes."""

    request: int
    name: str
    on: str
    kind: str
    configuration: bytes
    traceparent: str | None = None


class DropSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops a sink; what it has written stays."""

    request: int
    name: str
    traceparent: str | None = None


class ListSources(msgspec.Struct, frozen=True, gc=False, tag=True):
    """All sources, or all sinks, with their health and statistics."""

    request: int
    sinks: bool = False


class ForgetSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Gives up what dropped sources of that name have left outside: it is not tried any more to
    remove it, nor spoken of. `Done` says what it was."""

    request: int
    name: str


class CopyFrom(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Copies files into a table, all their rows at one time, or none. `path`: a file or a folder
    below the service's `source_dirs`. Answered by `CopyFromProgress` where it is wanted, then by
    `CopiedFrom`."""

    request: int
    table: str
    path: str
    format: Literal["parquet", "csv", "json"]
    columns: tuple[str, ...] = ()
    """Those of the table that the files have; none: all."""
    options: dict[str, str] = {}
    """Of Spark's reader for this format."""
    pattern: str = "*"
    recursive: bool = False
    uuid: str = ""
    """Of the copy: one that was done is not done again, but answered as it was."""
    progress: bool = False
    """Whether `CopyFromProgress` is wanted."""


class CopyFromProgress(msgspec.Struct, frozen=True, gc=False, tag=True):
    """How far a copy from files is; `rows` are those in parts. Files count when they were read
    whole."""

    request: int
    state: str
    files_done: int = 0
    files: int = 0
    bytes_done: int = 0
    bytes: int = 0
    rows: int = 0


class CopiedFrom(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy is durable: so many rows, all at `time`."""

    request: int
    rows: int
    time: Time
    repeated: bool = False
    """It was done before, by a request with the same uuid."""


class Health(msgspec.Struct, frozen=True, gc=False):
    """Of a source, a table of it, or a sink."""

    status: str
    """starting, running, paused (no replica is connected), stalled, ceased; of a source that is no
    longer there, while what the outside keeps for it is: dropped."""
    error: str = ""
    hint: str = ""
    since_ms: int = 0
    """Since when (Unix time)."""


class SourceTableStatus(msgspec.Struct, frozen=True, gc=False):
    """A table that a source fills."""

    name: str
    outside: str
    health: Health
    upper: Frontier


class SourceStatus(msgspec.Struct, frozen=True, gc=False):
    """One source, or one sink (which has no tables)."""

    name: str
    kind: str
    health: Health
    upper: Frontier
    statistics: Statistics | None = None
    """As last told; None: nothing was told yet."""
    tables: tuple[SourceTableStatus, ...] = ()
    on: str = ""
    """Of a sink: the object it writes."""
    failed: Health | None = None
    """How it was when it stalled last, since the service started."""


class SourceReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ListSources`."""

    request: int
    time: Time
    sources: tuple[SourceStatus, ...]
