"""The checkers of runs with a storage half: one order, one client at a time, no since advanced
early.

They inspect the workers of the service's present life after each durable change and each message of
a storage client (`RenderingsChecker`), the responses that workers send and clients receive
(`StorageToldChecker`), and every durable change (`StorageHoldsChecker`). `outside.SinksChecker`
compares sinks with the truth, `checkers.SourcesChecker` sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from actors.model.protocol.relations import PREFIX
from actors.model.protocol.storage import (
    FrontierUpper,
    IngestionDescription,
    Response,
    RunOneshotIngestion,
    StagedBatches,
)
from actors.replica.cluster.sequencer import Sequencer
from actors.replica.storage.renderings import LogEntry
from actors.replica.storage.reporting import Described
from actors.replica.storage.state import StorageState
from actors.runtime.kernel.cell import ActorCell
from actors.runtime.progress import EMPTY, Frontier, Nonce, ObjectId
from actors.worker import Worker
from tests.simulators.service.history import CheckerViolation, ShardHistories
from tests.simulators.service.outside import SinksChecker

"""Workers of one cluster, by index, and its sequencer."""
DATAFLOWS: Final = f"{PREFIX}dataflows"


def id_of(description: Described) -> ObjectId:
    """Return the object's id; for a one-shot ingestion its uuid."""
    return description.uuid if isinstance(description, RunOneshotIngestion) else description.id


class StorageToldChecker:
    """Checks that a storage client receives only responses that workers sent to it: a frontier is
    the least that all of them sent under its nonce, a one-shot ingestion is answered when all of
    them answered it under that nonce, any other response passes unchanged. And no frontier is sent
    before its data are durable: in the object's shard, or externally.

    Does not cover: responses of workers that no client receives (displaced clients), and latency.
    """

    def __init__(self, workers: int, history: ShardHistories, sinks: SinksChecker) -> None:
        self._workers = workers
        self._history = history
        self._sinks = sinks
        self._uppers: dict[tuple[Nonce, ObjectId], dict[str, Frontier]] = {}
        self._sent: dict[Nonce, set[bytes]] = {}
        """Responses as they cross a wire: an actor that receives one may have a copy."""

    def sent(self, adapter: str, nonce: Nonce, response: Response) -> None:
        """Note a response that a worker sends by way of its adapter."""
        if isinstance(response, FrontierUpper):
            told = self._uppers.setdefault((nonce, response.id), {})
            told[adapter] = max(told.get(adapter, 0), response.upper)
        elif isinstance(response, StagedBatches):
            self._uppers.setdefault((nonce, response.uuid), {})[adapter] = EMPTY
        else:
            self._sent.setdefault(nonce, set()).add(msgspec.msgpack.encode(response))

    def told(self, nonce: Nonce, response: Response) -> None:
        """Check a response that the client of that nonce receives."""
        if isinstance(response, StagedBatches):
            response = FrontierUpper(response.uuid, EMPTY)  # merged as one
        if not isinstance(response, FrontierUpper):
            if msgspec.msgpack.encode(response) not in self._sent.get(nonce, ()):
                raise CheckerViolation(
                    f"nonces: {nonce} was told what nobody sent to it: {response}"
                )
            return
        id_, upper = response.id, response.upper
        uppers = self._uppers.get((nonce, id_), {})
        if len(uppers) < self._workers or min(uppers.values()) < upper:
            raise CheckerViolation(
                f"nonces: {nonce} was told {id_} below {upper}, workers sent {uppers}"
            )
        durable = self._durable(id_)
        if durable is not None and upper > durable:
            raise CheckerViolation(f"told: {id_} below {upper}, and it is durable below {durable}")

    def _durable(self, id_: ObjectId) -> Frontier | None:
        held = self._history.shards.get(id_)
        if held is not None:
            return held.state.upper
        written = self._sinks.written.get(id_)
        return None if written is None else written.upper or written.as_of


class StorageHoldsChecker:
    """Checks that the since of a shard is never beyond the committed upper of a sink on it, nor
    beyond the time from which a view on it would resume after a restart.

    Does not cover: indexes and subscribes, which may begin anew at any readable time.
    """

    def __init__(self, history: ShardHistories, sinks: SinksChecker) -> None:
        self._history = history
        self._sinks = sinks

    def check(self) -> None:
        """Check the sinces after a durable change."""
        history = self._history
        shards = {entry.id: entry.shard for entry in history.catalog.objects}
        for entry in history.catalog.objects:
            if entry.kind == "sink":
                written = self._sinks.written.get(entry.id)
                upper = None if written is None else written.upper
                needed = entry.as_of if upper is None else upper
            elif entry.kind == "view" and entry.shard in history.shards:
                needed = max(history.shards[entry.shard].state.upper - 1, entry.as_of)
            else:
                continue
            for on in entry.depends:
                held = history.shards.get(shards.get(on) or "")
                if held is not None and held.state.since > needed:
                    raise CheckerViolation(
                        f"holds: {entry.name} needs shard {held.state.id} from {needed} on, and "
                        f"its since is {held.state.since}"
                    )


class _Order:
    """The renderings of the workers of one cluster, by place in their logs."""

    def __init__(self, workers: object) -> None:
        self.workers = workers  # kept alive, so that no other list gets its `id`
        self.entries: list[LogEntry] = []
        self.digests: dict[int, str] = {}
        self.seen: dict[int, int] = {}
        self.dataflows: dict[int, tuple[ObjectId, str]] = {}


class RenderingsChecker:
    """Checks that all workers of a cluster render alike, of both halves: one's log is a prefix of
    the other's, whichever clients displaced each other; the invariants of each state hold
    (`validate`). When no command of the one order is under way, the renderings of the storage half
    are those that worker 0 wants: so no dropped object was rendered again. In the relations no id
    is of both halves, and each object of the storage half is shown by one worker.

    Does not cover: descriptions of dataflows (the checker of views sees what they make).
    """

    def __init__(self) -> None:
        self._orders: dict[int, _Order] = {}

    def check(self, workers: Sequence[Worker]) -> None:
        """Check one cluster, at any moment at which none of these actors is at work."""
        if not workers:
            return
        key = id(workers[0]._workers)
        order = self._orders.setdefault(key, _Order(workers[0]._workers))
        states = [each._storage.state for each in workers if each._storage is not None]
        for index, worker in enumerate(workers):
            self._check_dataflows(order, worker)
            if worker._storage is not None:
                self._check_log(order, index, worker._storage.state)
        for state in states:
            try:
                state.validate()
            except AssertionError as error:
                raise CheckerViolation(f"renderings: worker {state.index}: {error!r}") from None
        self._check_relations(workers)
        if len(states) == len(workers):
            self._check_settled(states, sequencer_of(workers[0]))

    def _check_log(self, order: _Order, index: int, state: StorageState) -> None:
        log = state.renderings.log
        seen = order.seen.get(index, 0)
        new = list(log.entries)[-(log.length - seen) :] if log.length > seen else []
        for place, entry in enumerate(new, log.length - len(new)):
            if place < len(order.entries):
                if order.entries[place] != entry:
                    raise CheckerViolation(
                        f"renderings: worker {index} has {entry} where another has "
                        f"{order.entries[place]}"
                    )
            elif place == len(order.entries):
                order.entries.append(entry)
        order.seen[index] = log.length
        if order.digests.setdefault(log.length, log.digest) != log.digest:
            raise CheckerViolation(
                f"renderings: the log of worker {index} differs within {log.length} changes"
            )

    def _check_dataflows(self, order: _Order, worker: Worker) -> None:
        for number, made in worker._state._numbers.items():
            what = (made.description.id, type(made.description.export).__name__)
            if order.dataflows.setdefault(number, what) != what:
                raise CheckerViolation(
                    f"renderings: worker {worker._index} has {what} as number {number}, another "
                    f"{order.dataflows[number]}"
                )

    def _check_relations(self, workers: Sequence[Worker]) -> None:
        shown: dict[ObjectId, int] = {}
        for index, worker in enumerate(workers):
            half = worker._storage
            if half is None:
                continue
            mine = {row[1] for row in half.rows("dataflows")}
            theirs = [row[2] for row in worker._logs.rows(DATAFLOWS) if row[2] not in mine]
            rows = [row[2] for row in worker._logs.rows(DATAFLOWS)]
            both = mine & {made.description.id for made in worker._state._numbers.values()}
            missing = {id_of(half._described[number]) for number in half._tasks} - mine
            if both or missing or len(rows) - len(theirs) < len(mine):
                raise CheckerViolation(
                    f"relations: worker {index} shows {rows}; of both halves {both}, not shown "
                    f"{missing}"
                )
            for id_ in mine:
                if shown.setdefault(id_, index) != index:
                    raise CheckerViolation(
                        f"relations: workers {shown[id_]} and {index} both show {id_}"
                    )

    def _check_settled(self, states: Sequence[StorageState], sequencer: Sequencer) -> None:
        first = states[0]
        if not settled(states, sequencer):
            return
        wanted, running = first.client.wanted, first.desired.running()
        if running.keys() != {*wanted.ingestions, *wanted.sinks}:
            raise CheckerViolation(
                f"renderings: {sorted(running)} are to run, the client wants "
                f"{sorted((*wanted.ingestions, *wanted.sinks))}"
            )
        rendered = {
            id_: each.what
            for id_, each in first.renderings.current.items()
            if id_ not in first.desired.oneshots
        }
        if rendered.keys() != running.keys():
            raise CheckerViolation(
                f"renderings: {sorted(rendered)} are rendered, {sorted(running)} are to run"
            )
        for id_, what in rendered.items():
            if isinstance(what, IngestionDescription) and what != running[id_]:
                raise CheckerViolation(
                    f"renderings: {id_} is rendered as {what}, not {running[id_]}"
                )


def settled(states: Sequence[StorageState], sequencer: Sequencer) -> bool:
    """Return whether no command of the one order is under way, and no client is initializing."""
    first = states[0]
    desired = first.desired
    return (
        first.client.incoming is None
        and first.client.nonce is not None
        and all(state.next_index == sequencer._order.next_index for state in states)
        and first.ordered == first.proposed
        and not desired.looked_up()
    )


def leftovers(states: Iterable[StorageState]) -> list[str]:
    """Return the renderings that are left though all objects were dropped, for people."""
    return [
        f"worker {state.index} renders {sorted(state.renderings.current)}, runs "
        f"{sorted(state.tasks.running)}, stops {sorted(state.tasks.stopping)}"
        for state in states
        if state.renderings.current or state.tasks.running or state.tasks.stopping
    ]


def upper_of(id_: ObjectId, sinks: SinksChecker) -> Frontier:
    """Return the committed upper of a sink."""
    written = sinks.written.get(id_)
    return EMPTY if written is None else written.upper or 0


def sequencer_of(worker: Worker) -> Sequencer:
    """Return the sequencer that worker 0 owns."""
    sequencer: Sequencer = worker._propose.__self__  # type: ignore[attr-defined]
    return sequencer


def halves_of(cells: Mapping[str, ActorCell[Any]], count: int) -> list[list[Worker]]:
    """Return the workers of every cluster all of whose `count` workers have begun."""
    found: dict[str, list[Worker]] = {}
    for path, cell in cells.items():
        workers = found.setdefault(path.rpartition("/")[0], [])
        if isinstance(cell.actor, Worker) and hasattr(cell.actor, "_installs"):
            workers.append(cell.actor)
    return [
        sorted(workers, key=lambda worker: worker._index)
        for workers in found.values()
        if len(workers) == count
    ]
