"""Measures the last step of a dataflow, for people."""

from __future__ import annotations

import msgspec

from actors.dataflow.gather import SnapshotProgress
from actors.dataflow.view import StepOutcome
from actors.progress import ObjectId
from actors.protocol.internal import DataflowStatus
from actors.spans import forget_measures, measure
from actors.telemetry import STEP_ROWS_IN, STEP_ROWS_OUT, STEP_SECONDS, STEPS


class StepMeasures(msgspec.Struct):
    """Measures of the last step; times in ms."""

    started_ms: float = 0.0
    rows_in: int = 0
    rows_out: int = 0
    step_ms: float = 0.0
    spark_ms: float = 0.0
    rows_read: int = 0
    prepared: bool = False
    recomputed: bool = False
    rejected: str = ""
    wait_ms: float = 0.0

    def take(self, outcome: StepOutcome) -> None:
        """Note how a view's step was computed."""
        self.rows_out = outcome.deltas.output.num_rows
        self.spark_ms = outcome.deltas.spark_ms
        self.prepared = outcome.deltas.prepared
        self.rows_read = outcome.rows_read
        self.recomputed = outcome.recomputed
        self.rejected = outcome.rejected
        self.wait_ms = outcome.deltas.wait_ms

    def tell(self, dataflow: ObjectId) -> None:
        """Record the metrics of a finished step."""
        measure(STEPS, 1, dataflow)
        measure(STEP_ROWS_IN, self.rows_in, dataflow)
        measure(STEP_ROWS_OUT, self.rows_out, dataflow)
        measure(STEP_SECONDS, self.step_ms / 1000, dataflow)

    @staticmethod
    def forget(dataflow: ObjectId) -> None:
        """Remove the metrics of a dropped dataflow."""
        forget_measures(dataflow, STEPS, STEP_ROWS_IN, STEP_ROWS_OUT, STEP_SECONDS)

    def status(
        self, dataflow: ObjectId, state: str, text: str, reading: SnapshotProgress | None = None
    ) -> DataflowStatus:
        """Return the dataflow's status; `reading` is the progress of its snapshot read."""
        far = reading or SnapshotProgress()
        return DataflowStatus(
            dataflow=dataflow,
            state=state,
            text=text,
            rows_in=self.rows_in,
            rows_out=self.rows_out,
            step_ms=self.step_ms,
            spark_ms=self.spark_ms,
            rows_read=self.rows_read,
            prepared=self.prepared,
            recomputed=self.recomputed,
            rejected=self.rejected,
            wait_ms=self.wait_ms,
            parts_read=far.parts_read,
            parts_total=far.parts_total,
            bytes_read=far.bytes_read,
            bytes_total=far.bytes_total,
        )
