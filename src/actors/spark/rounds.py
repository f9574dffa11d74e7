"""Rounds: prepared steps that wait at the same time run as one Spark job.

Theory of operation. Of a small step executed again, most of what is left is the job around it:
its scheduling, its tasks, the way of its answer. Twenty views of one source want twenty steps at
once, and two cores would do twenty such jobs one after the other. So a step that finds every
core at work on another waits, and a job that is back makes room for its share of all that wait,
as one job: the union of their plans, gone through by one task. Nothing waits for company: a
step that finds a core free runs alone, at once, and as it always has. (One job of as many tasks
as cores would have every task carry all plans, and their serialisation is the most of it.)

Rules
- As many jobs, of one step or of a round, are out at a time as there are cores, and the share is
  what waits divided by them; `engine_round_wait_ms_max` bounds the wait: then a step runs by
  itself beside whatever takes so long.
- Behind each plan stands its marker, a row with the plan's own number. An answer whose markers
  are not all there in their order is no answer.
- A round that fails, or whose job was canceled for one of its members, fails for all with
  `RoundFailed`; each then goes the general path, and has its own error. The job may have left
  tasks that still read, so the slots of all are given up, as after any failure.
- Plans with settings of their own go alone: a job has one set of settings.
- A step that is expected to take more than `engine_short_step_ms` of a core is *heavy*: its task
  would keep its core from all others until it ends. Of those one core fewer are out than there are,
  one at least, each by itself. The others wait `HEAVY_WAITS` times as long as they are expected to
  take, and go with the short ones then: who takes half a second does not stand behind who takes
  half a minute. Half of the engine's threads are left to short steps, too.
- What is expected is the less of what the plan took the last two times with rows, and less for
  fewer rows: a first run, or one beside much else, says little. (More rows do not say that it takes
  longer: much of a step is fixed.) A plan of which nothing is known runs by itself, so that nobody
  stands behind it.

What it does not do: it does not look at plans; what is unfit for being executed again never
comes here (`actors.spark.prepared`).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame

from actors.settings import Settings
from actors.spark.bridge import ClassicBridge
from actors.threshold_probes import HEAVY_STEP, ROUND_ALONE, ROUND_STEPS

POOL: Final = "rounds"
_MARKER: Final = b"\0penstock:"
"""No Arrow message begins so: they begin with 0xFFFFFFFF."""
_NUMBERS: Final = itertools.count()
_ENDED_MAX: Final = 256
HEAVY_WAITS: Final = 2
_CHECK_SECONDS: Final = 0.1


class RoundFailed(Exception):
    """The job of a round failed, for whatever reason: its members should be planned anew."""


class Runnable:
    """A prepared plan as something that can run alone or in a round.

    Of its frame only what runs is kept: the trees that it was planned from take several times as
    much of the driver's memory, and Spark's own execution of a frame describes its plan to
    listeners each time.

    Used by one thread at a time: its slots have one user at a time.
    """

    def __init__(self, bridge: ClassicBridge, frame: DataFrame, *, sociable: bool) -> None:
        """`sociable`: it has no settings of its own. Raises Spark's own error of a plan that
        cannot run."""
        self._bridge = bridge
        self.sociable: Final = sociable
        """Says whether it may take part in a round."""
        self.marker: Final = _MARKER + b"%d" % next(_NUMBERS)
        """Of this plan's alone."""
        self._schema = bridge.arrow_schema(frame)
        self._batches: Any = bridge.resident(frame._jdf.toArrowBatchRdd())
        self._marked: Any = None
        self._costs: deque[tuple[int, float]] = deque(maxlen=2)
        """Keeps the rows and the ms of its last runs alone."""

    def expected_ms(self, rows: int) -> float | None:
        """Return about how long it takes alone with so many rows; None: nobody knows yet."""
        costs = [ms * min(1.0, max(1, rows) / known) for known, ms in self._costs]
        return min(costs, default=None)

    def took(self, rows: int, ms: float) -> None:
        """Note what a run alone took. One of no rows, a rehearsal, says nothing."""
        if rows:
            self._costs.append((rows, ms))

    def alone(self, wanted: pa.Schema, group: str) -> pa.Table:
        """Executes the plan by itself. Raises Spark's own error."""
        return self.table(self._bridge.messages(self._batches, group), wanted)

    def batches(self) -> Any:
        """The JVM's RDD of its answer, an Arrow message a batch, and of its marker behind it.

        Computed anew at each job.
        """
        if self._marked is None:
            items = self._bridge.jvm.java.util.ArrayList()
            items.add(bytearray(self.marker))
            marker = self._bridge.session.sparkContext._jsc.parallelize(items, 1)
            self._marked = self._batches.toJavaRDD().union(marker)
        return self._marked

    def table(self, messages: Sequence[bytes], wanted: pa.Schema) -> pa.Table:
        """Its answer, of Arrow messages."""
        if not messages:
            return wanted.empty_table()
        batches = [
            pa.ipc.read_record_batch(pa.ipc.read_message(message), self._schema)
            for message in messages
        ]
        return pa.Table.from_batches(batches, self._schema).cast(wanted)


class _Member:
    """A step that waits."""

    __slots__ = ("began", "group", "result", "runnable", "turn", "wanted")

    def __init__(self, runnable: Runnable, wanted: pa.Schema, group: str) -> None:
        self.runnable = runnable
        self.wanted = wanted
        self.group = group
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Filled when the wait is over: with a result, or for it to run alone."""
        self.result: pa.Table | RoundFailed | None = None
        self.began = 0.0
        """When its round went out, on the monotonic clock."""


class Rounds:
    """Of one engine; used by all its threads."""

    def __init__(self, jobs_max: int, settings: Settings) -> None:
        """`jobs_max`: at a time."""
        self._jobs_max = jobs_max
        self._members_max = settings.engine_round_steps_max
        self._wait_ms_max = settings.engine_round_wait_ms_max
        self._short_ms = settings.engine_short_step_ms
        self._heavy = threading.BoundedSemaphore(max(1, jobs_max - 1))
        self._places = threading.BoundedSemaphore(max(1, settings.engine_jobs_in_flight_max // 2))
        """Bounds the heavy steps that are out or wait."""
        self._lock = threading.Lock()
        self._out = 0
        self._waiting: deque[_Member] = deque()
        self._groups: dict[str, str] = {}
        """Of steps whose round is out, and its job's group."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        """The same of steps whose round is back, the last `_ENDED_MAX`."""
        self._lanes: list[_Lane] = []

    def collect(
        self,
        runnable: Runnable,
        wanted: pa.Schema,
        group: str,
        bridge: ClassicBridge,
        rows: int,
        check: Callable[[], None],
        waited: Callable[[float], None] = lambda _: None,
    ) -> pa.Table:
        """Run a step and return its rows.

        Args:
            runnable: Its plan.
            wanted: The types of the answer.
            group: Names its job.
            bridge: Its settings are those of every plan that is sociable.
            rows: Of its inputs.
            check: Called now and then while it waits; ends the wait by raising `Canceled`.
            waited: Told the milliseconds that it has waited for others.

        Raises:
            RoundFailed: The job of a round failed.
            Canceled: From `check`.
            Exception: Spark's own error.
        """
        asked = time.monotonic()
        expected = runnable.expected_ms(rows)
        if expected is None or not runnable.sociable:
            return self._alone(runnable, wanted, group, rows)
        heavy = HEAVY_STEP.crossed(expected > self._short_ms)
        if heavy and self._places.acquire(blocking=False):
            try:
                if self._heavy_turn(expected, check):
                    waited((time.monotonic() - asked) * 1000)
                    try:
                        return self._alone(runnable, wanted, group, rows)
                    finally:
                        self._heavy.release()
            finally:
                self._places.release()
        runnable.batches()  # of this thread's time, and once, not of the round's
        member = _Member(runnable, wanted, group)
        with self._lock:
            first = self._out < self._jobs_max
            if first:
                self._out += 1
            else:
                if not self._lanes:
                    self._lanes = [_Lane(self, bridge) for _ in range(self._jobs_max)]
                self._waiting.append(member)
        if not first:
            first = self._turn_of(member)
        waited(((member.began or time.monotonic()) - asked) * 1000)
        if member.result is None:
            try:
                return self._alone(runnable, wanted, group, rows)
            finally:
                if first:
                    self.pass_on()
        if isinstance(member.result, RoundFailed):
            raise member.result
        return member.result

    def _heavy_turn(self, expected_ms: float, check: Callable[[], None]) -> bool:
        """Wait until a heavy step may go out; return whether one may before it is short beside
        those that are out. Raises what `check` does."""
        until = time.monotonic() + HEAVY_WAITS * expected_ms / 1000
        while not self._heavy.acquire(timeout=_CHECK_SECONDS):
            check()
            if time.monotonic() >= until:
                return False
        return True

    def _alone(self, runnable: Runnable, wanted: pa.Schema, group: str, rows: int) -> pa.Table:
        started = time.monotonic()
        found = runnable.alone(wanted, group)
        runnable.took(rows, (time.monotonic() - started) * 1000)
        return found

    def interrupting(self, group: str) -> str:
        """The job group to be canceled for a step's own."""
        with self._lock:
            return self._groups.get(group, group)

    def group_of(self, group: str) -> str:
        """The job group in which a step has run whose own is `group`; for a while after it has."""
        with self._lock:
            return self._ended.get(group, group)

    def pass_on(self) -> None:
        """A job that was out is back: the next is a share of those who wait."""
        with self._lock:
            share = -(-len(self._waiting) // self._jobs_max)
            if share and ROUND_STEPS.crossed(share > self._members_max):
                share = self._members_max
            members = [self._waiting.popleft() for _ in range(share)]
            if not members:
                self._out -= 1
            elif len(members) > 1:
                # There is one: a lane for each job that may be out.
                lane = next(lane for lane in self._lanes if not lane.busy)
                lane.busy = True
        if len(members) == 1:
            members[0].turn.put(None)
        elif members:
            lane.put(members)

    def began(self, members: Sequence[_Member], group: str) -> None:
        """A round's job goes out under this name."""
        now = time.monotonic()
        with self._lock:
            self._groups |= {member.group: group for member in members}
        for member in members:
            member.began = now

    def ended(self, members: Sequence[_Member], lane: _Lane) -> None:
        """It is back, with the members' results."""
        with self._lock:
            lane.busy = False
            for member in members:
                if (group := self._groups.pop(member.group, None)) is not None:
                    self._ended[member.group] = group
            while len(self._ended) > _ENDED_MAX:
                self._ended.popitem(last=False)
        for member in members:
            member.turn.put(None)
        self.pass_on()

    def _turn_of(self, member: _Member) -> bool:
        """Waits for its turn; whether what is out is this very step then."""
        try:
            member.turn.get(timeout=self._wait_ms_max / 1000)
            ROUND_ALONE.crossed(False)
        except queue.Empty:
            with self._lock:
                if ROUND_ALONE.crossed(member in self._waiting):
                    self._waiting.remove(member)
                    return False
            member.turn.get()
        return member.result is None


class _Lane:
    """A thread that runs rounds, the settings of whose jobs are its own."""

    def __init__(self, rounds: Rounds, bridge: ClassicBridge) -> None:
        self._rounds = rounds
        self._bridge = bridge
        self.busy = False
        """Whether it has a round. The rounds' lock is for it too."""
        # Asked for once: py4j looks through all jars for each package on the way.
        self._rdd_class = bridge.jvm.org.apache.spark.api.java.JavaRDD
        self._box: queue.SimpleQueue[list[_Member]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=POOL, daemon=True).start()

    def put(self, members: list[_Member]) -> None:
        """A round, at least two."""
        self._box.put(members)

    def _run(self) -> None:
        self._bridge.activate()
        while True:
            members = self._box.get()
            group = f"round#{next(_NUMBERS)}"
            self._rounds.began(members, group)
            try:
                answers = self._job(members, group)
                for member, messages in zip(members, answers, strict=True):
                    member.result = member.runnable.table(messages, member.wanted)
            except Exception as error:  # noqa: BLE001 - each has its own when it is planned anew
                for member in members:
                    member.result = RoundFailed(f"{type(error).__name__}: {error}")
            self._rounds.ended(members, self)

    def _job(self, members: Sequence[_Member], group: str) -> list[list[bytes]]:
        """One job over all members: the Arrow messages of each."""
        context: Any = self._bridge.session.sparkContext
        array = context._gateway.new_array(self._rdd_class, len(members))
        for index, member in enumerate(members):
            array[index] = member.runnable.batches()
        whole = context._jsc.union(array).coalesce(1, False)
        messages = self._bridge.messages(whole.rdd(), group, POOL)
        return parted(messages, [member.runnable.marker for member in members])


def parted(messages: Sequence[bytes], markers: Sequence[bytes]) -> list[list[bytes]]:
    """A round's answer, taken apart at its members' markers. Raises `RoundFailed`."""
    found: list[list[bytes]] = [[]]
    for message in messages:
        if not message.startswith(_MARKER):
            found[-1].append(message)
            continue
        if message not in markers[len(found) - 1 : len(found)]:
            raise RoundFailed(f"marker {message!r} is behind plan {len(found)} of {len(markers)}")
        found.append([])
    if len(found) != len(markers) + 1 or found[-1]:
        raise RoundFailed(f"a round of {len(markers)} was answered in {len(found)} pieces")
    return found[:-1]
