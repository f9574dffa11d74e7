"""Prepared steps: a plan built once over slot files and executed again for every step.

Theory of operation. Planning is most of what a small step costs, and of two steps of one
dataflow nothing differs but the rows. So a step's statement is analysed and planned once over
slot files (`actors.spark.slots`); a later step writes its rows to the same files and executes
the same frame. It is built for the first step that wants it: building costs what planning that
step anew would have cost, and a stream of steps has one slow step and not two; or before, in a
*rehearsal*: then it has none.

Variants. A plan is good for the same strata and the same set of changed inputs (deltas and outputs
of earlier strata that have rows), at one time or at several: terms that read none of the others are
not in its text, and are neither planned nor run, and what is at one time needs no window. State
that happens to be empty gets an empty slot instead, so that hot and cold groups do not make
variants of their own. A step without a plan of its own first uses a *wider* one, of more changed
inputs or of several times, whose further inputs are empty then: to plan takes the most when the JVM
has just begun, and most sets of changes are seldom. Where steps have done so often, the answer says
that a rehearsal pays. Settings belong to the dataflow. Variants are bounded, for each dataflow and
in all; the least recently used go first.

Never stale. Executing a frame again runs its physical plan again, but whatever that plan keeps
is kept: the files of a shuffle, a broadcast table, a cached relation, the result of a subquery,
a reused exchange. `inspect` lets a plan pass only if every node of it is of a kind known to
keep nothing (`KEEPS_NOTHING`), it has no subquery, it reads no file but its own slots, and
nothing in it was computed while it was planned (the current time, a random seed). A relation of
constants may be in it: its rows come from the text. The statement itself must not name the
step's interval. What is refused goes the general path; the reason is kept and logged once.

Failures. A step that fails or is canceled may leave a task behind that still reads: its plan
and its slots are dropped, and the next step builds new ones. An error of the data is the
answer, as on the general path. After any other the general path has its turn, and the plan is
refused from then on; but not after a failed round (`actors.spark.rounds`: steps that wait go
together), which says nothing of its members.

What it does not do: steps at time 0 (hydration), steps that compute a view from scratch and
steps with large inputs never come here; nor does anything on a cluster, whose executors need
not see our files, or over Spark Connect, whose plans cannot be looked at.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame

from actors.errors import Canceled
from actors.plan.delta import CHANGED
from actors.plan.schema import Schema
from actors.settings import Settings
from actors.spark.bridge import Bridge, ClassicBridge
from actors.spark.failures import describe
from actors.spark.rounds import RoundFailed, Rounds, Runnable
from actors.spark.session import local_cores
from actors.spark.slots import SlotBusy, SlotOverflow, SlotSet, positional
from actors.spark.translate import Relation
from actors.threshold_probes import PREPARED_EACH, PREPARED_PLANS, SLOT_BYTES, WIDER_USES

KEEPS_NOTHING: Final = frozenset(
    {
        "CartesianProduct",
        "Coalesce",
        "ColumnarToRow",
        "Expand",
        "Filter",
        "Generate",
        "HashAggregate",
        "LocalTableScan",
        "ObjectHashAggregate",
        "Project",
        "Range",
        "Scan OneRowRelation",
        "Scan slot",
        "ShuffledHashJoin",
        "Sort",
        "SortAggregate",
        "SortMergeJoin",
        "Union",
        "Window",
        "WindowGroupLimit",
    }
)
"""Nodes of physical plans that compute their rows afresh from their inputs, each time."""

_NODE: Final = re.compile(r"^[ :+|-]*(?:\* ?)?(.*?) *\((?:unknown|\d+)\)$")
_REASON_CHARS_MAX: Final = 300
WIDER_KEPT_MAX: Final = 4_096
"""Steps of which it is counted how often they used a wider plan."""


class Refused(Exception):
    """A plan that cannot be prepared; the text says why."""


class Request(msgspec.Struct, frozen=True):
    """A step as far as preparation is concerned."""

    owner: int
    """The prepared plan (`PreparedPlan.serial`)."""
    name: str
    """The dataflow, for the log."""
    strata: tuple[int, ...]
    """Those of the statement (`PreparedPlan.strata`)."""
    one_time: bool
    """Whether all changes are at one time, which the statement then relies on."""
    schemas: Mapping[str, Schema]
    """Of every input that these strata read."""
    tables: Mapping[str, pa.Table]
    """The rows of inputs that have any."""
    render: Callable[[Mapping[str, Relation], tuple[int, int]], str]
    """The statement over relations, for an interval."""
    wanted: Callable[[], pa.Schema]
    sociable: bool
    """Whether it may run in one job with others: its dataflow has no settings of its own."""
    group: str
    """Of its jobs, by which it is canceled."""
    open: Callable[[], Bridge]
    """This thread's session for plans over slots."""
    check: Callable[[], None]
    """Raises `Canceled`."""
    waited: Callable[[float], None] = lambda _: None
    """Told the milliseconds that the step has waited for others."""

    @property
    def changed(self) -> frozenset[str]:
        """Inputs that hold changes, as against state, and have rows."""
        return frozenset(name for name in self.tables if name[0] in CHANGED)


class VariantKey(NamedTuple):
    """What tells variants apart."""

    owner: int
    strata: tuple[int, ...]
    changed: frozenset[str]
    one_time: bool


class Variant(msgspec.Struct, frozen=True):
    """A plan ready to be executed."""

    bridge: ClassicBridge
    runnable: Runnable
    slots: SlotSet
    schemas: Mapping[str, Schema]
    """Holds those of the slots, by name."""


Inspect: TypeAlias = Callable[[ClassicBridge, DataFrame, SlotSet], Mapping[str, Sequence[int]]]
"""Which columns of which slots a plan reads. Raises `Refused`."""


def inspect(bridge: ClassicBridge, frame: DataFrame, slots: SlotSet) -> Mapping[str, Sequence[int]]:
    """Looks for anything that a plan would keep between executions; see the module's text."""
    query: Any = frame._jdf.queryExecution()
    patterns = bridge.jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if query.analyzed().containsPattern(patterns.CURRENT_LIKE()):
        raise Refused("it reads the clock, which a plan does once")
    if not bridge.deterministic(frame):
        raise Refused("an expression is not deterministic")
    plan = query.executedPlan()
    for line in plan.treeString(False, False, 0, True, False).splitlines():
        if line.strip():
            found = _NODE.match(line)
            node = found.group(1) if found else line.strip()
            if node not in KEEPS_NOTHING and node.split(" ")[0] not in KEEPS_NOTHING:
                raise Refused(f"its plan holds a node of kind {node[:80]!r}")
    if not plan.subqueriesAll().isEmpty():
        raise Refused("its plan holds a subquery")
    return _columns_read(plan, slots)


def _columns_read(plan: Any, slots: SlotSet) -> Mapping[str, Sequence[int]]:
    by_path = {str(slots.path(name)): name for name in slots.names}
    leaves = plan.collectLeaves()
    read: dict[str, set[int]] = {}
    for number in range(leaves.size()):
        leaf = leaves.apply(number)
        if not leaf.nodeName().startswith("Scan slot"):
            continue
        files = [_plain_path(file) for file in leaf.relation().location().inputFiles()]
        if len(files) != 1 or files[0] not in by_path:
            raise Refused(f"it reads {files[:3]}, which are no slots of its own")
        fields = leaf.requiredSchema().fieldNames()
        read.setdefault(by_path[files[0]], set()).update(int(field[1:]) for field in fields)
    if not read:
        raise Refused("it reads no slot")
    return {name: sorted(columns) for name, columns in read.items()}


def _plain_path(uri: str) -> str:
    return "/" + unquote(uri.removeprefix("file:")).lstrip("/")


class PreparedSteps:
    """The variants of all dataflows of an engine. Used by all its threads."""

    def __init__(self, settings: Settings, folder: Path, look: Inspect = inspect) -> None:
        self._max = settings.prepared_plans_max
        self._max_each = settings.prepared_plans_per_dataflow_max
        self._capacity = settings.prepared_slot_bytes_max
        self._local = re.match(r"local(\[|$)", settings.spark_master) is not None
        self._folder = folder.resolve()
        self._inspect = look
        self.rounds = Rounds(local_cores(settings.spark_master), settings)
        # Reentrant: a plan may be forgotten by the collector while this thread holds it.
        self._lock = threading.RLock()
        self._variants: OrderedDict[VariantKey, Variant] = OrderedDict()
        self._refused: dict[VariantKey, str] = {}
        self._wide_uses: dict[VariantKey, int] = {}
        """How often a step that has no plan of its own has used a wider one."""
        self._rehearsed: dict[VariantKey, threading.Event] = {}
        """Set when the plan is there, or will not be."""

    def run(self, request: Request) -> pa.Table | None:
        """The step's rows; None when it must go the general path.

        Raises `Canceled`, or Spark's own error of the data.
        """
        key = _key(request)
        with self._lock:
            going = [done for other, done in self._rehearsed.items() if _is_wider(other, key)]
        if going and self._find(key) is None and self._wider(key, request) is None:
            began = time.monotonic()
            for rehearsal in going:
                rehearsal.wait()  # sooner than building a second one
            request.waited((time.monotonic() - began) * 1000)
        return self._run(key, request)

    def is_frequent(self, request: Request) -> bool:
        """Tell, once for so many steps, whether steps like this one have used a wider plan so often
        that their own would pay."""
        key = _key(request)
        with self._lock:
            frequent = WIDER_USES.exceeded_by(self._wide_uses.get(key, 0))
            if frequent:
                del self._wide_uses[key]
            return frequent

    def rehearse(self, request: Request) -> None:
        """Builds a plan for steps to come and executes it, if there is room without another's.

        Raises as `run` does. A step that wants the plan meanwhile waits for it.
        """
        key = _key(request)
        with self._lock:
            mine = sum(other.owner == key.owner for other in self._variants)
            room = len(self._variants) < self._max and mine < self._max_each
            if not room or key in self._variants or key in self._rehearsed:
                return
            done = self._rehearsed[key] = threading.Event()
        try:
            self._run(key, request, rehearsing=True)
        finally:
            with self._lock:
                del self._rehearsed[key]
            done.set()

    def _run(
        self, key: VariantKey, request: Request, *, rehearsing: bool = False
    ) -> pa.Table | None:
        if not self._local or key in self._refused:
            return None
        largest = max((table.nbytes for table in request.tables.values()), default=0)
        if SLOT_BYTES.crossed(largest > self._capacity):
            return None  # its file may be smaller, but is not worth a plan
        try:
            variant = None
            if not rehearsing:
                variant = self._find(key) or self._wider(key, request)
            variant = variant or self._build(key, request)
            tables = _in_order(request.tables, variant.schemas)
            with variant.slots.use(tables):
                request.check()
                return self.rounds.collect(
                    variant.runnable,
                    request.wanted(),
                    request.group,
                    variant.bridge,
                    sum(table.num_rows for table in tables.values()),
                    request.check,
                    request.waited,
                )
        except RoundFailed as error:
            self._drop(key)
            request.check()
            print(f"{request.name}: a round failed: {error}", file=sys.stderr, flush=True)
            return None
        except (SlotOverflow, SlotBusy):
            return None
        except Canceled:
            self._drop(key)
            raise
        except Refused as error:
            self._refuse(key, request.name, str(error))
        except Exception as error:
            self._drop(key)
            request.check()
            code, text = describe(error)
            if code == "DefiniteError":
                raise
            self._refuse(key, request.name, f"it failed: {text}")
        return None

    def forget(self, owner: int) -> None:
        """Drops all that is kept for a plan."""
        with self._lock:
            for key in [key for key in self._variants if key.owner == owner]:
                self._drop(key)
            for kept in (self._refused, self._wide_uses):
                for key in [key for key in kept if key.owner == owner]:
                    del kept[key]

    def reasons(self, owner: int) -> tuple[str, ...]:
        """Why steps of a plan were refused."""
        with self._lock:
            return tuple(text for key, text in self._refused.items() if key.owner == owner)

    def __len__(self) -> int:
        return len(self._variants)

    def _build(self, key: VariantKey, request: Request) -> Variant:
        """Plans the step over new slots. Raises `Refused` or Spark's own error."""
        viewed = [n for n in request.schemas if n in request.changed or n[0] not in CHANGED]
        relations = {
            name: Relation(schema, f"__{name}" if name in viewed else None)
            for name, schema in request.schemas.items()
        }
        text = request.render(relations, (1, 2))
        if text != request.render(relations, (5, 9)):
            raise Refused("its text depends on the step's interval")
        kinds = {name: positional(request.schemas[name].arrow_updates()) for name in viewed}
        slots = SlotSet(self._folder / uuid.uuid4().hex, kinds, self._capacity)
        try:
            bridge = request.open()
            if not isinstance(bridge, ClassicBridge):
                raise Refused("its plan is made where it cannot be looked at")
            frames = {
                f"__{name}": bridge.slot(
                    slots.path(name), kinds[name], request.schemas[name].arrow_updates().names
                )
                for name in viewed
            }
            with bridge.views(frames):
                frame = bridge.sql(text)
            slots.narrow(self._inspect(bridge, frame, slots))
        except BaseException:
            slots.abandon()
            raise
        runnable = Runnable(bridge, frame, sociable=request.sociable)
        schemas = {name: request.schemas[name] for name in viewed}
        variant = Variant(bridge, runnable, slots, schemas)
        self._keep(key, variant)
        return variant

    def _find(self, key: VariantKey) -> Variant | None:
        """The step's own plan, unless it is being rehearsed: its slots are in use then."""
        with self._lock:
            found = None if key in self._rehearsed else self._variants.get(key)
            if found is not None:
                self._variants.move_to_end(key)
            return found

    def _wider(self, key: VariantKey, request: Request) -> Variant | None:
        """A plan that does more than is wanted; None when there is none."""
        with self._lock:
            found = [other for other in self._variants if _is_wider(other, key)]
            found = [other for other in found if other not in self._rehearsed]
            found = [other for other in found if _has_room(self._variants[other], request.tables)]
            if not found:
                return None
            uses = self._wide_uses.pop(key, 0) + 1
            if len(self._wide_uses) >= WIDER_KEPT_MAX:
                del self._wide_uses[next(iter(self._wide_uses))]
            self._wide_uses[key] = uses
            return self._find(min(found, key=lambda other: (len(other.changed), other.one_time)))

    def _keep(self, key: VariantKey, variant: Variant) -> None:
        with self._lock:
            self._drop(key)
            mine = [other for other in self._variants if other.owner == key.owner]
            if PREPARED_EACH.crossed(len(mine) >= self._max_each):
                self._drop(mine[0])
            while PREPARED_PLANS.crossed(len(self._variants) >= self._max):
                self._drop(next(iter(self._variants)))
            self._variants[key] = variant

    def _drop(self, key: VariantKey) -> None:
        with self._lock:
            dropped = self._variants.pop(key, None)
        if dropped is not None:
            dropped.slots.abandon()

    def _refuse(self, key: VariantKey, name: str, reason: str) -> None:
        self._drop(key)
        text = " ".join(reason.split())[:_REASON_CHARS_MAX]
        changed = ", ".join(sorted(key.changed)) or "nothing"
        with self._lock:
            if len(self._refused) >= 4 * self._max:
                del self._refused[next(iter(self._refused))]
            self._refused[key] = text
        print(
            f"{name}: strata {', '.join(map(str, key.strata))} with changes of {changed} "
            f"are planned anew each time: {text}",
            file=sys.stderr,
            flush=True,
        )


def _is_wider(other: VariantKey, key: VariantKey) -> bool:
    """Return whether a plan makes what another one would, where its further inputs are empty."""
    return (
        other.owner == key.owner
        and other.strata[-1] == key.strata[-1]
        and set(other.strata) >= set(key.strata)
        and other.changed >= key.changed
        and (other.one_time == key.one_time or not other.one_time)
    )


def _has_room(variant: Variant, tables: Mapping[str, pa.Table]) -> bool:
    """Return whether a plan has a slot for each of these tables, whose columns are among theirs."""
    return all(
        name in variant.schemas and set(variant.schemas[name].names) <= set(table.column_names)
        for name, table in tables.items()
    )


def _key(request: Request) -> VariantKey:
    return VariantKey(request.owner, request.strata, request.changed, request.one_time)


def _in_order(
    given: Mapping[str, pa.Table], schemas: Mapping[str, Schema]
) -> Mapping[str, pa.Table]:
    """The rows, their columns as the plan orders them. Raises `Refused`."""
    tables = {}
    for name, table in given.items():
        wanted = schemas[name].arrow_updates()
        if not table.schema.equals(wanted):
            missing = [column for column in wanted.names if column not in table.column_names]
            if missing:
                raise Refused(f"rows of {name} lack column {missing[0]!r}")
            table = table.select(wanted.names).cast(wanted)
        tables[name] = table
    return tables
