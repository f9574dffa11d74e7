"""Compiles views of another version of the program anew, when the service starts.

A view's plan and the state that it keeps are durable. A view whose plan was made by other rules
(`rules_digest`), or over tables that had no rows where their sizes matter (`DeltaPlan.eager_open`),
is compiled again from its text, before its dataflow begins. (The latter not by a service that stood
by and has taken over: it goes on with the plan that runs.) If the plan's fingerprint is the same,
nothing else happens. If not, the view is *rebuilt*: it gets hidden shards for the state of the new
plan, and is computed whole at the first time that its output does not have yet
(`dataflow.hydrate`).

One set changes the catalog and makes the shards. A crash before it leaves nothing; one after it
leaves shards of the old plan, which the next start drops.
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
"""Names of the shards that belong to objects."""


async def upgrade_views(
    found: BootState,
    persist: PersistClient,
    analyze: AnalyzeQuery,
    check: CheckPlan,
    settings: Settings,
) -> BootState:
    """Compile again the views that other rules compiled. Return the durable state after that.

    One that means something else now is in quarantine, and so are objects of which no dataflow can
    be described. Raises what the engine and the stores raise, which says nothing of a view.
    """
    found = await end_replacements(found, persist)
    rules = rules_digest()
    stale = [
        entry
        for entry in found.catalog.of_kind(VIEW)
        if entry.id not in found.catalog.quarantined
        and (
            entry.compiled_by != rules
            # Another choice makes steps cheaper, and costs a start of the engine and a rebuild: not
            # while clients wait for a service that failed.
            or (not persist.took_over and _is_open(entry) and all(_rows(found, entry)))
        )
    ]
    if stale:
        found = await _upgraded(found, stale, persist, analyze, check, settings)
    described = [each for each in found.catalog.objects if each.id not in found.catalog.quarantined]
    unusable = find_unusable(described, lambda each: _describe(found, each))
    found = replace(found, catalog=found.catalog.quarantine(unusable))
    # Shards of former plans, also of an upgrade that a crash has interrupted.
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
    log.info("%s compiled anew: other rules, or tables that were empty then", views)
    made: dict[ObjectId, CatalogObject] = {}
    refused: dict[ObjectId, Quarantine] = {}
    for entry in stale:
        try:
            made[entry.id] = await _again(found, entry, analyze, check, settings)
        # The engine and the stores say nothing of a view.
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
        raise StateDirectoryError("another service has changed the catalog: start again")
    again = await load(persist)
    return replace(again, catalog=again.catalog.quarantine(refused))


async def _again(
    found: BootState,
    entry: CatalogObject,
    analyze: AnalyzeQuery,
    check: CheckPlan,
    settings: Settings,
) -> CatalogObject:
    """Return a view's entry with its plan by the present rules."""
    limits = PlanLimits(settings.engine_plan_nodes_max, settings.view_plan_nodes_max)
    conf = tuple(sorted(entry.conf.items()))

    async def chosen(_: Sequence[str]) -> EagerChoice:
        if not _is_open(entry):
            # The earlier choice is repeated: another one would be another plan, and a rebuild.
            return EagerChoice(made=() if entry.plan is None else entry.plan.eager)
        return EagerChoice(_rows(found, entry), settings.eager_aggregation_rows_min)

    plan = await compile_view(
        entry.sql, found.catalog.readable_by(entry.plan), analyze, conf, limits, chosen, check
    )
    policy = AUTO if entry.plan is None else entry.plan.policy
    plan = with_policy(plan, policy)
    if plan.output != entry.schema:
        names = f"{entry.schema.names} became {plan.output.names}"
        raise InvalidUsage(f"its columns or their types differ: {names}")
    renewed = replace(entry, plan=plan, compiled_by=rules_digest())
    if plan.fingerprint == entry.fingerprint:
        log.info("view %s: the same plan", entry.name)
        return renewed
    log.info("view %s: another plan, so it is rebuilt", entry.name)
    assert entry.shard is not None, entry.name
    begun = f"{entry.id}{HIDDEN_SHARD}"
    hidden = tuple(f"{begun}{i}-{plan.fingerprint[:12]}" for i in range(len(plan.hidden)))
    return replace(
        renewed,
        fingerprint=plan.fingerprint,
        hidden_shards=hidden,
        # The output stays: the answer of a text is the same by any plan.
        rebuilt_at=found.states[entry.shard].upper,
        # Contents that it was to take are of the former plan, and have no state of this one.
        taken_shard=None,
    )


def _describe(found: BootState, entry: CatalogObject) -> object:
    """Make the description with which the controller has an object run."""
    if entry.kind in (VIEW, INDEX):
        return describe_dataflow(found.catalog, entry, restart_as_of(found, entry))
    return None


def _is_open(entry: CatalogObject) -> bool:
    """Return whether sums below joins could not be chosen when the view was made."""
    return entry.plan is not None and entry.plan.eager_open


def _rows(found: BootState, entry: CatalogObject) -> tuple[int, ...]:
    """Return about how many rows the view's inputs have."""
    assert entry.plan is not None, entry.name
    inputs = (found.catalog.find(name, quarantined=True) for name in entry.plan.inputs)
    shards = (each.shard for each in inputs)
    return tuple(found.states[shard].rows for shard in shards if shard is not None)


def _refusal(why: str) -> str:
    return f"it means something else to this version, or nothing: {why}"


def _hidden_shards(entry: CatalogObject) -> list[NewShard]:
    assert entry.plan is not None, entry.name
    since = max(0, min(entry.rebuilt_at, entry.as_of))
    holds = {dataflow_holder(entry.dataflow_id): since}
    return [
        NewShard(id=shard, schema=state.schema, since=since, holds=holds)
        for shard, state in zip(entry.hidden_shards, entry.plan.hidden, strict=True)
    ]


def _left(catalog: CatalogSnapshot, there: Sequence[ShardId]) -> list[ShardId]:
    """Return the shards that no object names any more: of former plans, and of views that were
    replaced."""
    known = {shard for entry in catalog.objects for shard in entry.shards}
    # An object that cannot be read may have shards of which nothing is known.
    kept = {id_ for id_, found in catalog.quarantined.items() if found.original}
    return [
        shard
        for shard in there
        if shard not in known
        and _OF_OBJECT.fullmatch(shard)
        and shard.partition(HIDDEN_SHARD)[0] not in kept
    ]
