"""The service's relations about itself, and the rules for names of relations and objects.

A relation is read like a table, by `Client.peek` and ``penstock peek``, with the same filter,
columns, order, limit and offset. It is a snapshot of the moment of the request and has no history,
so an `as_of` and a subscribe are refused. `kept_by` says who keeps it: the controller, or every
worker of every replica, each with its own rows. The client gets the rows of all workers, which have
the columns `replica` and `worker`. A replica that is not connected, or that answers with an error,
is left out; the error is raised if no other replica answers.

An empty frontier (no more updates) is NULL, and so is an unknown value.
`docs/reference/relations.md` is generated from the definitions below; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, UnknownObject

PREFIX: Final = "penstock."
"""Prefix of the names of all relations. Names of objects must not start with it."""


REPLICA: Final = "replica"
"""Column of the relations that workers keep: the name of the replica."""


class SystemColumn(msgspec.Struct, frozen=True):
    """A column with its Spark type, and a description that includes the unit."""

    name: str
    type: str
    text: str


class SystemRelation(msgspec.Struct, frozen=True):
    """A relation with its description and columns."""

    name: str
    kept_by: Literal["workers", "controller"]
    text: str
    columns: tuple[SystemColumn, ...]

    @property
    def schema(self) -> TableSchema:
        """Return the relation's columns, all of them nullable."""
        return TableSchema(tuple(TableColumn(column.name, column.type) for column in self.columns))

    def row(self, source: object, **given: Any) -> tuple[Any, ...]:
        """Return a row without the column `replica`.

        The value of a column is the one in `given` with its name, otherwise the attribute of
        `source` with its name.
        """
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
    "name of the replica: r1, …, or the address of a replica process",
)
_WORKER: Final = ("worker", "int", "number of the worker")
_ID: Final = ("id", "string", "id of the dataflow; an object's first dataflow has the object's id")
_NAME: Final = ("name", "string", "name of the object that it maintains")

_BY_WORKERS: Final = (
    _relation(
        "dataflows",
        "workers",
        "Every dataflow that is running or being dropped. Dataflows that compute are reported by "
        "worker 0, those of sources and sinks by the worker that runs them.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        ("kind", "string", "view, index, subscribe, copy, ingestion, sink or oneshot"),
        ("as_of", "bigint", "time at which its contents start"),
        ("until", "bigint", "frontier at which it ends"),
        ("since", "bigint", "time below which nobody reads its contents"),
        ("scheduled", "boolean", "true if it may run; otherwise it waits for its turn"),
        ("state", "string", "current state: hydrating, gathering, running, stalled, dropping, …"),
        ("text", "string", "more about its state, such as an error"),
        ("steps", "bigint", "number of steps since it was started"),
        ("imports", "string", "shards that it reads, separated by commas"),
    ),
    _relation(
        "frontiers",
        "workers",
        "Progress of each dataflow on each worker. Worker 0 reports subscribes, and sources and "
        "sinks are reported by the worker that runs them. Copies have no frontiers.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        ("since", "bigint", "time below which nobody reads its contents"),
        ("input", "bigint", "frontier to which all its inputs are known; NULL for a source"),
        (
            "write",
            "bigint",
            "frontier to which its output is durable; of an index, to which this "
            "partition is complete",
        ),
        ("output", "bigint", "frontier to which its output is complete and installed here"),
        ("lag_ms", "bigint", "distance of the output behind the input, in ms"),
    ),
    _relation(
        "arrangements",
        "workers",
        "Rows kept by key. Every worker has a partition of every index. Worker 0 has the "
        "arrangements that views share for their lookups, and those of the hidden states of their "
        "groupings. The worker of a source has what it needs to find old rows. Arrangements of the "
        "table writer are in `penstock.memory`.",
        _REPLICA,
        _WORKER,
        ("kind", "string", "index, shared, hidden or upserts"),
        ("id", "string", "id of the index, of the arranged shard, or of the source's table"),
        ("key", "string", "key columns, separated by commas"),
        ("columns", "string", "columns that it holds, separated by commas"),
        ("filter", "string", "condition of the rows that it holds; empty for all rows"),
        ("rows", "bigint", "number of updates, before those of equal rows are summed"),
        ("runs", "bigint", "number of sorted runs; merging reduces it"),
        ("bytes_memory", "bigint", "bytes in memory"),
        ("bytes_mapped", "bigint", "bytes in mapped files"),
        ("users", "bigint", "number of views that share it; of an index, reads that wait or run"),
    ),
    _relation(
        "worker_peeks",
        "workers",
        "Reads that a worker has not answered yet. Reads of clients are in `penstock.peeks`.",
        _REPLICA,
        _WORKER,
        ("uuid", "string", "uuid of the peek"),
        ("kind", "string", "index, shard or relation"),
        ("target", "string", "id of the index, shard or relation"),
        ("time", "bigint", "time of the read"),
        ("started", "boolean", "false while it waits until that time is sealed"),
    ),
    _relation(
        "steps",
        "workers",
        "The last steps of all dataflows, at most `log_rows_max`. Kept by worker 0.",
        _REPLICA,
        _WORKER,
        ("at_ms", "bigint", "time at which the step was complete, in ms since 1970"),
        _ID,
        _NAME,
        ("step", "bigint", "number of the step since the dataflow was started"),
        ("hi", "bigint", "frontier that it reached"),
        ("rows_in", "bigint", "changes that it read"),
        ("rows_read", "bigint", "rows of state that it looked up"),
        ("rows_out", "bigint", "changes that it produced"),
        ("ms", "double", "total duration in ms"),
        ("wait_ms", "double", "part of it spent waiting for the engine and for other jobs there"),
        ("spark_ms", "double", "part of it spent in Spark"),
        ("own_ms", "double", "part of it spent outside Spark: lookups, changes, the commit"),
        ("prepared", "boolean", "true if it used prepared Spark plans"),
        ("recomputed", "boolean", "true if it recomputed the view instead of applying changes"),
    ),
    _relation(
        "parts_in_flight",
        "workers",
        "Parts that wait at each input of each dataflow. Kept by worker 0.",
        _REPLICA,
        _WORKER,
        _ID,
        ("source", "int", "number of the input"),
        ("shard", "string", "shard that it reads"),
        ("described", "bigint", "frontier to which its parts are known"),
        ("waiting", "bigint", "parts known and not requested yet"),
        ("bytes_waiting", "bigint", "bytes of these parts"),
        ("fetching", "bigint", "parts requested and not received yet"),
        ("bytes_fetching", "bigint", "bytes of these parts"),
        ("rows_fetched", "bigint", "rows received that wait for their step"),
        ("bytes_fetched", "bigint", "bytes of these rows in memory"),
        (
            "parts_filtered",
            "bigint",
            "parts skipped, because by their statistics they hold no row for the dataflow",
        ),
        ("bytes_filtered", "bigint", "bytes of these parts"),
        ("parts_audited", "bigint", "skipped parts that were read anyway, to verify the filter"),
    ),
    _relation(
        "adapters",
        "workers",
        "Channel adapters: one for each worker and half. They pass the commands of the current "
        "client to the worker, and decide about each response by its client.",
        _REPLICA,
        _WORKER,
        ("half", "string", "compute or storage"),
        ("client", "string", "nonce of the client that it serves; NULL if there is none"),
        ("since_ms", "bigint", "time since when it serves the client, Unix ms"),
        ("clients_waiting", "int", "clients that wait for their predecessor to leave"),
        ("commands", "bigint", "commands passed to the worker"),
        ("commands_in_flight", "int", "commands passed that are not in the common order yet"),
        ("commands_dropped", "bigint", "commands of clients that it no longer served"),
        ("forwarded", "bigint", "responses passed to the client that was connected"),
        ("delivered", "bigint", "responses passed from the stash to a client that came later"),
        ("dropped", "bigint", "responses to clients that were displaced, left, or never came"),
        ("stashed", "int", "responses in the stash, which wait for their client"),
        ("held", "int", "responses that wait because the stash is full"),
    ),
    _relation(
        "hydration",
        "workers",
        "Dataflows that compute their first contents. Kept by worker 0.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        ("state", "string", "suspended while it waits for its turn (`hydrations_max`)"),
        ("parts_read", "bigint", "parts of its inputs read so far"),
        ("parts_total", "bigint", "parts of its inputs known so far"),
        ("bytes_read", "bigint", "bytes of the parts read so far"),
        ("bytes_total", "bigint", "bytes of the parts known so far"),
    ),
    _relation(
        "reconciliation",
        "workers",
        "What happened to running dataflows when a client connected, on each worker.",
        _REPLICA,
        _WORKER,
        ("flag", "string", "reused, created, dropped, replaced, or the reason for a replacement"),
        ("last", "bigint", "number of dataflows, the last time"),
        ("total", "bigint", "number of dataflows, since the start"),
    ),
)

_OBJECT: Final = ("object", "string", "name of the table, view, index, source or sink")
_SESSION: Final = ("session", "string", "connection of the client, as in `penstock.sessions`")
_REQUEST: Final = ("request", "bigint", "number of the request within the connection")

_BY_CONTROLLER: Final = (
    _relation(
        "relations",
        "controller",
        "These relations.",
        ("name", "string", "name of the relation"),
        ("kept_by", "string", "workers or controller"),
        ("columns", "int", "number of columns"),
        ("text", "string", "description of the relation"),
    ),
    _relation(
        "objects",
        "controller",
        "The catalog, with the progress of each object.",
        ("id", "string", "id of the object"),
        ("name", "string", "name of the object"),
        ("kind", "string", "table, view or index"),
        ("state", "string", "current state"),
        ("mode", "string", "how a view is maintained: incremental, keyed or opaque"),
        ("since", "bigint", "earliest time that can be read"),
        ("upper", "bigint", "frontier below which it is sealed"),
        ("lag_ms", "bigint", "age in ms of what a reader sees; 0 if it is up to date"),
        ("as_of", "bigint", "time at which its contents start"),
        ("depends", "string", "objects that it reads, separated by commas"),
        ("key", "string", "key columns, separated by commas"),
        ("columns", "string", "columns with their types"),
        ("sql", "string", "query of a view"),
        ("retain_history_ms", "bigint", "retained history in ms, if set for the object"),
        ("target_lag_ms", "bigint", "target lag of a view in ms, if set"),
        ("text", "string", "reason for its state, or what it waits for"),
        ("state_since_ms", "bigint", "time of the first failure, if it is stalled or in error, in "
         "ms since 1970"),
        ("retries", "int", "number of failed attempts since then"),
    ),
    _relation(
        "operators",
        "controller",
        "The plans of views, in the order of `penstock explain`, and the operators of the running "
        "tasks of sources and sinks, as last reported (`statistics_ms`). One row per node.",
        ("id", "string", "id of the view, source or sink"),
        ("name", "string", "name of the view, source or sink"),
        ("number", "int", "number of the node; the root is 0"),
        ("depth", "int", "depth of the node below the root"),
        ("operator", "string", "kind of the node"),
        ("text", "string", "the node in full"),
        ("mode", "string", "mode of the view: incremental, keyed or opaque"),
        ("reason", "string", "why the node is not incremental"),
        ("policy", "string", "refresh policy of the view"),
        ("rows", "bigint", "of a task: rows that have passed through the operator since the task "
         "started; NULL for nodes of views, because Spark runs several together "
         "(`penstock.steps`)"),
        ("ms", "double", "of a task: ms spent in the operator, including waits"),
        ("bytes_memory", "bigint", "of a task: bytes that the operator holds in memory"),
        ("bytes_mapped", "bigint", "of a task: bytes that the operator holds in mapped files"),
    ),
    _relation(
        "shards",
        "controller",
        "The shards of tables and views, including the hidden states of groupings.",
        ("shard", "string", "id of the shard"),
        _OBJECT,
        ("role", "string", "contents or hidden"),
        ("since", "bigint", "earliest time that can be read"),
        ("upper", "bigint", "frontier below which it is sealed"),
        ("batches", "bigint", "number of batches"),
        ("parts", "bigint", "number of parts, in blobs and inline"),
        ("rows", "bigint", "number of updates in them"),
        ("bytes", "bigint", "bytes of the parts"),
        ("leases", "bigint", "number of readers with a lease"),
    ),
    _relation(
        "holds",
        "controller",
        "What retains history: a shard's since is the least of its holds and leases.",
        ("shard", "string", "id of the shard"),
        _OBJECT,
        ("kind", "string", "hold or lease"),
        ("holder", "string", "name of the holder"),
        ("since", "bigint", "earliest time that the holder may read"),
        ("behind_ms", "bigint", "distance behind the shard's upper, in ms"),
    ),
    _relation(
        "peeks",
        "controller",
        "Reads, waits and queries of clients that have not been answered yet.",
        _SESSION,
        _REQUEST,
        ("kind", "string", "read, wait or query"),
        _OBJECT,
        ("time", "bigint", "time of the read"),
        ("state", "string", "checking, waiting until sealed, asked or streaming; of a query: "
         "analysing, waiting until sealed, run by Spark, or streaming"),
        ("waited_ms", "double", "ms since the request"),
        ("deadline_ms", "bigint", "deadline in ms"),
        ("uuid", "string", "uuid of its peek, as in `penstock.worker_peeks`; NULL for a query"),
    ),
    _relation(
        "subscribes",
        "controller",
        "Subscriptions of clients to the changes of objects.",
        _SESSION,
        _REQUEST,
        _OBJECT,
        ("told", "bigint", "frontier to which changes were sent to the client"),
        ("delivered", "bigint", "frontier to which changes have arrived here"),
        ("hold", "bigint", "time from which history is retained for it"),
        ("bytes_in_flight", "bigint", "bytes sent and not accepted yet"),
        ("idle_ms", "double", "ms since the client last accepted data while some was waiting"),
        ("dataflow", "string", "dataflow that feeds it; subscribers at the same frontier share "
         "one"),
    ),
    _relation(
        "copies",
        "controller",
        "Copies into files that are in progress.",
        _SESSION,
        _REQUEST,
        _OBJECT,
        ("as_of", "bigint", "time of the contents copied"),
        ("destination", "string", "folder or bucket"),
        ("format", "string", "parquet, csv or json"),
        ("state", "string", "waiting (until its time is sealed) or copying"),
        ("deadline_ms", "bigint", "deadline in ms, if it has one"),
        ("dataflow", "string", "dataflow that writes it"),
    ),
    _relation(
        "copies_from",
        "controller",
        "Copies from files into tables that are in progress.",
        _SESSION,
        _REQUEST,
        ("table", "string", "table that receives the rows"),
        ("path", "string", "file or folder"),
        ("format", "string", "parquet, csv or json"),
        ("state", "string", "beginning, reading, or appending (can no longer be canceled)"),
        ("files_read", "bigint", "number of files read completely"),
        ("files", "bigint", "number of all files; NULL until they were listed"),
        ("bytes_read", "bigint", "bytes of the files read"),
        ("bytes", "bigint", "bytes of all files"),
        ("rows_staged", "bigint", "rows written but not in the table yet"),
        ("oneshot", "string", "id of its dataflow in `penstock.dataflows`"),
    ),
    _relation(
        "sessions",
        "controller",
        "Open sessions of clients at all doors. For sessions of other roles, a role that is not an "
        "administrator sees only the first four columns.",
        ("number", "bigint", "number for canceling its statement or ending it: pg_cancel_backend, "
         "pg_terminate_backend, penstock sessions --end"),
        ("role", "string", "role of the session; NULL if it has not logged in as one"),
        ("door", "string", "client, postgresql or connect"),
        ("session", "string", "its connection, as in `penstock.peeks` and other relations; NULL "
         "for sessions of Spark Connect"),
        ("address", "string", "address of the client"),
        ("since_ms", "bigint", "start of the session, in ms since 1970"),
        ("state", "string", "active while a statement runs, otherwise idle"),
        ("statement", "string", "the running statement, without its secrets"),
        ("statement_ms", "bigint", "start of the running statement, or end of the last one, in ms "
         "since 1970"),
        ("requests", "bigint", "number of requests so far"),
        ("peeks", "bigint", "reads, waits and queries that have not been answered yet"),
        ("subscribes", "bigint", "running subscribes"),
    ),
    _relation(
        "errors",
        "controller",
        "Objects, sources and sinks that are stalled or in error.",
        ("id", "string", "id of the object"),
        _OBJECT,
        ("state", "string", "errored: reads fail until the data change; stalled, frozen: will be "
         "retried; failed: will not be retried; dropped: the external resource of a dropped source "
         "still exists"),
        ("text", "string", "description of the error"),
        ("since_ms", "bigint", "time of the first failure, in ms since 1970"),
        ("retries", "int", "number of failed attempts since then"),
    ),
    _relation(
        "spark_jobs",
        "controller",
        "Jobs of the engine: those that wait or run, then the last `log_rows_max` that have ended.",
        ("id", "string", "dataflow/incarnation/step/what"),
        ("dataflow", "string", "dataflow that requested it"),
        ("kind", "string", "Step, Difference, Select, Prepare, Analyze, …"),
        ("state", "string", "waiting, running, done, failed or canceled"),
        ("asked_ms", "bigint", "time of the request, in ms since 1970"),
        ("waited_ms", "double", "ms until it was passed to Spark"),
        ("ms", "double", "ms since then"),
        ("spark_ms", "double", "ms that Spark spent, for jobs that produce rows"),
        ("rows", "bigint", "number of rows produced"),
        ("tasks_done", "bigint", "Spark tasks completed, for long jobs"),
        ("tasks", "bigint", "Spark tasks known so far"),
        ("error", "string", "class of the error"),
    ),
    _relation(
        "sources",
        "controller",
        "Sources and sinks with their health and statistics.",
        ("id", "string", "id of the source or sink"),
        ("name", "string", "name of the source or sink"),
        ("direction", "string", "in for a source, out for a sink"),
        ("kind", "string", "postgres, files, nexmark, …, delta, parquet"),
        ("status", "string", "starting, running, paused, stalled, ceased, or dropped (waits for "
         "its removal)"),
        ("error", "string", "why it is stalled"),
        ("hint", "string", "what to do about it"),
        ("since_ms", "bigint", "time of the last change of status, in ms since 1970"),
        ("upper", "bigint", "frontier to which everything is durable, here or at a sink's "
         "destination"),
        ("messages", "bigint", "changes received; of a sink, commits"),
        ("bytes", "bigint", "bytes of them"),
        ("rows_inserted", "bigint", "rows inserted"),
        ("rows_deleted", "bigint", "rows deleted"),
        ("rows_staged", "bigint", "rows read and not durable yet"),
        ("snapshot_rows_known", "bigint", "approximate number of rows of the first contents"),
        ("snapshot_rows_staged", "bigint", "how many of them have been read"),
        ("position_known", "string", "latest position of the external system"),
        ("position_committed", "string", "latest durable position"),
        ("lag_ms", "bigint", "age in ms of what a reader sees"),
        ("lag_bytes", "bigint", "bytes behind the external system"),
        ("restarts", "bigint", "number of restarts"),
        ("failed", "string", "reason for the last stall since the service started"),
        ("failed_ms", "bigint", "time of that stall, in ms since 1970"),
        ("retries", "int", "number of failed attempts since it stalled"),
    ),
    _relation(
        "source_tables",
        "controller",
        "The tables that sources fill.",
        ("id", "string", "id of the table"),
        ("name", "string", "name of the table"),
        ("source", "string", "source that fills it"),
        ("outside", "string", "its external name"),
        ("status", "string", "starting, running, paused or stalled"),
        ("error", "string", "why it is stalled"),
        ("hint", "string", "what to do about it"),
        ("upper", "bigint", "frontier below which it is sealed"),
    ),
    _relation(
        "memory",
        "controller",
        "Memory that the service's process uses beyond what it had at its start, without the "
        "engine's processes: see *Memory* above.",
        ("kind", "string", "index, shared, hidden, table, upserts: arrangements; changes: of a "
         "dataflow, before and during its step; staged: of a source; gathered: of a sink's batch; "
         "decoded parts: those that are cached; arrow, python, malloc: memory that Arrow, Python's "
         "objects and C use in addition; allocator: memory that these three have freed and keep, "
         "and fragmentation"),
        ("id", "string", "id of the index, shard, table, dataflow, source or sink"),
        ("rows", "bigint", "number of rows or updates"),
        ("bytes_memory", "bigint", "bytes in memory"),
        ("bytes_mapped", "bigint", "bytes in mapped files"),
    ),
    _relation(
        "actors",
        "controller",
        "Every live actor of the service.",
        ("path", "string", "path in the tree of actors"),
        ("state", "string", "idle, handles X, asks /path, …"),
        ("doing", "string", "the actor's own description of its work"),
        ("depth", "bigint", "number of waiting messages"),
        ("depth_max", "bigint", "largest number of waiting messages so far"),
        ("received", "bigint", "number of messages received so far"),
        ("busy_ms", "double", "total ms spent handling messages"),
        ("effects", "bigint", "number of running effects"),
        ("crashes", "bigint", "number of crashes"),
    ),
)  # fmt: skip

RELATIONS: Final[Mapping[str, SystemRelation]] = {
    relation.name: relation for relation in (*_BY_CONTROLLER, *_BY_WORKERS)
}
"""All relations, by name."""
RELATION_SCHEMAS: Final = {name: relation.schema for name, relation in RELATIONS.items()}


def is_relation(name: str) -> bool:
    """Return whether a name is that of a relation, known or unknown."""
    # Case-insensitive, as names are in Spark by default (`spark.sql.caseSensitive`).
    return name.lower().startswith(PREFIX)


def relation_of(name: str) -> SystemRelation:
    """Return the relation with a name. Raises `UnknownObject`, which lists all relations."""
    found = RELATIONS.get(name.lower())
    if found is None:
        raise UnknownObject(f"unknown relation {name!r} (available: {', '.join(RELATIONS)})")
    return found


def worker_relation(name: str) -> SystemRelation:
    """Return the relation with a name, if workers keep it. Raises `UnknownObject`."""
    found = RELATIONS.get(name)
    if found is None or found.kept_by != "workers":
        kept = [each.name for each in RELATIONS.values() if each.kept_by == "workers"]
        raise UnknownObject(f"workers keep no relation {name} (available: {', '.join(kept)})")
    return found


def refuse_relation(name: str, what: str) -> None:
    """Raise `InvalidUsage` if a name is that of a relation; `what` starts the message."""
    if is_relation(name):
        raise InvalidUsage(
            f"{what} {name}: names that start with {PREFIX!r} are the service's own relations, "
            "which can only be read (peek)"
        )


# -- names of objects and columns ------------------------------------------------------------------

NAME_CHARACTERS_MAX: Final = 128
"""Maximum length of an object's name."""
SUBSCRIBED_PREFIX: Final = "__subscribe_"
"""Prefix of the names of views that belong to a single subscribe. Users cannot choose such a
name."""
_SUBSCRIBED: Final = re.compile(f"{SUBSCRIBED_PREFIX}[0-9a-f]{{1,32}}")


fold: Final = str.lower
"""Return the form of a name for comparisons, which ignore case as in Spark. The name itself keeps
its spelling."""


def is_subscribed_view(name: str) -> bool:
    """Return whether the view with this name belongs to a single subscribe.

    Such a view is not listed, no object may depend on it, and it is dropped with the connection
    that created it.

    >>> is_subscribed_view("__subscribe_1f"), is_subscribed_view("subscribe_1f")
    (True, False)
    """
    return _SUBSCRIBED.fullmatch(name) is not None


def check_name(what: str, name: str) -> str:
    """Return a name that is valid for an object: any printable text that Spark can quote.

    Raises `InvalidUsage` if it is empty, too long, reserved, or contains unprintable characters;
    `what` starts the message.
    """
    refuse_relation(name, what)
    if not name or name != name.strip() or not name.isprintable():
        raise InvalidUsage(
            f"invalid name for {what}: {name!r} must not be empty, start or end with a space, or "
            "contain line breaks or other unprintable characters"
        )
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidUsage(
            f"{what} {name[:32]!r}… is too long: {len(name)} characters "
            f"(limit {NAME_CHARACTERS_MAX})"
        )
    if name.startswith("__"):
        raise InvalidUsage(f"{what} {name!r}: names that start with '__' are reserved")
    return name
