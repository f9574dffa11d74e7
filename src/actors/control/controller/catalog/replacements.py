"""Replaces what maintains a view while the view stays readable.

There are two ways:

- *Restart* (ALTER of a refresh policy or a target lag): a new dataflow continues the view's shard
  from its upper. If the new plan keeps different state, the view is recomputed in full at that
  upper.
- *Replace* (CREATE OR REPLACE): a view of the new query is created alongside the old one, which is
  still maintained, and *swapped* in once it is computed. If its columns are the same, or extend the
  old ones, the shard stays: its contents become the new ones at a single timestamp, so readers,
  subscribers, indexes and views above see an ordinary change. With other columns the view takes
  over the shards and the dataflow of the new one, and nothing may depend on it.

Either way, the set that changes the catalog also makes the new dataflow the owner of the shards. So
the former dataflow, which may still run on a disconnected replica, can no longer write by the old
plan.
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
"""How often to try to hand shards over between two appends of the former dataflow."""


async def restart_view(
    store: CatalogStore,
    catalog: CatalogSnapshot,
    seqno: int | None,
    entry: CatalogObject,
    changed: CatalogObject,
) -> CatalogChanged:
    """Continue a view with a new definition, by a new dataflow. Raises `WriterFenced`,
    `StorageError`, and `PenstockError` if the former dataflow appends too often."""
    persist = store.persist
    assert entry.shard is not None, entry.name
    plan = changed.plan
    assert entry.plan is not None, entry.name
    assert plan is not None, entry.name
    rebuilt = (entry.plan.strata, entry.plan.hidden) != (plan.strata, plan.hidden)
    dataflow = catalog.new_id
    # The former dataflow is still running: the hand-over has to fit between two of its appends.
    for _ in range(HAND_OVER_ATTEMPTS_MAX):
        upper = await persist.upper(entry.shard)
        # The view has ended: no dataflow maintains it any more.
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
        f"view {entry.name} changes too often to be handed over: nothing was changed; try again"
    )


def _new_hidden(entry: CatalogObject, dataflow: ObjectId, since: Time) -> list[NewShard]:
    """Return the hidden shards for a view's plan, named after the dataflow that will fill them."""
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
    """Hold a view's inputs for its dataflow, from where it resumes at `upper`. Raises
    `StorageError`, `UnknownObject`."""
    holder = dataflow_holder(entry.dataflow_id)
    for id_ in entry.depends:
        shard = catalog.by_id(id_).shard
        if shard is None:
            continue
        # The former dataflow should still hold this time. If not, the view is recomputed later.
        since = max(0, upper - 1, (await persist.state(shard)).since)
        try:
            await persist.set_hold(shard, holder, since)
        except ReadBelowSince as error:
            log.info("view %s resumes where its inputs are readable: %s", entry.name, error)


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
    """Hand shards over and change the catalog in one set. Return False if an upper has moved.
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
    """Drop shards that no object names any more. Those that cannot be dropped go at the next
    start."""
    for shard in sorted(shards):
        try:
            await persist.drop_shards([shard])
        except (StorageError, UnknownObject) as error:
            log.info("shard %s could not be dropped before the next start: %s", shard, error)


# -- the replacement -------------------------------------------------------------------------------


def is_extension(old: TableSchema, new: TableSchema) -> bool:
    """Return whether a shard with the old columns can store the new ones without a visible
    difference for readers of the old: the new columns are the same, or add nullable columns at the
    end, which are NULL in older rows."""
    count = len(old.columns)
    added = new.columns[count:]
    same = new.columns[:count] == old.columns and new.key == old.key
    return same and all(column.nullable for column in added)


async def check_computed(persist: PersistClient, name: str, replacement: CatalogObject) -> None:
    """Raise `ViewInError` if the contents of the replacement hold an error."""
    assert replacement.shard is not None, replacement.name
    state = await persist.state(replacement.shard)
    if any(part.has_errors for batch in state.batches for part in batch.parts):
        raise ViewInError(
            f"the new query of {name} fails on the current rows, so the view is unchanged: run the "
            f"query on its own to see the error"
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
    """Swap in the view that was computed to replace `entry`, keeping the shard of `entry`. Return
    None if that is not possible yet. `ended` says whether the former dataflow was told to end.

    Raises `WriterFenced`, `StorageError`, `PenstockError`.
    """
    persist = store.persist
    assert entry.shard is not None, entry.name
    assert replacement.shard is not None, entry.name
    # A new id is needed: a replica that knew the former dataflow would mistake the new one for it.
    dataflow = catalog.new_id
    upper, reached = await persist.upper(entry.shard), await persist.upper(replacement.shard)
    since = (await persist.state(replacement.shard)).since
    # The new view's contents must be known at every time from the old one's upper on. But if the
    # old one was stopped before the new one's first time, the view holds an error in between.
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
    """Give a view the contents, the shards and the dataflow of its replacement, and drop its own
    shards. Raises `ObjectInUse`, `WriterFenced`, `StorageError`."""
    made = replace(
        replacement, id=entry.id, name=entry.name, replaces="", dataflow=replacement.dataflow_id
    )
    # Called only for its check: a dependent of the view would have to read another shard.
    catalog.remove(entry, replacement)
    grown = catalog.remove(replacement).put(made)
    cas = CompareAndSet(CATALOG_KEY, seqno, grown.encode())
    if entry.shards:
        done = await store.persist.drop_shards(entry.shards, extra=[cas])
    else:
        # The old view was quarantined, so its shards are unknown.
        done = await store.persist.compare_and_set([cas])
    if not done:
        raise fenced(seqno)
    return CatalogChanged(grown, seqno_after(seqno), dropped=replacement, altered=(made,))


async def drop_taken_shard(
    store: CatalogStore, catalog: CatalogSnapshot, seqno: int | None, entry: CatalogObject
) -> CatalogChanged:
    """Drop the shard whose contents a view has taken over. Raises `WriterFenced`,
    `StorageError`."""
    taken = entry.taken_shard
    changed = await store.replace_entries(catalog, seqno, [replace(entry, taken_shard=None)])
    if taken is not None:
        await _drop_quietly(store.persist, {taken})
    return changed


def replacement_name(name: str) -> str:
    """Return the name of the replacement of this view while it is being computed: one that users
    cannot give."""
    return f"__{name} (new)"


async def end_replacements(found: BootState, persist: PersistClient) -> BootState:
    """At the service's start, drop unfinished replacements, whose clients are gone, and shards
    whose contents were already taken over."""
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
        raise StateDirectoryError("another service changed the catalog: start this one again")
    return await load(persist)
