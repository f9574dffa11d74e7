"""Mutants of the storage half; see `planted`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

from actors.channel_adapter import ChannelAdapter
from actors.connectors.ingest.shards import IngestShards
from actors.connectors.ingest_task import IngestRunning, IngestTask
from actors.connectors.sink_task import SinkTask, _Driver
from actors.connectors.sinks.messages import hold_of
from actors.model.plan.schema import TableSchema
from actors.model.protocol.internal import TaggedResponse
from actors.model.protocol.storage_internal import CreateIngestionDataflow, DropObjects
from actors.replica.dataflow import commit
from actors.replica.storage.desired_state import DesiredState
from actors.replica.storage.events import CancelLookUp
from actors.replica.storage.half import StorageHalf
from actors.replica.storage.reconciliation import reconcile
from actors.replica.storage.renderings import RenderingEnded
from actors.replica.storage.reporting import dataflow_rows
from actors.replica.storage.state import StorageState
from tests.simulators.mutants import Mutants
from tests.simulators.service.storage_checkers import id_of

BUGS: Final = Mutants()
"""Only runs with a source can find one (`schedule.has_source`)."""


@BUGS.wraps(ChannelAdapter, "_from_worker")
async def storage_nonce_unchecked(right: Any, self: ChannelAdapter, tagged: TaggedResponse) -> None:
    """Let the storage half's adapter forward every response to the present connection."""
    current = self._rules.current
    if self._half == "compute":
        await right(self, tagged)
    elif current is not None and self._rules.connected:
        self._forward(TaggedResponse(current, tagged.response, tagged.serial))
    else:
        await self._acknowledge(tagged.nonce, (tagged.serial,))


@BUGS.planted
def rendered_after_its_drop() -> Iterator[None]:
    """Keep the look-up of a dropped object, whose answer then renders the object."""
    right_drop, right_found = DesiredState.drop, DesiredState.found

    def drop(self: DesiredState, *ids: str) -> list[Any]:
        late = {t: self._all[id].what for t, id in self._tickets.items() if id in ids}
        self.__dict__.setdefault("planted", {}).update(late)
        return [each for each in right_drop(self, *ids) if not isinstance(each, CancelLookUp)]

    def found(self: DesiredState, ticket: int, resume: Any) -> list[Any]:
        what = self.__dict__.get("planted", {}).pop(ticket, None)
        if what is not None:
            return [CreateIngestionDataflow(what, ticket, resume)]
        return right_found(self, ticket, resume)

    with (
        mock.patch.object(DesiredState, "drop", drop),
        mock.patch.object(DesiredState, "found", found),
    ):
        yield


@BUGS.wraps(StorageState, "_drop")
def dropped_out_of_order(right: Any, self: StorageState, id: str) -> Any:
    """Let a worker drop when its client says so, not at the drop's place in the one order."""
    effects = right(self, id)
    if self.index != 0:
        for change in self.renderings.apply(self.next_index, DropObjects((id,))):
            if isinstance(change, RenderingEnded):
                effects += self._ended(change)
    return effects


@BUGS.planted
def unmentioned_kept() -> Iterator[None]:
    """Let a reconciliation keep the objects that its client does not mention."""

    def keeping(*args: Any) -> Any:
        return replace(reconcile(*args), drop=())

    with mock.patch("actors.replica.storage.state.reconcile", keeping):
        yield


@BUGS.wraps(StorageHalf, "rows")
def shown_by_all_workers(right: Any, self: StorageHalf, name: str) -> Any:
    """Let every worker show the dataflows that any of them runs."""
    yield from right(self, name)
    if name == "dataflows":
        mine = {id_of(made) for made in self._described.values()}
        for id_, each in self.state.renderings.current.items():
            if id_ not in mine:
                made: Any = each.what
                yield from dataflow_rows(self._index, made, "running")


class _Forgetful:
    """A sink that does not return its external upper."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def open(self, schema: Any) -> None:
        await self._inner.open(schema)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@BUGS.wraps(SinkTask, "__init__")
def sink_begun_anew(right: Any, self: SinkTask, *args: Any, **options: Any) -> None:
    """Let a sink task begin at the sink's as_of, whatever was committed."""
    right(self, *args, **options)
    make = self._make
    self._make = lambda *each: _Forgetful(make(*each))


@BUGS.wraps(_Driver, "_write")
async def hold_moved_first(
    right: Any, self: _Driver, found: Any, upper: int, stretches: Any
) -> None:
    """Move a sink's hold before its batch is committed."""
    await right(self, found, upper, stretches)
    work = self._work
    await self._persist.set_hold(work.shard, hold_of(work.id), upper)
    await self._reader.downgrade(upper)


@BUGS.wraps(commit, "holds_at")
def view_hold_ahead(right: Any, description: Any, export: Any, lo: int) -> Any:
    """Move a view's holds on its inputs ahead of the time that a restart resumes from."""
    return right(description, export, lo + 100)


@BUGS.wraps(IngestTask, "_commit")
def told_before_durable(right: Any, self: IngestTask, batch: Any) -> None:
    """Report a source's upper when the write begins, not when it is durable."""
    upper = batch.time + 1
    sealed = tuple((name, upper) for name in self._shards.exports)
    self._owner.reply(IngestRunning(self._id, self._number, upper, sealed, ()))
    right(self, batch)


@BUGS.wraps(IngestShards, "_append")
async def contents_without_position(
    right: Any, self: IngestShards, upper: int, remap: Any, *more: Any
) -> Any:
    """Make a source's rows durable without the position behind them."""
    return await right(self, upper, (), *more)


@BUGS.planted
def columns_not_told() -> Iterator[None]:
    """Give a table columns without telling its source."""
    with mock.patch.object(TableSchema, "extends", lambda self, other: self == other):
        yield
