"""Rounds: prepared steps that wait at the same time run as one Spark job.

Theory of operation. Of a small step executed again, most of what is left is the job around it:
its scheduling, its tasks, the way of its answer. Twenty views of one source want twenty steps at
once, and two cores would do twenty such jobs one after the other. So a step that comes while
another runs waits for it, and all that wait are then one job: the union of their plans, run by
as many tasks as there are cores, each task going through several plans. Nothing waits for
company: a step that comes alone runs alone, at once, and as it always has.

Rules
- One job, of one step or of a round, is out at a time; `PATIENCE_SECONDS` bound the wait: then a
  step runs by itself beside whatever takes so long.
- Between the plans stand markers, a row each with the number of the plan before it. An answer
  whose markers are not all there in their order is no answer.
- A round that fails, or whose job was canceled for one of its members, fails for all with
  `RoundFailed`; each then goes the general path, and has its own error. The job may have left
  tasks that still read, so the slots of all are given up, as after any failure.
- A plan takes part once it has answered alone with rows: the Arrow schema of its answers is
  known from then on. Plans with settings of their own go alone: a job has one set of settings.

What it does not do: it does not look at plans; what is unfit for being executed again never
comes here (`actors.spark.prepared`).
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.serializers import NoOpSerializer
from pyspark.sql import DataFrame
from pyspark.util import _load_from_socket

from actors.spark.bridge import ClassicBridge

MEMBERS_MAX: Final = 16
PATIENCE_SECONDS: Final = 0.1
POOL: Final = "rounds"
_MARKER: Final = b"\0penstock:"
"""No Arrow message begins so: they begin with 0xFFFFFFFF."""


class RoundFailed(Exception):
    """The job of a round failed, for whatever reason: its members should be planned anew."""


class Runnable:
    """A prepared plan as something that can run alone or in a round.

    Used by one thread at a time: its slots have one user at a time.
    """

    def __init__(self, bridge: ClassicBridge, frame: DataFrame, *, sociable: bool) -> None:
        """`sociable`: it has no settings of its own."""
        self._bridge = bridge
        self._frame = frame
        self._sociable = sociable
        self._schema: pa.Schema | None = None
        self._batches: Any = None

    @property
    def ready(self) -> bool:
        """Whether it can take part in a round."""
        return self._sociable and self._schema is not None

    def alone(self, wanted: pa.Schema) -> pa.Table:
        """Executes the frame by itself. Raises Spark's own error."""
        batches: list[pa.RecordBatch] = self._frame._collect_as_arrow()
        if not batches:
            return wanted.empty_table()
        self._schema = batches[0].schema
        return pa.Table.from_batches(batches).cast(wanted)

    def batches(self) -> Any:
        """The JVM's RDD of its answer, an Arrow message a batch. Computed anew at each job."""
        if self._batches is None:
            self._batches = self._frame._jdf.toArrowBatchRdd().toJavaRDD()
        return self._batches

    def table(self, messages: Sequence[bytes], wanted: pa.Schema) -> pa.Table:
        """The answer that came in a round."""
        schema = self._schema
        assert schema is not None, "only a plan that is ready takes part"
        batches = [
            pa.ipc.read_record_batch(pa.ipc.read_message(message), schema) for message in messages
        ]
        return pa.Table.from_batches(batches, schema).cast(wanted)


class _Member:
    """A step that waits."""

    __slots__ = ("group", "result", "runnable", "turn", "wanted")

    def __init__(self, runnable: Runnable, wanted: pa.Schema, group: str) -> None:
        self.runnable = runnable
        self.wanted = wanted
        self.group = group
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Filled when the wait is over: with a result, or for it to run alone."""
        self.result: pa.Table | RoundFailed | None = None


class Rounds:
    """Of one engine; used by all its threads."""

    def __init__(self, tasks: int, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """`tasks`: of a round's job, at most."""
        self._tasks = tasks
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._out = False
        self._waiting: deque[_Member] = deque()
        self._groups: dict[str, str] = {}
        self._lane: _Lane | None = None

    def collect(
        self, runnable: Runnable, wanted: pa.Schema, group: str, bridge: ClassicBridge
    ) -> pa.Table:
        """The step's rows; `group` names its job, and the settings of `bridge` are those of every
        plan that is sociable. Raises `RoundFailed`, or Spark's own error."""
        if not runnable.ready:
            return runnable.alone(wanted)
        runnable.batches()  # of this thread's time, and once, not of the round's
        member = _Member(runnable, wanted, group)
        with self._lock:
            first = not self._out
            self._out = True
            if not first:
                if self._lane is None:
                    self._lane = _Lane(self, bridge, self._tasks)
                self._waiting.append(member)
        if not first:
            first = self._turn_of(member)
        if member.result is None:
            try:
                return runnable.alone(wanted)
            finally:
                if first:
                    self.pass_on()
        if isinstance(member.result, RoundFailed):
            raise member.result
        return member.result

    def interrupting(self, group: str) -> str:
        """The job group to be canceled for a step's own."""
        with self._lock:
            return self._groups.get(group, group)

    def pass_on(self) -> None:
        """The job that was out is back: the next is who waits."""
        with self._lock:
            members = [self._waiting.popleft() for _ in range(min(MEMBERS_MAX, len(self._waiting)))]
            self._out = bool(members)
            lane = self._lane
        if len(members) == 1:
            members[0].turn.put(None)
        elif members:
            assert lane is not None, "whoever waits has seen to it"
            lane.put(members)

    def began(self, members: Sequence[_Member], group: str) -> None:
        """A round's job goes out under this name."""
        with self._lock:
            self._groups |= {member.group: group for member in members}

    def ended(self, members: Sequence[_Member]) -> None:
        """It is back, with the members' results."""
        with self._lock:
            for member in members:
                self._groups.pop(member.group, None)
        for member in members:
            member.turn.put(None)
        self.pass_on()

    def _turn_of(self, member: _Member) -> bool:
        """Waits for its turn; whether what is out is this very step then."""
        try:
            member.turn.get(timeout=self._patience_seconds)
        except queue.Empty:
            with self._lock:
                if member in self._waiting:
                    self._waiting.remove(member)
                    return False
            member.turn.get()
        return member.result is None


class _Lane:
    """The thread that runs rounds, the settings of whose jobs are its own."""

    def __init__(self, rounds: Rounds, bridge: ClassicBridge, tasks: int) -> None:
        self._rounds = rounds
        self._bridge = bridge
        self._tasks = tasks
        # Asked for once: py4j looks through all jars for each package on the way.
        self._rdd_class = bridge.jvm.org.apache.spark.api.java.JavaRDD
        self._python = bridge.jvm.PythonRDD
        self._markers: list[Any] = []
        self._numbers = itertools.count(1)
        self._box: queue.SimpleQueue[list[_Member]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=POOL, daemon=True).start()

    def put(self, members: list[_Member]) -> None:
        """A round, at least two."""
        self._box.put(members)

    def _run(self) -> None:
        settled = False
        while True:
            members = self._box.get()
            group = f"round#{next(self._numbers)}"
            self._rounds.began(members, group)
            try:
                if not settled:
                    self._settle()
                    settled = True
                answers = self._job(members, group)
                for member, messages in zip(members, answers, strict=True):
                    member.result = member.runnable.table(messages, member.wanted)
            except Exception as error:  # noqa: BLE001 - each has its own when it is planned anew
                for member in members:
                    member.result = RoundFailed(f"{type(error).__name__}: {error}")
            self._rounds.ended(members)

    def _settle(self) -> None:
        """What Spark's own execution of a query sets for its tasks, once for this thread."""
        self._bridge.activate()
        context = self._bridge.session.sparkContext
        for name, value in self._bridge.session.conf.getAll.items():
            if name.startswith("spark."):
                context.setLocalProperty(name, value)
        context.setLocalProperty("spark.scheduler.pool", POOL)

    def _job(self, members: Sequence[_Member], group: str) -> list[list[bytes]]:
        """One job over all members: the Arrow messages of each."""
        context: Any = self._bridge.session.sparkContext
        parts: list[Any] = []
        for number, member in enumerate(members):
            parts += (member.runnable.batches(), self._marker(number))
        array = context._gateway.new_array(self._rdd_class, len(parts))
        for index, part in enumerate(parts):
            array[index] = part
        whole = context._jsc.union(array).coalesce(self._tasks, False)
        served = self._python.collectAndServeWithJobGroup(whole.rdd(), group, "round", True)
        with _load_from_socket(served, NoOpSerializer()) as stream:
            return parted(list(stream), len(members))

    def _marker(self, number: int) -> Any:
        while len(self._markers) <= number:
            items = self._bridge.jvm.java.util.ArrayList()
            items.add(bytearray(_MARKER + b"%d" % len(self._markers)))
            made = self._bridge.session.sparkContext._jsc.parallelize(items, 1)
            self._markers.append(made)
        return self._markers[number]


def parted(messages: Sequence[bytes], members: int) -> list[list[bytes]]:
    """A round's answer, taken apart at its markers. Raises `RoundFailed`."""
    found: list[list[bytes]] = [[]]
    for message in messages:
        if not message.startswith(_MARKER):
            found[-1].append(message)
            continue
        if message != _MARKER + b"%d" % (len(found) - 1):
            raise RoundFailed(f"marker {message!r} follows {len(found) - 1} plans")
        found.append([])
    if len(found) != members + 1 or found[-1]:
        raise RoundFailed(f"a round of {members} was answered in {len(found)} pieces")
    return found[:-1]
