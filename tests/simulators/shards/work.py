"""The operations of a process's tasks, and the checks of their answers.

While faults strike an operation may end with a `StorageError` (but never with `CorruptData`), with
`ReadBelowSince` if the since has really passed the time, with `LeaseLost` if the lease was really
dropped by another process. Rows that are read are compared with the truth at once: contents at a
time that is sealed never change.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import pyarrow as pa

from actors.durable.persist import (
    AppendCommitted,
    BatchPart,
    LeasedReader,
    PersistClient,
    ShardAppend,
)
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import (
    CorruptData,
    LeaseLost,
    ReadBelowSince,
    ResourceClosed,
    StorageError,
    WriterFenced,
)
from actors.runtime.progress import EMPTY
from tests.simulators.service.history import CheckerViolation
from tests.simulators.shards.calls import (
    DONE,
    NEVER,
    OTHER,
    AppendCall,
    CallInterval,
)
from tests.simulators.shards.schedule import SCOPE, TASK, ShardOperation
from tests.simulators.shards.truth import Rows, rows_of

if TYPE_CHECKING:
    from tests.simulators.shards.process import ShardProcess

K = TypeVar("K", bound=Hashable)

SCHEMA: Final = TableSchema((TableColumn("a", "bigint"),))
OPERATION_S: Final = 120.0
"""Virtual time within which an operation ends, with success or failure."""
PATIENCE_S: Final = 0.6
"""Longest wait of a reader for an upper that may never come."""
TRIES: Final = 4


class ProcessWork:
    """The tasks of one life of a process."""

    def __init__(self, process: ShardProcess, client: PersistClient, life: int) -> None:
        self.process = process
        self.world = process.world
        self.client = client
        self.life = life

    async def all_of(self, program: deque[ShardOperation]) -> None:
        """Run all operations of one task, in order. One that was begun in a life is not
        repeated."""
        while program:
            operation = program.popleft()
            await asyncio.sleep(operation.pause_ms / 1000)
            try:
                async with asyncio.timeout(OPERATION_S):
                    await self._do_unless_canceled(operation)
            except (CorruptData, WriterFenced) as error:
                self.process.fail(f"error: {operation}: {type(error).__name__}: {error}")
            except (StorageError, ResourceClosed) as error:
                self.world.trace.note("excused", operation.kind, type(error).__name__)
            except TimeoutError:
                self.process.fail(f"liveness: {operation} took more than {OPERATION_S} s")
            except CheckerViolation as violation:
                self.world.fail(violation)
            except Exception as error:  # noqa: BLE001 - whatever else comes is a finding
                self.process.fail(f"error: {operation}: {type(error).__name__}: {error}")

    async def _do_unless_canceled(self, operation: ShardOperation) -> None:
        after_s = operation.cancel_ms / 1000
        if operation.cancel == SCOPE:
            with anyio.move_on_after(after_s):
                await self.do(operation)
        elif operation.cancel == TASK:
            limit = asyncio.timeout(after_s)
            try:
                async with limit:
                    await self.do(operation)
            except TimeoutError:
                if not limit.expired():
                    raise
        else:
            await self.do(operation)

    async def do(self, operation: ShardOperation) -> None:
        """Run one operation."""
        client, shard, number = self.client, operation.shard, operation.number
        self.world.trace.note("do", self.process.number, operation.kind, shard, number)
        match operation.kind:
            case "append" | "append nothing":
                rows = number % 4 + 1 if operation.kind == "append" else 0
                await self.append([shard], number, rows)
            case "append both":
                await self.append(["s", "t"], number, number % 3)
            case "append wrong":
                await self.append([shard], number, 1, off=number % 5 - 2, tries=1)
            case "append canceled":
                with suppress(TimeoutError):
                    async with asyncio.timeout(number % 7 * 0.001):
                        await self.append([shard], number, 2)
            case "discard":
                await client.discard_parts(await self.write(shard, self.rows(shard, 0, 1, 2)))
            case "leave":
                self._abandon(await self.write(shard, self.rows(shard, 0, 1, 2)))
            case "snapshot" | "snapshot slowly":
                await self.snapshot(shard, number, slowly=operation.kind == "snapshot slowly")
            case "subscribe":
                await self.subscribe(shard, number)
            case "listen":
                await self.listen(shard, number)
            case "hold":
                since = max(0, await client.upper(shard) - 1 - number % 6)
                await client.set_hold(shard, f"h{self.process.number}", since)
            case "maintain":
                await client.maintain(shard)
            case "collect":
                await client.collect_orphans()
            case _:
                raise AssertionError(operation)

    # -- writing -------------------------------------------------------------------------------

    def rows(self, shard: str, lower: int, upper: int, count: int) -> Rows:
        """Return new rows in an interval, and if there is one the retraction of a row of ours."""
        found: Rows = Counter()
        for index in range(count):
            found[self.world.new_value(), lower + index % (upper - lower)] += 1
        mine = self.process.mine[shard]
        if count > 1 and mine:
            found[mine.pop(0), upper - 1] -= 1
        return found

    async def write(self, shard: str, rows: Rows) -> tuple[BatchPart, ...]:
        """Write durable parts."""
        if not rows:
            return ()
        flat = [(value, time, diff) for (value, time), diff in rows.items()]
        columns = [pa.array(column, pa.int64()) for column in zip(*flat, strict=True)]
        return await self.client.write_parts(
            shard, pa.Table.from_arrays(columns, names=["a", TIME, DIFF])
        )

    async def append(
        self, shards: list[str], number: int, count: int, *, off: int = 0, tries: int = TRIES
    ) -> bool:
        """Append to all shards, again at the upper of a mismatch; return whether it was
        acknowledged."""
        uppers = {shard: await self.client.upper(shard) for shard in shards}
        for _ in range(tries):
            appends: list[ShardAppend] = []
            intervals: dict[str, CallInterval] = {}
            call: AppendCall | None = None
            try:
                for shard in shards:
                    lower = max(0, uppers[shard] + off)
                    upper = lower + 1 + number % 3
                    rows = self.rows(shard, lower, upper, count)
                    flat = frozenset((value, time, n) for (value, time), n in rows.items())
                    intervals[shard] = CallInterval(lower, upper, flat)
                    appends.append(ShardAppend(shard, lower, upper, await self.write(shard, rows)))
                call = AppendCall(self.process.number, self.world.instant(), intervals)
                self.world.calls.append(call)
                outcome = await self.client.append(appends)
            except StorageError as error:
                if call is not None and error.determinate:
                    call.done(self.world.instant(), NEVER)
                if call is None or error.determinate or number % 2:  # else the parts stay orphans
                    await self._discard(appends)
                raise
            except asyncio.CancelledError:
                if call is None:
                    self._abandon(part for append in appends for part in append.parts)
                raise
            if isinstance(outcome, AppendCommitted):
                call.done(self.world.instant(), DONE)
                for shard, interval in intervals.items():
                    self.process.mine[shard] += [value for value, _, n in interval.rows if n > 0]
                return True
            call.shard, call.current = outcome.shard, outcome.current
            call.done(self.world.instant(), OTHER)
            await self._discard(appends)
            if outcome.current >= EMPTY:
                return False
            uppers[outcome.shard] = outcome.current
        return False

    def _abandon(self, parts: Iterable[BatchPart]) -> None:
        """Note parts that will never be appended or discarded."""
        self.process.left.update(part.key for part in parts)

    async def _discard(self, appends: Sequence[ShardAppend]) -> None:
        await self.client.discard_parts([part for append in appends for part in append.parts])

    # -- reading -------------------------------------------------------------------------------

    async def open_reader(self, shard: str) -> LeasedReader:
        """Open a reader with a fresh name."""
        self.process.readers += 1
        name = f"p{self.process.number}-{self.life}-{self.process.readers}"
        return await self.client.open_reader(shard, name)

    async def snapshot(self, shard: str, number: int, *, slowly: bool) -> None:
        """Check the contents at a time, some parts of which are read late."""
        reader = await self.open_reader(shard)
        as_of = max(0, await self.client.upper(shard) - 1 - number % 5 + number // 50)
        try:
            await self._contents(reader, as_of, pause_s=number / 100 if slowly else 0)
        finally:
            await reader.close()

    async def subscribe(self, shard: str, number: int) -> None:
        """Check the contents, and then every change, without a gap and without a repetition."""
        reader = await self.open_reader(shard)
        try:
            as_of = max(0, await self.client.upper(shard) - 1 - number % 3)
            if await self._contents(reader, as_of):
                await self._changes(reader, as_of + 1, number % 4 + 1)
        finally:
            await reader.close()

    async def listen(self, shard: str, number: int) -> None:
        """Check the changes from some frontier on."""
        reader = await self.open_reader(shard)
        try:
            frontier = max(reader.since, await self.client.upper(shard) - number % 7)
            await self._changes(reader, frontier, number % 4 + 1, pause_s=number % 3 / 20)
        finally:
            await reader.close()

    async def _contents(self, reader: LeasedReader, as_of: int, pause_s: float = 0) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                parts, upper = await reader.snapshot(as_of)
        except TimeoutError:
            return False  # no append reaches that time
        except (ReadBelowSince, LeaseLost) as error:
            self._check_refusal(reader, as_of, error)
            return False
        if upper <= as_of:
            raise CheckerViolation(
                f"snapshot: {reader.shard} at {as_of} is told to reach to {upper} only"
            )
        rows = await self._fetched(reader, parts, pause_s)
        if rows is None:
            return False
        found: Counter[int] = Counter()
        for (value, time), diff in rows.items():
            if time <= as_of:
                found[value] += diff
        found = Counter({value: n for value, n in found.items() if n})
        wanted = self.world.truth.shards[reader.shard].at(as_of)
        if found != wanted:
            raise CheckerViolation(
                f"snapshot: {reader.shard} at {as_of} held {_few(found, wanted)}, since"
                f" {self.world.truth.shards[reader.shard].state.since}"
            )
        return True

    async def _changes(
        self, reader: LeasedReader, frontier: int, count: int, pause_s: float = 0
    ) -> None:
        for _ in range(count):
            try:
                async with asyncio.timeout(PATIENCE_S):
                    batches, upper = await reader.next(frontier)
            except TimeoutError:
                return  # no append moves the upper
            except (ReadBelowSince, LeaseLost) as error:
                self._check_refusal(reader, frontier, error)
                return
            parts = [part for batch in batches for part in batch.parts]
            rows = await self._fetched(reader, parts, pause_s)
            if rows is None:
                return
            found = Counter({key: n for key, n in rows.items() if frontier <= key[1] < upper and n})
            wanted = self.world.truth.shards[reader.shard].between(frontier, upper)
            if found != wanted:
                raise CheckerViolation(
                    f"listen: {reader.shard} from {frontier} to {upper} told {_few(found, wanted)}"
                )
            await reader.downgrade(upper)
            frontier = upper

    async def _fetched(
        self, reader: LeasedReader, parts: list[BatchPart] | tuple[BatchPart, ...], pause_s: float
    ) -> Rows | None:
        """Return all rows; None when the lease was lost, which is checked."""
        rows: Rows = Counter()
        try:
            for part in parts:
                await asyncio.sleep(pause_s)
                rows.update(rows_of(await self.client.fetch(part, SCHEMA)))
                reader.release([part.key])
        except LeaseLost as error:
            self._check_refusal(reader, EMPTY, error)
            return None
        return rows

    def _check_refusal(self, reader: LeasedReader, time: int, error: Exception) -> None:
        shard = self.world.truth.shards[reader.shard]
        if isinstance(error, ReadBelowSince):
            if time >= shard.state.since:
                raise CheckerViolation(f"refusal: {error}; its since is {shard.state.since}")
        elif reader.lease_id not in shard.lost:
            raise CheckerViolation(
                f"refusal: {error}; nobody has dropped the lease {reader.lease_id}"
            )


def _few(found: Counter[K], wanted: Counter[K]) -> str:
    more = dict(list((found - wanted).items())[:4])
    less = dict(list((wanted - found).items())[:4])
    return f"{more} too much and {less} too little"
