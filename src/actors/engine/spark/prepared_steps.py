"""Prepared steps: a plan is built once over slot files and executed again for every step.

Planning is most of the cost of a small step, and the steps of a dataflow differ only in their rows.
So the statement of a step is planned once over slot files; a later step writes its rows to the same
files and executes the same plan, in the driver itself (`DriverExecution.java`): no job is
scheduled, and on a cluster no executor needs to see the files. The plan is built for the first step
that needs it, or earlier, in a *rehearsal*.

A plan (a *variant*) applies to the same strata and the same changed inputs (deltas and outputs of
earlier strata that have rows), at one time or at several, for few rows or for many: the operators
are interpreted for few rows and compiled for many. A step without its own plan first uses a *wider*
one, with more changed inputs or for several times, whose additional inputs are then empty. After
many such uses, the answer says that a rehearsal would pay. The number of variants is limited, per
dataflow and in total; the least recently used ones are dropped first.

Steps at time 0 (hydration), steps that compute a view from scratch, and steps with large inputs are
never prepared. Next to a Spark Connect server, whose plans can be neither inspected nor executed
without a job, the engine's own JVM prepares and executes them (`actors.engine.spark.plan_reader`).
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

from actors.engine.spark.bridge import ClassicBridge, SessionBridge
from actors.engine.spark.failures import describe
from actors.engine.spark.session import SlotRows, result_bytes_max
from actors.engine.spark.slot_files import SlotBusy, SlotOverflow, SlotSet, positional
from actors.engine.spark.spark_releases import installed_version, tree_text
from actors.engine.spark.translate import SessionRelation
from actors.model.plan.input_names import InputName
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import OperationCanceled
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import PREPARED_EACH, PREPARED_PLANS, SLOT_BYTES

INTERPRETED_ROWS_MAX: Final = 8_192
"""Maximum number of rows of a step whose operators are interpreted; for more rows they are
compiled. For 10 rows a compiled plan takes 1.3 to 2.2 × as long, for 50,000 rows an interpreted one
2.6 to 3.1 × as long (measured in November 2026)."""
WIDER_USES_MAX: Final = 20
"""Number of steps without their own plan that use a wider one before a plan is made for them."""

KEEPS_NOTHING: Final = frozenset(
    {
        "CartesianProduct",
        "Coalesce",
        "ColumnarToRow",
        "Expand",
        "Filter",
        "Generate",
        "HashAggregate",
        # Constants: their rows come from the text.
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
"""Nodes of physical plans that compute their rows from their inputs at each execution."""

_NODE: Final = re.compile(r"^[ :+|-]*(?:\* ?)?(.*?) *\((?:unknown|\d+)\)$")
_REASON_CHARS_MAX: Final = 300
WIDER_KEPT_MAX: Final = 4_096
"""Maximum number of steps whose uses of a wider plan are counted."""


class PlanRefused(Exception):
    """A plan that cannot be prepared; the text says why."""


class PreparedRequest(msgspec.Struct, frozen=True):
    """The part of a step that matters for preparation."""

    owner: int
    """Serial number of the plan (`PreparedPlan.serial`)."""
    name: str
    """Name of the dataflow, for the log."""
    strata: tuple[int, ...]
    """The strata of the statement (`PreparedPlan.strata`)."""
    one_time: bool
    """True if all changes are at one time, which the statement then relies on."""
    schemas: Mapping[str, TableSchema]
    """The schema of every input that these strata read."""
    tables: Mapping[str, pa.Table]
    """The rows of inputs that have any."""
    render: Callable[[Mapping[str, SessionRelation], tuple[int, int]], str]
    """Renders the statement over relations, for an interval."""
    wanted: Callable[[], pa.Schema]
    group: str
    """Name by which its execution can be canceled."""
    open: Callable[[SlotRows], SessionBridge]
    """Returns this thread's session for plans over slots of few or of many rows."""
    check: Callable[[], None]
    """Raises `OperationCanceled` if the job was canceled."""
    waited: Callable[[float], None] = lambda _: None
    """Called with the milliseconds that the step has waited for other steps."""

    @property
    def changed(self) -> frozenset[str]:
        """Return the inputs that hold changes (rather than state) and have rows."""
        return frozenset(name for name in self.tables if InputName.parse(name).holds_changes)

    @property
    def key(self) -> VariantKey:
        """Return the key of the step's own plan."""
        many = sum(table.num_rows for table in self.tables.values()) > INTERPRETED_ROWS_MAX
        return VariantKey(self.owner, self.strata, self.changed, self.one_time, many)


class VariantKey(NamedTuple):
    """Identifies a variant."""

    owner: int
    strata: tuple[int, ...]
    changed: frozenset[str]
    one_time: bool
    many: bool


class RunnablePlan:
    """A planned step that can be executed again. Only one thread may use it at a time, because its
    slots cannot be shared."""

    def __init__(self, bridge: ClassicBridge, frame: DataFrame) -> None:
        """Keep the part of a frame that runs. Raises Spark's own error for a plan that cannot run,
        and `PlanRefused` for one with several partitions."""
        self._bridge = bridge
        self._schema = bridge.arrow_schema(frame)
        # The frame is dropped: the trees it was planned from take several times as much of the
        # driver's memory, and Spark's own execution would describe the plan to listeners each time.
        self._batches: Any = frame._jdf.toArrowBatchRdd()
        if (partitions := self._batches.getNumPartitions()) != 1:
            raise PlanRefused(f"its plan has {partitions} partitions")

    def run(self, wanted: pa.Schema, group: str, answer: Path, bytes_max: int) -> pa.Table:
        """Execute the plan (see `ClassicBridge.execute_here`). Raises Spark's own error."""
        found = self._bridge.execute_here(self._batches, group, answer, bytes_max)
        reader, batches = pa.BufferReader(found), []
        while reader.tell() < len(found):
            message = pa.ipc.read_message(reader)
            batches.append(pa.ipc.read_record_batch(message, self._schema))
        return pa.Table.from_batches(batches, self._schema).cast(wanted)


class PlanVariant(msgspec.Struct, frozen=True):
    """A plan that is ready to be executed."""

    runnable: RunnablePlan
    slots: SlotSet
    schemas: Mapping[str, TableSchema]
    """The schemas of the slots, by name."""


Inspect: TypeAlias = Callable[[ClassicBridge, DataFrame, SlotSet], Mapping[str, Sequence[int]]]
"""Returns which columns of which slots a plan reads. Raises `PlanRefused`."""


def check_keeps_nothing(
    bridge: ClassicBridge, frame: DataFrame, slots: SlotSet
) -> Mapping[str, Sequence[int]]:
    """Refuse a plan that keeps anything between executions; return the columns that it reads from
    each slot."""
    query: Any = frame._jdf.queryExecution()
    patterns = bridge.jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if query.analyzed().containsPattern(patterns.CURRENT_LIKE()):
        raise PlanRefused("it reads the clock, which a plan does only once")
    if not bridge.deterministic(frame):
        raise PlanRefused("an expression is not deterministic")
    # Executing a frame again runs the same plan again, but whatever the plan keeps would be stale:
    # shuffle files, a broadcast table, a cached relation, the result of a subquery, a reused
    # exchange.
    plan = query.executedPlan()
    for line in tree_text(plan, installed_version()).splitlines():
        if line.strip():
            found = _NODE.match(line)
            node = found.group(1) if found else line.strip()
            if node not in KEEPS_NOTHING and node.split(" ")[0] not in KEEPS_NOTHING:
                raise PlanRefused(f"its plan contains a node of kind {node[:80]!r}")
    if not plan.subqueriesAll().isEmpty():
        raise PlanRefused("its plan contains a subquery")
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
            raise PlanRefused(f"it reads {files[:3]}, which are not its slots")
        fields = leaf.requiredSchema().fieldNames()
        read.setdefault(by_path[files[0]], set()).update(int(field[1:]) for field in fields)
    if not read:
        raise PlanRefused("it reads no slot")
    return {name: sorted(columns) for name, columns in read.items()}


def _plain_path(uri: str) -> str:
    return "/" + unquote(uri.removeprefix("file:")).lstrip("/")


class PreparedSteps:
    """Holds the variants of all dataflows of an engine; all its threads use it."""

    def __init__(
        self, settings: Settings, folder: Path, look: Inspect = check_keeps_nothing
    ) -> None:
        self._max = settings.prepared_plans_max
        self._max_each = settings.prepared_plans_per_dataflow_max
        self._capacity = settings.prepared_slot_bytes_max
        self._answer_bytes_max = result_bytes_max(settings.spark_driver_memory)
        self._folder = folder.resolve()
        self._inspect = look
        # Reentrant, since the garbage collector may free a plan while this thread holds the lock.
        self._lock = threading.RLock()
        # The plans that are ready, the least recently used first.
        self._variants: OrderedDict[VariantKey, PlanVariant] = OrderedDict()
        # Why plans were refused; they are not tried again before their owner is forgotten.
        self._refused: dict[VariantKey, str] = {}
        self._wide_uses: dict[VariantKey, int] = {}
        """Number of uses of a wider plan by steps without their own plan."""
        self._rehearsed: dict[VariantKey, threading.Event] = {}
        """Events of the current rehearsals, set when the plan is ready or has failed."""

    def run(self, request: PreparedRequest) -> pa.Table | None:
        """Run a step and return its rows; None if it must take the general path.

        Raises `OperationCanceled`, or Spark's own error for the data.
        """
        key = request.key
        with self._lock:
            going = [done for other, done in self._rehearsed.items() if _is_wider(other, key)]
        if going and self._find(key) is None and self._wider(key, request) is None:
            began = time.monotonic()
            for rehearsal in going:
                rehearsal.wait()  # This takes less time than building a second plan.
            request.waited((time.monotonic() - began) * 1000)
        return self._run(key, request)

    def is_frequent(self, request: PreparedRequest) -> bool:
        """Return whether steps like this one have used a wider plan so often that their own would
        pay. If so, the count starts again at 0."""
        key = request.key
        with self._lock:
            # A plan for many rows pays immediately, so it is made as soon as a step has that many.
            frequent = not key.many and self._wide_uses.get(key, 0) > WIDER_USES_MAX
            if frequent:
                del self._wide_uses[key]
            return frequent

    def rehearse(self, request: PreparedRequest) -> None:
        """Build a plan for future steps and execute it, if there is room for it without dropping
        another.

        Raises as `run` does. A step that needs the plan meanwhile waits for it.
        """
        key = request.key
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
        self, key: VariantKey, request: PreparedRequest, *, rehearsing: bool = False
    ) -> pa.Table | None:
        if key in self._refused:
            return None
        largest = max((table.nbytes for table in request.tables.values()), default=0)
        if SLOT_BYTES.crossed(largest > self._capacity):
            return None  # Its file may be smaller, but a plan for it does not pay.
        try:
            variant = None
            if not rehearsing:
                # A wider plan comes first: planning takes longest in a young JVM, and most sets of
                # inputs are rare.
                variant = self._find(key) or self._wider(key, request)
            variant = variant or self._build(key, request)
            tables = _in_order(request.tables, variant.schemas)
            with variant.slots.use(tables):
                request.check()
                return variant.runnable.run(
                    request.wanted(), request.group, variant.slots.answer, self._answer_bytes_max
                )
        except (SlotOverflow, SlotBusy):
            return None
        except OperationCanceled:
            self._drop(key)
            raise
        except PlanRefused as error:
            self._refuse(key, request.name, str(error))
        except Exception as error:
            self._drop(key)
            request.check()
            # An error of the data is the answer, as on the general path. After any other error the
            # step takes the general path, and the plan is refused from then on.
            code, text = describe(error)
            if code == "DefiniteError":
                raise
            self._refuse(key, request.name, f"it failed: {text}")
        return None

    def forget(self, owner: int) -> None:
        """Drop everything that is cached for a plan."""
        with self._lock:
            for key in [key for key in self._variants if key.owner == owner]:
                self._drop(key)
            for kept in (self._refused, self._wide_uses):
                for key in [key for key in kept if key.owner == owner]:
                    del kept[key]

    def reasons(self, owner: int) -> tuple[str, ...]:
        """Return the reasons why steps of a plan were refused."""
        with self._lock:
            return tuple(text for key, text in self._refused.items() if key.owner == owner)

    def __len__(self) -> int:
        return len(self._variants)

    def _build(self, key: VariantKey, request: PreparedRequest) -> PlanVariant:
        """Plan the step over new slots. Raises `PlanRefused` or Spark's own error."""
        # Unchanged deltas are left out of the text, so they are neither planned nor run. State that
        # happens to be empty gets a slot, so that hot and cold groups share a variant.
        changed = request.changed
        viewed = [
            name
            for name in request.schemas
            if name in changed or not InputName.parse(name).holds_changes
        ]
        relations = {
            name: SessionRelation(schema, f"__{name}" if name in viewed else None)
            for name, schema in request.schemas.items()
        }
        text = request.render(relations, (1, 2))
        # A plan serves steps of any interval, so its text must not contain one.
        if text != request.render(relations, (5, 9)):
            raise PlanRefused("its text depends on the step's interval")
        kinds = {name: positional(request.schemas[name].arrow_updates()) for name in viewed}
        slots = SlotSet(self._folder / uuid.uuid4().hex, kinds, self._capacity)
        try:
            bridge = request.open(SlotRows.MANY if key.many else SlotRows.FEW)
            assert isinstance(bridge, ClassicBridge)
            frames = {
                f"__{name}": bridge.slot(
                    slots.path(name), kinds[name], request.schemas[name].arrow_updates().names
                )
                for name in viewed
            }
            with bridge.views(frames):
                frame = bridge.sql(text)
            slots.narrow(self._inspect(bridge, frame, slots))
            runnable = RunnablePlan(bridge, frame)
        except BaseException:
            slots.abandon()
            raise
        variant = PlanVariant(runnable, slots, {name: request.schemas[name] for name in viewed})
        self._keep(key, variant)
        return variant

    def _find(self, key: VariantKey) -> PlanVariant | None:
        """Return the step's own plan, unless it is being rehearsed, since its slots are then in
        use."""
        with self._lock:
            found = None if key in self._rehearsed else self._variants.get(key)
            if found is not None:
                self._variants.move_to_end(key)
            return found

    def _wider(self, key: VariantKey, request: PreparedRequest) -> PlanVariant | None:
        """Return a plan that does more than is needed, with the fewest changed inputs; None if
        there is none."""
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
            # Of equal ones prefer a plan for a single time, which needs no windows over times.
            best = min(found, key=lambda other: (len(other.changed), not other.one_time))
            return self._find(best)

    def _keep(self, key: VariantKey, variant: PlanVariant) -> None:
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
            f"are planned at each step: {text}",
            file=sys.stderr,
            flush=True,
        )


def _is_wider(other: VariantKey, key: VariantKey) -> bool:
    """Return whether the plan `other` makes what `key` would make, if its additional inputs are
    empty."""
    return (
        other.owner == key.owner
        and other.strata[-1] == key.strata[-1]
        and set(other.strata) >= set(key.strata)
        and other.changed >= key.changed
        # A plan for several times can serve a step at a single time, but not the reverse.
        and (other.one_time == key.one_time or not other.one_time)
        and other.many == key.many
    )


def _has_room(variant: PlanVariant, tables: Mapping[str, pa.Table]) -> bool:
    """Return whether a plan has a slot for each of these tables, with columns that they all
    have."""
    return all(
        name in variant.schemas and set(variant.schemas[name].names) <= set(table.column_names)
        for name, table in tables.items()
    )


def _in_order(
    given: Mapping[str, pa.Table], schemas: Mapping[str, TableSchema]
) -> Mapping[str, pa.Table]:
    """Return the rows with their columns in the plan's order. Raises `PlanRefused`."""
    tables = {}
    for name, table in given.items():
        wanted = schemas[name].arrow_updates()
        if not table.schema.equals(wanted):
            missing = [column for column in wanted.names if column not in table.column_names]
            if missing:
                raise PlanRefused(f"rows of {name} lack column {missing[0]!r}")
            table = table.select(wanted.names).cast(wanted)
        tables[name] = table
    return tables
