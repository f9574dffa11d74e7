"""What the parts of the controller share: the state that all of them look at, and the few ways
in which they act. One object, owned by the controller actor and touched by its task alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from actors.cluster.cluster import ClusterStatistics
from actors.controller.catalog import Catalog, CatalogObject
from actors.controller.ddl import CatalogStore
from actors.controller.frontiers import ObjectFrontiers
from actors.controller.holds import RetainHolds
from actors.controller.instance import Instance
from actors.controller.storage_ddl import Nothing, StorageStore
from actors.errors import PenstockError, ReadBelowSince, ReadTooFarAhead, to_wire
from actors.kernel import Address, Context
from actors.persist import PersistClient
from actors.progress import EMPTY, ObjectId, ShardId, Time, is_empty
from actors.protocol.api import Failed
from actors.protocol.api_storage import Health
from actors.protocol.compute import Command
from actors.settings import Settings

Inspect: TypeAlias = Callable[[], Awaitable[ClusterStatistics | None]]


class NoContentsYet(Exception):
    """Says that a request reads a source's table that has no contents yet. The request is served
    when the table has."""

    def __init__(self, table: CatalogObject) -> None:
        super().__init__(table.name)
        self.table = table


class Desk:
    """Shared by statements, reads and subscribes."""

    def __init__(
        self,
        ctx: Context[Any],
        settings: Settings,
        persist: PersistClient,
        store: CatalogStore,
        catalog: Catalog,
        seqno: int | None,
        frontiers: ObjectFrontiers,
    ) -> None:
        self.ctx = ctx
        self.settings = settings
        self.persist = persist
        self.store = store
        self.catalog = catalog
        self.seqno = seqno
        self.frontiers = frontiers
        self.retain = RetainHolds(settings.hold_downgrade_ms)
        self.instance: Instance | None = None
        self.writer: Address[Any] | None = None
        self.maintenance: Address[Any] | None = None
        self.statistics: Inspect | None = None
        """Of the replicas' workers, where they are in reach."""
        self.outside = StorageStore(store, Nothing())
        self.created_outside: Callable[[CatalogObject], None] = lambda entry: None
        self.health: Callable[[CatalogObject], Health] = lambda entry: Health("starting")
        """Of sources, their tables, and sinks."""
        self.dropped_outside: Callable[[CatalogObject], None] = lambda entry: None
        """Of sources, their tables, and sinks."""
        self._transient = 0

    def command(self, command: Command) -> None:
        """Tells the replicas."""
        assert self.instance is not None
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
        """Holds a shard at a time first, then looks at its since, of which `done` makes a message
        to the controller: so nothing can slip away in between."""

        async def hold() -> Time:
            with contextlib.suppress(ReadBelowSince):
                await self.persist.set_holds([(shard, holder, since)])
            return (await self.persist.state(shard)).since

        self.ctx.effect(hold, done=done, failed=lambda error: failed(fault(error)))

    def drop_hold(self, shard: ShardId, holder: str) -> None:
        """Lets go of a hold."""
        store = self.store
        self.ctx.effect(lambda: store.drop_hold(shard, holder), done=lambda _: None)

    def transient_id(self) -> ObjectId:
        """An id for a dataflow that is not in the catalog. Unique in this life, and unlike
        those of earlier ones, whose dataflows a replica elsewhere may still run."""
        self._transient += 1
        return f"t{self._transient}-{self.ctx.random.getrandbits(32):08x}"

    def oracle_now(self) -> Time:
        """The time that a write would get now, but for its reservation."""
        return max(self.ctx.now_ms(), self.frontiers.tables_upper)

    def latest_with_contents(self, entry: CatalogObject) -> Time:
        """`latest`, where all source tables below the object have contents. Raises
        `NoContentsYet`: at any time before its first contents a source's table reads as empty."""
        for id_ in self.catalog.below(entry.id):
            if id_ is not None and self.frontiers.sealed_below(id_) == 0:
                raise NoContentsYet(self.catalog.by_id(id_))
        return self.latest(entry)

    def latest(self, entry: CatalogObject) -> Time:
        """When an object is read unless a reader says otherwise: the time of the last write to
        any table (0 before the first) where it stands on one, and the last sealed time of every
        source table below it; of one that has no contents yet, a time not yet sealed.

        What may be some time old is read as it is, unless it is older.
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

    def check_ahead(self, what: str, time: Time) -> None:
        """Raises `ReadTooFarAhead`."""
        limit = self.settings.read_ahead_ms_max
        now = self.oracle_now()
        if time > now + limit:
            raise ReadTooFarAhead(
                f"{what} at {time}: {time - now} ms ahead of the clock ({now}); the limit is "
                f"{limit} (read_ahead_ms_max)"
            )

    def waiting_for(self, entry: CatalogObject) -> str:
        """Why a read of the object waits, for people."""
        status = self.frontiers.status(entry.id)
        state = "" if status is None else f"; it is {status.state} {status.text}".rstrip()
        upper = self.frontiers.upper(entry)
        return f"{entry.kind} {entry.name} is sealed below {upper} only{state}"


def refuse(session: Address[Any], request: int, error: BaseException) -> None:
    """Answers a request with an error."""
    session.reply(Failed(request, *to_wire(error)))


def fault(error: Exception) -> PenstockError:
    """An error of ours as one that can be told."""
    if isinstance(error, PenstockError):
        return error
    told = PenstockError(f"internal fault: {type(error).__name__}: {error}")
    told.determinate = False
    return told
