"""How a dataflow spreads what it asks for over its fetch tasks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from actors.model.protocol.internal import DescribedPart, InputStarted
from actors.replica.dataflow.dataflow import TaskAddresses
from actors.replica.dataflow.dataflow_input import PartInterval


class Task:
    """A fetch task's address."""

    def __init__(self, asked: Counter[tuple[int, int]], name: tuple[int, int]) -> None:
        self._asked = asked
        self._name = name

    async def send(self, message: Any) -> None:
        self._asked[self._name] += 1


async def test_each_input_goes_round_its_workers_however_inputs_are_mixed() -> None:
    tasks, asked = TaskAddresses(2, 2), Counter[tuple[int, int]]()
    for input_index in range(2):
        for worker in range(2):
            fetch: Any = Task(asked, (input_index, worker))
            listen: Any = fetch if worker == 0 else None
            tasks.started(
                InputStarted(
                    "u1", 1, worker=worker, input_index=input_index, fetch=fetch, listen=listen
                )
            )
    part = DescribedPart("k", "s", None, 0, 1, 1, 1)
    for number in range(8):
        await tasks.ask(number % 2, PartInterval(part, 0, 1, 1, snapshot=False, group=1))
    assert asked == {(input_index, worker): 2 for input_index in range(2) for worker in range(2)}
