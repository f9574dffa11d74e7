"""The state that the controller's parts share, and operations on it. The controller actor owns it:
only that actor's task touches it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from actors.control.access.access_rules import AccessRules
from actors.control.access.open_sessions import OpenSessions
from actors.control.controller.catalog.catalog import CatalogObject, CatalogSnapshot
from actors.control.controller.catalog.connector_ddl import ConnectorStore
from actors.control.controller.catalog.ddl import CatalogStore
from actors.control.controller.frontiers import ObjectFrontiers
from actors.control.controller.holds import RetainHolds
from actors.control.controller.object_faults import ObjectFaults
from actors.control.controller.replicas.instance import ComputeInstance
from actors.durable.persist import PersistClient
from actors.model.protocol.api import RequestFailed
from actors.model.protocol.compute import Command
from actors.replica.cluster.cluster import ClusterStatistics
from actors.runtime.errors import (
    InvalidUsage,
    PenstockError,
    ReadBelowSince,
    ReadTooFarAhead,
    to_wire,
)
from actors.runtime.kernel import ActorAddress, ActorContext
from actors.runtime.progress import EMPTY, TIME_MAX, ObjectId, ShardId, Time, is_empty
from actors.runtime.settings import Settings

READ_AHEAD_MS_MAX: Final = 60_000
"""A read further ahead of the clock than this is refused immediately."""

Inspect: TypeAlias = Callable[[], Awaitable[ClusterStatistics | None]]


class NoContentsYet(Exception):
    """Raised for a request that reads a source's table without contents; it is served once they
    arrive."""

    def __init__(self, table: CatalogObject) -> None:
        super().__init__(table.name)
        self.table = table


class ControllerState:
    """State shared by statements, reads, subscribes, queries and copies."""

    def __init__(
        self,
        ctx: ActorContext[Any],
        settings: Settings,
        persist: PersistClient,
        store: CatalogStore,
        catalog: CatalogSnapshot,
        seqno: int | None,
        frontiers: ObjectFrontiers,
        retain: RetainHolds,
        instance: ComputeInstance,
        writer: ActorAddress[Any],
        connector_store: ConnectorStore,
        statistics: Inspect,
        maintenance: ActorAddress[Any] | None,
        sessions: OpenSessions,
    ) -> None:
        """Set up the state. `statistics` returns those of the replicas' workers, or None if they
        cannot be reached."""
        self.sessions = sessions
        self.ctx = ctx
        self.settings = settings
        self.persist = persist
        self.store = store
        self.catalog = catalog
        """The current catalog; replaced after each durable change."""
        self.seqno = seqno
        """Sequence number of the catalog's key; None if it was never written."""
        self.frontiers = frontiers
        self.retain = retain
        self.instance = instance
        self.writer = writer
        self.connector_store = connector_store
        self.statistics = statistics
        self.maintenance = maintenance
        self.access = AccessRules()
        """The roles and rights against which requests are checked; `RoleStore` replaces it."""
        self.faults = ObjectFaults()
        """Faults of all objects, for every display of an object's state."""
        self._transient = 0
        """Number of the last transient dataflow."""

    def command(self, command: Command) -> None:
        """Send a command to the replicas."""
        self.instance.command(command)

    def hold(
        self,
        shard: ShardId,
        holder: str,
        since: Time,
        *,
        done: Callable[[Time], Any],
        failed: Callable[[PenstockError], Any],
    ) -> None:
        """Hold a shard at a time, then read its since. `done` turns the since into a message to the
        controller, `failed` an error."""

        async def hold() -> Time:
            # Hold before reading the since: in the other order a compaction could come in between.
            # A refused hold shows in the since, which is then later than the time.
            with contextlib.suppress(ReadBelowSince):
                await self.persist.set_holds([(shard, holder, since)])
            return (await self.persist.state(shard)).since

        self.ctx.effect(hold, done=done, failed=lambda error: failed(to_penstock_error(error)))

    def drop_hold(self, shard: ShardId, holder: str) -> None:
        """Drop a hold; a failure is only logged."""
        store = self.store
        self.ctx.effect(lambda: store.drop_hold(shard, holder), done=lambda _: None)

    def transient_id(self) -> ObjectId:
        """Return an id for a dataflow that is not in the catalog."""
        self._transient += 1
        # Include random bits: a remote replica may still run dataflows of an earlier process.
        return f"t{self._transient}-{self.ctx.random.getrandbits(32):08x}"

    def oracle_now(self) -> Time:
        """Return the time that a write would get now."""
        return max(self.ctx.now_ms(), self.frontiers.tables_upper)

    def latest_with_contents(self, entry: CatalogObject) -> Time:
        """Return `latest` if all source tables below the object have contents. Raises
        `NoContentsYet`."""
        for id_ in self.catalog.below(entry.id):
            # At any time before its first contents a source's table would read as empty.
            if id_ is not None and self.frontiers.sealed_below(id_) == 0:
                raise NoContentsYet(self.catalog.by_id(id_))
        return self.latest(entry)

    def latest(self, entry: CatalogObject) -> Time:
        """Return the time at which an object is read by default: the maximum of the last write to
        any table, if it depends on one, and the last sealed time of each source table below it. A
        source table without contents counts with a time that is not sealed yet.

        An object with a target lag is read at its own last sealed time, unless that is older than
        the lag allows.
        """
        found = 0
        for id_ in self.catalog.below(entry.id):
            upper = self.frontiers.tables_upper if id_ is None else self.frontiers.sealed_below(id_)
            if id_ is not None and upper == 0:
                upper = self.oracle_now() + 1
            if not is_empty(upper):
                found = max(found, upper - 1)
        allowed_ms = self.catalog.allowed_lag_ms(entry.id)
        if allowed_ms:
            there = min(self.frontiers.upper(entry), EMPTY) - 1
            found = min(found, max(there, self.oracle_now() - allowed_ms, entry.as_of))
        return found

    def check_time(self, what: str, time: Time) -> None:
        """Raise `InvalidUsage` if the time is out of range, and `ReadTooFarAhead` if it is too far
        ahead of the clock."""
        if not 0 <= time <= TIME_MAX:
            raise InvalidUsage(f"{what}: invalid time {time}: expected 0 to {TIME_MAX}")
        now = self.oracle_now()
        if time > now + READ_AHEAD_MS_MAX:
            raise ReadTooFarAhead(
                f"{what}: time {time} is {time - now} ms ahead of the clock ({now}; limit "
                f"{READ_AHEAD_MS_MAX} ms)"
            )

    def waiting_for(self, entry: CatalogObject) -> str:
        """Return the reason why a read of the object waits, as readable text."""
        status = self.frontiers.status(entry.id)
        state = "" if status is None else f"; it is {status.state} {status.text}".rstrip()
        upper = self.frontiers.upper(entry)
        return f"{entry.kind} {entry.name} is sealed only below {upper}{state}"


def reply_error(session: ActorAddress[Any], request: int, error: BaseException) -> None:
    """Answer a request with an error."""
    session.reply(RequestFailed(request, *to_wire(error)))


def to_penstock_error(error: Exception) -> PenstockError:
    """Return the error itself, or wrap an internal error in an indeterminate `PenstockError`."""
    if isinstance(error, PenstockError):
        return error
    fault = PenstockError(f"internal fault: {type(error).__name__}: {error}")
    fault.determinate = False
    return fault
