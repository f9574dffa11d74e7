"""Reports a dataflow's frontiers and memory to its workers.

All inputs are described up to *input*. The output is known to be durable up to *write*, and is
installed up to *output*. Reports never go back and never repeat the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.model.protocol.compute import DataflowDescription, SubscribeExport
from actors.model.protocol.internal import DataflowProgress, DataflowReport, PartsDescribed
from actors.replica.dataflow.events import Event
from actors.replica.dataflow.machine import DataflowMachine
from actors.runtime.kernel import ActorAddress
from actors.runtime.memory_ledger import MemoryUse
from actors.runtime.progress import EMPTY


class FrontierReports:
    """Sends the reports of one dataflow, in room that the workers reserve."""

    def __init__(
        self,
        description: DataflowDescription,
        machine: DataflowMachine,
        workers: Sequence[ActorAddress[DataflowReport]],
    ) -> None:
        self._machine = machine
        alone = isinstance(description.export, SubscribeExport)
        # Only worker 0 runs a subscribe.
        self._workers = workers[:1] if alone else workers
        self._last = DataflowProgress(description.id, 0, 0, 0)
        """The last report."""

    def memory(self) -> list[MemoryUse]:
        """Return the memory of waiting changes and of the current step's changes, for a
        `MemoryLedger`."""
        inputs, step = self._machine.inputs, self._machine.step
        waiting = [held for input_ in inputs for held in input_.held]
        taken = [] if step is None else [table for tables in step.deltas for table in tables]
        rows = sum(held.rows.num_rows for held in waiting) + sum(t.num_rows for t in taken)
        size = sum(held.bytes for held in waiting) + sum(table.nbytes for table in taken)
        return [MemoryUse("changes", self._last.dataflow, rows, size)] if rows else []

    def after(self, event: Event, number: int) -> None:
        """Report the frontiers that an event advanced. `number` is the last step cut before the
        event."""
        machine = self._machine
        step = machine.step
        # Most steps of an idle view have no changes, so only their end is reported. Descriptions
        # that arrive during a step are reported immediately, because the step may take long.
        behind = isinstance(event, PartsDescribed) and machine.number == number
        if step is None or step.times or step.snapshot or behind:
            self.report()

    def report(self) -> None:
        """Report the frontiers, if they have advanced."""
        machine, last = self._machine, self._last
        known = min((input_.progress for input_ in machine.inputs), default=0)
        if not machine.input_count:
            known = EMPTY
        report = DataflowProgress(
            last.dataflow,
            max(last.write, machine.write, machine.lo),
            max(last.input, known, machine.lo),
            machine.reported or 0,
        )
        if report == last:
            return
        self._last = report
        for worker in self._workers:
            worker.reply(report)
