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
    "which of the replicas: r1, or the address of another process",
)
_WORKER: Final = ("worker", "int", "which of the workers")
_ID: Final = ("id", "string", "of the dataflow; an object's first dataflow has the object's id")
_NAME: Final = ("name", "string", "of the object that it maintains")

_BY_WORKERS: Final = (
    _relation(
        "dataflows",
        "workers",
        "Every dataflow that runs or is being dropped: those that compute, as worker 0 sees them, "
        "and those of sources and sinks, as their own worker does.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        ("kind", "string", "view, index, subscribe, copy, ingestion, sink or oneshot"),
        ("as_of", "bigint", "time from which it has contents"),
        ("until", "bigint", "frontier at which it ends"),
        ("since", "bigint", "nobody reads its contents below this time"),
        ("scheduled", "boolean", "whether it may run; others wait for their turn"),
        ("state", "string", "what it does: hydrating, gathering, running, stalled, dropping, …"),
        ("text", "string", "its own words, if it says more"),
        ("steps", "bigint", "steps since it was started"),
        ("imports", "string", "shards that it reads, with commas between"),
    ),
    _relation(
        "frontiers",
        "workers",
        "How far each dataflow is, on each worker; a subscribe is told by worker 0, a source or a "
        "sink by the worker that runs it, and a copy has no frontiers.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        ("since", "bigint", "nobody reads its contents below this time"),
        ("input", "bigint", "frontier to which it has heard of all its inputs; a source has none"),
        ("write", "bigint", "frontier to which its output is durable, or this partition is in"),
        ("output", "bigint", "frontier to which its output is done and installed here"),
        ("lag_ms", "bigint", "ms by which the output is behind the input"),
    ),
    _relation(
        "arrangements",
        "workers",
        "Rows kept by key: a partition of every index on every worker; on worker 0 the "
        "arrangements that views share for their lookups, and those of their groupings' hidden "
        "states; on the worker of a source what it keeps to find old rows in. Those of the table "
        "writer are in `penstock.memory`.",
        _REPLICA,
        _WORKER,
        ("kind", "string", "index, shared, hidden or upserts"),
        ("id", "string", "of the index, of the shard that is arranged, or of the source's table"),
        ("key", "string", "key columns, with commas between"),
        ("columns", "string", "columns that are held, with commas between"),
        ("filter", "string", "which rows are held; empty: all"),
        ("rows", "bigint", "updates held, before equal ones are summed up"),
        ("runs", "bigint", "sorted runs, which merging makes fewer"),
        ("bytes_memory", "bigint", "bytes in memory"),
        ("bytes_mapped", "bigint", "bytes in files: in memory only as far as they are read"),
        ("users", "bigint", "views that share it; of an index: reads that wait or run"),
    ),
    _relation(
        "worker_peeks",
        "workers",
        "Reads that a worker has not answered. Those of clients are in `penstock.peeks`.",
        _REPLICA,
        _WORKER,
        ("uuid", "string", "name of the peek"),
        ("kind", "string", "index, shard or relation"),
        ("target", "string", "id of what is read"),
        ("time", "bigint", "at which time"),
        ("started", "boolean", "false: it waits until that time is sealed"),
    ),
    _relation(
        "steps",
        "workers",
        "The last steps of all dataflows, on worker 0: at most `log_rows_max`.",
        _REPLICA,
        _WORKER,
        ("at_ms", "bigint", "when it was done: ms since 1970"),
        _ID,
        _NAME,
        ("step", "bigint", "its number since the dataflow was started"),
        ("hi", "bigint", "frontier that it reached"),
        ("rows_in", "bigint", "changes taken in"),
        ("rows_read", "bigint", "rows of state that were looked up"),
        ("rows_out", "bigint", "changes made"),
        ("ms", "double", "ms in all"),
        ("wait_ms", "double", "ms of them on the way to the engine, and in it behind others' jobs"),
        ("spark_ms", "double", "ms of them in Spark"),
        ("own_ms", "double", "ms of them outside: lookups, deltas, the commit"),
        ("prepared", "boolean", "whether Spark's plans were there already"),
        ("recomputed", "boolean", "whether it was computed whole in place of the changes"),
    ),
    _relation(
        "parts_in_flight",
        "workers",
        "What each input of each dataflow has before it, on worker 0.",
        _REPLICA,
        _WORKER,
        _ID,
        ("source", "int", "number of the import"),
        ("shard", "string", "that is read"),
        ("described", "bigint", "frontier to which its parts are known"),
        ("waiting", "bigint", "parts known and not asked for"),
        ("bytes_waiting", "bigint", "their bytes"),
        ("fetching", "bigint", "parts asked for and not here"),
        ("bytes_fetching", "bigint", "their bytes"),
        ("rows_fetched", "bigint", "rows that are here and wait for their step"),
        ("bytes_fetched", "bigint", "their bytes in memory"),
        ("parts_filtered", "bigint", "parts left out: by their statistics they hold no row for it"),
        ("bytes_filtered", "bigint", "their bytes"),
        ("parts_audited", "bigint", "of those, the ones that were read to prove it"),
    ),
    _relation(
        "hydration",
        "workers",
        "Dataflows that read their first contents, on worker 0.",
        _REPLICA,
        _WORKER,
        _ID,
        _NAME,
        ("state", "string", "suspended: it waits for its turn (hydrations_max)"),
        ("parts_read", "bigint", "parts of its inputs that were read"),
        ("parts_total", "bigint", "of so many that are known"),
        ("bytes_read", "bigint", "bytes of the parts that were read"),
        ("bytes_total", "bigint", "of so many"),
    ),
    _relation(
        "reconciliation",
        "workers",
        "What became of running dataflows when a client connected, on each worker.",
        _REPLICA,
        _WORKER,
        ("flag", "string", "reused, created, dropped, replaced, or why one was replaced"),
        ("last", "bigint", "dataflows, the last time"),
        ("total", "bigint", "dataflows, since the start"),
    ),
)

_OBJECT: Final = ("object", "string", "name of the table, view, index, source or sink")
_SESSION: Final = ("session", "string", "connection that asked, as in `penstock.sessions`")
_REQUEST: Final = ("request", "bigint", "its number within the connection")

_BY_CONTROLLER: Final = (
    _relation(
        "relations",
        "controller",
        "These relations.",
        ("name", "string", "to read it by"),
        ("kept_by", "string", "workers or controller"),
        ("columns", "int", "how many"),
        ("text", "string", "what it tells"),
    ),
    _relation(
        "objects",
        "controller",
        "The catalog, and how far each object is.",
        ("id", "string", "of the object"),
        ("name", "string", "of the object"),
        ("kind", "string", "table, view or index"),
        ("state", "string", "what it does"),
        ("mode", "string", "how a view is maintained"),
        ("since", "bigint", "earliest time that can be read"),
        ("upper", "bigint", "frontier below which it is sealed"),
        ("lag_ms", "bigint", "age of what a reader sees, in ms; 0: it has all that there is"),
        ("as_of", "bigint", "time from which it has contents"),
        ("depends", "string", "objects that it reads, with commas between"),
        ("key", "string", "key columns, with commas between"),
        ("columns", "string", "columns with their types"),
        ("sql", "string", "a view's query"),
        ("retain_history_ms", "bigint", "ms of history kept, if it says so itself"),
        ("target_lag_ms", "bigint", "ms that a view may be old, if it says so"),
        ("text", "string", "why it is in that state, or what it waits for"),
        ("state_since_ms", "bigint", "since when it is stalled or in error: ms since 1970"),
        ("retries", "int", "attempts that have failed since then"),
    ),
    _relation(
        "operators",
        "controller",
        "The plans of views in the order of `penstock explain`, and the operators of the tasks of "
        "sources and sinks that run, as they told last (`statistics_ms`); a row a node.",
        ("id", "string", "of the view, source or sink"),
        ("name", "string", "of the view, source or sink"),
        ("number", "int", "from 0, the root"),
        ("depth", "int", "of the node below the root"),
        ("operator", "string", "kind of the node"),
        ("text", "string", "the node in full"),
        ("mode", "string", "of the view: incremental, keyed or opaque"),
        ("reason", "string", "why it is not incremental"),
        ("policy", "string", "refresh policy"),
        ("rows", "bigint", "of a task: rows that have passed it since the task began; of a view's "
         "node, which Spark runs together with others, it is not known (`penstock.steps`)"),
        ("ms", "double", "of a task: ms spent in it, waits included"),
        ("bytes_memory", "bigint", "of a task: bytes that it holds in memory"),
        ("bytes_mapped", "bigint", "of a task: bytes in files, in memory only as far as they are "
         "read"),
    ),
    _relation(
        "shards",
        "controller",
        "Where contents lie: of tables and views, and the hidden states of groupings.",
        ("shard", "string", "its id"),
        _OBJECT,
        ("role", "string", "contents, or hidden"),
        ("since", "bigint", "earliest time that can be read"),
        ("upper", "bigint", "frontier below which it is sealed"),
        ("batches", "bigint", "intervals of times that it consists of"),
        ("parts", "bigint", "files and inline parts"),
        ("rows", "bigint", "updates in them"),
        ("bytes", "bigint", "bytes in them"),
        ("leases", "bigint", "readers that have parts of it in flight"),
    ),
    _relation(
        "holds",
        "controller",
        "Who keeps history: a shard's since is the least of its holds and leases.",
        ("shard", "string", "whose history"),
        _OBJECT,
        ("kind", "string", "hold, or lease"),
        ("holder", "string", "who"),
        ("since", "bigint", "reads what is at this time and later"),
        ("behind_ms", "bigint", "ms behind the shard's upper"),
    ),
    _relation(
        "peeks",
        "controller",
        "Reads, waits and queries of clients that have no answer yet.",
        _SESSION,
        _REQUEST,
        ("kind", "string", "read, wait or query"),
        _OBJECT,
        ("time", "bigint", "at which time"),
        ("state", "string", "checking, waiting until sealed, asked or streaming; of a query: "
         "analysing, waiting until sealed, run by Spark, or streaming"),
        ("waited_ms", "double", "ms since it was asked for"),
        ("deadline_ms", "bigint", "it fails after so many ms"),
        ("uuid", "string", "of its peek, as in `penstock.worker_peeks`; a query has none"),
    ),
    _relation(
        "subscribes",
        "controller",
        "Clients that hear the changes of an object.",
        _SESSION,
        _REQUEST,
        _OBJECT,
        ("told", "bigint", "frontier to which it was told"),
        ("delivered", "bigint", "frontier to which changes are here"),
        ("hold", "bigint", "time from which history is kept for it"),
        ("bytes_in_flight", "bigint", "bytes sent and not yet taken"),
        ("idle_ms", "double", "ms since it took some of what waits for it"),
        ("dataflow", "string", "that feeds it; subscribers that are as far share one"),
    ),
    _relation(
        "copies",
        "controller",
        "Copies into files that are under way.",
        _SESSION,
        _REQUEST,
        _OBJECT,
        ("as_of", "bigint", "at which time"),
        ("destination", "string", "folder or bucket"),
        ("format", "string", "parquet, csv or json"),
        ("state", "string", "waiting (until its time is sealed), or copying"),
        ("deadline_ms", "bigint", "it fails after so many ms, if it says so"),
        ("dataflow", "string", "that writes it"),
    ),
    _relation(
        "copies_from",
        "controller",
        "Copies from files into tables that are under way.",
        _SESSION,
        _REQUEST,
        ("table", "string", "that gets the rows"),
        ("path", "string", "file or folder"),
        ("format", "string", "parquet, csv or json"),
        ("state", "string", "beginning, reading, or appending (it cannot be canceled any more)"),
        ("files_read", "bigint", "whole"),
        ("files", "bigint", "in all; NULL until they were looked at"),
        ("bytes_read", "bigint", "of the files read"),
        ("bytes", "bigint", "of all files"),
        ("rows_staged", "bigint", "rows that are written, and not in the table yet"),
        ("oneshot", "string", "its id in `penstock.dataflows`"),
    ),
    _relation(
        "sessions",
        "controller",
        "Sessions that clients have open at any door. Of sessions of other roles, those who are no "
        "administrator see the first four columns alone.",
        ("number", "bigint", "to cancel its statement or end it by: pg_cancel_backend, "
         "pg_terminate_backend, penstock sessions --end"),
        ("role", "string", "that it acts as; NULL: it has proved none"),
        ("door", "string", "client, postgresql or connect"),
        ("session", "string", "its connection, as `penstock.peeks` and other relations name it; "
         "NULL for sessions of Spark Connect"),
        ("address", "string", "where it comes from"),
        ("since_ms", "bigint", "when it began: ms since 1970"),
        ("state", "string", "active: a statement runs; idle"),
        ("statement", "string", "that runs, without its secrets"),
        ("statement_ms", "bigint", "when it began, or the last one ended: ms since 1970"),
        ("requests", "bigint", "requests in all"),
        ("peeks", "bigint", "of them reads, waits and queries that have no answer yet"),
        ("subscribes", "bigint", "and subscribes that run"),
    ),
    _relation(
        "errors",
        "controller",
        "Objects that cannot go on or hold an error, sources and sinks as well, and since when.",
        ("id", "string", "of the object"),
        _OBJECT,
        ("state", "string", "errored: reads fail until the data change; stalled and frozen: tried "
         "again; failed: not; dropped: what the outside kept for a dropped source is still there"),
        ("text", "string", "what is wrong"),
        ("since_ms", "bigint", "since when: ms since 1970"),
        ("retries", "int", "attempts that have failed since then"),
    ),
    _relation(
        "spark_jobs",
        "controller",
        "Jobs of the engine: those that wait or run, then the last `log_rows_max` that ended.",
        ("id", "string", "dataflow/incarnation/step/what"),
        ("dataflow", "string", "that wants it"),
        ("kind", "string", "Step, Difference, Select, Prepare, Analyze, …"),
        ("state", "string", "waiting, running, done, failed or canceled"),
        ("asked_ms", "bigint", "when it was asked for: ms since 1970"),
        ("waited_ms", "double", "ms until it went to Spark"),
        ("ms", "double", "ms since then"),
        ("spark_ms", "double", "ms that Spark took, of jobs that make rows"),
        ("rows", "bigint", "rows that it made"),
        ("tasks_done", "bigint", "Spark's tasks that are done, of jobs that take long"),
        ("tasks", "bigint", "of so many that are known"),
        ("error", "string", "class of the error"),
    ),
    _relation(
        "sources",
        "controller",
        "Sources and sinks, how they are and what they have done.",
        ("id", "string", "of the source or sink"),
        ("name", "string", "of the source or sink"),
        ("direction", "string", "in: a source; out: a sink"),
        ("kind", "string", "postgres, files, nexmark, …, delta, parquet"),
        ("status", "string", "starting, running, paused, stalled, ceased; dropped: to be removed"),
        ("error", "string", "why it is stalled"),
        ("hint", "string", "what to do about it"),
        ("since_ms", "bigint", "since when: ms since 1970"),
        ("upper", "bigint", "frontier to which all is durable: here, or of a sink there"),
        ("messages", "bigint", "changes taken; of a sink: commits"),
        ("bytes", "bigint", "bytes of them"),
        ("rows_inserted", "bigint", "rows that came"),
        ("rows_deleted", "bigint", "rows that went"),
        ("rows_staged", "bigint", "rows read and not durable yet"),
        ("snapshot_rows_known", "bigint", "rows of the first contents, about"),
        ("snapshot_rows_staged", "bigint", "of them, those read"),
        ("position_known", "string", "newest position outside"),
        ("position_committed", "string", "newest position that is durable"),
        ("lag_ms", "bigint", "age of what a reader sees, in ms"),
        ("lag_bytes", "bigint", "bytes behind the outside"),
        ("restarts", "bigint", "times that it was started again"),
        ("failed", "string", "why it stalled last, since the service started"),
        ("failed_ms", "bigint", "when: ms since 1970"),
        ("retries", "int", "attempts that have failed since it is stalled"),
    ),
    _relation(
        "source_tables",
        "controller",
        "The tables that sources fill.",
        ("id", "string", "of the table"),
        ("name", "string", "of the table"),
        ("source", "string", "that fills it"),
        ("outside", "string", "its name there"),
        ("status", "string", "starting, running, paused or stalled"),
        ("error", "string", "why it goes on no further"),
        ("hint", "string", "what to do about it"),
        ("upper", "bigint", "frontier below which it is sealed"),
    ),
    _relation(
        "memory",
        "controller",
        "What the process of the service holds in memory beyond its start, without the engine's "
        "processes: see *Memory* above.",
        ("kind", "string", "index, shared, hidden, table and upserts: arrangements; changes: of a "
         "dataflow, before and in its step; staged: of a source; gathered: of a sink's batch; "
         "decoded parts; arrow: Arrow's memory beyond all of these; python: its objects; malloc: "
         "C's; allocator: what these three have freed and keep, or lose between blocks"),
        ("id", "string", "of the index, shard, table, dataflow, source or sink"),
        ("rows", "bigint", "rows or updates"),
        ("bytes_memory", "bigint", "bytes in memory"),
        ("bytes_mapped", "bigint", "bytes in files: in memory only as far as they are read"),
    ),
    _relation(
        "actors",
        "controller",
        "Every live actor of the service.",
        ("path", "string", "its name in the tree"),
        ("state", "string", "idle, handles X, asks /path, …"),
        ("doing", "string", "its own words"),
        ("depth", "bigint", "messages that wait"),
        ("depth_max", "bigint", "the most that ever waited"),
        ("received", "bigint", "messages so far"),
        ("busy_ms", "double", "ms in handlers so far"),
        ("effects", "bigint", "effects that run"),
        ("crashes", "bigint", "times that it was started anew"),
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
