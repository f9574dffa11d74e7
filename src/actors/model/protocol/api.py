"""Requests of the Python client to the controller, and its answers.

Every request has a `request` number, unique within its connection; its answers carry the same.
`SubscribeObject` is answered by many `SubscribeChanges` until `EndRequest` or an error;
`ReadObject` by one or more `ReadContents`, the last without `more`; `CopyTo` and `CopyFromFiles` by
their progress where it is wanted, then by one answer; every other request by exactly one answer.
Rows travel as Arrow IPC streams. The configuration of a source or sink is defined by its kind
(`connectors.sources.kinds`, `connectors.sinks.kinds`): here it is a kind and bytes.

A client may be of another release than the service. So tags stay when classes are renamed, fields
that are added come last with a default, and an unknown message is a named error.
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
"""Spark's setting of a session's time zone."""
PROTOCOL_VERSION = 1
COPY_FILE_BYTES: Final = 256 << 20
"""Size of one file of a copy, unless a client asks for another."""


# -- sources and sinks -----------------------------------------------------------------------------


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


class AlterSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Adds tables to a source. `Drop` removes a table."""

    request: int
    name: str
    add: tuple[SourceTable, ...]


class DropSource(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops a source and its tables; refused with `ObjectInUse` while others depend on them."""

    request: int
    name: str
    cascade: bool = False
    """True: what depends on its tables is dropped with them."""


class CreateSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a sink that writes the contents of the object `on` and their changes."""

    request: int
    name: str
    on: str
    kind: str
    configuration: bytes


class DropSink(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Drops a sink; the data that it has written stay."""

    request: int
    name: str


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
    """Time of the last change of status (Unix time); while it is stalled of the first failure."""
    retries: int = 0
    """Attempts that have failed since then, while it is stalled."""


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
    options: bytes = b""
    """Options that it was made with and that are not as by default, as JSON: secrets are named, and
    not in them. Empty: the session does not own it."""
    retain_history_ms: int | None = None
    """Time for which its history is kept; None: the service's default."""


class SourceReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ListSources`."""

    request: int
    time: Time
    sources: tuple[SourceStatus, ...]


# -- requests --------------------------------------------------------------------------------------


class ClientHello(msgspec.Struct, frozen=True, gc=False, tag="Welcome"):
    """First frame of the client: its protocol version and name."""

    version: int
    client: str = ""


class ServiceHello(msgspec.Struct, frozen=True, gc=False, tag="Welcomed"):
    """First frame of the service."""

    version: int
    service: str


class CreateTable(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a table; `retain_history_ms` None: the service's default."""

    request: int
    name: str
    schema: TableSchema
    retain_history_ms: int | None = None
    comment: str = ""
    column_comments: dict[str, str] = {}
    column_defaults: dict[str, ColumnDefault] = {}


class CreateView(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Creates a maintained view of a Spark SQL query. Answered when it is in the catalog."""

    request: int
    name: str
    sql: str
    retain_history_ms: int | None = None
    conf: dict[str, str] = {}
    refresh_policy: str = "auto"
    """``auto``, ``incremental``, ``incremental strict`` or ``full``."""
    target_lag_ms: int = 0
    """Age that the view may have; 0: as fresh as possible."""
    replace: bool = False
    """True: a view of that name is replaced when this one is computed, and answered then."""
    comment: str = ""
    plain: bool = False
    """True for a plain view, which is inlined where it is named; only `replace` and `comment` count
    beside its query."""
    as_of: Time | None = None
    """Time from which the view has contents; None: the latest at which its inputs can be read."""
    for_subscribe: bool = False
    """True for the view of one subscribe (see `relations.is_subscribed_view`): it needs no right to
    create, and has a name, a query, a refresh policy and a time alone."""


class AlterObject(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Changes an object's definition; what is None stays as it is."""

    request: int
    name: str
    rename: str | None = None
    refresh_policy: str | None = None
    target_lag_ms: int | None = None
    retain_history_ms: int | None = None
    """0: the service's default."""
    comment: str | None = None
    """Comment of the object, or of `column`; empty: none."""
    column: str = ""
    add_columns: tuple[TableColumn, ...] = ()
    """Further columns of a table."""
    column_comments: dict[str, str] = {}
    """Comments of those."""
    column_defaults: dict[str, ColumnDefault] = {}
    """Defaults of a table's columns from now on; one without a text is dropped."""


class CreateIndex(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Keeps an object arranged by `key`, for peeks."""

    request: int
    name: str
    on: str
    key: tuple[str, ...]


class DropObject(msgspec.Struct, frozen=True, gc=False, tag="Drop"):
    """Drops an object by name; refused with `ObjectInUse` while others depend on it."""

    request: int
    name: str
    cascade: bool = False
    """True: all that depend on it are dropped with it, at once."""


class TableChange(msgspec.Struct, frozen=True, gc=False):
    """Changes to one table, all at one time.

    `insert`: rows; columns that are left out have their defaults. `delete`: whole rows, or for a
    keyed table rows of its key columns. `update` (keyed tables): rows that hold the key columns and
    the columns to set.
    """

    table: str
    insert: bytes | None = None
    delete: bytes | None = None
    update: bytes | None = None
    defaults: str | None = None
    """Digest of the defaults with which the writer has filled its rows; the write is refused with
    `DefinitionChanged` if they are others now. None: it has used none."""
    left_out: bytes | None = None
    """Arrow IPC stream of booleans: of the columns that some inserted rows have, which rows leave
    them out, and so have their defaults; None if every row has the same columns."""
    columns: str | None = None
    """Digest of the columns that the writer took the table for (`TableSchema.digest`); refused with
    `DefinitionChanged` if they are others now. None: its rows name their columns themselves."""


class WriteTables(msgspec.Struct, frozen=True, gc=False, tag="Write"):
    """Changes tables atomically, at one time. Answered by `WriteCommitted` when durable."""

    request: int
    changes: tuple[TableChange, ...]


class ReadObject(msgspec.Struct, frozen=True, gc=False, tag="Read"):
    """Contents of an object at `as_of` (None: the latest written time), by `key` or whole."""

    request: int
    name: str
    as_of: Time | None = None
    key: bytes | None = None
    """Arrow IPC stream of the key values to look up (one row or more)."""
    key_columns: tuple[str, ...] = ()
    deadline_ms: int | None = None
    filter: tuple[ColumnComparison, ...] = ()
    """Comparisons that a row must pass, all of them."""
    project: tuple[str, ...] | None = None
    """Columns of the answer, which also has those of the order; None: all."""
    finishing: RowSetFinishing | None = None
    """The service leaves out what cannot be in the answer; the client finishes."""


class SubscribeObject(msgspec.Struct, frozen=True, gc=False, tag="Subscribe"):
    """Changes of an object. `from_` None: contents now (or at `as_of`), then changes; a frontier F:
    only the changes with ``time >= F``, for a subscriber that resumes."""

    request: int
    name: str
    from_: Frontier | None = None
    as_of: Time | None = None
    up_to: Frontier | None = None
    """Only changes with ``time < up_to``; then the empty upper and the end."""
    snapshot: bool = True
    """False: without the contents, only the changes after them."""
    progress: bool = True
    """False: no answers without rows, but for the last."""


class EndRequest(msgspec.Struct, frozen=True, gc=False, tag="Unsubscribe"):
    """Ends the subscribe (or cancels the read or wait) of that request number."""

    request: int
    target: int


class SignalSession(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ends a session of any door, by its number in `penstock.sessions`, or cancels what it runs.
    Answered by `RequestDone` at once; raises `UnknownObject` for a number that no session has."""

    request: int
    number: int
    end: bool = True
    """False: its statement is canceled, and the session goes on."""


class WaitFor(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answered when every time up to and including `time` is sealed in the object."""

    request: int
    name: str
    time: Time
    deadline_ms: int | None = None


class ReadStatus(msgspec.Struct, frozen=True, gc=False, tag="Status"):
    """All objects with their frontiers, and the oracle's time."""

    request: int


class ExplainView(msgspec.Struct, frozen=True, gc=False, tag="Explain"):
    """A view's plan as text."""

    request: int
    name: str


class ListActors(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Every live actor of the service."""

    request: int


class SetTracing(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Sets the share of new traces that are sampled, from 0 to 1; None: only reports it."""

    request: int
    ratio: float | None = None


class ChangeReplicas(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Adds a replica or drops one, durably; neither: only reports them."""

    request: int
    add: str = ""
    drop: str = ""


class RunQuery(msgspec.Struct, frozen=True, gc=False, tag="Query"):
    """A one-off query at `as_of` (None: the greatest time at which all its inputs are sealed).
    Answered by `ReadInstead`, or by `ReadContents` in the query's order."""

    request: int
    sql: str
    as_of: Time | None = None
    deadline_ms: int | None = None
    engine: bool = False
    """True if the engine must run even a plain read."""
    latest: bool = False
    """True: without `as_of` it is read at the latest written time, and waits until that is
    sealed."""
    conf: dict[str, str] = {}
    """Settings of Spark that the session has: its time zone, and others that change what a text
    means. Without them those of the service hold."""


class DescribeQuery(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks for the columns of a query, which is not run. Answered by `QueryDescribed`."""

    request: int
    sql: str
    conf: dict[str, str] = {}
    """Settings of Spark that the session has, as of `RunQuery`."""


class ExplainQuery(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Asks for the plan by which a view of this query would be maintained, as text; with the policy
    "none", for the way in which its rows would be read now."""

    request: int
    sql: str
    conf: dict[str, str] = {}
    refresh_policy: str = "auto"


class CopyTo(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Writes the contents of an object at `as_of` (None: the latest written time) into files
    below `destination`. Answered by `CopiedInto`."""

    request: int
    name: str
    destination: str
    format: Literal["parquet", "csv", "json"] = "parquet"
    as_of: Time | None = None
    file_bytes_max: int = COPY_FILE_BYTES
    overwrite: bool = False
    """True if this copy replaces an earlier one there, when this one is whole."""
    deadline_ms: int | None = None
    """The copy is dropped when it is not done by then."""
    progress: bool = False
    """True if `CopyProgressed` is wanted."""


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
"""Statements that change the catalog, from the grammar to the controller. Number 0: a statement
that no connection has sent yet."""
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
    """The request was carried out; `text` is its result, if it has one (Explain)."""

    request: int
    text: str = ""


class WriteCommitted(msgspec.Struct, frozen=True, gc=False, tag="Written"):
    """The write is durable, at `time`."""

    request: int
    time: Time
    rows: int


class ReadContents(msgspec.Struct, frozen=True, gc=False, tag="Contents"):
    """Rows of a read: columns and ``__diff``, Arrow IPC stream; read at `as_of`."""

    request: int
    as_of: Time
    arrow: bytes
    more: bool = False
    """True if further rows follow."""
    reads: tuple[tuple[str, str], ...] = ()
    """Ids and names of the objects that the rows are of, for a session of a role: it may lose its
    right before they are handed on. Empty for a session that is trusted."""


class SubscribeChanges(msgspec.Struct, frozen=True, gc=False, tag="Changes"):
    """Updates with ``lower <= time < upper`` of a subscribe; `arrow` None: progress only.

    `partial`: only some of the updates of an interval that begins at `lower`, and `upper` is
    `lower` too: the others follow, and the last of these answers has the interval's upper.
    """

    request: int
    lower: Frontier
    upper: Frontier
    arrow: bytes | None = None
    partial: bool = False
    reads: tuple[tuple[str, str], ...] = ()
    """The objects whose rows the changes hold; see `ReadContents.reads`."""


class ObjectStatus(msgspec.Struct, frozen=True, gc=False):
    """One object as `ReadStatus` shows it."""

    name: str
    kind: str
    since: Time
    upper: Frontier
    lag_ms: int
    """Age of what a reader sees; 0: it has all that there is."""
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
    """True if the last step's plans were prepared."""
    recomputed: bool = False
    """True if the view was computed whole instead of stepping."""
    rejected: str = ""
    """The alternative to the last step, and its estimated cost."""
    held_rows: int = 0
    """Updates of an index that the workers hold; their bytes in memory and in files follow."""
    held_bytes_memory: int = 0
    held_bytes_mapped: int = 0
    parts_read: int = 0
    """Parts of the inputs that were read while it hydrates, of `parts_total`; bytes likewise."""
    parts_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    target_lag_ms: int = 0
    """Age that a view may have; 0: as fresh as possible."""
    comment: str = ""
    column_comments: dict[str, str] = {}
    replaces: str = ""
    """The view in whose place this one comes when it is computed."""
    id: str = ""
    column_defaults: dict[str, ColumnDefault] = {}
    spark_conf: dict[str, str] = {}
    """Settings of Spark that a view keeps."""
    retain_history_ms: int | None = None
    """Time for which its history is kept; None: the service's default."""
    state_since_ms: int = 0
    """Time of the first failure, in a state of `ERROR_STATES` (Unix time)."""
    retries: int = 0
    """Attempts that have failed since then."""


class StatusReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ReadStatus`."""

    request: int
    time: Time
    tables_upper: Frontier
    objects: tuple[ObjectStatus, ...]


class ActorReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ListActors`. `monotonic_ms` is the service's clock: two reports give rates."""

    request: int
    monotonic_ms: float
    actors: tuple[ActorStatistics, ...]


class TracingReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `SetTracing`. Without an exporter (`exporting` False) no request is traced."""

    request: int
    exporting: bool
    ratio: float


class ReplicaStatus(msgspec.Struct, frozen=True, gc=False):
    """One replica."""

    name: str
    state: str
    """``connected`` or ``connecting``."""
    text: str = ""
    """Error that ended the last connection."""
    connections: int = 0
    """Number of connections so far."""
    reporting: int = 0
    """Dataflows that have reported a frontier on this connection, of `objects`."""
    objects: int = 0
    lag_ms: int = 0
    """Distance of its slowest dataflow from the furthest replica, in ms."""


class ReplicaReport(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to `ChangeReplicas`."""

    request: int
    replicas: tuple[ReplicaStatus, ...]


class ReadInstead(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The answer to a `RunQuery` that is a plain read: the read that the client must send. `names`
    are the query's columns, one for each of `project`."""

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
    """Progress of a copy. `state`: "waiting" for its time to be sealed, or "copying"; `rows` are
    those written."""

    request: int
    state: str
    rows: int = 0
    parts_read: int = 0
    parts_total: int = 0
    bytes_read: int = 0
    bytes_total: int = 0


class CopiedInto(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The copy is whole: `manifest` names its files."""

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
"""Requests that carry a trace context and are traced."""


def objects_of(request: Traced) -> str:
    """Return the names of the objects that a request is about, for people."""
    if isinstance(request, WriteTables):
        return ",".join(change.table for change in request.changes)
    if isinstance(request, RunQuery):
        return "query"
    return request.name


# The first bytes of a connection: a peer of another protocol is refused before anything is decoded.
CLIENT_MAGIC: Final = b"PNSTKAPI"
CLIENT_MAGIC_VERSION: Final = 2
"""Version of the handshake before `ClientHello`: 2 has identities and tokens."""
ClientMessage: TypeAlias = ClientHello | Request
ServiceMessage: TypeAlias = ServiceHello | Answer
