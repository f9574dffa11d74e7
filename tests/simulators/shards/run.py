"""The course of one run: tasks at work while faults strike, then a fault-free end without leaks.

When all operations are done the faults stop. From then on nothing may fail: each process appends to
each shard, reads it, and is stopped. Then a single process waits until every lease has expired,
keeps the shards small, and collects: the remaining blobs must be those that the states name, and
the states must be within their bounds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from actors.durable.persist import NewShard, PersistClient
from actors.runtime.errors import StorageError
from actors.runtime.settings import Settings
from actors.testing.drawn_settings import constants_of, draw_constants, draw_settings, drawn_text
from actors.testing.virtual_time import VirtualClock, VirtualDeadlock
from tests.simulators.service.cluster import RunReport, crashable_loop, quiet_run, report_of
from tests.simulators.service.crash import EndlessRun
from tests.simulators.service.faults import FaultInjector, TraceDigest
from tests.simulators.service.history import CheckerViolation
from tests.simulators.service.stores import SimulatedDisk
from tests.simulators.shards import calls
from tests.simulators.shards.process import COLLECT_S, TASKS, ShardProcess
from tests.simulators.shards.schedule import GRACE_MS, OPERATOR, ShardSchedule, ShardSetting
from tests.simulators.shards.truth import ShardsTruth, named
from tests.simulators.shards.work import SCHEMA, ProcessWork

SHARDS: Final = ("s", "t")
REST_S: Final = 300.0
"""Virtual time within which all operations end."""
LATE_S: Final = 1.0
"""Time after the last fault in which late effects happen, in s."""
ROUNDS_MAX: Final = 6
"""Most rounds of the last collection."""


KEPT_SETTINGS: Final = frozenset(
    {
        "batches_per_shard_max",
        "decoded_parts_bytes_max",
        "inline_bytes_per_shard_max",
        "inline_part_bytes_max",
        "part_bytes_target",
        "part_list_parts_min",
    }
)
"""Settings that the schedule fixes, so that they are not drawn."""


def settings_of(schedule: ShardSchedule) -> Settings:
    """Return small limits, which a short run reaches; for some seeds more are drawn."""
    base = _base_settings(schedule.setting)
    if not schedule.setting.drawn:
        return base
    return draw_settings(schedule.seed, base, KEPT_SETTINGS)


def settings_text(schedule: ShardSchedule) -> str:
    """Return the settings that a schedule has drawn beside its setting."""
    return drawn_text(_base_settings(schedule.setting), settings_of(schedule))


def _base_settings(setting: ShardSetting) -> Settings:
    return Settings(
        inline_part_bytes_max=1_000 if setting.inline else 1,
        inline_bytes_per_shard_max=3_000 if setting.inline else 1,
        batches_per_shard_max=setting.batches_max,
        part_list_parts_min=setting.listed_from,
        decoded_parts_bytes_max=1 << 20 if setting.decoded else 1,
        reader_lease_ms=setting.lease_ms,
        blob_orphan_grace_ms=GRACE_MS,
        stash_orphan_ms=GRACE_MS,
        part_bytes_target=64 if setting.pieces else 2_048,
        retry_delay_ms_min=5,
        retry_delay_ms_max=100,
        store_poll_ms=250,
    )


class ShardsWorld:
    """State that all processes of one run share."""

    def __init__(self, schedule: ShardSchedule, keep_trace: bool) -> None:
        self.schedule = schedule
        self.settings = settings_of(schedule)
        self.trace = TraceDigest(keep_trace)
        self.injector = FaultInjector(schedule.faults, self.trace)
        self.disk = SimulatedDisk(VirtualClock())
        self.truth = ShardsTruth(self.disk, self.instant, self.settings.reader_lease_ms)
        self.calls: list[calls.AppendCall] = []
        self.violation: CheckerViolation | None = None
        self._wrong = asyncio.Event()
        self._instant = self._lives = self._values = 0
        self.processes = [
            ShardProcess(self, number) for number in range(schedule.setting.processes)
        ]

    def instant(self) -> int:
        """Return the next instant of the run."""
        self._instant += 1
        return self._instant

    def new_life(self) -> int:
        """Return the next number among all lives."""
        self._lives += 1
        return self._lives

    def new_value(self) -> int:
        """Return a value that was never written before."""
        self._values += 1
        return self._values

    def fail(self, violation: CheckerViolation) -> None:
        """Note a violation, and end the run."""
        self.trace.note("violation", violation)
        self.violation = self.violation or violation
        self._wrong.set()

    def guarded(self, check: Callable[..., None]) -> Callable[..., None]:
        """Return a check whose violation ends the run and is not raised in the checked code."""

        def run(*args: Any) -> None:
            try:
                check(*args)
            except CheckerViolation as violation:
                self.fail(violation)

        return run

    async def prepare(self, client: PersistClient) -> None:
        """Create the shards, if they do not exist yet."""
        holds = {f"h{number}": 0 for number in range(self.schedule.setting.processes)}
        while set(self.truth.shards) != set(SHARDS):
            with suppress(StorageError):
                await client.create_shards([NewShard(name, SCHEMA, holds=holds) for name in SHARDS])
            await asyncio.sleep(0.01)

    async def drive(self) -> None:
        """Drive the run to its end, or to the first violation."""
        course = asyncio.get_running_loop().create_task(self._course())
        wrong = asyncio.get_running_loop().create_task(self._wrong.wait())
        await asyncio.wait([course, wrong], return_when=asyncio.FIRST_COMPLETED)
        wrong.cancel()
        if course.done() and course.exception() is not None:
            error = course.exception()
            assert error is not None, "it was just looked at"
            found = error if isinstance(error, CheckerViolation) else None
            self.fail(found or CheckerViolation(f"calm: {type(error).__name__}: {error}"))
        course.cancel()

    async def _course(self) -> None:
        loop = asyncio.get_running_loop()
        supervisors = [loop.create_task(process.supervise()) for process in self.processes]
        await asyncio.gather(*(self._operate(task) for task in range(TASKS)))
        async with asyncio.timeout(REST_S):
            while not all(process.idle for process in self.processes):
                await asyncio.sleep(0.05)
        self.injector.active = False
        await asyncio.sleep(LATE_S)
        await self._nothing_kept()
        for process in self.processes:
            process.stop(for_good=True)
        await asyncio.gather(*supervisors)
        calls.check(self.calls, self.truth.shards)
        await self._calm()

    async def _nothing_kept(self) -> None:
        """Check that no living process keeps a blob for an append that ended without an answer."""
        await asyncio.sleep(GRACE_MS / 1000 + 2 * COLLECT_S)
        for process in self.processes:
            kept = set() if process.client is None else set(process.client.pending_blobs())
            if kept - process.left:
                keys = ", ".join(sorted(kept - process.left))
                raise CheckerViolation(f"leak: process {process.number} keeps {keys}")

    async def _operate(self, task: int) -> None:
        for operation in self.schedule.operations:
            if (operation.process, operation.task) != (OPERATOR, task):
                continue
            await asyncio.sleep(operation.pause_ms / 1000)
            if operation.kind == "jump":
                process = self.processes[abs(operation.number) % len(self.processes)]
                process.clock.skew_ms += operation.number
                self.trace.note("jump", process.number, operation.number)
                continue
            process = self.processes[operation.number % len(self.processes)]
            if operation.kind == "kill":
                process.kill()
            else:
                process.stop()

    async def _calm(self) -> None:
        """Let every process append and read once more, then collect."""
        for process in self.processes:
            client = process.client = process.open(self.new_life())
            work = ProcessWork(process, client, 0)
            for shard in SHARDS:
                if not await work.append([shard], 4, 2):
                    raise CheckerViolation(f"calm: nothing can be appended to {shard}")
                await work.subscribe(shard, 4)
            await client.close()
            process.client = None
        await self._collect()

    async def _collect(self) -> None:
        keeper = self.processes[0]
        client = keeper.client = keeper.open(self.new_life())
        pause_s = max(GRACE_MS, self.settings.reader_lease_ms) / 1000 + 1
        for _ in range(ROUNDS_MAX):
            for shard in SHARDS:
                for holder in self.truth.shards[shard].state.holds:
                    await client.set_hold(shard, holder, self.truth.shards[shard].state.upper - 1)
                await client.maintain(shard)
            await client.collect_orphans()
            if not (left := self._left()):
                break
            await asyncio.sleep(pause_s)
        else:
            raise CheckerViolation(left)
        work = ProcessWork(keeper, client, 0)
        for shard in SHARDS:
            await work.snapshot(shard, 0, slowly=False)
        await client.close()

    def _left(self) -> str:
        """Return a leak, or a state beyond its bounds; "" if there is none."""
        names: set[str] = set()
        for shard in SHARDS:
            state = self.truth.shards[shard].state
            names |= named(state)
            bounds = (
                len(state.batches) <= self.settings.batches_per_shard_max,
                state.inline_bytes <= self.settings.inline_bytes_per_shard_max,
                not state.retired,
                not state.leases,
            )
            if not all(bounds):
                return f"bounds: {bounds} of {shard}: {state}"
        left = set(self.disk.blobs.keys()) - names
        return f"leak: nothing names {sorted(left)}" if left else ""


def simulate(schedule: ShardSchedule, *, keep_trace: bool = False) -> RunReport:
    """Run a schedule. Never raises for a fault of persist: see `RunReport.violation`."""
    with quiet_run():
        return _simulate(schedule, keep_trace)


def _simulate(schedule: ShardSchedule, keep_trace: bool) -> RunReport:
    with crashable_loop(schedule.seed) as loop:
        world = ShardsWorld(schedule, keep_trace)
        try:
            constants = draw_constants(schedule.seed) if schedule.setting.drawn else {}
            with constants_of(constants):
                loop.run_until_complete(world.drive())
        except (VirtualDeadlock, EndlessRun) as error:
            world.violation = world.violation or CheckerViolation(f"liveness: {error}")
        struck = Counter(fault.kind for fault in world.injector.struck)
        return report_of(schedule.seed, world.trace, struck, world.violation)
