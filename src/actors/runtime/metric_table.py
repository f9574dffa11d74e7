"""The table of all metrics.

From it come the page `/metrics`, docs/reference/metrics.md, and the Grafana dashboard in deploy/.
The alerts are in `actors.runtime.alert_table`. `python -m tests.kit.metric_files` writes the files.
A new metric is one definition here and one place that reports it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from actors.runtime.measurement import MetricDefinition
from actors.runtime.telemetry import DATAFLOW, OBJECT

ACTOR: Final = "actor"
CHANGE: Final = "penstock.change"
COMMAND: Final = "penstock.command"
DOOR: Final = "penstock.door"
ENGINE: Final = "penstock.engine"
ERROR_CLASS: Final = "penstock.error"
HALF: Final = "penstock.half"
KIND: Final = "penstock.kind"
OPERATION: Final = "penstock.operation"
OUTCOME: Final = "penstock.outcome"
PROCESS: Final = "penstock.process"
REASON: Final = "penstock.reason"
REPLICA: Final = "penstock.replica"
STATE: Final = "penstock.state"
STORE: Final = "penstock.store"
WAL_OUTCOME: Final = "penstock.wal.outcome"
MESSAGES: Final = (0, 5, 10, 25, 50, 75, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10000)

# -- objects ---------------------------------------------------------------------------------------

LAG_MS: Final = MetricDefinition(
    "Objects",
    "penstock.object.lag",
    "gauge",
    "Age of what a reader of the object sees; 0 if it has all changes.",
    "Look at the object in `penstock.objects`: its text names what it waits for. A view whose "
    "steps take longer than its changes need a smaller query or more cores.",
    "milliseconds",
    (OBJECT,),
)
STALLED_MS: Final = MetricDefinition(
    "Objects",
    "penstock.object.stalled",
    "gauge",
    "Time since the object has been stalled or in error; 0 if it is neither.",
    "Read the reason and the hint in `penstock.errors`.",
    "milliseconds",
    (OBJECT,),
)

OBJECT_RETRIES: Final = MetricDefinition(
    "Objects",
    "penstock.object.retries",
    "gauge",
    "Attempts of the object that have failed since it is stalled; 0 if it is not.",
    "The delay between attempts grows up to `retry_delay_ms_max`. Read the reason in "
    "`penstock.errors`: most reasons do not go away by themselves.",
    labels=(OBJECT,),
)
FRONTIER_AGE_MS: Final = MetricDefinition(
    "Objects",
    "penstock.object.frontier_age",
    "gauge",
    "Time between the clock and the object's frontier, below which it is complete.",
    "It grows while nothing is written to the object's tables, and is then harmless: see the lag.",
    "milliseconds",
    (OBJECT,),
)
FRONTIER_LAG_MS: Final = MetricDefinition(
    "Objects",
    "penstock.object.frontier_lag",
    "gauge",
    "Distance of the object's frontier from the least frontier of its inputs.",
    "The object's steps are slower than its inputs: look at its steps and at the engine's queue.",
    "milliseconds",
    (OBJECT,),
)
OBJECT_INFO: Final = MetricDefinition(
    "Objects",
    "penstock.object.info",
    "gauge",
    "Always 1: joins the name of an object to its kind and to the id of its dataflow.",
    "It needs no action.",
    labels=(OBJECT, KIND, DATAFLOW),
)

# -- dataflows and steps ---------------------------------------------------------------------------

STEPS: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.steps",
    "counter",
    "Steps of the dataflow.",
    "Many small steps cost more than a few large ones: give the view a `target_lag_ms`.",
    labels=(DATAFLOW,),
)
STEP_ROWS_IN: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.step.rows_in",
    "counter",
    "Changes that the dataflow's steps took in.",
    "Compare it with the writes to the view's inputs: it cannot be higher than these.",
    labels=(DATAFLOW,),
)
STEP_ROWS_OUT: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.step.rows_out",
    "counter",
    "Changes that the dataflow's steps made.",
    "If it is much higher than the changes taken in, a small change touches many rows: look for a "
    "join with a frequent key.",
    labels=(DATAFLOW,),
)
STEP_SECONDS: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.step.duration",
    "histogram",
    "Duration of a step, from choosing its changes to its commit.",
    "`penstock.steps` divides the time of each step into waiting, Spark and the rest.",
    "seconds",
    (DATAFLOW,),
)
STEPS_IN_ERROR: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.step.repeated_failures",
    "counter",
    "Failures that occurred three times in the same way and put the view in error.",
    "Read the error in `penstock.errors`, and repair the data or replace the view.",
    labels=(DATAFLOW,),
)

STEP_ROWS_READ: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.step.rows_read",
    "counter",
    "Rows of state that the dataflow's steps looked up.",
    "If it is much higher than the changes taken in, the view joins on a frequent key; "
    "`EXPLAIN MATERIALIZED VIEW` shows its lookups.",
    labels=(DATAFLOW,),
)
STEPS_RECOMPUTED: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.step.recomputed",
    "counter",
    "Steps in which the view was recomputed in full.",
    "`EXPLAIN MATERIALIZED VIEW` shows why the view is opaque. Views with `REFRESH POLICY FULL` "
    "are always recomputed: silence the alert for them.",
    labels=(DATAFLOW,),
)
DATAFLOWS: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.dataflows",
    "gauge",
    "Dataflows of the replica by state, and sources and sinks by whether they run.",
    "Many that are suspended wait for their turn to hydrate (`hydrations_max`); those that are "
    "stalled or frozen have a reason in `penstock.dataflows`.",
    labels=(REPLICA, STATE),
)
HYDRATIONS: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.hydrations",
    "gauge",
    "Dataflows that read their first contents, and those that wait for their turn.",
    "`penstock.hydration` shows how far each is. More turns (`hydrations_max`) need more memory.",
    labels=(REPLICA, STATE),
)
HYDRATION_SECONDS: Final = MetricDefinition(
    "Dataflows and steps",
    "penstock.hydration.duration",
    "histogram",
    "Duration of restoring a dataflow when it starts: from its permission to run until its first "
    "contents are durable or read.",
    "Hydration reads the inputs in full. Give the engine more cores, or hydrate fewer at a time.",
    "seconds",
)

# -- sources ---------------------------------------------------------------------------------------

SOURCE_LAG_MS: Final = MetricDefinition(
    "Sources",
    "penstock.source.lag",
    "gauge",
    "Age of what a reader of the source's tables sees.",
    "Compare with the lag in bytes: if that is 0, the external system sends nothing.",
    "milliseconds",
    (OBJECT,),
)
SOURCE_LAG_BYTES: Final = MetricDefinition(
    "Sources",
    "penstock.source.backlog",
    "gauge",
    "Bytes by which the source is behind its external system, where that system tells.",
    "The system makes changes faster than they are ingested. A replication slot keeps the log of "
    "PostgreSQL until then: watch its disk.",
    "bytes",
    (OBJECT,),
)
SOURCE_MESSAGES: Final = MetricDefinition(
    "Sources",
    "penstock.source.messages",
    "counter",
    "Changes that the source has received.",
    "This is the load. It needs no action.",
    labels=(OBJECT,),
)
SOURCE_BYTES: Final = MetricDefinition(
    "Sources",
    "penstock.source.received",
    "counter",
    "Bytes of the changes that the source has received.",
    "This is the load. It needs no action.",
    "bytes",
    (OBJECT,),
)
SOURCE_ROWS: Final = MetricDefinition(
    "Sources",
    "penstock.source.rows",
    "counter",
    "Rows that the source has inserted into its tables and deleted from them.",
    "This is the load. It needs no action.",
    labels=(OBJECT, CHANGE),
)
SOURCE_RESTARTS: Final = MetricDefinition(
    "Sources",
    "penstock.source.restarts",
    "counter",
    "Restarts of the source after failures.",
    "`SHOW SOURCES` has the last error and a hint.",
    labels=(OBJECT,),
)
SOURCE_ERRORS: Final = MetricDefinition(
    "Sources",
    "penstock.source.errors",
    "counter",
    "Reports that the source or one of its tables is stalled.",
    "`SHOW SOURCES` has the last error and a hint.",
    labels=(OBJECT,),
)

# -- sinks -----------------------------------------------------------------------------------------

SINK_LAG_MS: Final = MetricDefinition(
    "Sinks",
    "penstock.sink.lag",
    "gauge",
    "Age of what a reader of the sink's external table sees.",
    "`penstock.operators` shows where the sink spends its time: reading, writing, committing.",
    "milliseconds",
    (OBJECT,),
)
SINK_COMMITS: Final = MetricDefinition(
    "Sinks",
    "penstock.sink.commits",
    "counter",
    "Commits of the sink.",
    "Many small commits make many small files: give the sink's view a `target_lag_ms`.",
    labels=(OBJECT,),
)
SINK_BYTES: Final = MetricDefinition(
    "Sinks",
    "penstock.sink.sent",
    "counter",
    "Bytes that the sink has committed.",
    "This is the load. It needs no action.",
    "bytes",
    (OBJECT,),
)
SINK_ROWS: Final = MetricDefinition(
    "Sinks",
    "penstock.sink.rows",
    "counter",
    "Changes of rows that the sink has committed.",
    "This is the load. It needs no action.",
    labels=(OBJECT,),
)
SINK_RESTARTS: Final = MetricDefinition(
    "Sinks",
    "penstock.sink.restarts",
    "counter",
    "Restarts of the sink after failures.",
    "`SHOW SINKS` has the last error and a hint.",
    labels=(OBJECT,),
)
SINK_ERRORS: Final = MetricDefinition(
    "Sinks",
    "penstock.sink.errors",
    "counter",
    "Reports that the sink is stalled.",
    "`SHOW SINKS` has the last error and a hint.",
    labels=(OBJECT,),
)

# -- the engine ------------------------------------------------------------------------------------

ENGINE_UP: Final = MetricDefinition(
    "Engine",
    "penstock.engine.up",
    "gauge",
    "One if the engine's process is up, otherwise zero.",
    "At 0, views do not advance. `penstock.actors` shows why the engine does not start.",
    labels=(ENGINE,),
)
ENGINE_JOBS: Final = MetricDefinition(
    "Engine",
    "penstock.engine.jobs",
    "gauge",
    "Jobs that wait for the engine, and those that run.",
    "If jobs wait all the time, the engine is the limit: give it more cores, or allow more jobs at "
    "a time (`engine_jobs_in_flight_max`).",
    labels=(ENGINE, STATE),
)
ENGINE_JOBS_ENDED: Final = MetricDefinition(
    "Engine",
    "penstock.engine.jobs_ended",
    "counter",
    "Jobs that ended, by outcome: done, failed or canceled.",
    "`penstock.spark_jobs` has the errors of the last jobs.",
    labels=(ENGINE, OUTCOME),
)
ENGINE_WAIT_SECONDS: Final = MetricDefinition(
    "Engine",
    "penstock.engine.job.wait",
    "histogram",
    "Time that a job waited until it went to the engine.",
    "The engine is the limit: give it more cores, or allow more jobs at a time "
    "(`engine_jobs_in_flight_max`).",
    "seconds",
    (ENGINE,),
)
ENGINE_JOB_SECONDS: Final = MetricDefinition(
    "Engine",
    "penstock.engine.job.duration",
    "histogram",
    "Duration of a job in the engine.",
    "`penstock.spark_jobs` shows which jobs take long.",
    "seconds",
    (ENGINE,),
)
ENGINE_DEATHS: Final = MetricDefinition(
    "Engine",
    "penstock.engine.deaths",
    "counter",
    "Deaths of the engine's process while it was up.",
    "The log has the reason. Most often it is memory: compare `spark_driver_memory` with the "
    "machine's memory.",
    labels=(ENGINE,),
)
ENGINE_QUARANTINED: Final = MetricDefinition(
    "Engine",
    "penstock.engine.quarantined",
    "gauge",
    "Jobs that the engine refuses, because they have killed it.",
    "The views of these jobs are in error: `penstock.errors` names them.",
    labels=(ENGINE,),
)
ENGINE_MEMORY: Final = MetricDefinition(
    "Engine",
    "penstock.engine.memory",
    "gauge",
    "Memory of the engine's processes: of Python (`child`) and of the JVM (`jvm`).",
    "`spark_driver_memory` bounds the JVM's heap; the process needs about a third more.",
    "bytes",
    (ENGINE, PROCESS),
)

# -- stores ---------------------------------------------------------------------

APPEND_SECONDS: Final = MetricDefinition(
    "Stores",
    "penstock.append.duration",
    "histogram",
    "Duration of an append to shards, from writing its parts to its compare-and-set.",
    "The stores are slow or overloaded: look at their own metrics.",
    "seconds",
)

STORE_SECONDS: Final = MetricDefinition(
    "Stores",
    "penstock.store.duration",
    "histogram",
    "Duration of a request to the store of blobs or of documents, its retries included.",
    "The stores are slow or overloaded: look at their own metrics.",
    "seconds",
    (STORE, OPERATION),
)
STORE_ERRORS: Final = MetricDefinition(
    "Stores",
    "penstock.store.errors",
    "counter",
    "Requests to a store that failed, by the class of the error.",
    "The log has the errors. Views stall until the store answers again; nothing is lost.",
    labels=(STORE, ERROR_CLASS),
)
STORE_RETRIES: Final = MetricDefinition(
    "Stores",
    "penstock.store.retries",
    "counter",
    "Changes of documents that were tried again: because another change came first (conflict), or "
    "because the store did not answer (failure).",
    "Conflicts are normal if several replicas run one view. Failures: see the errors.",
    labels=(REASON,),
)

# -- memory ----------------------------------------------------------------------------------------

MEMORY_BYTES: Final = MetricDefinition(
    "Memory",
    "penstock.memory.size",
    "gauge",
    "Memory of the service's process by what holds it, without the engine.",
    "`penstock.memory` shows the objects. Arrangements grow with the rows that views look up.",
    "bytes",
    (KIND,),
)
MEMORY_MAPPED_BYTES: Final = MetricDefinition(
    "Memory",
    "penstock.memory.mapped",
    "gauge",
    "Bytes in mapped files by what holds them; they are in memory only as far as they are read.",
    "These are large arrangements in scratch files. They need a fast local disk.",
    "bytes",
    (KIND,),
)

# -- replicas --------------------------------------------------------------------------------------

REPLICAS: Final = MetricDefinition(
    "Replicas",
    "penstock.replicas",
    "gauge",
    "Replicas that the controller is connected to, and those that it is not.",
    "For those that are not connected, `penstock replicas` shows the last error.",
    labels=(STATE,),
)
HISTORY_COMMANDS: Final = MetricDefinition(
    "Replicas",
    "penstock.history.commands",
    "gauge",
    "Commands in the controller's histories, which a replica receives when it connects.",
    "There are a few commands for each object and each running read. More than that means that "
    "reads pile up.",
    labels=(HALF, COMMAND),
)
RECONCILED_OBJECTS: Final = MetricDefinition(
    "Replicas",
    "penstock.reconciliation.objects",
    "counter",
    "Dataflows (compute), and sources and sinks (storage), that new connections kept, created, "
    "replaced, dropped or refused.",
    "Those that are replaced read their first contents again; the replica's log has the reasons.",
    labels=(HALF, OUTCOME),
)
OUTBOX_MESSAGES: Final = MetricDefinition(
    "Replicas",
    "penstock.outbox.messages",
    "gauge",
    "Responses of the workers to their clients: those that wait for room, and those that are sent "
    "and not acknowledged.",
    "Responses that wait for long have a slow or lost client; see `penstock.actors`.",
    labels=(HALF, STATE),
)
RESPONSES_SENT: Final = MetricDefinition(
    "Replicas",
    "penstock.outbox.sent",
    "counter",
    "Responses that the workers have sent to their clients.",
    "This is the load. It needs no action.",
    labels=(HALF,),
)
ADAPTER_RESPONSES: Final = MetricDefinition(
    "Replicas",
    "penstock.adapter.responses",
    "counter",
    "Responses by what the channel adapters did: forward, drop, stash, hold, and deliver (from the "
    "stash, once the client was there).",
    "Dropped responses belong to former connections. Many of them mean that the controller loses "
    "its connection often.",
    labels=(HALF, OUTCOME),
)

RECONCILED_REUSED: Final = MetricDefinition(
    "Replicas",
    "penstock.reconciliation.reused",
    "counter",
    "Dataflows that a new connection found running and kept.",
    "It grows with each new connection of the controller: look for the reason in its log.",
)
RECONCILED_REPLACED: Final = MetricDefinition(
    "Replicas",
    "penstock.reconciliation.replaced",
    "counter",
    "Reasons for which a running dataflow was not kept by a new connection.",
    "A replaced dataflow reads its first contents again. After an upgrade this is expected; at "
    "other times the replica's log shows both descriptions.",
    labels=(REASON,),
)

# -- sessions --------------------------------------------------------------------------------------

SESSIONS: Final = MetricDefinition(
    "Sessions",
    "penstock.sessions",
    "gauge",
    "Open sessions by door: `client`, `postgresql` or `connect`.",
    "`penstock.sessions` lists them with their clients and statements.",
    labels=(DOOR,),
)
STATEMENT_SECONDS: Final = MetricDefinition(
    "Sessions",
    "penstock.statement.duration",
    "histogram",
    "Duration of statements and of requests by the client protocol.",
    "`penstock.peeks` shows what reads wait for, and `penstock.spark_jobs` the queries.",
    "seconds",
    (DOOR,),
)
STATEMENT_ERRORS: Final = MetricDefinition(
    "Sessions",
    "penstock.statement.errors",
    "counter",
    "Statements and requests that failed, by the class of the error.",
    "`ResourceBusy` and `DeadlineExceeded` mean overload; most others are mistakes of clients.",
    labels=(DOOR, ERROR_CLASS),
)
OPEN_REQUESTS: Final = MetricDefinition(
    "Sessions",
    "penstock.requests",
    "gauge",
    "Requests without a final answer: reads and waits, queries, subscribes and copies.",
    "`penstock.peeks`, `penstock.subscribes` and `penstock.copies` list them.",
    labels=(KIND,),
)

# -- actors ----------------------------------------------------------------------------------------

LOOP_DELAY_SECONDS: Final = MetricDefinition(
    "Actors",
    "penstock.loop.delay",
    "histogram",
    "Delay of the event loop's turns; every session waits this long.",
    "Something holds the loop or its core is busy: leave a core to the service (`pin_cores`).",
    "seconds",
)
MAILBOX_DEPTH: Final = MetricDefinition(
    "Actors",
    "penstock.mailbox.depth",
    "gauge",
    "Messages that wait for the actor.",
    "`penstock.actors` shows what the actor does meanwhile.",
    labels=(ACTOR,),
)
MAILBOX_DEPTH_MAX: Final = MetricDefinition(
    "Actors",
    "penstock.mailbox.depth_max",
    "gauge",
    "Most messages that have waited for the actor at a time.",
    "At the mailbox's limit senders wait. Brief peaks are harmless.",
    labels=(ACTOR,),
)
MAILBOX_RECEIVED: Final = MetricDefinition(
    "Actors",
    "penstock.mailbox.received",
    "counter",
    "Messages that the actor has received.",
    "Compare it with the load: the clients' requests, the changes, the steps.",
    labels=(ACTOR,),
)
ACTOR_BUSY_SECONDS: Final = MetricDefinition(
    "Actors",
    "penstock.actor.busy",
    "counter",
    "Time that the actor has spent in its handlers, waits included.",
    "An actor that is busy all the time limits those that send to it.",
    "seconds",
    (ACTOR,),
)

# -- the WAL ---------------------------------------------------------------------------------------

WAL_RECEIVERS: Final = MetricDefinition(
    "WAL",
    "penstock.wal.receivers",
    "level",
    "Connected proposers.",
    "More than one proposer of a log takes the log from the other: look for a second writer.",
)
WAL_QUEUED: Final = MetricDefinition(
    "WAL",
    "penstock.wal.queue.messages",
    "level",
    "Messages of proposers that the acceptors have not taken yet.",
    "The disk is slower than the proposers: compare with the duration of flushes.",
)
WAL_QUEUE_BYTES: Final = MetricDefinition(
    "WAL",
    "penstock.wal.queue.size",
    "level",
    "Log in the messages that wait.",
    "The disk is slower than the proposers: compare with the duration of flushes.",
    "bytes",
)
WAL_QUEUE_DEPTH: Final = MetricDefinition(
    "WAL",
    "penstock.wal.queue.depth",
    "histogram",
    "Messages of one proposer that wait, looked at every 5 s.",
    "The disk is slower than the proposers: compare with the duration of flushes.",
    bounds=MESSAGES,
)
WAL_MESSAGES: Final = MetricDefinition(
    "WAL",
    "penstock.wal.messages",
    "counter",
    "Messages of proposers, taken or failed.",
    "Failed messages have their errors in the log.",
    labels=(WAL_OUTCOME,),
)
WAL_BYTES: Final = MetricDefinition(
    "WAL",
    "penstock.wal.written",
    "counter",
    "Log that was written.",
    "This is the load. Compare it with what the disk can write.",
    "bytes",
)
WAL_WRITE_SECONDS: Final = MetricDefinition(
    "WAL",
    "penstock.wal.write.duration",
    "histogram",
    "Duration of the write of one append.",
    "The disk is slow or shared.",
    "seconds",
)
WAL_FLUSH_SECONDS: Final = MetricDefinition(
    "WAL",
    "penstock.wal.flush.duration",
    "histogram",
    "Duration of the flush of a group of appends; a commit waits for it.",
    "The disk is slow or shared: give the log a disk of its own.",
    "seconds",
)
WAL_RECOVERED_BYTES: Final = MetricDefinition(
    "WAL",
    "penstock.wal.recovered",
    "counter",
    "Log that was fetched from peers.",
    "An acceptor that was away catches up. If it does so all the time, its connection is bad.",
    "bytes",
)
WAL_OFFLOADED: Final = MetricDefinition(
    "WAL",
    "penstock.wal.offload.segments",
    "counter",
    "Segments that this acceptor has uploaded.",
    "This is the load. It needs no action.",
)
WAL_OFFLOAD_FAILURES: Final = MetricDefinition(
    "WAL",
    "penstock.wal.offload.failures",
    "counter",
    "Attempts to upload a segment that failed.",
    "The log has the error of each. Acceptors keep their segments until they are uploaded.",
)
WAL_BACKUP_LAG: Final = MetricDefinition(
    "WAL",
    "penstock.wal.offload.lag",
    "gauge",
    "Log of the timeline that is committed and not uploaded yet.",
    "Up to one segment is normal. More means that uploads fail or are slower than the log grows.",
    "bytes",
    (OBJECT,),
)


class ConnectorMetrics(NamedTuple):
    """The metrics that sources and sinks have alike."""

    lag_ms: MetricDefinition
    messages: MetricDefinition
    bytes: MetricDefinition
    rows: MetricDefinition
    restarts: MetricDefinition
    errors: MetricDefinition


OF_SOURCES: Final = ConnectorMetrics(
    SOURCE_LAG_MS, SOURCE_MESSAGES, SOURCE_BYTES, SOURCE_ROWS, SOURCE_RESTARTS, SOURCE_ERRORS
)
OF_SINKS: Final = ConnectorMetrics(
    SINK_LAG_MS, SINK_COMMITS, SINK_BYTES, SINK_ROWS, SINK_RESTARTS, SINK_ERRORS
)
METRICS: Final = tuple(each for each in globals().values() if isinstance(each, MetricDefinition))
"""All metrics, by group."""
