"""Reads of the service's relations about itself (`protocol.relations`).

A relation of the workers becomes a peek of the replicas, like any other read (`PendingReads`). A
relation of the controller is made here at the moment of the read; if it needs the state of shards
or the engine's jobs, an effect asks for them first. Filter, columns, order and limit are applied as
a worker does.

Rows come from the catalog, from open requests (whose number is limited elsewhere), and from ended
requests that are remembered (`log_rows_max`). The answer is a single message: one larger than
`result_bytes_max` is refused with an error that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec

from actors.control.access.open_sessions import dialect_of, may_signal
from actors.control.controller.catalog.catalog import (
    INDEX,
    TABLE,
    CatalogObject,
)
from actors.control.controller.connectors.objects import ConnectorObjects
from actors.control.controller.object_conditions import lag_ms
from actors.control.controller.reads.copies import RunningCopies
from actors.control.controller.reads.queries import RunningQueries
from actors.control.controller.reads.reads import RELATION, PendingReads, prototype
from actors.control.controller.reads.status import redacted_condition
from actors.control.controller.reads.subscribes import RunningSubscribes
from actors.control.controller.state import ControllerState, reply_error, to_penstock_error
from actors.durable.persist import ShardState
from actors.engine.sql.redaction import redact_statement
from actors.model.plan.job_log import JobNote
from actors.model.plan.jobs import ExecutorMessage, InspectJobs
from actors.model.protocol.api import ReadContents, ReadObject
from actors.model.protocol.compute import LogTarget, Peek, ShardImport
from actors.model.protocol.relations import PREFIX, RELATIONS, SystemRelation, relation_of
from actors.replica.compute.logs import Row, answer
from actors.runtime.errors import DeadlineExceeded, InvalidUsage, PenstockError
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import ShardId, Time, frontier_or_null

_ERRORED: Final = "its contents hold an error, which every read returns"


class RelationInputs(msgspec.Struct, frozen=True, gc=False):
    """Inputs of a relation that had to be asked for (the state of shards, the engine's jobs), and
    the role that asks."""

    states: dict[ShardId, ShardState] = {}
    jobs: tuple[JobNote, ...] = ()
    role: str | None = None
    """Role of the session that asks."""


class RelationRead(msgspec.Struct, frozen=True, gc=False):
    """The inputs of a relation have arrived, or an error has."""

    session: ActorAddress[Any]
    request: int
    relation: SystemRelation
    peek: Peek
    found: RelationInputs
    error: PenstockError | None = None


_ACTORS: Final = relation_of("penstock.actors")
_JOBS: Final = relation_of("penstock.spark_jobs")
_Make: TypeAlias = Callable[[RelationInputs], Iterable[Row]]


class SystemRelations:
    """Answers reads of relations."""

    def __init__(
        self,
        state: ControllerState,
        reads: PendingReads,
        subscribes: RunningSubscribes,
        queries: RunningQueries,
        copies: RunningCopies,
        executors: Sequence[ActorAddress[ExecutorMessage]],
        sources: ConnectorObjects,
    ) -> None:
        self._state = state
        self._sources = sources
        self._reads = reads
        self._subscribes = subscribes
        self._queries = queries
        self._executors = executors
        self._make: dict[str, _Make] = {
            "relations": lambda _: _relations(),
            "objects": self._objects,
            "operators": lambda _: chain(self._operators(), sources.operator_rows()),
            "shards": self._shards,
            "holds": self._holds,
            "peeks": lambda _: chain(self._reads.rows(), self._queries.rows()),
            "subscribes": lambda _: self._subscribes.rows(),
            "copies": lambda _: copies.rows(),
            "copies_from": lambda _: sources.copies.rows(),
            "sessions": lambda found: self._sessions(found.role),
            "errors": lambda found: self._errors(found.role),
            "spark_jobs": lambda found: map(_JOBS.row, found.jobs),
            "actors": lambda _: map(_ACTORS.row, state.ctx.actors()),
            "memory": lambda _: map(msgspec.structs.astuple, state.persist.ledger.uses()),
            "sources": lambda found: sources.rows(found.role),
            "source_tables": lambda found: sources.table_rows(found.role),
        }

    # -- reading -------------------------------------------------------------------------------

    def read(
        self, session: ActorAddress[Any], request: ReadObject, role: str | None = None
    ) -> None:
        """Start a read by a session with this role. Raises `UnknownObject`, `InvalidUsage` and its
        subclasses."""
        state = self._state
        relation = relation_of(request.name)
        if request.as_of is not None:
            raise InvalidUsage(
                f"cannot read {relation.name} as of {request.as_of}: system relations have no "
                "history; omit as_of"
            )
        name, schema = relation.name, relation.schema
        entry = CatalogObject(id=name, name=name, kind=RELATION, schema=schema)
        time = state.oracle_now()
        peek = prototype(entry, request, time, ShardImport("", schema))
        peek = msgspec.structs.replace(peek, target=LogTarget(name))
        if relation.kept_by == "workers":
            self._reads.read_relation(session, request, entry, peek)
            return
        number = request.request

        def done(found: RelationInputs) -> RelationRead:
            return RelationRead(session, number, relation, peek, found)

        short = name.removeprefix(PREFIX)
        if short in ("objects", "shards", "holds"):
            seek = lambda: self._states(role)  # noqa: E731
        elif short == "spark_jobs":
            deadline = request.deadline_ms or state.settings.peek_deadline_ms
            seek = lambda: self._jobs(deadline)  # noqa: E731
        else:
            self.answered(done(RelationInputs(role=role)))
            return
        state.ctx.effect(
            seek,
            done=done,
            failed=lambda error: RelationRead(
                session, number, relation, peek, RelationInputs(), to_penstock_error(error)
            ),
        )

    def answered(self, read: RelationRead) -> None:
        """Answer a read, now that its inputs have arrived."""
        limit = self._state.settings.result_bytes_max
        try:
            if read.error is not None:
                raise read.error
            # Made in one turn of the controller, so that a relation is a snapshot of one moment.
            rows = self._make[read.relation.name.removeprefix(PREFIX)](read.found)
            piece = next(answer(read.relation, rows, read.peek, limit))
            if not piece.last or len(piece.arrow) > limit:
                raise InvalidUsage(
                    f"the result of {read.relation.name} exceeds result_bytes_max ({limit}): read "
                    "fewer columns, or filter or limit the rows"
                )
        except PenstockError as error:
            reply_error(read.session, read.request, error)
        else:
            read.session.reply(ReadContents(read.request, read.peek.time, piece.arrow))

    async def _states(self, role: str | None) -> RelationInputs:
        """Return the state of all shards in the catalog."""
        found: dict[ShardId, ShardState] = {}
        for entry in self._state.catalog.objects:
            for shard in entry.shards:
                try:
                    found[shard] = await self._state.persist.state(shard)
                except PenstockError:
                    continue  # it was dropped in the meantime, or its store is not answering
        return RelationInputs(states=found, role=role)

    async def _jobs(self, deadline_ms: int) -> RelationInputs:
        try:
            found = [await each.ask(InspectJobs, deadline_ms) for each in self._executors]
            return RelationInputs(jobs=tuple(chain.from_iterable(found)))
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"the engine did not report its jobs within {deadline_ms} ms"
            ) from None

    # -- rows ----------------------------------------------------------------------------------

    def _objects(self, found: RelationInputs) -> Iterator[Row]:
        state = self._state
        for entry in state.catalog.objects:
            shown = redacted_condition(state, self._sources, found.role, entry)
            held = found.states.get(entry.shard or "")
            since = None if held is None else held.since
            # An index has no shard: its since is in memory.
            if entry.kind == INDEX:
                since = state.frontiers.readable_from(entry.id)
            yield (
                entry.id,
                entry.name,
                entry.kind,
                shown.state,
                None if entry.plan is None else entry.plan.mode,
                since,
                frontier_or_null(state.frontiers.upper(entry)),
                lag_ms(state, entry),
                entry.as_of,
                state.catalog.names(entry.depends),
                ", ".join(entry.key or entry.schema.key),
                entry.schema.ddl(),
                entry.written or None,
                entry.retain_history_ms,
                entry.target_lag_ms or None,
                ": ".join(filter(None, (shown.text, shown.hint))) or None,
                shown.since_ms or None,
                shown.retries,
            )

    def _operators(self) -> Iterator[Row]:
        for entry in self._state.catalog.objects:
            plan = entry.plan
            if plan is None:
                continue
            for number, line in enumerate(plan.tree.splitlines()):
                text = line.lstrip(" ")
                operator = text.partition(" ")[0].partition("(")[0]
                # The text of the tree is indented by two spaces per level.
                depth = (len(line) - len(text)) // 2
                plan_columns = plan.mode, plan.reason or None, plan.policy
                yield (
                    entry.id,
                    entry.name,
                    number,
                    depth,
                    operator,
                    text,
                    *plan_columns,
                    *(None,) * 4,
                )

    def _each_shard(
        self, found: RelationInputs
    ) -> Iterator[tuple[CatalogObject, ShardState, Time | None]]:
        for entry in self._state.catalog.objects:
            for shard in entry.shards:
                state = found.states.get(shard)
                if state is not None:
                    upper = state.upper
                    if entry.kind == TABLE:
                        upper = max(upper, self._state.frontiers.tables_upper)
                    yield entry, state, frontier_or_null(upper)

    def _shards(self, found: RelationInputs) -> Iterator[Row]:
        for entry, state, upper in self._each_shard(found):
            parts = [part for batch in state.batches for part in batch.parts]
            yield (
                state.id,
                entry.name,
                "contents" if state.id == entry.shard else "hidden",
                state.since,
                upper,
                len(state.batches),
                len(parts),
                sum(part.rows for part in parts),
                sum(part.bytes for part in parts),
                len(state.leases),
            )

    def _holds(self, found: RelationInputs) -> Iterator[Row]:
        for entry, state, upper in self._each_shard(found):
            holders = [("hold", holder, since) for holder, since in sorted(state.holds.items())]
            holders += [("lease", reader, lease.since) for reader, lease in state.leases.items()]
            for kind, holder, since in holders:
                behind = None if upper is None else max(0, upper - since)
                yield state.id, entry.name, kind, holder, frontier_or_null(since), behind

    def _sessions(self, role: str | None) -> Iterator[Row]:
        reads = self._reads.by_session() + self._queries.by_session()
        subscribes = self._subscribes.by_session()
        for each in self._state.sessions:
            known = (each.number, each.role or None, each.door, each.path or None)
            # As in `pg_stat_activity`, everyone may see that a session exists and whose it is.
            if not may_signal(self._state.access, role, each):
                yield *known, *(None,) * 8
                continue
            limit = self._state.settings.audit_text_characters_max
            statement = redact_statement(each.statement, dialect_of(each.door))
            yield (
                *known,
                each.peer,
                each.since_ms,
                "active" if each.statement else "idle",
                statement[:limit] or None,
                each.statement_ms,
                each.requests,
                reads[each.path],
                subscribes[each.path],
            )

    def _errors(self, role: str | None) -> Iterator[Row]:
        for id_, fault in self._state.faults.all():
            entry = self._state.catalog.get(id_)
            if entry is None:
                continue
            found = redacted_condition(self._state, self._sources, role, entry)
            text = f"{found.text} ({found.hint})" if found.hint else found.text
            text = text or (_ERRORED if fault.state == "errored" else "")
            yield id_, entry.name, fault.state, text, fault.since_ms, fault.retries
        for row in self._sources.error_rows(role):
            yield *row, 0


def _relations() -> Iterator[Row]:
    for relation in RELATIONS.values():
        yield relation.name, relation.kept_by, len(relation.columns), relation.text
