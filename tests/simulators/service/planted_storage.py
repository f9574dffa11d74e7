"""Mutants of the storage half; see `planted`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from msgspec.structs import replace

from actors.channel_adapter import ResponsesForwarded, StorageAdapter
from actors.connectors.ingest.shards import IngestShards
from actors.connectors.ingest_task import IngestRunning, IngestTask
from actors.connectors.sink_task import SinkTask, _Driver
from actors.connectors.sinks.messages import hold_of
from actors.dataflow import commit
from actors.plan.schema import TableSchema
from actors.protocol.storage import StorageTaggedResponse
from actors.protocol.storage_internal import CreateIngestionDataflow, DropObjects
from actors.storage.events import CancelLookUp
from actors.storage.half import StorageHalf
from actors.storage.history import reconcile
from actors.storage.pursuits import DesiredState
from actors.storage.renderings import RenderingEnded
from actors.storage.state import StorageState
from actors.storage.telling import dataflow_rows
from tests.simulators.service.storage_checkers import id_of


@contextmanager
def storage_nonce_unchecked() -> Iterator[None]:
    """Let the storage half's adapter forward every response to the present connection."""

    async def from_worker(self: StorageAdapter, tagged: Any) -> None:
        current = self._rules.current
        if current is not None and self._rules.connected:
            self._forward(StorageTaggedResponse(current, tagged.response, tagged.serial))
        else:
            await self._down(ResponsesForwarded(tagged.nonce, (tagged.serial,)))

    with mock.patch.object(StorageAdapter, "_from_worker", from_worker):
        yield


@contextmanager
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


@contextmanager
def dropped_out_of_order() -> Iterator[None]:
    """Let a worker drop when its client says so, not at the drop's place in the one order."""
    right = StorageState._drop

    def drop(self: StorageState, id: str) -> list[Any]:
        effects = right(self, id)
        if self.index != 0:
            for change in self.renderings.apply(self.next_index, DropObjects((id,))):
                if isinstance(change, RenderingEnded):
                    effects += self._ended(change)
        return effects

    with mock.patch.object(StorageState, "_drop", drop):
        yield


@contextmanager
def unmentioned_kept() -> Iterator[None]:
    """Let a reconciliation keep the objects that its client does not mention."""

    def keeping(*args: Any) -> Any:
        return replace(reconcile(*args), drop=())

    with mock.patch("actors.storage.state.reconcile", keeping):
        yield


@contextmanager
def shown_by_all_workers() -> Iterator[None]:
    """Let every worker show the dataflows that any of them runs."""
    right = StorageHalf.rows

    def rows(self: StorageHalf, name: str) -> Iterator[Any]:
        yield from right(self, name)
        if name == "dataflows":
            mine = {id_of(made) for made in self._described.values()}
            for id_, each in self.state.renderings.current.items():
                if id_ not in mine:
                    made: Any = each.what
                    yield from dataflow_rows(self._index, made, "running")

    with mock.patch.object(StorageHalf, "rows", rows):
        yield


class _Forgetful:
    """A sink that does not return its external upper."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def open(self, schema: Any) -> None:
        await self._inner.open(schema)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def sink_begun_anew() -> Iterator[None]:
    """Let a sink task begin at the sink's as_of, whatever was committed."""
    right = SinkTask.__init__

    def init(self: SinkTask, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        make = self._make
        self._make = lambda *each: _Forgetful(make(*each))

    with mock.patch.object(SinkTask, "__init__", init):
        yield


@contextmanager
def hold_moved_first() -> Iterator[None]:
    """Move a sink's hold before its batch is committed."""
    right = _Driver._write

    async def write(self: _Driver, found: Any, upper: int, stretches: Any) -> None:
        await right(self, found, upper, stretches)
        work = self._work
        await self._persist.set_hold(work.shard, hold_of(work.id), upper)
        await self._reader.downgrade(upper)

    with mock.patch.object(_Driver, "_write", write):
        yield


@contextmanager
def view_hold_ahead() -> Iterator[None]:
    """Move a view's holds on its inputs ahead of the time that a restart resumes from."""
    right = commit.holds_at

    def ahead(description: Any, export: Any, lo: int) -> Any:
        return right(description, export, lo + 100)

    with mock.patch.object(commit, "holds_at", ahead):
        yield


@contextmanager
def told_before_durable() -> Iterator[None]:
    """Report a source's upper when the write begins, not when it is durable."""
    right = IngestTask._commit

    def at_once(self: IngestTask, batch: Any) -> None:
        upper = batch.time + 1
        sealed = tuple((name, upper) for name in self._shards.exports)
        self._owner.reply(IngestRunning(self._id, self._number, upper, sealed, ()))
        right(self, batch)

    with mock.patch.object(IngestTask, "_commit", at_once):
        yield


@contextmanager
def contents_without_position() -> Iterator[None]:
    """Make a source's rows durable without the position behind them."""
    right = IngestShards._append

    async def append(self: IngestShards, upper: int, remap: Any, *more: Any) -> int:
        return await right(self, upper, (), *more)

    with mock.patch.object(IngestShards, "_append", append):
        yield


@contextmanager
def columns_not_told() -> Iterator[None]:
    """Give a table columns without telling its source."""
    with mock.patch.object(TableSchema, "extends", lambda self, other: self == other):
        yield


BUGS = {
    "storage_nonce_unchecked": storage_nonce_unchecked,
    "rendered_after_its_drop": rendered_after_its_drop,
    "dropped_out_of_order": dropped_out_of_order,
    "unmentioned_kept": unmentioned_kept,
    "shown_by_all_workers": shown_by_all_workers,
    "sink_begun_anew": sink_begun_anew,
    "hold_moved_first": hold_moved_first,
    "view_hold_ahead": view_hold_ahead,
    "told_before_durable": told_before_durable,
    "contents_without_position": contents_without_position,
    "columns_not_told": columns_not_told,
}
"""Mutants of the storage half; only runs with a source can find one (`schedule.has_source`)."""
