"""Replaces what maintains a view while it is read.

Two ways:

- *Restart*: another dataflow goes on with the view's shard from its upper (ALTER of a policy or a
  target lag). If the plan keeps other state, the view is computed whole at that upper.
- *Replace* (CREATE OR REPLACE): a view of the new query is created beside the old one, which is
  kept up meanwhile. When it is computed it is *swapped* in. With the same columns, or further ones
  behind them, the shard stays: its contents become the new ones at one time, so readers,
  subscribers, indexes and views above see a change like any other. With other columns the view gets
  the new one's shards and dataflow, and nothing may depend on it.

In both the shards get an owner in the set that changes the catalog, so that the former dataflow,
which may still run on a replica that is cut off, cannot write by the former plan.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from actors.control.controller.catalog.boot import BootState, load
from actors.control.controller.catalog.catalog import (
    CATALOG_KEY,
    HIDDEN_SHARD,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.ddl import CatalogChanged, CatalogStore, fenced, seqno_after
from actors.control.controller.holds import dataflow_holder
from actors.durable.persist import CompareAndSet, NewShard, PersistClient
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import (
    PenstockError,
    ReadBelowSince,
    StateDirectoryError,
    StorageError,
    UnknownObject,
    ViewInError,
)
from actors.runtime.progress import Frontier, ObjectId, ShardId, Time, is_empty

log = logging.getLogger("penstock.controller")

HAND_OVER_ATTEMPTS_MAX = 50
"""Bound of attempts to hand shards over between two appends of the former dataflow."""


async def restart_view(
    store: CatalogStore,
    catalog: CatalogSnapshot,
    seqno: int | None,
    entry: CatalogObject,
    changed: CatalogObject,
) -> CatalogChanged:
    """Let a view go on by another dataflow, with another definition. Raises `WriterFenced`,
    `StorageError`, and `PenstockError` if it steps too fast."""
    persist = store.persist
    assert entry.shard is not None, entry.name
    plan = changed.plan
    assert entry.plan is not None, entry.name
    assert plan is not None, entry.name
    rebuilt = (entry.plan.strata, entry.plan.hidden) != (plan.strata, plan.hidden)
    dataflow = catalog.new_id
    # The former dataflow steps on meanwhile: between two of its appends there is time enough.
    for _ in range(HAND_OVER_ATTEMPTS_MAX):
        upper = await persist.upper(entry.shard)
        # It has ended: no dataflow does anything for it any more.
        if is_empty(upper):
            return await store.replace_entries(catalog, seqno, [changed])
        made = replace(changed, dataflow=dataflow)
        new: list[NewShard] = []
        expected: dict[ShardId, Frontier] = {entry.shard: upper}
        if rebuilt:
            since = max(0, min(upper, entry.as_of))
            new = _new_hidden(made, dataflow, since)
            made = replace(
                made,
                rebuilt_at=upper,
                taken_shard=None,
                hidden_shards=tuple(shard.id for shard in new),
            )
        else:
            expected |= {each: await persist.upper(each) for each in entry.hidden_shards}
        await hold_from(persist, catalog, made, upper or entry.as_of + 1)
        grown = catalog.put(made, used=1)
        if await _handed_over(
            store, seqno, grown, dataflow, [entry.dataflow_id], expected, new=new
        ):
            if rebuilt:
                await _drop_quietly(persist, set(entry.shards) - set(made.shards))
            return CatalogChanged(grown, seqno_after(seqno), altered=(made,))
    await store.drop_holds(catalog, replace(entry, dataflow=dataflow))
    raise PenstockError(
        f"view {entry.name} steps faster than it can be handed over: nothing was changed; try again"
    )


def _new_hidden(entry: CatalogObject, dataflow: ObjectId, since: Time) -> list[NewShard]:
    """Return the hidden shards of a view's plan, named after the dataflow that fills them."""
    assert entry.plan is not None, entry.name
    holds = {dataflow_holder(dataflow): since}
    return [
        NewShard(
            id=f"{entry.id}{HIDDEN_SHARD}{index}-{dataflow}",
            schema=state.schema,
            since=since,
            holds=holds,
        )
        for index, state in enumerate(entry.plan.hidden)
    ]


async def hold_from(
    persist: PersistClient, catalog: CatalogSnapshot, entry: CatalogObject, upper: Time
) -> None:
    """Hold a view's inputs for its dataflow where it resumes from `upper`. Raises `StorageError`,
    `UnknownObject`."""
    holder = dataflow_holder(entry.dataflow_id)
    for id_ in entry.depends:
        shard = catalog.by_id(id_).shard
        if shard is None:
            continue
        # The former dataflow holds it as far as that. If not, the view is recomputed later on.
        since = max(0, upper - 1, (await persist.state(shard)).since)
        try:
            await persist.set_hold(shard, holder, since)
        except ReadBelowSince as error:
            log.info("view %s resumes where its inputs can be read: %s", entry.name, error)


async def _handed_over(
    store: CatalogStore,
    seqno: int | None,
    grown: CatalogSnapshot,
    dataflow: ObjectId,
    former: Sequence[ObjectId],
    expected: Mapping[ShardId, Frontier],
    *,
    new: Sequence[NewShard] = (),
    schemas: Mapping[ShardId, TableSchema] | None = None,
) -> bool:
    """Hand shards over together with a change of the catalog; return False if an upper has moved.
    Raises `WriterFenced`, `StorageError`."""
    done = await store.persist.hand_over(
        (dataflow, dataflow_holder(dataflow)),
        [dataflow_holder(each) for each in former],
        expected,
        new=new,
        schemas=schemas,
        extra=[CompareAndSet(CATALOG_KEY, seqno, grown.encode())],
    )
    if not done and (await store.read_back())[1] != seqno:
        raise fenced(seqno)
    return done


async def _drop_quietly(persist: PersistClient, shards: set[ShardId]) -> None:
    """Drop shards that no object names any more; what stays is dropped at the next start."""
    for shard in sorted(shards):
        try:
            await persist.drop_shards([shard])
        except (StorageError, UnknownObject) as error:
            log.info("shard %s stays until the next start: %s", shard, error)


# -- the replacement -------------------------------------------------------------------------------


def is_extension(old: TableSchema, new: TableSchema) -> bool:
    """Return whether a shard of the old columns can hold the new ones, and readers of the old ones
    see no difference: the same, or further ones behind them that may be NULL, as older rows have
    no value there."""
    count = len(old.columns)
    added = new.columns[count:]
    same = new.columns[:count] == old.columns and new.key == old.key
    return same and all(column.nullable for column in added)


async def check_computed(persist: PersistClient, name: str, replacement: CatalogObject) -> None:
    """Raise `ViewInError` if the contents of the view that comes hold an error."""
    assert replacement.shard is not None, replacement.name
    state = await persist.state(replacement.shard)
    if any(part.has_errors for batch in state.batches for part in batch.parts):
        raise ViewInError(
            f"the new query of {name} fails on the present rows, so the view stays as it is; run "
            f"the query by itself to see the error"
        )


async def swap_view(
    store: CatalogStore,
    catalog: CatalogSnapshot,
    seqno: int | None,
    entry: CatalogObject,
    replacement: CatalogObject,
    *,
    ended: bool,
) -> CatalogChanged | None:
    """Put the view that was computed beside `entry` in its place, with the same shard; None if that
    is not possible yet. The former dataflow should have been told to end: `ended`, if it was.

    Raises `WriterFenced`, `StorageError`, `PenstockError`.
    """
    persist = store.persist
    assert entry.shard is not None, entry.name
    assert replacement.shard is not None, entry.name
    # A new id: a replica that knew the former dataflow would take another one of that id for it.
    dataflow = catalog.new_id
    upper, reached = await persist.upper(entry.shard), await persist.upper(replacement.shard)
    since = (await persist.state(replacement.shard)).since
    # The contents of each time from the old one's upper on must be known of the new one; but where
    # the old one stood still before the new one began, they are an error up to there.
    if reached <= upper or (since > upper and not ended):
        return None
    made = replace(
        replacement,
        id=entry.id,
        name=entry.name,
        shard=entry.shard,
        as_of=entry.as_of,
        rebuilt_at=upper,
        taken_shard=replacement.shard,
        dataflow=dataflow,
        replaces="",
        column_comments={
            name: text
            for name, text in entry.column_comments.items()
            if name in replacement.schema.names
        },
    )
    await hold_from(persist, catalog, made, reached)
    indexes: list[CatalogObject] = []
    if made.schema != entry.schema:
        ids_from = catalog.next_id + 1
        indexes = await store.rebuilt_indexes(catalog, entry, made.schema, ids_from)
    grown = catalog.remove(replacement).put(made, *indexes, used=1 + len(indexes))
    expected = {entry.shard: upper}
    expected |= {shard: await persist.upper(shard) for shard in replacement.shards}
    schemas = {entry.shard: made.schema} if made.schema != entry.schema else {}
    former = [entry.dataflow_id, replacement.dataflow_id]
    if not await _handed_over(store, seqno, grown, dataflow, former, expected, schemas=schemas):
        for index in indexes:
            await store.drop_holds(catalog, index)
        return None
    await _drop_quietly(persist, set(entry.hidden_shards))
    return CatalogChanged(grown, seqno_after(seqno), dropped=replacement, altered=(made, *indexes))


async def rename_view(
    store: CatalogStore,
    catalog: CatalogSnapshot,
    seqno: int | None,
    entry: CatalogObject,
    replacement: CatalogObject,
) -> CatalogChanged:
    """Give a view the contents of the one that was computed beside it, with its shards and its
    dataflow; its own shards are dropped. Raises `ObjectInUse`, `WriterFenced`, `StorageError`."""
    made = replace(
        replacement, id=entry.id, name=entry.name, replaces="", dataflow=replacement.dataflow_id
    )
    # Only for its check: what depends on it would have to read another shard.
    catalog.remove(entry, replacement)
    grown = catalog.remove(replacement).put(made)
    cas = CompareAndSet(CATALOG_KEY, seqno, grown.encode())
    if entry.shards:
        done = await store.persist.drop_shards(entry.shards, extra=[cas])
    else:
        # It was in quarantine, and its shards cannot be read.
        done = await store.persist.compare_and_set([cas])
    if not done:
        raise fenced(seqno)
    return CatalogChanged(grown, seqno_after(seqno), dropped=replacement, altered=(made,))


async def drop_taken_shard(
    store: CatalogStore, catalog: CatalogSnapshot, seqno: int | None, entry: CatalogObject
) -> CatalogChanged:
    """Drop the shard whose contents a view has taken. Raises `WriterFenced`, `StorageError`."""
    taken = entry.taken_shard
    changed = await store.replace_entries(catalog, seqno, [replace(entry, taken_shard=None)])
    if taken is not None:
        await _drop_quietly(store.persist, {taken})
    return changed


def replacement_name(name: str) -> str:
    """Return the name of a view while it is computed to come in that one's place: none that a user
    can give."""
    return f"__{name} (new)"


async def end_replacements(found: BootState, persist: PersistClient) -> BootState:
    """Drop, at the service's start, views that were to come in others' places, and shards whose
    contents were taken. The client of the one is gone, and the other was only not noted."""
    catalog = found.catalog
    kept: list[CatalogObject] = []
    for entry in catalog.objects:
        if entry.replaces and entry.id not in catalog.quarantined:
            continue
        if entry.id in catalog.quarantined:
            kept.append(entry)
            continue
        done = entry.shard is not None and found.states[entry.shard].upper > entry.rebuilt_at
        kept.append(replace(entry, taken_shard=None) if entry.taken_shard and done else entry)
    if kept == list(catalog.objects):
        return found
    smaller = CatalogSnapshot(tuple(kept), catalog.next_id, catalog.quarantined)
    cas = CompareAndSet(CATALOG_KEY, found.seqno, smaller.encode())
    if not await persist.compare_and_set([cas]):
        raise StateDirectoryError("another service has changed the catalog: start again")
    return await load(persist)
