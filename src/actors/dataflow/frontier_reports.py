"""The frontiers that a dataflow reports to its workers, and when it does; and its memory.

*input* is to where all inputs have been described, *write* to where the output is known to be
durable, *output* to where it is installed.

Rules: a report never goes back and never repeats the last. Of a step without changes its end alone
is reported, since most steps of idle views are such; but what is described while one is under way
is reported at once, since that may not end soon. A subscribe is worker 0's alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.dataflow.events import Event
from actors.dataflow.machine import Machine
from actors.kernel import Address
from actors.memory_ledger import MemoryUse
from actors.progress import EMPTY
from actors.protocol.compute import DataflowDescription, SubscribeExport
from actors.protocol.internal import DataflowProgress, DataflowReport, Described


class FrontierReports:
    """Sends the reports of one dataflow, in room that the workers reserve."""

    def __init__(
        self,
        description: DataflowDescription,
        machine: Machine,
        workers: Sequence[Address[DataflowReport]],
    ) -> None:
        self._machine = machine
        alone = isinstance(description.export, SubscribeExport)
        self._workers = workers[:1] if alone else workers
        self._last = DataflowProgress(description.id, 0, 0, 0)

    def memory(self) -> list[MemoryUse]:
        """Tell what is here of changes, for a `MemoryLedger`: those that wait for their step, and
        those of the step under way."""
        sources, step = self._machine.sources, self._machine.step
        waiting = [held for source in sources for held in source.held]
        taken = [] if step is None else [table for tables in step.deltas for table in tables]
        rows = sum(held.rows.num_rows for held in waiting) + sum(t.num_rows for t in taken)
        size = sum(held.bytes for held in waiting) + sum(table.nbytes for table in taken)
        return [MemoryUse("changes", self._last.dataflow, rows, size)] if rows else []

    def after(self, event: Event, number: int) -> None:
        """Report what an event has moved; `number`: the last step that was cut before it."""
        machine = self._machine
        step = machine.step
        behind = isinstance(event, Described) and machine.number == number
        if step is None or step.times or step.snapshot or behind:
            self.report()

    def report(self) -> None:
        """Report the frontiers, if they have moved."""
        machine, last = self._machine, self._last
        known = min((source.progress for source in machine.sources), default=0)
        if not machine.source_count:
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
