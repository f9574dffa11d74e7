"""The table of all metrics.

From it come the page `/metrics`, docs/reference/metrics.md, and the Grafana dashboard and the
Prometheus alerts in deploy/ (`python -m tests.kit.metric_files` writes these files). A new metric
is one definition here and one place that reports it.
"""

from __future__ import annotations

from typing import Final

from actors.runtime.measurement import AlertRule, MetricDefinition
from actors.runtime.telemetry import DATAFLOW, OBJECT

ACTOR: Final = "actor"
REASON: Final = "penstock.reason"
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
    alerts=(
        AlertRule(
            "PenstockObjectStale",
            "penstock_object_lag_milliseconds > 60000",
            5,
            "warning",
            "Readers of {{ $labels.penstock_object }} see data that is more than a minute old.",
        ),
    ),
)
STALLED_MS: Final = MetricDefinition(
    "Objects",
    "penstock.object.stalled",
    "gauge",
    "Time since the object has been stalled or in error; 0 if it is neither.",
    "Read the reason and the hint in `penstock.errors`.",
    "milliseconds",
    (OBJECT,),
    alerts=(
        AlertRule(
            "PenstockObjectStalled",
            "penstock_object_stalled_milliseconds > 0",
            1,
            "critical",
            "{{ $labels.penstock_object }} is stalled or in error; penstock.errors has the reason.",
        ),
    ),
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
    alerts=(
        AlertRule(
            "PenstockStepsFail",
            "increase(penstock_step_repeated_failures_total[15m]) > 0",
            0,
            "critical",
            "Steps of dataflow {{ $labels.penstock_dataflow }} fail again and again.",
        ),
    ),
)

# -- writes and the event loop ---------------------------------------------------------------------

APPEND_SECONDS: Final = MetricDefinition(
    "Stores",
    "penstock.append.duration",
    "histogram",
    "Duration of an append to shards, from writing its parts to its compare-and-set.",
    "The stores are slow or overloaded: look at their own metrics.",
    "seconds",
)

# -- replicas --------------------------------------------------------------------------------------

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
    "Connections of clients.",
    "`penstock.sessions` lists the open sessions with their clients and statements.",
)

# -- actors ----------------------------------------------------------------------------------------

LOOP_DELAY_SECONDS: Final = MetricDefinition(
    "Actors",
    "penstock.loop.delay",
    "histogram",
    "Delay of the event loop's turns; every session waits this long.",
    "Something holds the loop or its core is busy: leave a core to the service (`pin_cores`).",
    "seconds",
    alerts=(
        AlertRule(
            "PenstockLoopSlow",
            "histogram_quantile(0.99, sum by (le, instance) "
            "(rate(penstock_loop_delay_seconds_bucket[5m]))) > 0.25",
            5,
            "warning",
            "The event loop of {{ $labels.instance }} is often held up for a quarter of a second.",
        ),
    ),
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
    alerts=(
        AlertRule(
            "PenstockWalFlushSlow",
            "histogram_quantile(0.99, sum by (le, instance) "
            "(rate(penstock_wal_flush_duration_seconds_bucket[5m]))) > 0.5",
            5,
            "warning",
            "Flushes of the log on {{ $labels.instance }} take more than half a second.",
        ),
    ),
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
    alerts=(
        AlertRule(
            "PenstockWalOffloadFails",
            "increase(penstock_wal_offload_failures_total[15m]) > 3",
            0,
            "warning",
            "Segments of the log on {{ $labels.instance }} cannot be uploaded.",
        ),
    ),
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

METRICS: Final = tuple(each for each in globals().values() if isinstance(each, MetricDefinition))
"""All metrics, by group."""
