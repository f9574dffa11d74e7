"""Sources and sinks as the controller sees them: commands to the storage half, and its responses.

A part of the controller, which runs in its task. The commands follow from the current catalog
(`commands`), so no history is kept. The storage half has one connection, to a single replica, since
an external system should be read once. Health and statistics are as last reported; while no replica
is connected, a source is *paused*.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from actors.control.access.role_registry import OWN
from actors.control.controller.catalog.catalog import (
    SINK,
    SOURCE,
    SOURCE_TABLE,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.connector_ddl import ConnectorMakers
from actors.control.controller.connectors.cleanup_record import CleanupRecord
from actors.control.controller.connectors.external_cleanup import ExternalCleanup
from actors.control.controller.holds import sink_holder
from actors.control.controller.object_conditions import (
    ObjectCondition,
    condition_of,
    lag_ms,
    note_report,
)
from actors.control.controller.replicas.replica import (
    ReplicaConnected,
    ReplicaLink,
    ReplicaLost,
    ReplicaResponse,
)
from actors.control.controller.roles.request_rights import redacted_error
from actors.control.controller.state import ControllerState
from actors.control.controller.tables.copies_from import CopiesFrom
from actors.model.protocol.api import (
    ListSources,
    ObjectHealth,
    SourceReport,
    SourceStatus,
    SourceTableStatus,
)
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    ConnectionRefused,
    InitializationComplete,
    ShardImport,
)
from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.relations import relation_of
from actors.model.protocol.storage import (
    Command,
    DroppedId,
    FrontierUpper,
    IngestionDescription,
    IngestionExport,
    Response,
    RunIngestion,
    RunSink,
    SinkDescription,
    StagedBatches,
    StatisticsUpdates,
    StatusUpdate,
    UpdateStorageConfiguration,
)
from actors.replica.compute.logs import Row
from actors.runtime import metric_table
from actors.runtime.measurement import Measurement
from actors.runtime.progress import EMPTY, ObjectId, frontier_or_null

log = logging.getLogger("penstock.controller")


def describe_source(catalog: CatalogSnapshot, entry: CatalogObject) -> IngestionDescription:
    """Describe a source with its tables for the cluster."""
    assert entry.configuration is not None, entry.name
    assert entry.shard is not None, entry.name
    exports = tuple(
        IngestionExport(table.id, table.outside, table.schema, table.shard, name=table.name)
        for table in catalog.dependents(entry.id)
        if table.shard is not None and table.id not in catalog.quarantined
    )
    return IngestionDescription(entry.id, entry.name, entry.configuration, entry.shard, exports)


def describe_sink(catalog: CatalogSnapshot, entry: CatalogObject) -> SinkDescription:
    """Describe a sink with its input for the cluster."""
    assert entry.configuration is not None, entry.name
    on = catalog.by_id(entry.depends[0])
    assert on.shard is not None, on.name
    imported = ShardImport(on.shard, on.schema, on.kind == "table")
    return SinkDescription(entry.id, entry.name, imported, entry.configuration, entry.as_of)


_SOURCES: Final = relation_of("penstock.sources")


class ConnectorObjects:
    """All sources and sinks of the catalog. `link` owns the connection to the storage half."""

    def __init__(
        self,
        state: ControllerState,
        link: ReplicaLink | None,
        copies: CopiesFrom,
        makers: ConnectorMakers,
        cleanup_records: tuple[CleanupRecord, ...] = (),
    ) -> None:
        self._state = state
        self.copies = copies
        self._makers = makers
        self.cleanup = ExternalCleanup(state, cleanup_records)
        self._link = link
        self._incarnation = 0
        """Number of the current connection."""
        self._health: dict[ObjectId, StatusUpdate] = {}
        """Last reported health of each object."""
        self._failed: dict[ObjectId, ObjectHealth] = {}
        """Health of each object when it last stalled; its current health does not show that while
        it restarts."""
        self._statistics: dict[ObjectId, ObjectStatistics] = {}
        """Last reported statistics of each object."""
        self._stalls: Counter[ObjectId] = Counter()
        """Reports of sources and sinks that they, or a table of theirs, are stalled."""
        self._dropping: dict[ObjectId, CatalogObject] = {}
        """Dropped sinks whose holds are dropped once the cluster has stopped them."""

    # -- commands --------------------------------------------------------------------------------

    def connected(self, message: ReplicaConnected) -> None:
        """Send all commands to a new connection."""
        self._incarnation = message.incarnation
        assert self._link is not None, "the event came from the link"
        self._link.replay(message.incarnation, self.commands())
        for entry in list(self._dropping.values()):
            self._let_go(entry.id)  # this connection was never told to run it
        self.cleanup.connected()

    def commands(self) -> list[Command]:
        """Return all commands for a new connection, after its Hello."""
        catalog, settings = self._state.catalog, self._state.settings
        found: list[Command] = [
            UpdateStorageConfiguration(
                source_tick_ms=settings.source_tick_ms,
                statistics_ms=settings.statistics_ms,
                source_inflight_bytes_max=settings.source_inflight_bytes_max,
            )
        ]
        left_out = catalog.quarantined
        sources = [each for each in catalog.of_kind(SOURCE) if each.id not in left_out]
        sinks = [each for each in catalog.of_kind(SINK) if each.id not in left_out]
        found += [RunIngestion(describe_source(catalog, each)) for each in sources]
        found += [RunSink(describe_sink(catalog, each)) for each in sinks]
        found += self.copies.commands()
        return [*found, InitializationComplete(), AllowWrites()]

    def created(self, entry: CatalogObject) -> None:
        """Run a source, a source's table, or a sink that was added to the catalog, or a source's
        table that got columns."""
        catalog = self._state.catalog
        if entry.kind == SINK:
            self._push(RunSink(describe_sink(catalog, entry)))
        elif entry.kind == SOURCE:
            # Do this first: a pending removal must not take the resource away from the new source.
            self.cleanup.created(entry)
            self._push(RunIngestion(describe_source(catalog, entry)))
        elif entry.kind == SOURCE_TABLE:
            # Alter the running source: it has one more export, or one with more columns.
            source = catalog.by_id(entry.depends[0])
            self._push(RunIngestion(describe_source(catalog, source)))

    def dropped(self, entry: CatalogObject) -> None:
        """Stop an object that was removed from the catalog."""
        self._health.pop(entry.id, None)
        self._failed.pop(entry.id, None)
        self._statistics.pop(entry.id, None)
        self._stalls.pop(entry.id, None)
        self.cleanup.dropped(entry)
        if entry.kind == SINK:
            # The sink reads under its hold until the cluster has stopped it.
            self._dropping[entry.id] = entry
        if entry.kind == SOURCE_TABLE and self._state.catalog.get(entry.depends[0]) is None:
            return  # it stops with its source
        if not self._state.faults.is_quarantined(entry.id):
            self._push(AllowCompaction(entry.id, EMPTY))

    def _push(self, command: Command) -> None:
        if self._link is not None:
            self._link.push(command)

    # -- responses -------------------------------------------------------------------------------

    def responded(self, message: ReplicaResponse) -> ObjectId | None:
        """Handle a response. Return the object whose upper advanced, if one did."""
        response: Response = message.response
        present = message.incarnation == self._incarnation
        if isinstance(response, StagedBatches):
            # Accept it from a former connection, too: the parts may have no other owner than this
            # copy.
            self.copies.staged(response, present=present)
        if not present:
            return None
        match response:
            case FrontierUpper(id_, upper):
                return id_ if self._state.frontiers.sealed(id_, upper) else None
            case StatusUpdate(id=id_, time_ms=time_ms):
                # Worker 0 and the object's owner both report it, in any order.
                known = self._health.get(id_)
                late = known is not None and time_ms < known.time_ms
                if self._state.catalog.get(id_) is not None and not late:
                    self._health[id_] = response
                    self._note(response)
            case StatisticsUpdates(sources, sinks, oneshots):
                for each in oneshots:
                    self.copies.noted(each)
                for each in (*sources, *sinks):
                    if self._state.catalog.get(each.id) is not None:
                        self._statistics[each.id] = each
                        self._state.frontiers.note_behind(each.id, each.lag_ms)
            case DroppedId(id_):
                self._let_go(id_)
                self.cleanup.schedule_removal(id_)
            case StagedBatches():
                pass
            case ConnectionRefused():
                log.warning("the cluster refused: %s", response)
        return None

    def lost(self, message: ReplicaLost) -> None:
        """Mark all objects as paused until the next connection."""
        if message.incarnation == self._incarnation:
            self._incarnation = 0

    def _note(self, update: StatusUpdate) -> None:
        entry = self._state.catalog.by_id(update.id)
        known = self._state.faults.get(entry.id)
        reason, hint = update.error or "", update.hint or ""
        note_report(self._state, entry, update.status, reason, hint)
        if update.status == "stalled":
            self._failed[entry.id] = _health(update)
            self._stalls[entry.depends[0] if entry.kind == SOURCE_TABLE else entry.id] += 1
        elif known is None:
            why = f" ({hint})" if hint else ""
            log.info("%s %s is %s%s", entry.kind, entry.name, update.status, why)

    def _let_go(self, id_: ObjectId) -> None:
        entry = self._dropping.pop(id_, None)
        if entry is None:
            return
        on = self._state.catalog.get(entry.depends[0])
        if on is not None and on.shard is not None:
            self._state.drop_hold(on.shard, sink_holder(id_))

    # -- reporting ---------------------------------------------------------------------------------

    def health(self, entry: CatalogObject) -> ObjectHealth:
        """Return the health of a source, a source's table, or a sink."""
        found, update = self.condition(entry), self._health.get(entry.id)
        since_ms = found.since_ms or (0 if update is None else update.time_ms)
        return ObjectHealth(found.state, found.text, found.hint, since_ms, found.retries)

    def condition(self, entry: CatalogObject) -> ObjectCondition:
        """Return the condition of a source, a source's table, or a sink."""
        if not self._incarnation and not self._state.faults.is_quarantined(entry.id):
            return ObjectCondition("paused", "no replica is connected")
        update = self._health.get(entry.id)
        if update is None:
            return condition_of(self._state, entry, "starting")
        found = condition_of(self._state, entry, update.status, update.error or "")
        return found if found.since_ms else replace(found, hint=update.hint or "")

    def _shown(
        self, entry: CatalogObject | None, health: ObjectHealth, role: str | None
    ) -> ObjectHealth:
        """Return a health as a session of this role may see it."""
        error = redacted_error(self._state.access, role, entry, health.error)
        return health if error == health.error else replace(health, error=error, hint="")

    def report(self, request: ListSources, role: str | None) -> SourceReport:
        """Return the status of all sources, or of all sinks, as a session of this role may see
        it."""
        state = self._state
        kind = SINK if request.sinks else SOURCE
        found = tuple(self._status(entry, role) for entry in state.catalog.of_kind(kind))
        if not request.sinks:
            found += tuple(
                replace(shown, health=self._shown(None, shown.health, role))
                for _, shown in self.cleanup.statuses()
            )
        return SourceReport(request.request, state.oracle_now(), found)

    def _status(self, entry: CatalogObject, role: str | None) -> SourceStatus:
        state = self._state
        tables = () if entry.kind == SINK else state.catalog.dependents(entry.id)
        failed, statistics = self._failed.get(entry.id), self._statistics.get(entry.id)
        return SourceStatus(
            entry.name,
            "" if entry.configuration is None else entry.configuration.kind,
            self._shown(entry, self.health(entry), role),
            state.frontiers.upper(entry),
            None if statistics is None else replace(statistics, lag_ms=lag_ms(state, entry)),
            tuple(
                SourceTableStatus(
                    table.name,
                    table.outside,
                    self._shown(table, self.health(table), role),
                    state.frontiers.upper(table),
                )
                for table in tables
            ),
            state.catalog.names(entry.depends) if entry.kind == SINK else "",
            None if failed is None else self._shown(entry, failed, role),
            self._options(entry, role),
            entry.retain_history_ms,
        )

    def _options(self, entry: CatalogObject, role: str | None) -> bytes:
        """Return the options of a source or a sink, or none if the session may not see them or they
        cannot be read."""
        state = self._state
        if entry.configuration is None or entry.id in state.catalog.quarantined:
            return b""
        # Hosts, folders and names of secrets are not for everyone.
        if not state.access.may(role, OWN, entry.id):
            return b""
        return self._makers.options(entry.configuration, of_sink=entry.kind == SINK)

    def rows(self, role: str | None) -> Iterator[Row]:
        """Yield the rows of `penstock.sources`, as a session of this role may see them."""
        catalog = self._state.catalog
        objects = [*catalog.of_kind(SOURCE), *catalog.of_kind(SINK)]
        listed = [(entry.id, self._status(entry, role)) for entry in objects]
        left = [
            (id_, replace(shown, health=self._shown(None, shown.health, role)))
            for id_, shown in self.cleanup.statuses()
        ]
        for id_, shown in (*listed, *left):
            health, statistics = shown.health, shown.statistics or ObjectStatistics(id_)
            failed = shown.failed or ObjectHealth("")
            yield _SOURCES.row(
                statistics,
                id=id_,
                name=shown.name,
                direction="out" if shown.on else "in",
                kind=shown.kind,
                status=health.status,
                error=health.error or None,
                hint=health.hint or None,
                since_ms=health.since_ms or None,
                upper=frontier_or_null(shown.upper),
                failed=failed.error or None,
                failed_ms=failed.since_ms or None,
                retries=health.retries,
            )

    def operator_rows(self) -> Iterator[Row]:
        """Yield the rows of `penstock.operators` for the running tasks, as last reported."""
        catalog = self._state.catalog
        for entry in (*catalog.of_kind(SOURCE), *catalog.of_kind(SINK)):
            statistics = self._statistics.get(entry.id)
            for number, each in enumerate(() if statistics is None else statistics.operators or ()):
                did = each.rows, each.ms, each.bytes_memory, each.bytes_mapped
                own = entry.id, entry.name, number, number, each.operator, each.text
                yield (*own, None, None, None, *did)

    def error_rows(self, role: str | None) -> Iterator[Row]:
        """Yield the rows of `penstock.errors` about dropped sources, as a session of this role may
        see them."""
        for id_, shown in self.cleanup.statuses(failing=True):
            health = self._shown(None, shown.health, role)
            yield id_, shown.name, health.status, health.error, health.since_ms

    def table_rows(self, role: str | None) -> Iterator[Row]:
        """Yield the rows of `penstock.source_tables`, as a session of this role may see them."""
        catalog = self._state.catalog
        for entry in catalog.of_kind(SOURCE_TABLE):
            health = self._shown(entry, self.health(entry), role)
            yield (
                entry.id,
                entry.name,
                catalog.names(entry.depends),
                entry.outside,
                health.status,
                health.error or None,
                health.hint or None,
                frontier_or_null(self._state.frontiers.upper(entry)),
            )

    def measures(self) -> Iterator[Measurement]:
        """Yield the metrics of all sources and sinks."""
        state = self._state
        if self._link is not None:
            kinds = Counter(type(each).__name__ for each in self.commands())
            for command, count in kinds.items():
                yield Measurement(metric_table.HISTORY_COMMANDS, count, ("storage", command))
        for kind, metrics in ((SOURCE, metric_table.OF_SOURCES), (SINK, metric_table.OF_SINKS)):
            for entry in state.catalog.of_kind(kind):
                name, known = (entry.name,), self._statistics.get(entry.id)
                yield Measurement(metrics.lag_ms, lag_ms(state, entry), name)
                yield Measurement(metrics.errors, self._stalls[entry.id], name)
                if known is None:  # it has not reported yet
                    continue
                yield Measurement(metrics.messages, known.messages, name)
                yield Measurement(metrics.bytes, known.bytes, name)
                yield Measurement(metrics.restarts, known.restarts, name)
                if kind == SINK:
                    yield Measurement(metrics.rows, known.rows_inserted, name)
                    continue
                yield Measurement(metrics.rows, known.rows_inserted, (*name, "insert"))
                yield Measurement(metrics.rows, known.rows_deleted, (*name, "delete"))
                if known.lag_bytes is not None:
                    yield Measurement(metric_table.SOURCE_LAG_BYTES, known.lag_bytes, name)

    def describe(self) -> str:
        """Return the number of sources and sinks, and whether they run."""
        catalog = self._state.catalog
        state = "connected" if self._incarnation else "not connected"
        return (
            f"{len(catalog.of_kind(SOURCE))} sources, {len(catalog.of_kind(SINK))} sinks, {state}"
        )


def _health(update: StatusUpdate) -> ObjectHealth:
    return ObjectHealth(update.status, update.error or "", update.hint or "", update.time_ms)
