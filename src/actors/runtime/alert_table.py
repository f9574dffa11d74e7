"""The alerts of Prometheus on the metrics of `actors.runtime.metric_table`.

`python -m tests.kit.metric_files` writes them into deploy/ and into docs/reference/metrics.md.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from actors.runtime import metric_table
from actors.runtime.measurement import MetricDefinition


class AlertRule(msgspec.Struct, frozen=True):
    """An alert on one metric."""

    metric: MetricDefinition
    name: str
    expression: str
    """PromQL that is true while something is wrong."""
    minutes: int
    """Time for which the expression must hold before the alert fires."""
    severity: Literal["warning", "critical"]
    summary: str
    """One sentence for whoever is alerted; it may use Prometheus' `{{ $labels.… }}`."""


ALERTS: Final = (
    AlertRule(
        metric_table.LAG_MS,
        "PenstockObjectStale",
        "penstock_object_lag_milliseconds > 60000",
        5,
        "warning",
        "Readers of {{ $labels.penstock_object }} see data that is more than a minute old.",
    ),
    AlertRule(
        metric_table.STALLED_MS,
        "PenstockObjectStalled",
        "penstock_object_stalled_milliseconds > 0",
        1,
        "critical",
        "{{ $labels.penstock_object }} is stalled or in error; penstock.errors has the reason.",
    ),
    AlertRule(
        metric_table.STEPS_IN_ERROR,
        "PenstockStepsFail",
        "increase(penstock_step_repeated_failures_total[15m]) > 0",
        0,
        "critical",
        "Steps of dataflow {{ $labels.penstock_dataflow }} fail again and again.",
    ),
    AlertRule(
        metric_table.STEPS_RECOMPUTED,
        "PenstockFullRecomputes",
        "increase(penstock_step_recomputed_total[30m]) > 10",
        0,
        "warning",
        "Dataflow {{ $labels.penstock_dataflow }} is recomputed in full again and again.",
    ),
    AlertRule(
        metric_table.SOURCE_LAG_MS,
        "PenstockSourceBehind",
        "penstock_source_lag_milliseconds > 60000",
        5,
        "warning",
        "Source {{ $labels.penstock_object }} is more than a minute behind.",
    ),
    AlertRule(
        metric_table.SOURCE_RESTARTS,
        "PenstockSourceRestarts",
        "increase(penstock_source_restarts_total[15m]) > 3",
        0,
        "warning",
        "Source {{ $labels.penstock_object }} fails and is restarted again and again.",
    ),
    AlertRule(
        metric_table.SINK_LAG_MS,
        "PenstockSinkBehind",
        "penstock_sink_lag_milliseconds > 300000",
        5,
        "warning",
        "Sink {{ $labels.penstock_object }} is more than five minutes behind.",
    ),
    AlertRule(
        metric_table.SINK_RESTARTS,
        "PenstockSinkRestarts",
        "increase(penstock_sink_restarts_total[15m]) > 3",
        0,
        "warning",
        "Sink {{ $labels.penstock_object }} fails and is restarted again and again.",
    ),
    AlertRule(
        metric_table.ENGINE_UP,
        "PenstockEngineDown",
        'penstock_engine_up{penstock_engine="spark"} < 1',
        5,
        "critical",
        "The engine of {{ $labels.instance }} is down: views do not advance.",
    ),
    AlertRule(
        metric_table.ENGINE_JOBS,
        "PenstockEngineQueueLong",
        'penstock_engine_jobs{penstock_state="waiting"} > 20',
        10,
        "warning",
        "More than 20 jobs wait for engine {{ $labels.penstock_engine }} all the time.",
    ),
    AlertRule(
        metric_table.ENGINE_DEATHS,
        "PenstockEngineDies",
        "increase(penstock_engine_deaths_total[30m]) > 0",
        0,
        "warning",
        "Engine {{ $labels.penstock_engine }} of {{ $labels.instance }} died.",
    ),
    AlertRule(
        metric_table.STORE_ERRORS,
        "PenstockStoreFails",
        "increase(penstock_store_errors_total[5m]) > 0",
        5,
        "critical",
        "Requests to the store of {{ $labels.penstock_store }} fail.",
    ),
    AlertRule(
        metric_table.REPLICAS,
        "PenstockReplicaLost",
        'penstock_replicas{penstock_state="disconnected"} > 0',
        2,
        "critical",
        "The controller {{ $labels.instance }} is not connected to all of its replicas.",
    ),
    AlertRule(
        metric_table.STATEMENT_SECONDS,
        "PenstockStatementsSlow",
        "histogram_quantile(0.95, sum by (le, penstock_door) "
        "(rate(penstock_statement_duration_seconds_bucket[5m]))) > 10",
        10,
        "warning",
        "One of 20 statements at door {{ $labels.penstock_door }} takes more than 10 s.",
    ),
    AlertRule(
        metric_table.LOOP_DELAY_SECONDS,
        "PenstockLoopSlow",
        "histogram_quantile(0.99, sum by (le, instance) "
        "(rate(penstock_loop_delay_seconds_bucket[5m]))) > 0.25",
        5,
        "warning",
        "The event loop of {{ $labels.instance }} is often held up for a quarter of a second.",
    ),
    AlertRule(
        metric_table.WAL_FLUSH_SECONDS,
        "PenstockWalFlushSlow",
        "histogram_quantile(0.99, sum by (le, instance) "
        "(rate(penstock_wal_flush_duration_seconds_bucket[5m]))) > 0.5",
        5,
        "warning",
        "Flushes of the log on {{ $labels.instance }} take more than half a second.",
    ),
    AlertRule(
        metric_table.WAL_OFFLOAD_FAILURES,
        "PenstockWalOffloadFails",
        "increase(penstock_wal_offload_failures_total[15m]) > 3",
        0,
        "warning",
        "Segments of the log on {{ $labels.instance }} cannot be uploaded.",
    ),
)
"""All alerts, in the order of the metrics."""
