"""Runs a script's views as the service does: real dataflows over real shards.

`ScriptStage` makes a shard for every table and view in the store of its `PersistClient`, writes the
tables' changes, and keeps one `DataflowActor` per view, with listen and fetch tasks and a stand-in
for its worker, on the engine it is given. Views that read views import their output shards. It can
stop all of them and start them again from durable state, let the shards compact, and read a view's
contents at a time as a client would.

Rules: tables and views share one clock; `write` moves all tables' uppers together. `wait` fails
with the dataflows' last statuses if a view does not reach the upper in time.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import pyarrow as pa

from actors.durable.persist import AppendCommitted, NewShard, PersistClient, ShardAppend
from actors.engine.views.input_uses import input_filter
from actors.fetch_task import FetchTask
from actors.listen_task import ListenTask
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema
from actors.model.plan.updates import between
from actors.model.protocol.compute import (
    DataflowDescription,
    ShardImport,
    StatusResponse,
    ViewExport,
)
from actors.model.protocol.internal import (
    BatchEmitted,
    DataflowProgress,
    DataflowScheduled,
    EmitBatch,
    InputStarted,
    InstallUpdates,
    StartInputs,
    UpdatesInstalled,
    WritesAllowed,
)
from actors.replica.dataflow.dataflow import DataflowActor
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import Actor, ActorAddress, ActorSystem
from actors.runtime.settings import Settings
from actors.testing.engine import table_of
from actors.testing.maintain import updates_of
from actors.testing.nodes import NodeRelation
from actors.testing.nodes import Update as Row
from actors.testing.patience import PATIENCE_S

RETAIN: Final = "retain"
WAIT_SECONDS: Final = PATIENCE_S
LARGE_PARTS: Final = 3
"""Number of parts into which a large table is split when it is written at once."""
POLL_SECONDS: Final = 0.25
"""Interval in seconds at which silent dataflows are checked for crashes."""


def shard_name(name: str) -> str:
    """Return the shard of a table or view. Names that are not valid for shards are encoded."""
    plain = re.fullmatch(r"\w[\w.=-]*", name, re.ASCII)
    return name if plain else f"named.{name.encode().hex()}"


class ViewStuck(PenstockError):
    """Raised if a view does not reach an upper in time, or its dataflow crashed."""


class _Worker(Actor[Any]):
    """Stands in for a view's worker: starts its tasks and records its reports."""

    def __init__(self, stage: ScriptStage, description: DataflowDescription) -> None:
        self._stage = stage
        self._description = description
        self._tasks: list[ActorAddress[Any]] = []
        """Listen and fetch tasks that it has started."""
        self.flow: ActorAddress[Any] | None = None
        """The dataflow; None until it is started."""
        self.status = "not started"
        """Text of the last reported status."""
        self.upper = 0
        """Last reported upper."""

    async def receive(self, message: Any) -> None:
        """Handle one report of the dataflow."""
        flow = self.flow
        assert flow is not None
        match message:
            case StartInputs(incarnation=incarnation):
                for task in self._tasks:
                    await self.ctx.stop_child(task)
                self._tasks.clear()
                for index, imported in enumerate(self._description.imports):
                    self._start(flow, incarnation, index, imported)
            case InstallUpdates(dataflow=id_, incarnation=incarnation, upper=upper):
                flow.send_nowait(UpdatesInstalled(id_, incarnation, 0, upper))
            case EmitBatch(dataflow=id_, incarnation=incarnation, batch=batch):
                flow.send_nowait(BatchEmitted(id_, incarnation, batch.upper))
            case DataflowProgress(dataflow=id_, output=output):
                self.upper = max(self.upper, output)
                self._stage.progress[id_] = max(output, self._stage.progress.get(id_, 0))
            case StatusResponse(state=state, text=text):
                self.status = f"{state} {text}".strip()
                self._stage.statuses[message.id] = message
        self._stage.news.set()
        self._stage.news = anyio.Event()

    def _start(
        self, flow: ActorAddress[Any], incarnation: int, index: int, imported: ShardImport
    ) -> None:
        stage, id_ = self._stage, self._description.id
        fetch = self.ctx.spawn(
            lambda: FetchTask(
                stage.persist, imported.schema, id_, incarnation, index, flow, stage.settings
            ),
            f"fetch-{incarnation}-{index}",
        )
        export = self._description.export
        wanted = input_filter(export.plan, index) if isinstance(export, ViewExport) else None
        listen = self.ctx.spawn(
            lambda: ListenTask(
                stage.persist,
                imported,
                id_,
                incarnation,
                index,
                flow,
                stage.settings,
                wanted=wanted,
            ),
            f"listen-{incarnation}-{index}",
        )
        self._tasks += [fetch, listen]
        flow.send_nowait(InputStarted(id_, incarnation, 0, index, fetch, listen))


class ScriptStage:
    """The running tables and views of one script."""

    def __init__(
        self,
        system: ActorSystem,
        executor: ActorAddress[Any],
        persist: PersistClient,
        scratch: Path,
        settings: Settings,
        name: str,
    ) -> None:
        self.persist = persist
        self.settings = settings
        self.progress: dict[str, int] = {}
        """Last reported output frontier of each dataflow."""
        self.statuses: dict[str, StatusResponse] = {}
        """Last status of each dataflow."""
        self.wait_seconds: float = WAIT_SECONDS
        self.news = anyio.Event()
        """Set whenever a dataflow reports something, then replaced."""
        self._system = system
        self._executor = executor
        self._scratch = scratch
        self._name = name
        self._tables: dict[str, TableSchema] = {}
        """Schemas of the tables, by name."""
        self._plans: dict[str, DeltaPlan] = {}
        """Plans of the views, by name."""
        self._running: list[tuple[ActorAddress[Any], ActorAddress[Any], _Worker]] = []
        """Running dataflows, each with its worker and stand-in."""
        self._lives = itertools.count(1)
        """Numbers the starts of dataflows, for unique names."""
        self._upper = 0
        """Shared upper of the tables."""

    async def open(self, tables: Mapping[str, TableSchema], plans: Mapping[str, DeltaPlan]) -> None:
        """Make the shards of tables and views."""
        self._tables, self._plans = dict(tables), dict(plans)
        new = [
            NewShard(shard_name(name), schema, holds={RETAIN: 0}) for name, schema in tables.items()
        ]
        for name, plan in plans.items():
            new.append(NewShard(shard_name(name), plan.output, holds={RETAIN: 0}))
            for shard, state in zip(_hidden_names(name, plan), plan.hidden, strict=True):
                new.append(NewShard(shard, state.schema, holds={RETAIN: 0}))
        if not await self.persist.create_shards(new):
            raise ViewStuck("a shard already exists")

    async def write(
        self,
        updates: Mapping[str, Sequence[Row]],
        upper: int,
        large: Mapping[str, Sequence[pa.Table]] | None = None,
    ) -> None:
        """Append the tables' updates with times from the last upper up to this one, and for `large`
        tables these updates, in several parts each."""
        for name, schema in self._tables.items():
            shard = shard_name(name)
            columns = tuple((column.name, column.type) for column in schema.columns)
            rows = list(updates.get(name, []))
            table = table_of(NodeRelation(columns, rows))
            parts = list(await self.persist.write_parts(shard, table) if rows else ())
            for whole in (large or {}).get(name, ()):
                piece = -(-whole.num_rows // LARGE_PARTS)
                for start in range(0, whole.num_rows, piece or 1):
                    parts += await self.persist.write_parts(shard, whole.slice(start, piece))
            done = await self.persist.append([ShardAppend(shard, self._upper, upper, tuple(parts))])
            if not isinstance(done, AppendCommitted):
                raise ViewStuck(f"{name} could not be appended to: {done}")
        self._upper = upper

    async def start(self, as_of: int, settings: Settings | None = None, replica: str = "") -> None:
        """Start a dataflow per view; a new one is hydrated at `as_of`. A second call with another
        `replica` starts one alongside the first."""
        life = next(self._lives)
        limits = settings or self.settings
        for name, plan in self._plans.items():
            description = self._description(name, plan, as_of)
            worker = _Worker(self, description)
            prefix = f"{self._dataflow(name)}-{life}"
            at = self._system.spawn(partial(_same, worker), f"{prefix}-worker")
            flow = self._system.spawn(
                self._maker(description, at, limits, self._scratch / prefix, replica), prefix
            )
            worker.flow = flow
            self._running.append((flow, at, worker))
            await flow.send(WritesAllowed())
            await flow.send(DataflowScheduled())

    def _maker(
        self,
        description: DataflowDescription,
        at: ActorAddress[Any],
        limits: Settings,
        scratch: Path,
        replica: str,
    ) -> Callable[[], DataflowActor]:
        return lambda: DataflowActor(
            description, (at,), self._executor, self.persist, limits, scratch, replica=replica
        )

    def _description(self, name: str, plan: DeltaPlan, as_of: int) -> DataflowDescription:
        schemas = self._tables | {other: p.output for other, p in self._plans.items()}
        imports = tuple(ShardImport(shard_name(n), schemas[n]) for n in plan.inputs)
        export = ViewExport(plan, shard_name(name), _hidden_names(name, plan))
        return DataflowDescription(self._dataflow(name), name, imports, export, as_of)

    def _dataflow(self, view: str) -> str:
        return f"{self._name}-{shard_name(view)}"

    async def stop(self, first: int | None = None) -> None:
        """Stop all dataflows, or the `first` ones that were started. Durable state stays."""
        stopped, self._running = self._running[:first], self._running[first or len(self._running) :]
        for flow, worker, _ in stopped:
            for address in (flow, worker):
                cell = self._system.cells.get(address.path)
                if cell is not None:
                    cell.request_stop()
                    await cell.stopped.wait()
        if not self._running:
            self.progress.clear()

    async def wait_each(self, upper: int) -> None:
        """Wait until every view has reached `upper` on every replica. Raises `ViewStuck`."""
        with anyio.move_on_after(self.wait_seconds) as scope:
            while any(worker.upper < upper for _, _, worker in self._running):
                with anyio.move_on_after(POLL_SECONDS):
                    await self.news.wait()
                self._look()
        if scope.cancelled_caught:
            said = "; ".join(worker.status for _, _, worker in self._running)
            raise ViewStuck(
                f"not all reached {upper} in {self.wait_seconds:.0f} s; dataflows: {said}"
            )

    async def wait(self, upper: int) -> None:
        """Wait until every view has been computed up to `upper`. Raises `ViewStuck`."""
        with anyio.move_on_after(self.wait_seconds) as scope:
            while any(
                self.progress.get(f"{self._name}-{shard_name(name)}", 0) < upper
                for name in self._plans
            ):
                with anyio.move_on_after(POLL_SECONDS):
                    await self.news.wait()
                self._look()
        if scope.cancelled_caught:
            said = "; ".join(worker.status for _, _, worker in self._running)
            raise ViewStuck(
                f"no progress to {upper} in {self.wait_seconds:.0f} s; dataflows: {said}"
            )

    def rows_read(self, view: str) -> int:
        """Return how many rows of state the lookups of a view's last step returned; -1 if the view
        was computed in full."""
        status = self.statuses.get(self._dataflow(view))
        return -1 if status is None or status.recomputed else status.rows_read

    def _look(self) -> None:
        """Raise `ViewStuck` if a dataflow has crashed."""
        for flow, _, _ in self._running:
            cell = self._system.cells.get(flow.path)
            if cell is None or cell.stopped.is_set():
                raise ViewStuck(f"the dataflow {flow.path} has crashed")

    async def compact(self, since: int) -> None:
        """Advance all sinces to `since`, and merge the shards' batches."""
        shards = [shard_name(name) for name in (*self._tables, *self._plans)]
        for name, plan in self._plans.items():
            shards += _hidden_names(name, plan)
        await self.persist.set_holds([(shard, RETAIN, since) for shard in shards])
        for shard in shards:
            await self.persist.maintain(shard)

    async def contents(self, view: str, times: Sequence[int]) -> dict[int, Counter[Any] | None]:
        """Return a view's contents at each time; None where it holds an error."""
        schema = self._plans[view].output
        found: dict[int, Counter[Any] | None] = {}
        reader = await self.persist.open_reader(shard_name(view), f"check-{times[-1]}")
        try:
            for time in times:
                found[time] = await self._read(reader, schema, time)
        finally:
            await reader.close()
        return found

    async def _read(self, reader: Any, schema: TableSchema, time: int) -> Counter[Any] | None:
        parts, _ = await reader.snapshot(time)
        sums: Counter[Any] = Counter()
        errors: Counter[str] = Counter()
        for part in parts:
            table = between(await self.persist.fetch(part, schema), 0, time + 1)
            if ERROR in table.column_names:
                texts = zip(table[ERROR].to_pylist(), table[DIFF].to_pylist(), strict=True)
                for text, diff in texts:
                    if text is not None:
                        errors[text] += diff
                table = table.filter(table[ERROR].is_null())
            for row, _, diff in updates_of(table.select([*schema.names, TIME, DIFF]), schema.names):
                sums[row] += diff
        if any(diff > 0 for diff in errors.values()):
            return None
        return Counter({row: diff for row, diff in sums.items() if diff})


def _same(worker: _Worker) -> _Worker:
    return worker


def _hidden_names(name: str, plan: DeltaPlan) -> tuple[str, ...]:
    return tuple(f"{shard_name(name)}.hidden{index}" for index in range(len(plan.hidden)))
