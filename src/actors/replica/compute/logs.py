"""The relations that a worker keeps about itself, as rows. Pure.

A worker answers a peek of a relation (`LogTarget`) with its own current rows. The client gets the
combined rows of all workers of all replicas. State that only worker 0 has (dataflow actors and
their statuses) appears only in worker 0's rows. Keys, filter, columns, order and limit apply as in
any other read (`compute.peeks`).

The number of rows is bounded: one for each dataflow, arrangement or pending peek, which have their
own limits, and the last `log_rows_max` steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from actors.durable.arrangement.hashing import Hashes
from actors.durable.arrangement.shared import SharedStatistics
from actors.model.plan.schema import DIFF, ERROR
from actors.model.plan.updates import ResultPiece
from actors.model.protocol.compute import (
    ERROR_STATES,
    CopyToExport,
    DataflowDescription,
    IndexExport,
    IndexTarget,
    Peek,
    ShardTarget,
    StatusResponse,
    SubscribeExport,
    ViewExport,
)
from actors.model.protocol.internal import AdapterStatistics, Half, InputStatistics
from actors.model.protocol.relations import PREFIX, SystemRelation, worker_relation
from actors.replica.compute.events import LogReconciliation
from actors.replica.compute.peeks import PeekSpec
from actors.replica.compute.rendered_dataflow import RenderedDataflow
from actors.replica.compute.rendering import DataflowRendering
from actors.replica.compute.state import ComputeState
from actors.runtime.measurement import Measurement
from actors.runtime.memory_ledger import MemoryUse
from actors.runtime.metric_table import DATAFLOWS, RECONCILED_OBJECTS
from actors.runtime.progress import Frontier, frontier_or_null, ms_behind

Row: TypeAlias = tuple[Any, ...]

_STEPS: Final = worker_relation(f"{PREFIX}steps")
_HYDRATING: Final = ("suspended", "hydrating")
PARTS_IN_FLIGHT: Final = f"{PREFIX}parts_in_flight"
"""Name of the relation whose rows come from asking the dataflows."""
ADAPTERS: Final = f"{PREFIX}adapters"
"""Name of the relation whose rows come from asking the adapters."""
_ADAPTERS: Final = worker_relation(ADAPTERS)


# -- rows as contents ------------------------------------------------------------------------------


def table_of(relation: SystemRelation, rows: Iterable[Row]) -> pa.Table:
    """Return rows as a table with a `DIFF` column."""
    gathered = list(rows)
    fields = [*relation.schema.arrow(), pa.field(DIFF, pa.int64())]
    columns = list(zip(*gathered, strict=True)) or [()] * len(relation.columns)
    arrays = [
        pa.array(values, field.type) for values, field in zip(columns, fields[:-1], strict=True)
    ]
    arrays.append(pa.array([1] * len(gathered), pa.int64()))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


class LogTableContents:
    """Rows of a relation, as the contents that a peek reads."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def errors(self) -> pa.Table:
        """Return an empty table: relations contain no errors."""
        return pa.table({ERROR: pa.array([], pa.string()), DIFF: pa.array([], pa.int64())})

    def rows(self, wanted: Hashes | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows. The table is too small for lookups by hash to pay off."""
        yield from self._table.to_batches()


def answer(
    relation: SystemRelation, rows: Iterable[Row], peek: Peek, piece_bytes: int
) -> Iterator[ResultPiece]:
    """Yield the rows that the peek selects. Raise `InvalidUsage` if it does not fit."""
    spec = PeekSpec(relation.schema, peek)
    return spec.answer(LogTableContents(table_of(relation, rows)), None, piece_bytes)


# -- logs ------------------------------------------------------------------------------------------


class StepLog:
    """Log of the last steps of a worker's dataflows."""

    def __init__(self, rows_max: int) -> None:
        self._rows: deque[tuple[int, DataflowDescription, StatusResponse]] = deque(maxlen=rows_max)

    def note(self, rendered: RenderedDataflow, seen: StatusResponse, now_ms: int) -> None:
        """Add a step if the status reports more steps than the previous status.

        Call this before `rendered` takes over the new status.
        """
        known = 0 if rendered.status is None else rendered.status.steps
        if seen.steps and seen.steps != known:
            self._rows.append((now_ms, rendered.description, seen))

    def rows(self, worker: int) -> Iterator[Row]:
        """Yield the logged steps, oldest first."""
        for at_ms, description, seen in self._rows:
            yield _STEPS.row(
                seen,
                worker=worker,
                at_ms=at_ms,
                name=description.name,
                step=seen.steps,
                hi=frontier_or_null(seen.hi),
                ms=seen.step_ms,
                own_ms=seen.step_ms - seen.wait_ms - seen.spark_ms,
            )


class ReconciliationLog:
    """Counts of the outcomes of reconciliations."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        """Count of each outcome and flag since the worker started."""
        self._last: Counter[str] = Counter()
        """Counts of the last reconciliation."""

    def note(self, done: LogReconciliation) -> None:
        """Add a reconciliation."""
        self._last = Counter(
            reused=done.reused,
            created=done.created,
            dropped=done.dropped,
            replaced=len(done.replaced),
        )
        self._last.update(flag.value for each in done.replaced for flag in each.flags)
        self.total.update(self._last)

    def flags(self) -> tuple[tuple[str, int], ...]:
        """Return why dataflows were replaced: each flag with its count."""
        return tuple(sorted((f, n) for f, n in self.total.items() if f not in _OUTCOMES))

    def rows(self, worker: int) -> Iterator[Row]:
        """Yield a row for each outcome, then one for each flag."""
        for outcome in _OUTCOMES:
            yield worker, outcome, self._last[outcome], self.total[outcome]
        for flag, total in self.flags():
            yield worker, flag, self._last[flag], total


_OUTCOMES: Final = ("reused", "created", "dropped", "replaced")
_OUTCOMES_MEASURED: Final = {"reused": "kept"}
"""Names of outcomes in metrics, where both halves have the same."""
_STATES_MEASURED: Final = (
    "gathering",
    "running",
    "suspended",
    "hydrating",
    "stalled",
    "frozen",
    "errored",
)
"""States that are always measured, so that a graph shows when their last dataflow has gone."""


# -- relations -------------------------------------------------------------------------------------


class WorkerLogs:
    """The relations of one worker.

    `shared` returns the arrangements that views share. `replica` is the name used in the rows.
    """

    def __init__(
        self,
        state: ComputeState,
        renderings: dict[int, DataflowRendering],
        rows_max: int,
        shared: Callable[[], list[SharedStatistics]],
        replica: str = "",
    ) -> None:
        self._replica = replica
        self._state = state
        self._renderings = renderings
        self._shared = shared
        self.storage_rows: Callable[[str], Iterable[Row]] = lambda name: ()
        """Returns the storage half's rows of `dataflows`, `frontiers` and `arrangements`."""
        self.steps = StepLog(rows_max)
        self.reconciliation = ReconciliationLog()

    def rows(self, name: str, answers: Sequence[Any] = ()) -> Iterator[Row]:
        """Return the rows of a relation.

        `answers` are those of the actors that were asked: the dataflows' `InputStatistics` for
        `parts_in_flight`, and for `adapters` pairs of a half and its `AdapterStatistics`. Raise
        `UnknownObject` if the workers do not keep the relation.
        """
        return ((self._replica, *row) for row in self._rows(worker_relation(name), answers))

    def _rows(self, relation: SystemRelation, answers: Sequence[Any]) -> Iterator[Row]:
        """Return the rows without the replica's name."""
        worker = self._state.index
        match relation.name.removeprefix(PREFIX):
            case "dataflows":
                return chain(self._dataflows(worker), self.storage_rows("dataflows"))
            case "frontiers":
                return chain(self._frontiers(worker), self.storage_rows("frontiers"))
            case "arrangements":
                return chain(self._arrangements(worker), self.storage_rows("arrangements"))
            case "worker_peeks":
                return self._peeks(worker)
            case "steps":
                return self.steps.rows(worker)
            case "parts_in_flight":
                return (_input_row(worker, each) for each in answers)
            case "adapters":
                return (_adapter_row(worker, half, each) for half, each in answers)
            case "hydration":
                return self._hydration(worker)
            case _:
                return self.reconciliation.rows(worker)

    def _dataflows(self, worker: int) -> Iterator[Row]:
        if worker != 0:
            return
        for rendered in self._state.rendered.values():
            status = rendered.status
            # An error text may quote rows. `penstock.errors` shows it, to those who may read the
            # rows.
            quiet = status is None or status.state in ERROR_STATES
            yield _dataflow_row(
                rendered.description,
                rendered.allowed,
                rendered.scheduled,
                _state_of(rendered),
                "" if status is None or quiet else status.text,
                0 if status is None else status.steps,
            )
        for number in self._state.dropping:
            rendering = self._renderings.get(number)
            if rendering is not None:
                yield _dataflow_row(rendering.description, None, False, "dropping", "", 0)

    def _frontiers(self, worker: int) -> Iterator[Row]:
        for rendered in self._state.rendered.values():
            described = rendered.description
            if rendered.is_copy or (rendered.is_subscribe and worker != 0):
                continue
            upper = rendered.emitted if rendered.is_subscribe else rendered.output
            write = None if rendered.is_subscribe else frontier_or_null(rendered.write)
            yield (
                worker,
                described.id,
                described.name,
                frontier_or_null(rendered.allowed),
                frontier_or_null(rendered.input),
                write,
                frontier_or_null(upper),
                ms_behind(rendered.input, upper),
            )

    def _arrangements(self, worker: int) -> Iterator[Row]:
        for rendering in self._renderings.values():
            held = None if rendering.index is None else rendering.index.statistics(rendering.id)
            if held is None or not isinstance(rendering.description.export, IndexExport):
                continue
            key = ", ".join(rendering.description.export.key)
            users = len(self._state.reads.pending.of(rendering.number))
            sizes = held.rows, held.runs, held.bytes_memory, held.bytes_mapped
            columns = ", ".join(rendering.description.export.schema.names)
            yield (worker, "index", held.id, key, columns, "", *sizes, users)
        # Dataflows run on worker 0, so only its rows include the arrangements they share.
        if worker != 0:
            return
        for shared in self._shared():
            inner = shared.arrangement
            sizes = inner.rows, inner.runs, inner.bytes_memory, inner.bytes_mapped
            kind = "hidden" if shared.private else "shared"
            what = ", ".join(shared.key), ", ".join(shared.columns), shared.filter
            yield (worker, kind, shared.shard, *what, *sizes, shared.users)

    def measures(self) -> Iterator[Measurement]:
        """Yield the metrics of worker 0: dataflows by state, and outcomes of reconciliations."""
        # All workers decide alike, and only worker 0 knows the states.
        if self._state.index != 0:
            return
        states = Counter(dict.fromkeys(_STATES_MEASURED, 0))
        states.update(_state_of(each) for each in self._state.rendered.values())
        states["dropping"] += len(self._state.dropping)
        for state, count in states.items():
            yield Measurement(DATAFLOWS, count, (self._replica, state))
        for outcome in _OUTCOMES:
            count = self.reconciliation.total[outcome]
            named = _OUTCOMES_MEASURED.get(outcome, outcome)
            yield Measurement(RECONCILED_OBJECTS, count, ("compute", named))

    def memory(self) -> Iterator[MemoryUse]:
        """Yield the memory of the index partitions, for a `MemoryLedger`."""
        for rendering in self._renderings.values():
            held = None if rendering.index is None else rendering.index.statistics(rendering.id)
            if held is not None:
                yield MemoryUse("index", held.id, held.rows, held.bytes_memory, held.bytes_mapped)

    def _peeks(self, worker: int) -> Iterator[Row]:
        for pending in self._state.reads.pending.all():
            peek = pending.peek
            kind = "relation"
            if isinstance(peek.target, IndexTarget):
                kind = "index"
            elif isinstance(peek.target, ShardTarget):
                kind = "shard"
            yield worker, peek.uuid, kind, peek.target.id, peek.time, pending.started

    def _hydration(self, worker: int) -> Iterator[Row]:
        if worker != 0:
            return
        for rendered in self._state.rendered.values():
            status = rendered.status
            state = "suspended" if status is None else status.state
            if rendered.is_subscribe or rendered.is_copy or state not in _HYDRATING:
                continue
            read = (None,) * 4
            if status is not None and status.parts_total:
                read = (
                    status.parts_read,
                    status.parts_total,
                    status.bytes_read,
                    status.bytes_total,
                )  # type: ignore[assignment]
            yield (worker, rendered.id, rendered.description.name, state, *read)


def _state_of(rendered: RenderedDataflow) -> str:
    if rendered.status is not None:
        return rendered.status.state
    return "running" if rendered.scheduled else "suspended"


def kind_of(description: DataflowDescription) -> str:
    """Return the kind of a dataflow's export, as shown in `penstock.dataflows`."""
    match description.export:
        case ViewExport():
            return "view"
        case IndexExport():
            return "index"
        case SubscribeExport():
            return "subscribe"
        case CopyToExport():
            return "copy"


def _dataflow_row(
    description: DataflowDescription,
    since: Frontier | None,
    scheduled: bool,
    state: str,
    text: str,
    steps: int,
) -> Row:
    return (
        0,
        description.id,
        description.name,
        kind_of(description),
        description.as_of,
        frontier_or_null(description.until),
        frontier_or_null(since),
        scheduled,
        state,
        text,
        steps,
        ", ".join(imported.shard for imported in description.imports),
    )


def _adapter_row(worker: int, half: Half, each: AdapterStatistics) -> Row:
    return _ADAPTERS.row(
        each,
        worker=worker,
        half=half,
        client=each.nonce,
        clients_waiting=each.waiting,
        held=each.holding,
    )


def _input_row(worker: int, each: InputStatistics) -> Row:
    values = msgspec.structs.astuple(each)
    dataflow, index, shard, described, *sizes = values
    return (worker, dataflow, index, shard, frontier_or_null(described), *sizes)
