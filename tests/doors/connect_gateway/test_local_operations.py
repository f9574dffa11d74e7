"""Operations that the gateway answers itself: streams that a client may leave and take up again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from pyspark.sql.connect.proto import base_pb2

from actors.doors.connect_gateway import local_operations
from actors.doors.connect_gateway.error_status import SparkCondition
from actors.doors.connect_gateway.local_operations import LocalOperation, OperationTags
from actors.doors.connect_gateway.row_messages import complete_answer
from actors.runtime.errors import InvalidUsage

NAMES = OperationTags("s", "server", "o")


def answer(size: int = 1) -> Any:
    made = base_pb2.ExecutePlanResponse()
    made.arrow_batch.data = b"x" * size
    return made


class Source:
    """Answers that a test lets come."""

    def __init__(self, count: int, size: int = 1, error: Exception | None = None) -> None:
        self.made = 0
        self.closed = False
        self._count, self._size, self._error = count, size, error

    async def __call__(self) -> AsyncGenerator[Any, None]:
        try:
            for _ in range(self._count):
                self.made += 1
                yield answer(self._size)
            if self._error is not None:
                raise self._error
            yield complete_answer()
        finally:
            self.closed = True


def operation(source: Source, *, reattachable: bool = True) -> LocalOperation:
    return LocalOperation(NAMES, lambda: source(), reattachable=reattachable)


async def read(made: LocalOperation, after: str = "", count: int = 1 << 30) -> list[Any]:
    found = []
    async for data in made.stream(after):
        found.append(base_pb2.ExecutePlanResponse.FromString(data))
        if len(found) == count:
            break
    return found


async def test_all_responses_carry_the_ids() -> None:
    made = operation(Source(3))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        found = await read(made)
    assert [each.HasField("result_complete") for each in found] == [False, False, False, True]
    assert {
        (each.session_id, each.server_side_session_id, each.operation_id) for each in found
    } == {NAMES}
    assert len({each.response_id for each in found}) == 4


async def test_a_client_that_left_goes_on_where_it_was() -> None:
    made = operation(Source(5))
    await made.run()
    first = await read(made, count=2)
    rest = await read(made, first[-1].response_id)
    whole = await read(made)
    assert [each.response_id for each in first + rest] == [each.response_id for each in whole]


async def test_released_responses_are_gone() -> None:
    made = operation(Source(5))
    await made.run()
    found = await read(made)
    made.release_until(found[1].response_id)
    made.release_until("unknown")
    assert len(await read(made, found[1].response_id)) == 4
    for gone in ("", found[0].response_id, "unknown"):
        with pytest.raises(SparkCondition, match="POSITION_NOT_AVAILABLE"):
            await read(made, gone)


async def test_a_slow_client_holds_back_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_operations, "UNSENT_BYTES_MAX", 1_000)
    source = Source(50, 400)
    made = operation(source, reattachable=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        await anyio.wait_all_tasks_blocked()
        assert source.made == 3
        found = await read(made, count=10)
        await anyio.wait_all_tasks_blocked()
        assert 10 < source.made <= 14
        found += await read(made, found[-1].response_id)
    assert len(found) == 51


async def test_sent_responses_are_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_operations, "UNSENT_BYTES_MAX", 1_000)
    monkeypatch.setattr(local_operations, "KEPT_BYTES_MAX", 2_000)
    made = operation(Source(50, 400))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        found = await read(made)
    assert len(found) == 51
    with pytest.raises(SparkCondition, match="POSITION_NOT_AVAILABLE"):
        await read(made, found[10].response_id)
    assert len(await read(made, found[48].response_id)) == 2


async def test_an_error_comes_behind_the_rows() -> None:
    made = operation(Source(1, error=InvalidUsage("wrong")))
    await made.run()
    found: list[bytes] = []
    with pytest.raises(InvalidUsage, match="wrong"):
        async for data in made.stream():
            found.append(data)  # noqa: PERF401
    assert len(found) == 1


async def test_a_fault_of_the_program_is_the_operations_alone() -> None:
    made = operation(Source(0, error=ZeroDivisionError("fault")))
    await made.run()
    with pytest.raises(ZeroDivisionError):
        await read(made)


async def test_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_operations, "UNSENT_BYTES_MAX", 10)
    source = Source(5, 400)
    made = operation(source)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        await anyio.wait_all_tasks_blocked()
        assert made.cancel()
        await anyio.wait_all_tasks_blocked()
        assert source.closed
        assert not made.cancel()
    with pytest.raises(SparkCondition, match="OPERATION_CANCELED"):
        await read(made)


async def test_only_what_surely_changed_nothing_is_repeatable() -> None:
    """An operation that was cancelled may have changed something before."""
    unknown = InvalidUsage("x")
    unknown.determinate = False
    for error, repeatable in ((InvalidUsage("x"), True), (unknown, False), (None, False)):
        made = operation(Source(1, error=error))
        assert not made.is_repeatable  # it has not ended
        await made.run()
        assert made.is_repeatable is repeatable

    async def hang() -> AsyncGenerator[Any, None]:
        yield answer()
        await anyio.sleep_forever()

    made = LocalOperation(NAMES, hang)
    async with anyio.create_task_group() as group:
        group.start_soon(made.run)
        await anext(made.stream())
        assert made.cancel()
    assert made.ended
    assert not made.is_repeatable
