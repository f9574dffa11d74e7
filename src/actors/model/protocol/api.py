"""The requests of clients to the controller, and its answers.

Every request has a `request` number, unique within its connection, and its answers carry the same
number. `SubscribeObject` is answered by many `SubscribeChanges`, until `EndRequest` or an error.
`ReadObject` is answered by one or more `ReadContents`, the last one without `more`. `CopyTo` and
`CopyFromFiles` are answered by their progress, if requested, and then by one answer. Every other
request gets exactly one answer.

Rows travel as Arrow IPC streams. The configuration of a source or sink is defined by its kind
(`connectors.sources.kinds`, `connectors.sinks.kinds`); here it is a kind and bytes.

Client and service may be of different releases. So tags do not change when classes are renamed, new
fields come last and have a default, and an unknown message is a separate error.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from actors.model.plan.column_defaults import ColumnDefault
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.message_parts import ColumnComparison, ObjectStatistics, RowSetFinishing
from actors.model.protocol.role_messages import CheckRight, ListRoles, RolesReport, RoleStatement
from actors.runtime.progress import Frontier, Time
from actors.runtime.telemetry import ActorStatistics

TIME_ZONE: Final = "spark.sql.session.timeZone"
"""Spark's setting for the time zone of a session."""
PROTOCOL_VERSION = 1
COPY_FILE_BYTES: Final = 256 << 20
"""Default size of one file of a copy."""


# -- sources and sinks -----------------------------------------------------------------------------


class SourceTable(msgspec.Struct, frozen=True, gc=False):
    """A table that a source fills."""

    outside: str
    """Name in the external system."""
    name: str = ""
    """Name in this service; "": the external name, or the source's name if it has a single
    table."""
    exclude: tuple[str, ...] = ()
    """Columns to leave out."""


class CreateSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a source and the tables that it fills; `tables` None means every external table.

    Answered when the source is in the catalog; its first contents come later.
    """

    request: int
    name: str
    kind: str
    configuration: bytes
    tables: tuple[SourceTable, ...] | None = None
    retain_history_ms: int | None = None


class AlterSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Adds tables to a source. `DropObject` removes a table."""

    request: int
    name: str
    add: tuple[SourceTable, ...]


class DropSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops a source and its tables. Refused with `ObjectInUse` while other objects depend on
    them."""

    request: int
    name: str
    cascade: bool = False
    """True to drop the objects that depend on its tables as well."""


class CreateSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a sink that writes the contents of the object `on` and its changes."""

    request: int
    name: str
    on: str
    kind: str
    configuration: bytes


class DropSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops a sink. The data that it has written remain."""

    request: int
    name: str


class ListSources(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Lists all sources, or all sinks, with their health and statistics."""

    request: int
    sinks: bool = False


class ForgetSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Stops trying to remove the external resources of dropped sources with this name.

    The sources are no longer listed. The answer names the resources.
    """

    request: int
    name: str


class CopyFromFiles(msgspec.Struct, frozen=True, gc=False, tag="CopyFrom"):
    """Copies files into a table: all their rows at one timestamp, or none.

    Answered by `CopyFromProgress`, if requested, and then by `CopiedFrom`.
    """

    request: int
    table: str
    path: str
    """A file or a folder below the service's `source_dirs`, or a URL in one of its buckets."""
    format: Literal["parquet", "csv", "json"]
    columns: tuple[str, ...] = ()
    """Columns of the table that the files contain; empty for all."""
    options: dict[str, str] = {}
    """Options of Spark's reader for this format."""
    pattern: str = "*"
    """Pattern that the names of files in a folder must match."""
    recursive: bool = False
    """True to read subfolders as well."""
    uuid: str = ""
    """Idempotency token: a copy that was made before is not repeated, and gets the same answer."""
    progress: bool = False
    """True to request `CopyFromProgress`."""


class CopyFromProgress(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Progress of a copy from files. A file counts once it was read completely; `rows` counts rows
    that were written into parts."""

    request: int
    state: str
    files_done: int = 0
    files: int = 0
    bytes_done: int = 0
    bytes: int = 0
    rows: int = 0


class CopiedFrom(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy is durable, with all its rows at `time`."""

    request: int
    rows: int
    time: Time
    repeated: bool = False
    """True if an earlier request with the same uuid made the copy."""


class ObjectHealth(msgspec.Struct, frozen=True, gc=False):
    """Health of a source, of one of its tables, or of a sink."""

    status: str
    """``starting``, ``running``, ``paused`` (no replica is connected), ``stalled``, ``ceased``, or
    ``dropped`` (a dropped source whose external resource is not removed yet)."""
    error: str = ""
    hint: str = ""
    since_ms: int = 0
    """Unix time in ms of the last change of status; if stalled, of the first failure."""
    retries: int = 0
    """If stalled, number of failed attempts since then."""


class SourceTableStatus(msgspec.Struct, frozen=True, gc=False):
    """A table that a source fills."""

    name: str
    outside: str
    health: ObjectHealth
    upper: Frontier


class SourceStatus(msgspec.Struct, frozen=True, gc=False):
    """A source, or a sink (which has no tables)."""

    name: str
    kind: str
    health: ObjectHealth
    upper: Frontier
    statistics: ObjectStatistics | None = None
    """The last statistics reported; None if there are none yet."""
    tables: tuple[SourceTableStatus, ...] = ()
    on: str = ""
    """The object whose changes a sink writes out; "" for a source."""
    failed: ObjectHealth | None = None
    """Health at the last stall since the service started."""
    options: bytes = b""
    """Options other than defaults with which it was created, as JSON. They name secrets but do not
    contain them. Empty if the session does not own the source or sink."""
    retain_history_ms: int | None = None
    """Time in ms for which its history is kept; None for the service's default."""


class SourceReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ListSources`."""

    request: int
    time: Time
    sources: tuple[SourceStatus, ...]


# -- requests --------------------------------------------------------------------------------------


class ClientHello(msgspec.Struct, frozen=True, gc=False, tag="Welcome"):
    """The first message of a client: its protocol version and name."""

    version: int
    client: str = ""


class ServiceHello(msgspec.Struct, frozen=True, gc=False, tag="Welcomed"):
    """The first message of the service: its protocol version and name."""

    version: int
    service: str


class CreateTable(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a table. `retain_history_ms` None means the service's default."""

    request: int
    name: str
    schema: TableSchema
    retain_history_ms: int | None = None
    comment: str = ""
    column_comments: dict[str, str] = {}
    column_defaults: dict[str, ColumnDefault] = {}


class CreateView(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a view of a Spark SQL query, maintained or plain. Answered when it is in the
    catalog."""

    request: int
    name: str
    sql: str
    retain_history_ms: int | None = None
    conf: dict[str, str] = {}
    refresh_policy: str = "auto"
    """``auto``, ``incremental``, ``incremental strict`` or ``full``."""
    target_lag_ms: int = 0
    """Permitted age of the view's contents; 0 for as fresh as possible."""
    replace: bool = False
    """True to replace an existing view of this name once the new one is computed; the request is
    answered at that point."""
    comment: str = ""
    plain: bool = False
    """True for a plain view, which is inlined where it is named. Only `sql`, `replace` and
    `comment` apply to it."""
    as_of: Time | None = None
    """First time at which the view has contents; None for the latest at which its inputs can be
    read."""
    for_subscribe: bool = False
    """True for the view of a single subscribe (see `relations.is_subscribed_view`). It needs no
    CREATE right, and has only a name, a query, a refresh policy and a time."""


class AlterObject(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Changes the definition of an object. What is None, or empty, stays as it is."""

    request: int
    name: str
    rename: str | None = None
    refresh_policy: str | None = None
    target_lag_ms: int | None = None
    retain_history_ms: int | None = None
    """0 for the service's default."""
    comment: str | None = None
    """Comment of the object, or of `column`; "" removes it."""
    column: str = ""
    """The column that `comment` is for; "" for the object."""
    add_columns: tuple[TableColumn, ...] = ()
    """Columns to add to a table."""
    column_comments: dict[str, str] = {}
    """Comments of the added columns."""
    column_defaults: dict[str, ColumnDefault] = {}
    """New defaults of a table's columns; one without a text removes the default."""


class CreateIndex(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates an index: the object `on` is kept in memory by `key`, for peeks."""

    request: int
    name: str
    on: str
    key: tuple[str, ...]


class DropObject(msgspec.Struct, frozen=True, gc=False, tag="Drop"):
    """Drops an object. Refused with `ObjectInUse` while other objects depend on it."""

    request: int
    name: str
    cascade: bool = False
    """True to drop all objects that depend on it as well, atomically."""


class TableChange(msgspec.Struct, frozen=True, gc=False):
    """Changes to one table, all at the same timestamp. Rows are Arrow IPC streams."""

    table: str
    insert: bytes | None = None
    """Rows to insert. Missing columns get their defaults."""
    delete: bytes | None = None
    """Rows to delete: all columns, or in a table with a PRIMARY KEY only its key columns."""
    update: bytes | None = None
    """Rows to update in a table with a PRIMARY KEY: its key columns, and the columns to set."""
    defaults: str | None = None
    """Digest of the defaults that the writer used to fill its rows; None if it used none. The write
    is refused with `DefinitionChanged` if the table's defaults have changed."""
    left_out: bytes | None = None
    """Arrow IPC stream of booleans, one column for each column that some inserted rows leave out:
    true where a row leaves it out and gets the default. None if all rows have the same columns."""
    columns: str | None = None
    """Digest of the table's columns as the writer knows them (`TableSchema.digest`); None if its
    rows name their columns. The write is refused with `DefinitionChanged` if the columns have
    changed."""


class WriteTables(msgspec.Struct, frozen=True, gc=False, tag="Write"):
    """Changes tables atomically, at one timestamp. Answered by `WriteCommitted` when durable."""

    request: int
    changes: tuple[TableChange, ...]


class ReadObject(msgspec.Struct, frozen=True, gc=False, tag="Read"):
    """Reads an object at `as_of` (None: the latest written time), all of it or rows by `key`."""

    request: int
    name: str
    as_of: Time | None = None
    key: bytes | None = None
    """Arrow IPC stream with the key values to look up, one or more rows."""
    key_columns: tuple[str, ...] = ()
    deadline_ms: int | None = None
    filter: tuple[ColumnComparison, ...] = ()
    """Comparisons, all of which a row must pass."""
    project: tuple[str, ...] | None = None
    """Columns to return, in addition to those of the order; None for all."""
    finishing: RowSetFinishing | None = None
    """Order, offset and limit. The service leaves out rows that cannot be in the result; the client
    applies the rest."""


class SubscribeObject(msgspec.Struct, frozen=True, gc=False, tag="Subscribe"):
    """Subscribes to the changes of an object.

    Without `from_`, the contents now (or at `as_of`) come first, then changes. A subscriber that
    resumes gives a frontier as `from_` and gets only the changes with ``time >= from_``.
    """

    request: int
    name: str
    from_: Frontier | None = None
    as_of: Time | None = None
    up_to: Frontier | None = None
    """Ends the subscribe after the changes with ``time < up_to``, with the empty upper."""
    snapshot: bool = True
    """False to leave out the contents and send only the changes after them."""
    progress: bool = True
    """False to send no answers without rows, except the last one."""


class EndRequest(msgspec.Struct, frozen=True, gc=False, tag="Unsubscribe"):
    """Ends a subscribe, or cancels a read or wait; `target` is its request number."""

    request: int
    target: int


class SignalSession(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends a session of any door, or cancels its statement.

    Answered immediately by `RequestDone`, or by `UnknownObject` if there is no such session.
    """

    request: int
    number: int
    """Number of the session in `penstock.sessions`."""
    end: bool = True
    """False to cancel its statement and keep the session."""


class WaitFor(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Waits until every time up to and including `time` is sealed in the object."""

    request: int
    name: str
    time: Time
    deadline_ms: int | None = None


class ReadStatus(msgspec.Struct, frozen=True, gc=False, tag="Status"):
    """Asks for all objects with their frontiers, and for the oracle's time."""

    request: int


class ExplainView(msgspec.Struct, frozen=True, gc=False, tag="Explain"):
    """Asks for a view's plan as text."""

    request: int
    name: str


class ListActors(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks for the statistics of every live actor of the service."""

    request: int


class SetTracing(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Sets the fraction of new traces that are sampled, from 0 to 1; None only asks for it."""

    request: int
    ratio: float | None = None


class ChangeReplicas(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Adds or drops a replica durably. Without either name it only asks for the replicas."""

    request: int
    add: str = ""
    drop: str = ""


class RunQuery(msgspec.Struct, frozen=True, gc=False, tag="Query"):
    """Runs a one-off query at `as_of` (None: the latest time at which all its inputs are sealed).

    Answered by `ReadInstead`, or by `ReadContents` in the query's order.
    """

    request: int
    sql: str
    as_of: Time | None = None
    deadline_ms: int | None = None
    engine: bool = False
    """True to run even a plain read on the engine."""
    latest: bool = False
    """True to read at the latest written time if `as_of` is None, after waiting until it is
    sealed."""
    conf: dict[str, str] = {}
    """Spark settings of the session: its time zone, and others that change the meaning of a query.
    Settings not given have the service's values."""


class DescribeQuery(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks for the columns of a query without running it. Answered by `QueryDescribed`."""

    request: int
    sql: str
    conf: dict[str, str] = {}
    """Spark settings of the session, as in `RunQuery`."""


class ExplainQuery(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks for the plan that would maintain a view of this query, as text.

    With the policy ``none`` it asks how the query's rows would be read now.
    """

    request: int
    sql: str
    conf: dict[str, str] = {}
    refresh_policy: str = "auto"


class CopyTo(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Copies the contents of an object at `as_of` (None: the latest written time) into files.

    Answered by `CopyProgressed`, if requested, and then by `CopiedInto`.
    """

    request: int
    name: str
    destination: str
    format: Literal["parquet", "csv", "json"] = "parquet"
    as_of: Time | None = None
    file_bytes_max: int = COPY_FILE_BYTES
    overwrite: bool = False
    """True to replace an existing copy once this one is complete."""
    deadline_ms: int | None = None
    """The copy is dropped if it takes longer than this."""
    progress: bool = False
    """True to request `CopyProgressed`."""


CatalogStatement: TypeAlias = (
    CreateTable
    | CreateView
    | CreateIndex
    | CreateSource
    | CreateSink
    | AlterObject
    | AlterSource
    | DropObject
    | DropSource
    | DropSink
)
"""Statements that change the catalog. The grammar creates them and the controller executes them;
their request number is 0 until a connection sends them."""
Request: TypeAlias = (
    CatalogStatement
    | RoleStatement
    | WriteTables
    | ReadObject
    | SubscribeObject
    | EndRequest
    | WaitFor
    | ReadStatus
    | ExplainView
    | ListActors
    | SetTracing
    | ChangeReplicas
    | RunQuery
    | DescribeQuery
    | ExplainQuery
    | CopyTo
    | ListSources
    | ForgetSource
    | CopyFromFiles
    | ListRoles
    | CheckRight
    | SignalSession
)


class RequestDone(msgspec.Struct, frozen=True, gc=False, tag="Done"):
    """The request was carried out. `text` is its result if it has one, as `ExplainView` does."""

    request: int
    text: str = ""


class WriteCommitted(msgspec.Struct, frozen=True, gc=False, tag="Written"):
    """The write is durable, at `time`."""

    request: int
    time: Time
    rows: int


class ReadContents(msgspec.Struct, frozen=True, gc=False, tag="Contents"):
    """Rows read at `as_of`: columns and ``__diff``, as an Arrow IPC stream."""

    request: int
    as_of: Time
    arrow: bytes
    more: bool = False
    """True if more rows follow."""
    reads: tuple[tuple[str, str], ...] = ()
    """Ids and names of the objects that were read, for a session with a role: it may lose its right
    before the rows reach the client. Empty for a trusted session."""


class SubscribeChanges(msgspec.Struct, frozen=True, gc=False, tag="Changes"):
    """Updates of a subscribe with ``lower <= time < upper``; `arrow` None means progress only.

    A `partial` answer has only some of the updates of an interval that starts at `lower`, and its
    `upper` equals `lower`. The last answer of the interval has the interval's upper.
    """

    request: int
    lower: Frontier
    upper: Frontier
    arrow: bytes | None = None
    partial: bool = False
    reads: tuple[tuple[str, str], ...] = ()
    """Ids and names of the objects that were read, as in `ReadContents`."""


class ObjectStatus(msgspec.Struct, frozen=True, gc=False):
    """Status of one object, in a `StatusReport`."""

    name: str
    kind: str
    since: Time
    upper: Frontier
    lag_ms: int
    """Age in ms of what a reader sees; 0 if it is up to date."""
    state: str = ""
    text: str = ""
    mode: str = ""
    steps: int = 0
    step_ms: float = 0.0
    spark_ms: float = 0.0
    rows_in: int = 0
    rows_out: int = 0
    schema: TableSchema | None = None
    sql: str = ""
    rows_read: int = 0
    """Rows of state that the last step's lookups returned."""
    prepared: bool = False
    """True if the last step used prepared plans."""
    recomputed: bool = False
    """True if the last step recomputed the view in full."""
    rejected: str = ""
    """The alternative to the last step, and its estimated cost."""
    held_rows: int = 0
    """Number of updates that the workers hold for an index; then their bytes in memory and in
    mapped files."""
    held_bytes_memory: int = 0
    held_bytes_mapped: int = 0
    parts_read: int = 0
    """While the object hydrates: number of input parts read so far, of `parts_total`; the same for
    bytes."""
    parts_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    target_lag_ms: int = 0
    """Permitted age of the view's contents; 0 for as fresh as possible."""
    comment: str = ""
    column_comments: dict[str, str] = {}
    replaces: str = ""
    """The view that this one replaces once it is computed."""
    id: str = ""
    column_defaults: dict[str, ColumnDefault] = {}
    spark_conf: dict[str, str] = {}
    """Spark settings that a view was created with and keeps."""
    retain_history_ms: int | None = None
    """Time in ms for which its history is kept; None for the service's default."""
    state_since_ms: int = 0
    """Unix time in ms of the first failure, if the state is one of `ERROR_STATES`."""
    retries: int = 0
    """Number of failed attempts since then."""


class StatusReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ReadStatus`."""

    request: int
    time: Time
    tables_upper: Frontier
    objects: tuple[ObjectStatus, ...]


class ActorReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ListActors`.

    `monotonic_ms` is the service's clock, for computing rates from two reports.
    """

    request: int
    monotonic_ms: float
    actors: tuple[ActorStatistics, ...]


class TracingReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `SetTracing`. If `exporting` is False, tracing is off whatever the ratio."""

    request: int
    exporting: bool
    ratio: float


class ReplicaStatus(msgspec.Struct, frozen=True, gc=False):
    """Status of one replica."""

    name: str
    state: str
    """``connected`` or ``connecting``."""
    text: str = ""
    """The error that ended the last connection."""
    connections: int = 0
    """Number of connections so far."""
    reporting: int = 0
    """Number of dataflows that have reported a frontier on this connection, of `objects`."""
    objects: int = 0
    lag_ms: int = 0
    """Distance in ms of its slowest dataflow from the most advanced replica."""


class ReplicaReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ChangeReplicas`."""

    request: int
    replicas: tuple[ReplicaStatus, ...]


class ReadInstead(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to a `RunQuery` that is a plain read: the `ReadObject` that the client must send.

    `names` are the column names of the query, one for each column in `project`.
    """

    request: int
    name: str
    as_of: Time | None
    project: tuple[str, ...]
    names: tuple[str, ...]
    filter: tuple[ColumnComparison, ...] = ()
    finishing: RowSetFinishing | None = None


class QueryDescribed(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `DescribeQuery`."""

    request: int
    schema: TableSchema


class RequestFailed(msgspec.Struct, frozen=True, gc=False, tag="Failed"):
    """The request failed; `code` is an error class of `actors.runtime.errors`."""

    request: int
    code: str
    text: str
    determinate: bool = True


class CopyProgressed(msgspec.Struct, frozen=True, gc=False, tag="CopyProgress"):
    """Progress of a copy into files; `rows` counts the rows written.

    `state` is ``waiting`` until the copy's time is sealed, then ``copying``.
    """

    request: int
    state: str
    rows: int = 0
    parts_read: int = 0
    parts_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0


class CopiedInto(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy is complete. `manifest` is the path of the file that lists its files."""

    request: int
    rows: int
    files: int
    manifest: str
    as_of: Time


Answer: TypeAlias = (
    RequestDone
    | WriteCommitted
    | ReadContents
    | SubscribeChanges
    | StatusReport
    | ActorReport
    | TracingReport
    | RequestFailed
    | ReplicaReport
    | ReadInstead
    | QueryDescribed
    | CopyProgressed
    | CopiedInto
    | SourceReport
    | CopyFromProgress
    | CopiedFrom
    | RolesReport
)


Traced: TypeAlias = CatalogStatement | WriteTables | ReadObject | SubscribeObject | RunQuery
"""Requests that carry a trace context."""


def objects_of(request: Traced) -> str:
    """Return the names of a request's objects, for traces."""
    if isinstance(request, WriteTables):
        return ",".join(change.table for change in request.changes)
    if isinstance(request, RunQuery):
        return "query"
    return request.name


# First bytes of a connection, so that a peer of another protocol is refused before decoding.
CLIENT_MAGIC: Final = b"PNSTKAPI"
CLIENT_MAGIC_VERSION: Final = 2
"""Version of the handshake that precedes `ClientHello`. Version 2 added identities and tokens."""
ClientMessage: TypeAlias = ClientHello | Request
ServiceMessage: TypeAlias = ServiceHello | Answer
