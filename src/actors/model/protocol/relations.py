"""The relations of the service about itself, and the names that they and its objects may have.

One table lists the relations' columns, types and units. A relation is read like a table, by
`Client.peek` and ``penstock peek``, with the same filter, columns, order, limit and offset. It is a
snapshot of the moment of the request: it has no history, so that an `as_of` and a subscribe are
refused. `kept_by` names its keeper: every worker of every replica with its own rows (the client
gets all of them; `replica` and `worker` are columns), or the controller. A replica that is not
connected, or answers with an error of its own (it is busy), is left out; the error is raised when
no other answers.

A frontier that is empty (no more updates) is NULL, and so is an unknown value.
`docs/reference/relations.md` is made from this table, which a test ensures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, UnknownObject

PREFIX: Final = "penstock."
"""Prefix of all relations' names; no object's name may begin so."""


REPLICA: Final = "replica"
"""Column of the relations that workers keep, which the replica's own name fills."""


class SystemColumn(msgspec.Struct, frozen=True):
    """A column: its Spark type, and what it means, with its unit."""

    name: str
    type: str
    text: str


class SystemRelation(msgspec.Struct, frozen=True):
    """One relation."""

    name: str
    kept_by: Literal["workers", "controller"]
    text: str
    columns: tuple[SystemColumn, ...]

    @property
    def schema(self) -> TableSchema:
        """Return the relation's columns; any may be NULL."""
        return TableSchema(tuple(TableColumn(column.name, column.type) for column in self.columns))

    def row(self, source: object, **given: Any) -> tuple[Any, ...]:
        """Return a row, without the column `replica`: each value is one that is `given` under the
        column's name, or else the attribute of `source` that has the name."""
        names = (column.name for column in self.columns if column.name != REPLICA)
        return tuple(given[name] if name in given else getattr(source, name) for name in names)


def _relation(
    name: str,
    kept_by: Literal["workers", "controller"],
    text: str,
    *columns: tuple[str, str, str],
) -> SystemRelation:
    made = tuple(SystemColumn(*column) for column in columns)
    return SystemRelation(f"{PREFIX}{name}", kept_by, text, made)


_REPLICA: Final = (
    REPLICA,
    "string",
    "name of the replica: r1, or the address of another process",
)
_WORKER: Final = ("worker", "int", "number of the worker")
_ID: Final = (
    "id",
    "string",
    "id of the dataflow; that of an object's first dataflow is the object's id",
)
_NAME: Final = ("name", "string", "name of the object that it maintains")

_BY_WORKERS: Final = (
    _relation(
        "dataflows",
        "workers",
        "Every dataflow that runs or is being dropped. Worker 0 reports those that compute; the"
        " worker of a source or sink reports that one's.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        ("kind", "string", "view, index, subscribe, copy, ingestion, sink or oneshot"),
        ("as_of", "bigint", "timestamp from which it has contents"),
        ("until", "bigint", "frontier at which it ends"),
        ("since", "bigint", "its contents cannot be read below this timestamp"),
        ("scheduled", "boolean", "true if it may run; others wait for their turn"),
        (
            "state",
            "string",
            "current activity: hydrating, gathering, running, stalled, dropping, …",
        ),
        ("text", "string", "details of the state, if any"),
        ("steps", "bigint", "steps since it was started"),
        ("imports", "string", "shards that it reads, separated by commas"),
    ),
    _relation(
        "frontiers",
        "workers",
        "The progress of each dataflow on each worker. Worker 0 reports subscribes, and the "
        "worker of a source or sink reports that one's. Copies have no frontiers.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        ("since", "bigint", "its contents cannot be read below this timestamp"),
        ("input", "bigint", "frontier up to which it knows all its inputs; NULL for a source"),
        (
            "write",
            "bigint",
            "frontier up to which its output is durable, or is in this partition of an index",
        ),
        (
            "output",
            "bigint",
            "frontier up to which its output is complete and installed on this worker",
        ),
        ("lag_ms", "bigint", "ms by which the output is behind the input"),
    ),
    _relation(
        "arrangements",
        "workers",
        "Rows indexed by key. Every worker has a partition of every index. Worker 0 has the "
        "arrangements that views share for lookups and those of hidden states. The worker of a "
        "source has those in which it looks up old rows. For those of the table writer see "
        "`penstock.memory`.",
        _REPLICA,
        _WORKER,
        ("kind", "string", "index, shared, hidden or upserts"),
        ("id", "string", "id of the index, of the arranged shard, or of the source's table"),
        ("key", "string", "key columns, separated by commas"),
        ("columns", "string", "stored columns, separated by commas"),
        ("filter", "string", "condition on the stored rows; empty: all rows"),
        ("rows", "bigint", "stored updates, before consolidation"),
        ("runs", "bigint", "number of sorted runs, which merging reduces"),
        ("bytes_memory", "bigint", "bytes in memory"),
        (
            "bytes_mapped",
            "bigint",
            "bytes in memory-mapped files, which are in memory only while they are read",
        ),
        ("users", "bigint", "number of views that share it; for an index: reads that wait or run"),
    ),
    _relation(
        "worker_peeks",
        "workers",
        "Peeks that a worker has not answered. For clients' reads see `penstock.peeks`.",
        _REPLICA,
        _WORKER,
        ("uuid", "string", "id of the peek"),
        ("kind", "string", "index, shard or relation"),
        ("target", "string", "id of the index, shard or relation"),
        ("time", "bigint", "timestamp of the read"),
        ("started", "boolean", "false while it waits until that timestamp is sealed"),
    ),
    _relation(
        "steps",
        "workers",
        "The latest steps of all dataflows, on worker 0: at most `log_rows_max`.",
        _REPLICA,
        _WORKER,
        ("at_ms", "bigint", "end of the step, in ms since 1970"),
        _ID,
        _NAME,
        ("step", "bigint", "number of the step since the dataflow was started"),
        ("hi", "bigint", "frontier that the step reached"),
        ("rows_in", "bigint", "input changes"),
        ("rows_read", "bigint", "rows of state that were looked up"),
        ("rows_out", "bigint", "output changes"),
        ("ms", "double", "total duration in ms"),
        ("wait_ms", "double", "ms spent on the way to the engine and waiting there for other jobs"),
        ("spark_ms", "double", "ms spent in Spark"),
        ("own_ms", "double", "ms spent outside the engine: lookups, deltas, the commit"),
        ("prepared", "boolean", "true if Spark's plans were already prepared"),
        (
            "recomputed",
            "boolean",
            "true if the view was recomputed in full instead of from changes",
        ),
    ),
    _relation(
        "parts_in_flight",
        "workers",
        "The parts that each input of each dataflow is waiting for, on worker 0.",
        _REPLICA,
        _WORKER,
        _ID,
        ("source", "int", "number of the import"),
        ("shard", "string", "shard that the input reads"),
        ("described", "bigint", "frontier up to which its parts are known"),
        ("waiting", "bigint", "known parts that have not been requested"),
        ("bytes_waiting", "bigint", "bytes of these parts"),
        ("fetching", "bigint", "requested parts that have not arrived"),
        ("bytes_fetching", "bigint", "bytes of these parts"),
        ("rows_fetched", "bigint", "fetched rows that wait for their step"),
        ("bytes_fetched", "bigint", "bytes of these rows in memory"),
        (
            "parts_filtered",
            "bigint",
            "parts skipped because, by their statistics, they contain no rows for the view",
        ),
        ("bytes_filtered", "bigint", "bytes of the skipped parts"),
        ("parts_audited", "bigint", "skipped parts that were read anyway, to verify the filter"),
    ),
    _relation(
        "hydration",
        "workers",
        "Dataflows that are hydrating, on worker 0.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        (
            "state",
            "string",
            "state of the hydration; suspended: waiting for its turn (`hydrations_max`)",
        ),
        ("parts_read", "bigint", "parts of its inputs that were read"),
        ("parts_total", "bigint", "known parts of its inputs"),
        ("bytes_read", "bigint", "bytes of the parts that were read"),
        ("bytes_total", "bigint", "bytes of the known parts"),
    ),
    _relation(
        "reconciliation",
        "workers",
        "What happened to running dataflows when a client connected, on each worker.",
        _REPLICA,
        _WORKER,
        ("flag", "string", "reused, created, dropped, replaced, or the reason for a replacement"),
        ("last", "bigint", "number of dataflows at the last connection"),
        ("total", "bigint", "number of dataflows since the start"),
    ),
)

_OBJECT: Final = ("object", "string", "name of the table, view, index, source or sink")
_SESSION: Final = (
    "session",
    "string",
    "connection that sent the request, as in `penstock.sessions`",
)
_REQUEST: Final = ("request", "bigint", "number of the request within the connection")

_BY_CONTROLLER: Final = (
    _relation(
        "relations",
        "controller",
        "These relations.",
        ("name", "string", "name for reads"),
        ("kept_by", "string", "workers or controller"),
        ("columns", "int", "number of columns"),
        ("text", "string", "description"),
    ),
    _relation(
        "objects",
        "controller",
        "The objects of the catalog and their progress.",
        ("id", "string", "id of the object"),
        ("name", "string", "name of the object"),
        ("kind", "string", "table, view or index"),
        ("state", "string", "current state"),
        ("mode", "string", "how a view is maintained"),
        ("since", "bigint", "earliest readable timestamp"),
        ("upper", "bigint", "frontier below which it is sealed"),
        ("lag_ms", "bigint", "age of what a reader sees, in ms; 0 if it is up to date"),
        ("as_of", "bigint", "timestamp from which it has contents"),
        ("depends", "string", "objects that it reads, separated by commas"),
        ("key", "string", "key columns, separated by commas"),
        ("columns", "string", "columns with their types"),
        ("sql", "string", "query of a view"),
        ("retain_history_ms", "bigint", "retained history in ms, if the object sets its own"),
        ("target_lag_ms", "bigint", "target lag of a view in ms, if set"),
        ("text", "string", "reason for the state, or what it waits for"),
        ("state_since_ms", "bigint", "start of the stall or error, in ms since 1970"),
        ("retries", "int", "failed attempts since then"),
    ),
    _relation(
        "operators",
        "controller",
        "The plans of views, in the order of `penstock explain`, and the operators of running "
        "source and sink tasks, as last reported (every `statistics_ms`). One row per node.",
        ("id", "string", "id of the view, source or sink"),
        ("name", "string", "name of the view, source or sink"),
        ("number", "int", "number of the node; 0 is the root"),
        ("depth", "int", "depth of the node below the root"),
        ("operator", "string", "kind of the node"),
        ("text", "string", "full description of the node"),
        ("mode", "string", "mode of the view: incremental, keyed or opaque"),
        ("reason", "string", "why it is not incremental"),
        ("policy", "string", "refresh policy"),
        ("rows", "bigint", "for a task: rows that have passed the operator since the task "
         "started. NULL for a view's node, which Spark runs together with others (see "
         "`penstock.steps`)"),
        ("ms", "double", "for a task: ms spent in the operator, including waits"),
        ("bytes_memory", "bigint", "for a task: bytes held in memory"),
        ("bytes_mapped", "bigint", "for a task: bytes in memory-mapped files"),
    ),
    _relation(
        "shards",
        "controller",
        "The shards with the contents of tables and views, and with hidden states.",
        ("shard", "string", "id of the shard"),
        _OBJECT,
        ("role", "string", "contents or hidden"),
        ("since", "bigint", "earliest readable timestamp"),
        ("upper", "bigint", "frontier below which it is sealed"),
        ("batches", "bigint", "number of batches"),
        ("parts", "bigint", "number of files and inline parts"),
        ("rows", "bigint", "updates in them"),
        ("bytes", "bigint", "bytes in them"),
        ("leases", "bigint", "readers that have parts of it in flight"),
    ),
    _relation(
        "holds",
        "controller",
        "The holds and leases on the history of shards. A shard's since is the least of them.",
        ("shard", "string", "id of the shard"),
        _OBJECT,
        ("kind", "string", "hold or lease"),
        ("holder", "string", "name of the holder"),
        ("since", "bigint", "earliest timestamp that the holder needs"),
        ("behind_ms", "bigint", "ms behind the shard's upper"),
    ),
    _relation(
        "peeks",
        "controller",
        "Unanswered reads, waits and queries of clients.",
        _SESSION,
        _REQUEST,
        ("kind", "string", "read, wait or query"),
        _OBJECT,
        ("time", "bigint", "timestamp of the read"),
        ("state", "string", "checking, waiting until sealed, asked or streaming; for a query: "
         "analysing, waiting until sealed, run by Spark, or streaming"),
        ("waited_ms", "double", "ms since the request"),
        ("deadline_ms", "bigint", "deadline in ms after the request"),
        ("uuid", "string", "id of its peek, as in `penstock.worker_peeks`; NULL for a query"),
    ),
    _relation(
        "subscribes",
        "controller",
        "Running subscribes of clients.",
        _SESSION,
        _REQUEST,
        _OBJECT,
        ("told", "bigint", "frontier up to which the client has been sent changes"),
        ("delivered", "bigint", "frontier up to which the controller has changes"),
        ("hold", "bigint", "timestamp from which history is held for it"),
        ("bytes_in_flight", "bigint", "bytes sent and not yet accepted"),
        ("idle_ms", "double", "ms since the client last accepted something"),
        ("dataflow", "string", "dataflow that feeds it; subscribers at the same frontier share "
         "one"),
    ),
    _relation(
        "copies",
        "controller",
        "Running copies into files.",
        _SESSION,
        _REQUEST,
        _OBJECT,
        ("as_of", "bigint", "timestamp of the copy"),
        ("destination", "string", "folder or bucket"),
        ("format", "string", "parquet, csv or json"),
        ("state", "string", "waiting (until its timestamp is sealed) or copying"),
        ("deadline_ms", "bigint", "deadline in ms, if set"),
        ("dataflow", "string", "dataflow that writes the files"),
    ),
    _relation(
        "copies_from",
        "controller",
        "Running copies from files into tables.",
        _SESSION,
        _REQUEST,
        ("table", "string", "destination table"),
        ("path", "string", "file or folder"),
        ("format", "string", "parquet, csv or json"),
        ("state", "string", "beginning, reading, or appending (no longer cancellable)"),
        ("files_read", "bigint", "files read in full"),
        ("files", "bigint", "total number of files; NULL until they have been listed"),
        ("bytes_read", "bigint", "bytes of the files read"),
        ("bytes", "bigint", "bytes of all files"),
        ("rows_staged", "bigint", "rows written but not yet in the table"),
        ("oneshot", "string", "id in `penstock.dataflows`"),
    ),
    _relation(
        "sessions",
        "controller",
        "Open sessions of clients over any protocol. Only administrators see more than the "
        "first four columns of other roles' sessions.",
        ("number", "bigint", "number by which to cancel its statement or end it: "
         "pg_cancel_backend, pg_terminate_backend, penstock sessions --end"),
        ("role", "string", "role that it acts as; NULL without authentication as a role"),
        ("door", "string", "client, postgresql or connect"),
        ("session", "string", "its connection, as in `penstock.peeks` and other relations; NULL"
         " for Spark Connect"),
        ("address", "string", "address of the client"),
        ("since_ms", "bigint", "start, in ms since 1970"),
        ("state", "string", "active (running a statement) or idle"),
        ("statement", "string", "running statement, without its secrets"),
        ("statement_ms", "bigint", "start of the running statement, or end of the last one, in "
         "ms since 1970"),
        ("requests", "bigint", "total number of requests"),
        ("peeks", "bigint", "unanswered reads, waits and queries"),
        ("subscribes", "bigint", "running subscribes"),
    ),
    _relation(
        "errors",
        "controller",
        "Objects, sources and sinks that are stalled or in error.",
        ("id", "string", "id of the object"),
        _OBJECT,
        ("state", "string", "errored: reads fail until the data change; stalled, frozen: being "
         "retried; failed: not retried; dropped: a dropped source's external resource still "
         "exists"),
        ("text", "string", "error"),
        ("since_ms", "bigint", "start, in ms since 1970"),
        ("retries", "int", "failed attempts since then"),
    ),
    _relation(
        "spark_jobs",
        "controller",
        "Jobs of the engine: those that wait or run, then the last `log_rows_max` that ended.",
        ("id", "string", "dataflow/incarnation/step/kind"),
        ("dataflow", "string", "dataflow that requested it"),
        ("kind", "string", "Step, Difference, Select, Prepare, Analyze, …"),
        ("state", "string", "waiting, running, done, failed or canceled"),
        ("asked_ms", "bigint", "time of the request, in ms since 1970"),
        ("waited_ms", "double", "ms until it was passed to Spark"),
        ("ms", "double", "ms since then"),
        ("spark_ms", "double", "ms in Spark, for jobs that return rows"),
        ("rows", "bigint", "rows returned"),
        ("tasks_done", "bigint", "completed Spark tasks, for long jobs"),
        ("tasks", "bigint", "known Spark tasks"),
        ("error", "string", "class of the error"),
    ),
    _relation(
        "sources",
        "controller",
        "Sources and sinks: their state and statistics.",
        ("id", "string", "id of the source or sink"),
        ("name", "string", "name of the source or sink"),
        ("direction", "string", "in: a source; out: a sink"),
        ("kind", "string", "postgres, files, nexmark, …, delta, parquet"),
        ("status", "string", "starting, running, paused, stalled, ceased; dropped: awaiting "
         "removal"),
        ("error", "string", "why it is stalled"),
        ("hint", "string", "what to do about it"),
        ("since_ms", "bigint", "start of the status, in ms since 1970"),
        ("upper", "bigint", "frontier up to which its output is durable; for a sink: in the "
         "external system"),
        ("messages", "bigint", "changes read; for a sink: commits"),
        ("bytes", "bigint", "bytes of these changes"),
        ("rows_inserted", "bigint", "inserted rows"),
        ("rows_deleted", "bigint", "deleted rows"),
        ("rows_staged", "bigint", "rows read and not yet durable"),
        ("snapshot_rows_known", "bigint", "estimated rows of the snapshot"),
        ("snapshot_rows_staged", "bigint", "rows of the snapshot read so far"),
        ("position_known", "string", "latest position in the external system"),
        ("position_committed", "string", "latest durable position"),
        ("lag_ms", "bigint", "age of what a reader sees, in ms"),
        ("lag_bytes", "bigint", "bytes behind the external system"),
        ("restarts", "bigint", "number of restarts"),
        ("failed", "string", "error of the last stall since the service started"),
        ("failed_ms", "bigint", "time of that stall, in ms since 1970"),
        ("retries", "int", "failed attempts since it stalled"),
    ),
    _relation(
        "source_tables",
        "controller",
        "The tables that sources fill.",
        ("id", "string", "id of the table"),
        ("name", "string", "name of the table"),
        ("source", "string", "source that fills it"),
        ("outside", "string", "its name in the external system"),
        ("status", "string", "starting, running, paused or stalled"),
        ("error", "string", "why it does not advance"),
        ("hint", "string", "what to do about it"),
        ("upper", "bigint", "frontier below which it is sealed"),
    ),
    _relation(
        "memory",
        "controller",
        "What the service's process holds in memory beyond its start, without the engine's "
        "processes: see *Memory* above.",
        ("kind", "string", "arrangements: index, shared, hidden, table and upserts. Rows: "
         "changes (of a dataflow, before and in its step), held (of a view in error), staged "
         "(of a source), gathered (of a sink's batch) and decoded parts. Other: arrow (the rest"
         " of Arrow's memory), python (its objects), malloc (the rest of C's heap), allocator "
         "(freed but kept, or lost between blocks)"),
        ("id", "string", "id of the index, shard, table, dataflow, source or sink"),
        ("rows", "bigint", "rows or updates"),
        ("bytes_memory", "bigint", "bytes in memory"),
        ("bytes_mapped", "bigint", "bytes in memory-mapped files, which are in memory only "
         "while they are read"),
    ),
    _relation(
        "actors",
        "controller",
        "Every live actor of the service.",
        ("path", "string", "path in the tree of actors"),
        ("state", "string", "idle, handles X, asks /path, …"),
        ("doing", "string", "current activity, as the actor describes it"),
        ("depth", "bigint", "waiting messages"),
        ("depth_max", "bigint", "highest number of waiting messages so far"),
        ("received", "bigint", "messages received"),
        ("busy_ms", "double", "ms in handlers"),
        ("effects", "bigint", "running effects"),
        ("crashes", "bigint", "number of restarts after a crash"),
    ),
)  # fmt: skip

RELATIONS: Final[Mapping[str, SystemRelation]] = {
    relation.name: relation for relation in (*_BY_CONTROLLER, *_BY_WORKERS)
}
"""All relations, by name."""
RELATION_SCHEMAS: Final = {name: relation.schema for name, relation in RELATIONS.items()}


def is_relation(name: str) -> bool:
    """Return whether the name is a relation's, known or not."""
    # As Spark compares names while `spark.sql.caseSensitive` is false, its default.
    return name.lower().startswith(PREFIX)


def relation_of(name: str) -> SystemRelation:
    """Return the relation of a name. Raises `UnknownObject`, which lists all relations."""
    found = RELATIONS.get(name.lower())
    if found is None:
        raise UnknownObject(
            f"the service has no relation {name!r} about itself; it has {', '.join(RELATIONS)}"
        )
    return found


def worker_relation(name: str) -> SystemRelation:
    """Return a relation that workers keep. Raises `UnknownObject`."""
    found = RELATIONS.get(name)
    if found is None or found.kept_by != "workers":
        kept = [each.name for each in RELATIONS.values() if each.kept_by == "workers"]
        raise UnknownObject(f"this worker keeps no relation {name}; it keeps {', '.join(kept)}")
    return found


def refuse_relation(name: str, what: str) -> None:
    """Raise `InvalidUsage` for a name that is a relation's."""
    if is_relation(name):
        raise InvalidUsage(
            f"{what} {name}: names that begin with {PREFIX!r} are relations of the service about "
            "itself, which can only be read (peek)"
        )


# -- names of objects and columns ------------------------------------------------------------------

NAME_CHARACTERS_MAX: Final = 128
SUBSCRIBED_PREFIX: Final = "__subscribe_"
"""Prefix of the names of views that belong to one subscribe: no name of a user may begin so."""
_SUBSCRIBED: Final = re.compile(f"{SUBSCRIBED_PREFIX}[0-9a-f]{{1,32}}")


fold: Final = str.lower
"""Returns the form by which a name is compared: without regard to case, as Spark does. The name
itself keeps the spelling that it was given."""


def is_subscribed_view(name: str) -> bool:
    """Return whether a view of this name belongs to one subscribe: it is not listed, nothing may be
    built on it, and it ends with the connection that created it.

    >>> is_subscribed_view("__subscribe_1f"), is_subscribed_view("subscribe_1f")
    (True, False)
    """
    return _SUBSCRIBED.fullmatch(name) is not None


def check_name(what: str, name: str) -> str:
    """Return the name, which may be any text that Spark can quote. Raises `InvalidUsage` when it is
    empty, too long, reserved, or holds characters that are not printed."""
    refuse_relation(name, what)
    if not name or name != name.strip() or not name.isprintable():
        raise InvalidUsage(
            f"{what} {name!r} is not a valid name: it must not be empty, begin or end with a "
            f"space, or hold line breaks or other characters that are not printed"
        )
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidUsage(
            f"{what} {name[:32]!r}… has {len(name)} characters; the limit is {NAME_CHARACTERS_MAX}"
        )
    if name.startswith("__"):
        raise InvalidUsage(f"{what} {name!r}: names that start with '__' belong to the system")
    return name
