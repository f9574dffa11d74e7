"""The status of all objects, for `StatusResponse`: frontiers, lag, and the states of dataflows."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from actors.control.controller.catalog.catalog import (
    CONNECTOR_KINDS,
    INDEX,
    PLAIN_VIEW,
    TABLE,
    CatalogObject,
)
from actors.control.controller.connectors.objects import ConnectorObjects
from actors.control.controller.messages import ObjectReadiness
from actors.control.controller.object_conditions import ObjectCondition, condition_of, lag_ms
from actors.control.controller.roles.request_rights import redacted_error
from actors.control.controller.state import ControllerState, to_penstock_error
from actors.model.protocol.api import ObjectStatus, RequestFailed, StatusReport
from actors.model.protocol.compute import ERROR_STATES, StatusResponse
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import ObjectId, Time

_OF_STATUS: Final = set(StatusResponse.__struct_fields__) & {*ObjectStatus.__struct_fields__} - {
    "id"
}
"""Fields of an object's status that are copied from its dataflow's."""


class IndexMemory(msgspec.Struct, gc=False):
    """Size of an index over all workers: rows on one replica, bytes on all replicas."""

    rows: int = 0
    bytes_memory: int = 0
    bytes_mapped: int = 0


class StatusRead(msgspec.Struct, frozen=True, gc=False):
    """The sinces and sizes for a `StatusResponse` were read."""

    session: ActorAddress[Any]
    request: int
    sinces: dict[ObjectId, Time]
    held: dict[ObjectId, IndexMemory] = {}
    error: PenstockError | None = None
    role: str | None = None
    """Role of the session."""


def read_sinces(
    state: ControllerState, session: ActorAddress[Any], request: int, role: str | None
) -> None:
    """Read the sinces of all shards; `StatusRead` follows."""
    wanted = [(entry.id, entry.shard) for entry in state.catalog.objects if entry.shard is not None]

    async def read() -> tuple[dict[ObjectId, Time], dict[ObjectId, IndexMemory]]:
        found: dict[ObjectId, Time] = {}
        for id_, shard in wanted:
            try:
                found[id_] = (await state.persist.state(shard)).since
            except PenstockError:
                continue  # it was dropped in the meantime, or its store is not answering
        return found, await _held(state)

    state.ctx.effect(
        read,
        done=lambda read: StatusRead(session, request, *read, role=role),
        failed=lambda error: StatusRead(session, request, {}, {}, to_penstock_error(error)),
    )


async def _held(state: ControllerState) -> dict[ObjectId, IndexMemory]:
    held: dict[ObjectId, IndexMemory] = {}
    found = await state.statistics()
    rows: dict[tuple[str, str], int] = {}
    if found is not None:
        for worker in found.workers:
            for index in worker.indexes:
                sums = held.setdefault(index.id, IndexMemory())
                of_replica = rows.get((worker.replica, index.id), 0) + index.rows
                rows[worker.replica, index.id] = of_replica
                # Every replica has the same rows: take the largest count.
                sums.rows = max(sums.rows, of_replica)
                sums.bytes_memory += index.bytes_memory
                sums.bytes_mapped += index.bytes_mapped
    return held


def report(
    state: ControllerState, connectors: ConnectorObjects, read: StatusRead
) -> StatusReport | RequestFailed:
    """Build the status of all objects from the sinces read."""
    frontiers = state.frontiers
    objects = tuple(_status(state, connectors, entry, read) for entry in state.catalog.objects)
    return StatusReport(read.request, state.oracle_now(), frontiers.tables_upper, objects)


def _status(
    state: ControllerState, connectors: ConnectorObjects, entry: CatalogObject, read: StatusRead
) -> ObjectStatus:
    sinces, held = read.sinces, read.held.get(entry.id, IndexMemory())
    frontiers = state.frontiers
    upper = frontiers.upper(entry)
    status = frontiers.status(entry.id)
    shown = ObjectStatus(
        name=entry.name,
        kind=entry.kind,
        since=frontiers.readable_from(entry.id)
        if entry.kind == INDEX
        else sinces.get(entry.id, state.retain.since(entry.shard or "")),
        upper=upper,
        lag_ms=lag_ms(state, entry),
        mode="" if entry.plan is None else entry.plan.mode,
        schema=entry.schema,
        sql=entry.written,
        held_rows=held.rows,
        held_bytes_memory=held.bytes_memory,
        held_bytes_mapped=held.bytes_mapped,
        target_lag_ms=entry.target_lag_ms,
        comment=entry.comment,
        column_comments=entry.column_comments,
        replaces=state.catalog.by_id(entry.replaces).name if entry.replaces else "",
        id=entry.id,
        column_defaults=entry.column_defaults,
        spark_conf=entry.conf,
        retain_history_ms=entry.retain_history_ms,
    )
    if status is not None:
        measured = {name: getattr(status, name) for name in _OF_STATUS}
        shown = msgspec.structs.replace(shown, **measured)
    found = redacted_condition(state, connectors, read.role, entry)
    text = ": ".join(filter(None, (found.text, found.hint)))
    return msgspec.structs.replace(
        shown, state=found.state, text=text, state_since_ms=found.since_ms, retries=found.retries
    )


def redacted_condition(
    state: ControllerState, connectors: ConnectorObjects, role: str | None, entry: CatalogObject
) -> ObjectCondition:
    """Return the condition of an object as a session of this role may see it."""
    if entry.kind in CONNECTOR_KINDS:
        found = connectors.condition(entry)
    else:
        status = state.frontiers.status(entry.id)
        resting = "ready" if entry.kind in (TABLE, PLAIN_VIEW) else "starting"
        word, text = (resting, "") if status is None else (status.state, status.text)
        found = condition_of(state, entry, word, text)
    if found.state not in ERROR_STATES:
        return found
    text = redacted_error(state.access, role, entry, found.text)
    # A hint may quote what its error quotes.
    return found if text == found.text else msgspec.structs.replace(found, text=text, hint="")


def inspect_objects(
    state: ControllerState, connectors: ConnectorObjects
) -> tuple[ObjectReadiness, ...]:
    """Return the condition of all objects, for a monitor."""
    found = []
    for entry in state.catalog.objects:
        each = redacted_condition(state, connectors, None, entry)
        reason = ": ".join(filter(None, (each.text, each.hint)))
        own = entry.name, entry.kind, each.state, lag_ms(state, entry)
        found.append(ObjectReadiness(*own, reason, each.since_ms, each.retries))
    return tuple(found)


def running_state_text(
    state: ControllerState, connectors: ConnectorObjects, role: str | None, entry: CatalogObject
) -> str:
    """Return the state of a running view, for `explain` by a session of this role."""
    status = state.frontiers.status(entry.id)
    if status is None:
        return "not running yet"
    condition = redacted_condition(state, connectors, role, entry)
    lines = [f"state: {condition.state}" + (f" ({condition.text})" if condition.text else "")]
    if not status.steps:
        return lines[0]
    if status.recomputed:
        how = "recomputed whole"
    else:
        how = "prepared" if status.prepared else "planned anew"
    lines.append(
        f"last step: {how}, {status.rows_in} changes in, {status.rows_read} rows of state read, "
        f"{status.rows_out} changes out, {status.step_ms:.0f} ms (Spark {status.spark_ms:.0f})"
    )
    lines.append(f"rejected: {status.rejected}" if status.rejected else "rejected: nothing")
    return "\n".join(lines)
