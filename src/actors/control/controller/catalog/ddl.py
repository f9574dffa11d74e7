"""Changes of the catalog, each one compare-and-set together with the shards it affects.

Order of a creation: check the names → (views: Spark analyses the text) → choose the as_of → take
durable holds on the inputs → ONE set: catalog and new shards with their first holds. Order of a
drop: check the dependents → (tables: wait for running writes) → ONE set: catalog and removed shards
→ drop the holds on the inputs. A crash leaves at most holds without an object, which the next start
drops.

The caller makes one change at a time.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
import pyarrow as pa

from actors.control.controller.catalog.analysis_requests import analyzer, plan_checker
from actors.control.controller.catalog.boot import last_sealed_time
from actors.control.controller.catalog.catalog import (
    CATALOG_KEY,
    CONNECTOR_KINDS,
    HIDDEN_SHARD,
    INDEX,
    PLAIN_VIEW,
    SOURCE_TABLE,
    TABLE,
    VIEW,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.quarantine import decode_catalog
from actors.control.controller.holds import RETAIN, dataflow_holder
from actors.control.controller.tables.rows import check_key_columns
from actors.durable.arrangement.hashing import check_key_type
from actors.durable.persist import CompareAndSet, NewShard, PersistClient
from actors.engine.views.compile import compile_view
from actors.engine.views.eager_choice import EagerChoice
from actors.engine.views.fingerprint import rules_digest, with_policy
from actors.engine.views.query_analysis import AnalyzeQuery
from actors.model.plan.column_defaults import DEFAULT_BYTES_MAX, ColumnDefault
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.jobs import ExecutorMessage
from actors.model.plan.plan_splitting import PlanLimits
from actors.model.plan.schema import TableColumn, TableSchema, arrow_type
from actors.model.plan.updates import from_ipc
from actors.model.protocol.api import TIME_ZONE, CreateIndex, CreateTable, CreateView
from actors.model.protocol.relations import SUBSCRIBED_PREFIX, check_name, fold, is_subscribed_view
from actors.replica.dataflow.hydration_journal import note_key
from actors.runtime.errors import (
    InvalidUsage,
    PenstockError,
    ReadBelowSince,
    ResourceBusy,
    StorageError,
    UnknownObject,
    WriterFenced,
)
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import ObjectId, ShardId, Time
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.controller")

AS_OF_ATTEMPTS_MAX: Final = 5
COLUMNS_MAX: Final = 1024


def check_subscribed_view(request: CreateView) -> None:
    """Raise `InvalidUsage` if a request to create the view of a subscribe contains anything that
    such a view may not have."""
    # Such a view needs no CREATE right, so it must be exactly what a subscribe creates.
    plain = CreateView(
        request.request,
        request.name,
        request.sql,
        conf={key: each for key, each in request.conf.items() if key == TIME_ZONE},
        refresh_policy=request.refresh_policy,
        as_of=request.as_of,
        for_subscribe=True,
    )
    if request != plain or not is_subscribed_view(request.name):
        raise InvalidUsage(
            f"invalid view {request.name!r} of a subscribe: its name must start with "
            f"{SUBSCRIBED_PREFIX}, and it may set only a query, a time zone, a refresh policy and "
            "a time"
        )


class CatalogChanged(msgspec.Struct, frozen=True):
    """A durable change of the catalog."""

    catalog: CatalogSnapshot
    seqno: int
    created: CatalogObject | None = None
    dropped: CatalogObject | None = None
    also: tuple[CatalogObject, ...] = ()
    """Tables of a source that were created or dropped with it, or dependents that were dropped."""
    notices: tuple[str, ...] = ()
    """Notices for the client, such as skipped tables."""
    altered: tuple[CatalogObject, ...] = ()
    """Objects whose definition changed; their ids are the same."""
    refusal: PenstockError | None = None
    """The error to answer with, although the catalog changed: what the statement had created was
    dropped again."""


class CatalogStore:
    """Carries out changes of the catalog."""

    def __init__(
        self,
        persist: PersistClient,
        executor: ActorAddress[ExecutorMessage],
        settings: Settings,
    ) -> None:
        self._persist = persist
        self._analyze = analyzer(executor, "analyze")
        self._check = plan_checker(executor, "check")
        self._settings = settings

    # -- creation ------------------------------------------------------------------------------

    async def create_table(
        self, catalog: CatalogSnapshot, seqno: int | None, request: CreateTable
    ) -> CatalogChanged:
        """Create a table. Raises `InvalidUsage` and its subclasses, and `StorageError`."""
        name = check_name("table", request.name)
        catalog.check_free(name)
        schema = table_schema(name, request.schema)
        id_ = catalog.new_id
        entry = CatalogObject(
            id=id_,
            name=name,
            kind=TABLE,
            schema=schema,
            shard=id_,
            retain_history_ms=retain(request.retain_history_ms),
            comment=request.comment,
            column_comments=request.column_comments,
            column_defaults=checked_defaults(name, schema, request.column_defaults),
        )
        shard = NewShard(id=id_, schema=schema, holds={RETAIN: 0}, tables=True)
        return await self.store(catalog.add(entry), seqno, [shard], created=entry)

    async def create_view(
        self, catalog: CatalogSnapshot, seqno: int | None, request: CreateView
    ) -> CatalogChanged:
        """Create a view. Raises `QueryRejected`, `InvalidUsage` and its subclasses, engine and
        store errors."""
        name = self._view_name(catalog, request)
        catalog.check_free(name)
        return await self.add_view(catalog, seqno, name, request)

    async def add_view(
        self,
        catalog: CatalogSnapshot,
        seqno: int | None,
        name: str,
        request: CreateView,
        plan: DeltaPlan | None = None,
        replaces: ObjectId = "",
    ) -> CatalogChanged:
        """Add a view under this name. `plan` is its plan if already compiled; `replaces` is the
        view that it will replace once computed. Raises as `create_view` does."""
        # Check before taking holds, so that a refused view leaves nothing behind.
        retained, lag_ms = retain(request.retain_history_ms), target_lag(request.target_lag_ms)
        if plan is None:
            plan = await self.compile(catalog, request.sql, request.conf, request.refresh_policy)
        sql, plain = catalog.inlined(request.sql)
        inputs = [catalog.find(name) for name in plan.inputs]
        id_ = catalog.new_id
        # Hold the inputs before the view exists, so that they cannot be compacted beyond the as_of.
        as_of = await self.hold_inputs(dataflow_holder(id_), inputs, request.as_of)
        shards = [_view_shard(id_, plan.output, id_, as_of)]
        hidden = tuple(
            NewShard(
                id=f"{id_}{HIDDEN_SHARD}{index}",
                schema=state.schema,
                since=as_of,
                holds={dataflow_holder(id_): as_of},
            )
            for index, state in enumerate(plan.hidden)
        )
        shards += hidden
        entry = CatalogObject(
            id=id_,
            name=name,
            kind=VIEW,
            schema=plan.output,
            shard=id_,
            hidden_shards=tuple(shard.id for shard in hidden),
            depends=tuple(dict.fromkeys((*(each.id for each in inputs), *plain))),
            sql=sql,
            text="" if sql == request.sql else request.sql,
            plan=plan,
            fingerprint=plan.fingerprint,
            compiled_by=rules_digest(),
            conf=request.conf,
            spark_version=importlib.metadata.version("pyspark"),
            retain_history_ms=retained,
            target_lag_ms=lag_ms,
            as_of=as_of,
            comment=request.comment,
            replaces=replaces,
        )
        return await self._create_on(catalog, seqno, entry, shards)

    def _view_name(self, catalog: CatalogSnapshot, request: CreateView) -> str:
        """Return the name of a new view. Raises `InvalidUsage`, and `ResourceBusy` if there are too
        many views of subscribes."""
        if not request.for_subscribe:
            return check_name("view", request.name)
        check_subscribed_view(request)
        limit = self._settings.sql_followed_queries_max
        if sum(is_subscribed_view(each.name) for each in catalog.objects) >= limit:
            raise ResourceBusy(
                f"too many subscribes to queries: {limit} are open (sql_followed_queries_max)"
            )
        return request.name

    async def compile(
        self,
        catalog: CatalogSnapshot,
        sql: str,
        conf: Mapping[str, str],
        policy: str,
        former: DeltaPlan | None = None,
    ) -> DeltaPlan:
        """Compile a query and return its plan; nothing is changed. `former` is the plan that it
        replaces, if any. Raises `QueryRejected`, `UnknownObject`, `InvalidUsage` and engine
        errors."""
        sql, _ = catalog.inlined(sql)
        limits = PlanLimits(
            self._settings.engine_plan_nodes_max, self._settings.view_plan_nodes_max
        )
        choose = partial(self._eager_choice, catalog)
        settings = tuple(sorted(conf.items()))
        readable = catalog.readable_by(former)
        plan = await compile_view(
            sql, readable, self._analyze, settings, limits, choose, self._check
        )
        return with_policy(plan, policy)

    async def _eager_choice(self, catalog: CatalogSnapshot, inputs: Sequence[str]) -> EagerChoice:
        """Decide from the sizes of the inputs which sums to take below joins."""
        found = (catalog.find(name).shard for name in inputs)
        states = [await self._persist.state(shard) for shard in found if shard is not None]
        rows = tuple(state.rows for state in states)
        return EagerChoice(rows, self._settings.eager_aggregation_rows_min)

    async def create_index(
        self, catalog: CatalogSnapshot, seqno: int | None, request: CreateIndex
    ) -> CatalogChanged:
        """Create an index. Raises `InvalidUsage` and its subclasses, and `StorageError`."""
        name = check_name("index", request.name)
        catalog.check_free(name)
        target = catalog.find_stored(request.on, f"index {name}")
        if target.kind == INDEX:
            raise InvalidUsage(f"{target.name} is an index: create the index on a table or a view")
        key = columns_named(target, request.key)
        for column in target.schema.columns:
            if column.name in key:
                check_key_type(column.name, arrow_type(column.type))
        if not key:
            raise InvalidUsage(f"index {name}: expected at least one key column of {target.name}")
        id_ = catalog.new_id
        as_of = await self.hold_inputs(dataflow_holder(id_), [target])
        entry = CatalogObject(
            id=id_,
            name=name,
            kind=INDEX,
            schema=target.schema,
            depends=(target.id,),
            key=key,
            as_of=as_of,
        )
        return await self._create_on(catalog, seqno, entry, [])

    async def rebuilt_indexes(
        self, catalog: CatalogSnapshot, entry: CatalogObject, schema: TableSchema, first_id: int
    ) -> list[CatalogObject]:
        """Return an object's indexes with these columns, each maintained by a new dataflow; the
        dataflows get ids from `first_id` on, and holds on the object. Raises `ReadBelowSince`,
        `StorageError`."""
        found = []
        for number, index in enumerate(catalog.indexes(entry.id), first_id):
            # The running dataflow keeps the columns that it was created with, so a new one is
            # needed.
            made = msgspec.structs.replace(index, schema=schema, dataflow=f"u{number}")
            as_of = await self.hold_inputs(dataflow_holder(made.dataflow_id), [entry])
            found.append(msgspec.structs.replace(made, as_of=as_of))
        return found

    async def _create_on(
        self,
        catalog: CatalogSnapshot,
        seqno: int | None,
        entry: CatalogObject,
        shards: Sequence[NewShard],
    ) -> CatalogChanged:
        """Store an object whose inputs are held; drop the holds if the object was certainly not
        created."""
        try:
            return await self.store(catalog.add(entry), seqno, shards, created=entry)
        except PenstockError as error:
            # If the error is indeterminate, the object may exist and need its holds.
            if error.determinate:
                await self.drop_holds(catalog, entry)
            raise

    async def hold_inputs(
        self, holder: str, inputs: Sequence[CatalogObject], wanted: Time | None = None
    ) -> Time:
        """Hold all inputs for `holder` at the latest time at which all of them can be read, or at
        `wanted` if that is earlier. Return the time. Raises `ReadBelowSince`."""
        shards = [each.shard for each in inputs if each.shard is not None]
        names = ", ".join(each.name for each in inputs)
        failed = PenstockError(
            f"the history of {names} is compacted faster than it can be held: try again"
        )
        for _ in range(AS_OF_ATTEMPTS_MAX):
            states = [await self._persist.state(shard) for shard in shards]
            uppers = [await self._persist.upper(shard) for shard in shards]
            since = max((state.since for state in states), default=0)
            as_of: Time = max(last_sealed_time(min(uppers)), since)
            if wanted is not None and wanted < as_of:
                as_of = wanted
            if as_of < since:
                text = f"cannot read {names} at {as_of}: the history begins at {since}"
                failed = ReadBelowSince(text)
                break
            try:
                await self._persist.set_holds([(shard, holder, as_of) for shard in shards])
            except ReadBelowSince:
                # An input was compacted beyond the chosen time in the meantime: choose again.
                continue
            states = [await self._persist.state(shard) for shard in shards]
            if all(state.since <= as_of for state in states):
                return as_of
        # The object will not be created, so nothing else would drop its holds.
        for shard in shards:
            await self.drop_hold(shard, holder)
        raise failed

    # -- drop ----------------------------------------------------------------------------------

    async def drop(
        self,
        catalog: CatalogSnapshot,
        seqno: int | None,
        entry: CatalogObject,
        also: tuple[CatalogObject, ...] = (),
    ) -> CatalogChanged:
        """Drop an object, and with it `also`, others that depend on it. Raises `ObjectInUse`,
        `StorageError`. Keeps the holds on the inputs: see `drop_holds`."""
        return await self.drop_all(catalog.remove(entry, *also), seqno, entry, also)

    async def replace_entries(
        self, catalog: CatalogSnapshot, seqno: int | None, entries: Sequence[CatalogObject]
    ) -> CatalogChanged:
        """Store new definitions of objects whose shards and dataflows stay the same. Raises
        `ObjectExists`, `WriterFenced`, `StorageError`."""
        made = catalog.put(*entries)
        if not await self._persist.compare_and_set(
            [CompareAndSet(CATALOG_KEY, seqno, made.encode())]
        ):
            raise fenced(seqno)
        return CatalogChanged(made, seqno_after(seqno), altered=tuple(entries))

    @property
    def persist(self) -> PersistClient:
        """Return the store of the shards and the catalog."""
        return self._persist

    @property
    def analyze(self) -> AnalyzeQuery:
        """Return the function by which the engine analyses queries."""
        return self._analyze

    async def drop_all(
        self,
        smaller: CatalogSnapshot,
        seqno: int | None,
        entry: CatalogObject,
        also: tuple[CatalogObject, ...],
        records: Sequence[CompareAndSet] = (),
    ) -> CatalogChanged:
        """Store a catalog without these objects, and set `records` with it. Raises `WriterFenced`,
        `StorageError`."""
        cas = [CompareAndSet(CATALOG_KEY, seqno, smaller.encode()), *records]
        shards = [shard for each in (entry, *also) for shard in each.shards]
        if shards:
            done = await self._persist.drop_shards(shards, extra=cas)
        else:
            done = await self._persist.compare_and_set(cas)
        if not done:
            raise fenced(seqno)
        # Sources and sinks have no hydration notes, and their tasks should be stopped soon.
        if entry.kind not in CONNECTOR_KINDS:
            await self._forget_hydrations(shards)
        return CatalogChanged(smaller, seqno_after(seqno), dropped=entry, also=also)

    async def _forget_hydrations(self, shards: Sequence[ShardId]) -> None:
        """Delete the hydration notes of a view that was dropped while hydrating. If that fails,
        they stay forever."""
        with suppress(StorageError):
            for shard in shards:
                head = await self._persist.head(note_key(shard))
                if head is not None:
                    await self._persist.compare_and_set(
                        [CompareAndSet(note_key(shard), head.seqno, None)]
                    )

    async def drop_holds(self, catalog: CatalogSnapshot, entry: CatalogObject) -> None:
        """Drop the holds of an object's dataflow on its inputs; a failure is only logged."""
        for id_ in entry.depends:
            below = catalog.get(id_)
            if below is not None and below.shard is not None:
                await self.drop_hold(below.shard, dataflow_holder(entry.dataflow_id))

    async def drop_hold(self, shard: ShardId, holder: str) -> None:
        """Drop one hold. A failure is only logged: the next start drops the hold."""
        try:
            await self._persist.drop_hold(shard, holder)
        except (StorageError, UnknownObject) as error:
            log.info("hold %s on shard %s could not be dropped yet: %s", holder, shard, error)

    # -- the record ----------------------------------------------------------------------------

    async def store(
        self,
        catalog: CatalogSnapshot,
        seqno: int | None,
        shards: Sequence[NewShard],
        *,
        created: CatalogObject,
        also: tuple[CatalogObject, ...] = (),
    ) -> CatalogChanged:
        """Make a catalog durable, with new shards. Raises `WriterFenced`, `StorageError`."""
        cas = CompareAndSet(CATALOG_KEY, seqno, catalog.encode())
        if shards:
            # One set: a crash leaves neither an object without shards nor shards without an object.
            done = await self._persist.create_shards(shards, extra=[cas])
        else:
            done = await self._persist.compare_and_set([cas])
        if not done:
            raise fenced(seqno)
        return CatalogChanged(catalog, seqno_after(seqno), created=created, also=also)

    async def read_back(self) -> tuple[CatalogSnapshot, int | None]:
        """Read the durable catalog, after a change with an indeterminate error."""
        head = await self._persist.head(CATALOG_KEY)
        return (
            (CatalogSnapshot(), None) if head is None else (decode_catalog(head.data), head.seqno)
        )


def seqno_after(seqno: int | None) -> int:
    """Return the catalog's seqno after a successful set."""
    # Computed, not read: a failed read would report a durable change as a failure.
    return 0 if seqno is None else seqno + 1


def columns_named(entry: CatalogObject, names: Sequence[str]) -> tuple[str, ...]:
    """Return column names in the object's spelling. Raises `InvalidUsage` for unknown and duplicate
    names."""
    own = {fold(name): name for name in entry.schema.names}
    for name in names:
        if fold(name) not in own:
            raise InvalidUsage(
                f"{entry.name} has no column {name!r} (available: {', '.join(entry.schema.names)})"
            )
    found = tuple(own[fold(name)] for name in names)
    if len(set(found)) < len(found):
        raise InvalidUsage(f"{entry.name}: duplicate column in ({', '.join(names)})")
    return found


def _view_shard(id_: ObjectId, schema: TableSchema, shard: ShardId, as_of: Time) -> NewShard:
    holds = {RETAIN: as_of, dataflow_holder(id_): as_of}
    return NewShard(id=shard, schema=schema, since=as_of, holds=holds)


def table_schema(table: str, schema: TableSchema) -> TableSchema:
    """Check a table's schema and return it with its key columns NOT NULL. Raises `InvalidUsage`."""
    if not 0 < len(schema.columns) <= COLUMNS_MAX:
        raise InvalidUsage(
            f"table {table} has {len(schema.columns)} columns: expected 1 to {COLUMNS_MAX}"
        )
    own: dict[str, TableColumn] = {}
    for column in schema.columns:
        check_name(f"table {table}: column", column.name)
        if fold(column.name) in own:
            raise InvalidUsage(f"table {table}: duplicate column {column.name}")
        if arrow_type(column.type) == arrow_type("void"):
            raise InvalidUsage(f"table {table}: column {column.name} has type void: give it a type")
        own[fold(column.name)] = column
    missing = [name for name in schema.key if fold(name) not in own]
    if missing or len({fold(name) for name in schema.key}) < len(schema.key):
        raise InvalidUsage(
            f"table {table}: PRIMARY KEY ({', '.join(schema.key)}) must name different columns of "
            f"{', '.join(schema.names)}"
        )
    key = tuple(own[fold(name)].name for name in schema.key)
    columns = tuple(
        msgspec.structs.replace(c, nullable=c.nullable and c.name not in key)
        for c in schema.columns
    )
    fitted = TableSchema(columns, key)
    check_key_columns(f"table {table}", fitted)
    return fitted


def checked_defaults(
    table: str, schema: TableSchema, given: Mapping[str, ColumnDefault]
) -> dict[str, ColumnDefault]:
    """Check the defaults that a request gives a table's columns, and return them by the columns'
    own names. Raises `InvalidUsage` for an unknown column, a value of another type, or a default
    that is too long."""
    own = {fold(column.name): column for column in schema.columns}
    found = {}
    for name, default in given.items():
        column = own.get(fold(name))
        if column is None:
            raise InvalidUsage(f"default for unknown column {name} of table {table}")
        what = f"table {table}, column {column.name}: the default"
        if len(default.text.encode()) + len(default.value) > DEFAULT_BYTES_MAX:
            raise InvalidUsage(f"{what} is too long (limit {DEFAULT_BYTES_MAX} bytes)")
        kind = arrow_type(column.type)
        # Writes use the value without checking it again.
        if default.value:
            value = from_ipc(default.value)
            if value.num_rows != 1 or value.schema.types != [kind]:
                raise InvalidUsage(f"{what} is not a value of type {column.type}")
        elif default.moment and not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
            raise InvalidUsage(f"{what} is a time, but the column has type {column.type}")
        found[column.name] = default
    return found


def target_lag(target_lag_ms: int) -> int:
    """Check the target lag and return it. Raises `InvalidUsage` for a negative one."""
    if target_lag_ms < 0:
        raise InvalidUsage(
            f"target_lag_ms = {target_lag_ms}: must not be negative (0 is as fresh as possible)"
        )
    return target_lag_ms


def retain(retain_history_ms: int | None) -> int | None:
    """Check the requested retained history and return it; None means the default. Raises
    `InvalidUsage`."""
    if retain_history_ms is not None and retain_history_ms <= 0:
        raise InvalidUsage(f"retain_history_ms = {retain_history_ms}: must be greater than zero")
    return retain_history_ms


def fenced(seqno: int | None) -> WriterFenced:
    """Return the error for a catalog that another service has changed."""
    return WriterFenced(
        f"the catalog is no longer at seqno {seqno}: another service changed it; nothing was done",
        determinate=True,
    )


_SHOWN_KINDS: Final = {VIEW: "materialized view", PLAIN_VIEW: "view", SOURCE_TABLE: "table"}


def cascade_notices(gone: Iterable[CatalogObject]) -> tuple[str, ...]:
    """Return a notice for each object that is dropped by CASCADE, in PostgreSQL's wording."""
    return tuple(
        f"drop cascades to {_SHOWN_KINDS.get(each.kind, each.kind)} {each.name}"
        for each in gone
        # Users do not see these: they did not create them.
        if not each.replaces and not is_subscribed_view(each.name)
    )
