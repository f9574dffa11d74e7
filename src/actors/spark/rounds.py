"""Rounds: prepared steps that wait at the same time run as one Spark job.

Most of the cost of a small step that is executed again is the job around it: its scheduling, its
tasks, the way of its answer. So a step that finds every core at work on another waits, and a job
that is back makes room for its share of all that wait, as one job: the union of their plans. A step
that finds a core free runs alone, at once.

- As many jobs, of one step or of a round, are out at a time as there are cores, and the share is
  the number of waiting steps divided by them. `engine_round_wait_ms_max` bounds the wait: then a
  step runs by itself beside the others.
- A round that fails, or whose job was canceled for one of its members, fails for all with
  `RoundFailed`; each then goes the general path, and has its own error.
- A step that is expected to take more than `engine_short_step_ms` of a core is *heavy*: its task
  would keep its core from all others until it ends. One core fewer than there are (one at least)
  runs heavy steps, each by itself. A heavy step that waits too long goes with the short ones.
- Plans with settings of their own go alone: a job has one set of settings.
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
"""Prefix of markers. No Arrow message begins so: they begin with 0xFFFFFFFF."""
_NUMBERS: Final = itertools.count()
_ENDED_MAX: Final = 256
HEAVY_WAITS: Final = 2
_CHECK_SECONDS: Final = 0.1


class RoundFailed(Exception):
    """The job of a round failed, for whatever reason: its members should be planned anew."""


class RunnablePlan:
    """A prepared plan that can run alone or in a round.

    Used by one thread at a time: its slots have one user at a time.
    """

    def __init__(self, bridge: ClassicBridge, frame: DataFrame, *, sociable: bool) -> None:
        """Keep the part of a frame that runs. `sociable`: it has no settings of its own. Raises
        Spark's own error of a plan that cannot run."""
        self._bridge = bridge
        self.sociable: Final = sociable
        """True if it may take part in a round."""
        self.marker: Final = _MARKER + b"%d" % next(_NUMBERS)
        """Marker of this plan alone."""
        self._schema = bridge.arrow_schema(frame)
        # The frame is dropped: the trees that it was planned from take several times as much of the
        # driver's memory, and Spark's own execution of it describes its plan to listeners each
        # time.
        self._batches: Any = bridge.resident(frame._jdf.toArrowBatchRdd())
        self._marked: Any = None
        self._costs: deque[tuple[int, float]] = deque(maxlen=2)
        """(rows, ms) of its last runs alone."""

    def expected_ms(self, rows: int) -> float | None:
        """Return about how long it takes alone with so many rows; None if that is not known yet."""
        # The lesser of two runs: a first one, or one beside much else, says little. More rows need
        # not take longer: much of a step is fixed.
        costs = [ms * min(1.0, max(1, rows) / known) for known, ms in self._costs]
        return min(costs, default=None)

    def took(self, rows: int, ms: float) -> None:
        """Note the time of a run alone. A run without rows, a rehearsal, says nothing."""
        if rows:
            self._costs.append((rows, ms))

    def alone(self, wanted: pa.Schema, group: str) -> pa.Table:
        """Execute the plan by itself. Raises Spark's own error."""
        return self.table(self._bridge.messages(self._batches, group), wanted)

    def batches(self) -> Any:
        """Return the JVM's RDD of its answer, an Arrow message a batch, and of its marker behind
        it.

        Its rows are computed anew at each job.
        """
        if self._marked is None:
            items = self._bridge.jvm.java.util.ArrayList()
            items.add(bytearray(self.marker))
            marker = self._bridge.session.sparkContext._jsc.parallelize(items, 1)
            self._marked = self._batches.toJavaRDD().union(marker)
        return self._marked

    def table(self, messages: Sequence[bytes], wanted: pa.Schema) -> pa.Table:
        """Return its answer, decoded from Arrow messages."""
        if not messages:
            return wanted.empty_table()
        batches = [
            pa.ipc.read_record_batch(pa.ipc.read_message(message), self._schema)
            for message in messages
        ]
        return pa.Table.from_batches(batches, self._schema).cast(wanted)


class _Member:
    """A step that waits for its round."""

    __slots__ = ("began", "group", "result", "runnable", "turn", "wanted")

    def __init__(self, runnable: RunnablePlan, wanted: pa.Schema, group: str) -> None:
        self.runnable = runnable
        self.wanted = wanted
        self.group = group
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Filled when the wait is over: with a result, or for it to run alone."""
        self.result: pa.Table | RoundFailed | None = None
        self.began = 0.0
        """Monotonic time at which its round went out."""


class StepRounds:
    """Makes rounds of one engine's steps. Used by all its threads."""

    def __init__(self, jobs_max: int, settings: Settings) -> None:
        """Take the limits from the settings. `jobs_max`: Spark jobs at a time."""
        self._jobs_max = jobs_max
        self._members_max = settings.engine_round_steps_max
        self._wait_ms_max = settings.engine_round_wait_ms_max
        self._short_ms = settings.engine_short_step_ms
        self._heavy = threading.BoundedSemaphore(max(1, jobs_max - 1))
        # Half of the engine's threads are left to short steps.
        self._places = threading.BoundedSemaphore(max(1, settings.engine_jobs_in_flight_max // 2))
        """Bounds the heavy steps that are out or wait."""
        self._lock = threading.Lock()
        self._out = 0
        self._waiting: deque[_Member] = deque()
        self._groups: dict[str, str] = {}
        """Job group of the round of each step whose round is out."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        """The same of steps whose round is back, the last `_ENDED_MAX`."""
        self._lanes: list[_Lane] = []

    def collect(
        self,
        runnable: RunnablePlan,
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
            group: Its job group.
            bridge: A session with the settings of every sociable plan.
            rows: Number of rows of its inputs.
            check: Called now and then while it waits; ends the wait by raising `OperationCanceled`.
            waited: Called with the milliseconds that it has waited for others.

        Raises:
            RoundFailed: The job of a round failed.
            Canceled: From `check`.
            Exception: Spark's own error.
        """
        asked = time.monotonic()
        expected = runnable.expected_ms(rows)
        # A plan of unknown cost runs by itself, so that no other step stands behind it.
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
        runnable.batches()  # built once, in this thread's time and not in the round's
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
                    # After an error, too: the place of the job must not be lost.
                    self.start_next_jobs()
        if isinstance(member.result, RoundFailed):
            raise member.result
        return member.result

    def _heavy_turn(self, expected_ms: float, check: Callable[[], None]) -> bool:
        """Wait until a heavy step may go out. Return False when it has waited too long: it then
        goes with the short ones. Raises what `check` does."""
        # In proportion: a step of half a second must not stand behind one of half a minute.
        until = time.monotonic() + HEAVY_WAITS * expected_ms / 1000
        while not self._heavy.acquire(timeout=_CHECK_SECONDS):
            check()
            if time.monotonic() >= until:
                return False
        return True

    def _alone(self, runnable: RunnablePlan, wanted: pa.Schema, group: str, rows: int) -> pa.Table:
        started = time.monotonic()
        found = runnable.alone(wanted, group)
        runnable.took(rows, (time.monotonic() - started) * 1000)
        return found

    def find_group_to_cancel(self, group: str) -> str:
        """Return the job group to be canceled for a step's own."""
        with self._lock:
            return self._groups.get(group, group)

    def group_of(self, group: str) -> str:
        """Return the job group in which a step has run whose own is `group`; for a while after it
        has."""
        with self._lock:
            return self._ended.get(group, group)

    def start_next_jobs(self) -> None:
        """Send out a share of the waiting steps in place of a job that is back."""
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
        """Note the job group under which a round's job goes out."""
        now = time.monotonic()
        with self._lock:
            self._groups |= {member.group: group for member in members}
        for member in members:
            member.began = now

    def ended(self, members: Sequence[_Member], lane: _Lane) -> None:
        """End a round that is back, with the members' results."""
        with self._lock:
            lane.busy = False
            for member in members:
                if (group := self._groups.pop(member.group, None)) is not None:
                    self._ended[member.group] = group
            while len(self._ended) > _ENDED_MAX:
                self._ended.popitem(last=False)
        for member in members:
            member.turn.put(None)
        self.start_next_jobs()

    def _turn_of(self, member: _Member) -> bool:
        """Wait for a step's turn. Return whether the step now runs alone in the place of a job that
        is back."""
        try:
            member.turn.get(timeout=self._wait_ms_max / 1000)
            ROUND_ALONE.crossed(False)
        except queue.Empty:
            with self._lock:
                if ROUND_ALONE.crossed(member in self._waiting):
                    self._waiting.remove(member)
                    return False
            # A job has taken it out of the queue meanwhile: its turn comes.
            member.turn.get()
        return member.result is None


class _Lane:
    """A thread that runs rounds; their jobs have the thread's own settings."""

    def __init__(self, rounds: StepRounds, bridge: ClassicBridge) -> None:
        self._rounds = rounds
        self._bridge = bridge
        self.busy = False
        """True while it has a round. Guarded by the lock of `StepRounds`."""
        # Asked for once: py4j looks through all jars for each package on the way.
        self._rdd_class = bridge.jvm.org.apache.spark.api.java.JavaRDD
        self._box: queue.SimpleQueue[list[_Member]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=POOL, daemon=True).start()

    def put(self, members: list[_Member]) -> None:
        """Hand over a round, of at least two members."""
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
        """Run one job over all members and return the Arrow messages of each."""
        context: Any = self._bridge.session.sparkContext
        array = context._gateway.new_array(self._rdd_class, len(members))
        for index, member in enumerate(members):
            array[index] = member.runnable.batches()
        # One task: with as many as cores each would carry all plans, whose serialisation is most of
        # it.
        whole = context._jsc.union(array).coalesce(1, False)
        messages = self._bridge.messages(whole.rdd(), group, POOL)
        return split_at_markers(messages, [member.runnable.marker for member in members])


def split_at_markers(messages: Sequence[bytes], markers: Sequence[bytes]) -> list[list[bytes]]:
    """Split a round's answer at its members' markers. Raises `RoundFailed`."""
    found: list[list[bytes]] = [[]]
    for message in messages:
        if not message.startswith(_MARKER):
            found[-1].append(message)
            continue
        # Behind each plan's rows stands its marker. An answer whose markers are not all there, in
        # their order, is no answer.
        if message not in markers[len(found) - 1 : len(found)]:
            raise RoundFailed(f"marker {message!r} is behind plan {len(found)} of {len(markers)}")
        found.append([])
    if len(found) != len(markers) + 1 or found[-1]:
        raise RoundFailed(f"a round of {len(markers)} was answered in {len(found)} pieces")
    return found[:-1]
