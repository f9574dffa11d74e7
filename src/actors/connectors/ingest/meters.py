"""Meters of the operators of a task (`ingest_task`, `sink_task`): rows, time, memory.

An operator is a stage that rows pass. Its time includes waits: for the external system, stores,
threads. Several operators may be at work at a time.
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
    "Append": "Append position and rows of all tables at one time",
    "Spill": "Spill rows of a long transaction into parts",
    "Stage": "Stage rows up to a mark",
    "Resolve": "Resolve changes that come without old rows, and truncates",
    "Read": "Read what the outside gives",
}
OF_SINK: Final = {
    "Commit": "Commit what was written with its frontier",
    "Write": "Write changes outside",
    "Gather": "Gather the changes of a batch, summed up",
    "Read": "Read parts of the object",
}
"""Operators of a task, last stage first, with descriptions."""


class OperatorMeter(msgspec.Struct):
    """Counters of one operator."""

    text: str
    rows: int = 0
    ms: float = 0.0
    bytes_memory: int = 0
    bytes_mapped: int = 0


class TaskMeters:
    """Meters of one task of the object `id`. `operators`: `OF_SOURCE` or `OF_SINK`."""

    def __init__(
        self, monotonic_ms: Callable[[], float], operators: Mapping[str, str], id: ObjectId
    ) -> None:
        self._id = id
        self._monotonic_ms = monotonic_ms
        self._meters = {name: OperatorMeter(text) for name, text in operators.items()}
        self._reported: tuple[OperatorStatistics, ...] = ()

    def __getitem__(self, name: str) -> OperatorMeter:
        return self._meters[name]

    @contextmanager
    def timed(self, name: str) -> Iterator[OperatorMeter]:
        """Add the time of the block to the operator's."""
        meter, began = self._meters[name], self._monotonic_ms()
        try:
            yield meter
        finally:
            meter.ms += self._monotonic_ms() - began

    def memory(self) -> list[MemoryUse]:
        """Return the memory that operators hold for a batch, for a `MemoryLedger`."""
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
        # A task at rest must report no changes, though its clocks go on.
        if [_without_time(each) for each in made] != [
            _without_time(each) for each in self._reported
        ]:
            self._reported = made
        return self._reported


def _without_time(statistics: OperatorStatistics) -> OperatorStatistics:
    return msgspec.structs.replace(statistics, ms=0.0)
