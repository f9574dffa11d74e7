"""Meters the operators of an ingest or sink task: rows, time and memory.

An operator is a stage that rows pass through. Its time includes waiting for the external system,
stores and threads. Several operators may work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec

from actors.model.protocol.message_parts import OperatorStatistics
from actors.runtime.memory_ledger import MemoryUse
from actors.runtime.progress import ObjectId

OF_SOURCE: Final = {
    "Append": "Append the position and the rows of all tables at one timestamp",
    "Spill": "Spill the rows of a long transaction to parts",
    "Stage": "Stage rows up to a mark",
    "Resolve": "Resolve truncates, and changes without old rows",
    "Read": "Read from the external system",
}
OF_SINK: Final = {
    "Commit": "Commit the written data with its frontier",
    "Write": "Write changes to the external system",
    "Gather": "Gather and consolidate the changes of a batch",
    "Read": "Read the object's parts",
}
"""Operators of a task, last stage first, with descriptions for users."""


class OperatorMeter(msgspec.Struct):
    """Counters of one operator, since the task started."""

    text: str
    rows: int = 0
    ms: float = 0.0
    bytes_memory: int = 0
    bytes_mapped: int = 0


class TaskMeters:
    """Meters of one task. `operators` is `OF_SOURCE` or `OF_SINK`, and `id` the task's object."""

    def __init__(
        self, monotonic_ms: Callable[[], float], operators: Mapping[str, str], id: ObjectId
    ) -> None:
        self._id = id
        self._monotonic_ms = monotonic_ms
        self._meters = {name: OperatorMeter(text) for name, text in operators.items()}
        self._reported: tuple[OperatorStatistics, ...] = ()
        """Statistics returned last."""

    def __getitem__(self, name: str) -> OperatorMeter:
        return self._meters[name]

    @contextmanager
    def timed(self, name: str) -> Iterator[OperatorMeter]:
        """Add the duration of the block to the operator's time."""
        meter, began = self._meters[name], self._monotonic_ms()
        try:
            yield meter
        finally:
            meter.ms += self._monotonic_ms() - began

    def memory(self) -> list[MemoryUse]:
        """Return the memory that operators use for a batch, for a `MemoryLedger`."""
        return [
            MemoryUse("gathered", self._id, 0, meter.bytes_memory, meter.bytes_mapped)
            for meter in self._meters.values()
            if meter.bytes_memory or meter.bytes_mapped
        ]

    def statistics(self) -> tuple[OperatorStatistics, ...]:
        """Return the operators' statistics."""
        made = tuple(
            OperatorStatistics(name, *msgspec.structs.astuple(meter))
            for name, meter in self._meters.items()
        )
        # An idle task must not report changes, although its times advance.
        if [_without_time(each) for each in made] != [
            _without_time(each) for each in self._reported
        ]:
            self._reported = made
        return self._reported


def _without_time(statistics: OperatorStatistics) -> OperatorStatistics:
    return msgspec.structs.replace(statistics, ms=0.0)
