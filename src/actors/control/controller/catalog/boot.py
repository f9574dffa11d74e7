"""The durable state from which a controller starts: the catalog, the state of all its shards, and
the roles."""

from __future__ import annotations

import secrets
from typing import Final

import msgspec

from actors.control.access.role_registry import ROLES_KEY, RoleRegistry
from actors.control.controller.catalog.catalog import (
    CATALOG_KEY,
    INDEX,
    PLAIN_VIEW,
    SINK,
    TABLE,
    CatalogObject,
    CatalogSnapshot,
    columns_read,
)
from actors.control.controller.catalog.quarantine import decode_catalog
from actors.control.controller.connectors.cleanup_record import CleanupRecord
from actors.control.controller.connectors.cleanup_record import load as load_cleanup_records
from actors.control.controller.holds import RETAIN, dataflow_holder, sink_holder
from actors.durable.persist import PersistClient, ShardState
from actors.durable.persist.split_leases import CONSUMER
from actors.model.plan.delta import DeltaPlan
from actors.model.protocol.compute import (
    DataflowDescription,
    Export,
    IndexExport,
    ShardImport,
    ViewExport,
)
from actors.runtime.errors import StateDirectoryError, UnknownObject
from actors.runtime.progress import EMPTY, Frontier, ObjectId, ShardId, Time

SECRET_BYTES: Final = 32


class BootState(msgspec.Struct, frozen=True):
    """All durable state that the controller needs."""

    catalog: CatalogSnapshot
    seqno: int | None
    """Sequence number of the catalog's key; None if it was never written."""
    states: dict[ShardId, ShardState]
    tables_upper: Frontier
    cleanup_records: tuple[CleanupRecord, ...] = ()
    """External resources of dropped sources that are still to be removed."""
    roles: RoleRegistry = RoleRegistry()
    roles_seqno: int | None = None
    """Sequence number of the roles' key; None if it was never written."""


async def load_roles(persist: PersistClient) -> tuple[RoleRegistry, int | None]:
    """Return the durable roles and their sequence number, which is None if none were ever stored.
    Raises `StateDirectoryError`, `StorageError`."""
    head = await persist.head(ROLES_KEY)
    if head is None:
        # This secret is stored with the first role. Until then there are no roles, so it is only
        # used for verifiers of nonexistent ones.
        return RoleRegistry(secret=secrets.token_bytes(SECRET_BYTES)), None
    return RoleRegistry.decode(head.data), head.seqno


async def load(persist: PersistClient) -> BootState:
    """Read the durable state. Raises `StateDirectoryError` if it is incomplete or from a newer
    version, and `StorageError`."""
    head = await persist.head(CATALOG_KEY)
    catalog = CatalogSnapshot() if head is None else decode_catalog(head.data)
    states: dict[ShardId, ShardState] = {}
    for entry in catalog.objects:
        for shard in entry.shards:
            try:
                states[shard] = await persist.state(shard)
            except UnknownObject:
                if entry.id in catalog.quarantined:
                    continue
                raise StateDirectoryError(
                    f"{entry.kind} {entry.name} is in the catalog but its shard {shard} is "
                    f"missing: restore the state directory from a backup"
                ) from None
    live = {RETAIN, *(dataflow_holder(entry.dataflow_id) for entry in catalog.objects)}
    live |= {sink_holder(entry.id) for entry in catalog.of_kind(SINK)}
    for shard, state in states.items():
        # A hold without an object belongs to a subscribe that ended with its service, or to a
        # catalog change that a crash interrupted. Holds of consumers belong to external streams,
        # which drop them.
        for holder in sorted(set(state.holds) - live):
            if not holder.startswith(CONSUMER):
                await persist.drop_hold(shard, holder)
    cleanup_records = await load_cleanup_records(persist)
    tables_upper = await persist.tables_upper()
    roles, roles_seqno = await load_roles(persist)
    seqno = None if head is None else head.seqno
    return BootState(catalog, seqno, states, tables_upper, cleanup_records, roles, roles_seqno)


def shard_import(entry: CatalogObject, plan: DeltaPlan | None = None) -> ShardImport:
    """Describe a table or view as the import of a dataflow. `plan` is the plan that reads it, if
    any."""
    assert entry.shard is not None, entry.name
    schema = columns_read(plan, entry.name, entry.schema)
    return ShardImport(entry.shard, schema, entry.kind == TABLE)


def describe_dataflow(
    catalog: CatalogSnapshot, entry: CatalogObject, as_of: Time
) -> DataflowDescription:
    """Describe the dataflow that maintains a view or an index."""
    below = (catalog.by_id(id_) for id_ in entry.depends)
    # Plain views are already inlined in the query's text, together with the objects they read.
    imports = tuple(shard_import(each, entry.plan) for each in below if each.kind != PLAIN_VIEW)
    export: Export
    if entry.kind == INDEX:
        export = IndexExport(entry.key, entry.schema)
    else:
        assert entry.plan is not None, entry.name
        assert entry.shard is not None, entry.name
        export = ViewExport(
            entry.plan,
            entry.shard,
            entry.hidden_shards,
            entry.rebuilt_at,
            entry.target_lag_ms,
            entry.dataflow,
            entry.taken_shard or "",
        )
    return DataflowDescription(entry.dataflow_id, entry.name, imports, export, as_of)


def last_sealed_time(upper: Frontier) -> Time:
    """Return the last sealed time, or 0 if there is none."""
    return max(0, min(upper, EMPTY - 1) - 1)


def restart_as_of(boot: BootState, entry: CatalogObject) -> Time:
    """Return the `as_of` at which an object's dataflow resumes after a restart."""
    if entry.kind == INDEX:
        return index_as_of(boot.catalog, boot.states, boot.tables_upper, entry.depends[0])
    assert entry.shard is not None, entry.name
    # The output is durable below its upper: resume there, not at the first as_of.
    return max(last_sealed_time(boot.states[entry.shard].upper), entry.as_of)


def index_as_of(
    catalog: CatalogSnapshot,
    states: dict[ShardId, ShardState],
    tables_upper: Frontier,
    on: ObjectId,
) -> Time:
    """Return the latest time at which the object under an index can be read."""
    target = catalog.by_id(on)
    assert target.shard is not None, target.name
    state = states[target.shard]
    # An idle table is sealed only by the shared upper; its own shard's upper lags.
    upper = max(state.upper, tables_upper) if target.kind == TABLE else state.upper
    return max(state.since, last_sealed_time(upper))
