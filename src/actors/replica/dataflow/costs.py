"""Measures of the last step of a dataflow, in its status, for people."""

from __future__ import annotations

import msgspec

from actors.model.protocol.compute import StatusResponse
from actors.replica.dataflow.view import StepOutcome
from actors.runtime.progress import ObjectId
from actors.runtime.spans import forget_measures, measure
from actors.runtime.telemetry import (
    STEP_ROWS_IN,
    STEP_ROWS_OUT,
    STEP_SECONDS,
    STEPS,
    STEPS_IN_ERROR,
)


def measured(status: StatusResponse, outcome: StepOutcome) -> StatusResponse:
    """Return the status with how a view's step was computed."""
    return msgspec.structs.replace(
        status,
        rows_out=outcome.deltas.rows_out,
        spark_ms=outcome.deltas.spark_ms,
        prepared=outcome.deltas.prepared,
        rows_read=outcome.rows_read,
        recomputed=outcome.recomputed,
        rejected=outcome.rejected,
        wait_ms=outcome.deltas.wait_ms,
    )


def record_step(status: StatusResponse) -> None:
    """Record the metrics of a finished step."""
    measure(STEPS, 1, status.id)
    measure(STEP_ROWS_IN, status.rows_in, status.id)
    measure(STEP_ROWS_OUT, status.rows_out, status.id)
    measure(STEP_SECONDS, status.step_ms / 1000, status.id)


def forget_steps(dataflow: ObjectId) -> None:
    """Remove the metrics of a dropped dataflow."""
    forget_measures(dataflow, STEPS, STEP_ROWS_IN, STEP_ROWS_OUT, STEP_SECONDS, STEPS_IN_ERROR)
