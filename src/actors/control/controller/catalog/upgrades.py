"""Recompiles the views of other program versions when the service starts.

A view's plan and the state that it keeps are durable. A view is compiled again from its text,
before its dataflow starts, if other rules made its plan (`rules_digest`), or if the tables were
empty when their sizes mattered (`DeltaPlan.eager_open`). The latter is skipped by a standby that
has taken over: it keeps the running plans. If the plan's fingerprint is unchanged, that is all.
Otherwise the view is *rebuilt*: it gets hidden shards for the state of the new plan, and is
computed in full at the first time that its output does not have yet (`dataflow.hydrate`).

One set changes the catalog and creates the shards. A crash before it leaves nothing; a crash after
it leaves shards of the old plan, which the next start drops.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from actors.control.controller.catalog.boot import BootState, describe_dataflow, load, restart_as_of
from actors.control.controller.catalog.catalog import (
    CATALOG_KEY,
    HIDDEN_SHARD,
    INDEX,
    VIEW,
    CatalogObject,
    CatalogSnapshot,
    Quarantine,
)
from actors.control.controller.catalog.quarantine import fault_text, find_unusable
from actors.control.controller.catalog.replacements import end_replacements
from actors.control.controller.holds import dataflow_holder
from actors.durable.persist import CompareAndSet, NewShard, PersistClient
from actors.engine.views.compile import CheckPlan, compile_view
from actors.engine.views.eager_choice import EagerChoice
from actors.engine.views.fingerprint import rules_digest, with_policy
from actors.engine.views.query_analysis import AnalyzeQuery
from actors.model.plan.delta import AUTO
from actors.model.plan.plan_splitting import PlanLimits
from actors.runtime.errors import (
    EngineLost,
    EngineUnavailable,
    InvalidUsage,
    ResourceClosed,
    StateDirectoryError,
    StorageError,
)
from actors.runtime.progress import ObjectId, ShardId
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.controller")

_OF_OBJECT: Final = re.compile(rf"u[0-9]+({HIDDEN_SHARD}.*)?")
"""Matches the names of shards that belong to objects."""


async def upgrade_views(
    found: BootState,
    persist: PersistClient,
    analyze: AnalyzeQuery,
    check: CheckPlan,
    settings: Settings,
) -> BootState:
    """Recompile the views that other rules compiled. Return the durable state afterwards.

    A view whose text no longer compiles to the same columns is quarantined, as are objects whose
    dataflow cannot be described. Engine and store errors are raised, since they say nothing about a
    view.
    """
    found = await end_replacements(found, persist)
    rules = rules_digest()
    stale = [
        entry
        for entry in found.catalog.of_kind(VIEW)
        if entry.id not in found.catalog.quarantined
        and (
            entry.compiled_by != rules
            # A better choice makes steps cheaper, but costs an engine start and a rebuild: skip it
            # while clients wait for a service that has just taken over.
            or (not persist.took_over and _is_open(entry) and all(_rows(found, entry)))
        )
    ]
    if stale:
        found = await _upgraded(found, stale, persist, analyze, check, settings)
    described = [each for each in found.catalog.objects if each.id not in found.catalog.quarantined]
    unusable = find_unusable(described, lambda each: _describe(found, each))
    found = replace(found, catalog=found.catalog.quarantine(unusable))
    # Shards of former plans, including those of an upgrade that a crash interrupted.
    left = _left(found.catalog, await persist.list_shards())
    if left:
        await persist.drop_shards(left)
    return found


async def _upgraded(
    found: BootState,
    stale: Sequence[CatalogObject],
    persist: PersistClient,
    analyze: AnalyzeQuery,
    check: CheckPlan,
    settings: Settings,
) -> BootState:
    views = "1 view is" if len(stale) == 1 else f"{len(stale)} views are"
    log.info("%s recompiled: the rules changed, or its tables were empty before", views)
    made: dict[ObjectId, CatalogObject] = {}
    refused: dict[ObjectId, Quarantine] = {}
    for entry in stale:
        try:
            made[entry.id] = await _again(found, entry, analyze, check, settings)
        # Engine and store errors say nothing about a view.
        except (EngineUnavailable, EngineLost, StorageError, ResourceClosed):
            raise
        except Exception as error:  # noqa: BLE001 - no view keeps the others from their upgrade
            refused[entry.id] = Quarantine(_refusal(fault_text(error)))
    objects = tuple(made.get(entry.id, entry) for entry in found.catalog.objects)
    catalog = CatalogSnapshot(objects, found.catalog.next_id, found.catalog.quarantined)
    shards = [
        shard
        for entry in stale
        if entry.id in made and made[entry.id].hidden_shards != entry.hidden_shards
        for shard in _hidden_shards(made[entry.id])
    ]
    cas = CompareAndSet(CATALOG_KEY, found.seqno, catalog.encode())
    if shards:
        done = await persist.create_shards(shards, extra=[cas])
    else:
        done = await persist.compare_and_set([cas])
    if not done:
        raise StateDirectoryError("another service changed the catalog: start this one again")
    again = await load(persist)
    return replace(again, catalog=again.catalog.quarantine(refused))


async def _again(
    found: BootState,
    entry: CatalogObject,
    analyze: AnalyzeQuery,
    check: CheckPlan,
    settings: Settings,
) -> CatalogObject:
    """Return a view's entry with the plan that the current rules make."""
    limits = PlanLimits(settings.engine_plan_nodes_max, settings.view_plan_nodes_max)
    conf = tuple(sorted(entry.conf.items()))

    async def chosen(_: Sequence[str]) -> EagerChoice:
        if not _is_open(entry):
            # Repeat the earlier choice: another one would make another plan and cause a rebuild.
            return EagerChoice(made=() if entry.plan is None else entry.plan.eager)
        return EagerChoice(_rows(found, entry), settings.eager_aggregation_rows_min)

    plan = await compile_view(
        entry.sql, found.catalog.readable_by(entry.plan), analyze, conf, limits, chosen, check
    )
    policy = AUTO if entry.plan is None else entry.plan.policy
    plan = with_policy(plan, policy)
    if plan.output != entry.schema:
        names = f"{entry.schema.names} became {plan.output.names}"
        raise InvalidUsage(f"its columns or their types would change: {names}")
    renewed = replace(entry, plan=plan, compiled_by=rules_digest())
    if plan.fingerprint == entry.fingerprint:
        log.info("view %s: the plan is unchanged", entry.name)
        return renewed
    log.info("view %s: the plan changed, so the view is rebuilt", entry.name)
    assert entry.shard is not None, entry.name
    begun = f"{entry.id}{HIDDEN_SHARD}"
    hidden = tuple(f"{begun}{i}-{plan.fingerprint[:12]}" for i in range(len(plan.hidden)))
    return replace(
        renewed,
        fingerprint=plan.fingerprint,
        hidden_shards=hidden,
        # The output is kept: a query has the same result by any plan.
        rebuilt_at=found.states[entry.shard].upper,
        # Contents that it was about to take over belong to the former plan and lack this plan's
        # state.
        taken_shard=None,
    )


def _describe(found: BootState, entry: CatalogObject) -> object:
    """Describe the dataflow of an object, as the controller would to run it."""
    if entry.kind in (VIEW, INDEX):
        return describe_dataflow(found.catalog, entry, restart_as_of(found, entry))
    return None


def _is_open(entry: CatalogObject) -> bool:
    """Return whether sums below joins could not be chosen when the view was created."""
    return entry.plan is not None and entry.plan.eager_open


def _rows(found: BootState, entry: CatalogObject) -> tuple[int, ...]:
    """Return the approximate number of rows of each of the view's inputs."""
    assert entry.plan is not None, entry.name
    inputs = (found.catalog.find(name, quarantined=True) for name in entry.plan.inputs)
    shards = (each.shard for each in inputs)
    return tuple(found.states[shard].rows for shard in shards if shard is not None)


def _refusal(why: str) -> str:
    return f"this version cannot compile it, or compiles it differently: {why}"


def _hidden_shards(entry: CatalogObject) -> list[NewShard]:
    assert entry.plan is not None, entry.name
    since = max(0, min(entry.rebuilt_at, entry.as_of))
    holds = {dataflow_holder(entry.dataflow_id): since}
    return [
        NewShard(id=shard, schema=state.schema, since=since, holds=holds)
        for shard, state in zip(entry.hidden_shards, entry.plan.hidden, strict=True)
    ]


def _left(catalog: CatalogSnapshot, there: Sequence[ShardId]) -> list[ShardId]:
    """Return the shards that no object names any more, from former plans and replaced views."""
    known = {shard for entry in catalog.objects for shard in entry.shards}
    # An object that cannot be read may have shards that are unknown here.
    kept = {id_ for id_, found in catalog.quarantined.items() if found.original}
    return [
        shard
        for shard in there
        if shard not in known
        and _OF_OBJECT.fullmatch(shard)
        and shard.partition(HIDDEN_SHARD)[0] not in kept
    ]
