"""Measurements of a dataflow's last step, for its status and the metrics."""

from __future__ import annotations

from typing import Final

import msgspec

from actors.model.protocol.compute import StatusResponse
from actors.replica.dataflow.step import StepDeltas
from actors.replica.dataflow.view import StepOutcome
from actors.runtime.metric_table import (
    STEP_ROWS_IN,
    STEP_ROWS_OUT,
    STEP_ROWS_READ,
    STEP_SECONDS,
    STEPS,
    STEPS_IN_ERROR,
    STEPS_RECOMPUTED,
)
from actors.runtime.progress import ObjectId
from actors.runtime.spans import forget_measures, measure

_OF_DELTAS: Final = [name for name in StatusResponse.__struct_fields__ if hasattr(StepDeltas, name)]
_OF_OUTCOME: Final = [
    name for name in StatusResponse.__struct_fields__ if hasattr(StepOutcome, name)
]


def measured(status: StatusResponse, outcome: StepOutcome) -> StatusResponse:
    """Return the status with the step's measurements, copied from fields with the same names."""
    measures = {name: getattr(outcome.deltas, name) for name in _OF_DELTAS}
    measures |= {name: getattr(outcome, name) for name in _OF_OUTCOME}
    return msgspec.structs.replace(status, **measures)


def record_step(status: StatusResponse) -> None:
    """Record the metrics of a finished step."""
    measure(STEPS, 1, status.id)
    measure(STEP_ROWS_IN, status.rows_in, status.id)
    measure(STEP_ROWS_OUT, status.rows_out, status.id)
    measure(STEP_ROWS_READ, status.rows_read, status.id)
    measure(STEP_SECONDS, status.step_ms / 1000, status.id)
    measure(STEPS_RECOMPUTED, int(status.recomputed), status.id)


def forget_steps(dataflow: ObjectId) -> None:
    """Remove the metrics of a dropped dataflow."""
    forget_measures(
        dataflow,
        STEPS,
        STEP_ROWS_IN,
        STEP_ROWS_OUT,
        STEP_ROWS_READ,
        STEP_SECONDS,
        STEPS_IN_ERROR,
        STEPS_RECOMPUTED,
    )
