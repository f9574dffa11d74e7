"""What must hold of both halves of a replica, a checker a promise. Each begins a violation with its
name, and says what it does not cover.

What the states assert of themselves (`validate`) is checked after every few events and whenever
all is delivered, what a client may hear (`ResponseRules`, `StorageResponseRules`) with every
response (*rules*), what a read finds sealed and readable with every read (`outside`). That ids of
what is shown in relations differ between the halves cannot be seen here: clients give the ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actors.errors import Canceled
from actors.progress import Frontier, ObjectId
from actors.protocol import compute, storage
from actors.protocol import storage_internal as internal
from actors.protocol.internal import Half
from actors.testing.halves.wishes import ComputeTruth, Shape, StorageTruth, timeless
from actors.testing.simulation.history import Violation

if TYPE_CHECKING:
    from actors.compute.state import ComputeState
    from actors.storage.state import StorageState
    from actors.testing.halves.outside import Outside

KINDS = ("write", "input", "output")


def hold(right: bool, rule: str, wrong: str, *operands: object) -> None:
    """Raises `Violation` unless it is; what is wrong is put into words only then."""
    if not right:
        raise Violation(f"{rule}: {wrong.format(*operands)}")


class OrderChecker:
    """*order*: whatever renders, changes or drops something is at the same place of one order on
    all workers, both halves together: their logs are equal as far as each has come, and so are the
    digests of the storage half's, which hold the descriptions too.

    Does not cover: descriptions of dataflows (`WantedChecker` compares what they became).
    """

    def __init__(self) -> None:
        self.entries: list[tuple[int, Any]] = []
        self.seen: Counter[int] = Counter()
        self._digests: dict[int, str] = {}

    def render(self, worker: int, place: int, what: Any) -> None:
        """A worker comes to its next entry: `place` is that of the command that led to it."""
        entry, at = (place, what), self.seen[worker]
        self.seen[worker] += 1
        if at == len(self.entries):
            before = self.entries[-1][0] if self.entries else 0
            hold(place >= before, "order", "worker {} renders {} after {}", worker, entry, before)
            self.entries.append(entry)
        hold(
            self.entries[at] == entry,
            "order",
            "worker {} renders {}, another one {}",
            worker,
            entry,
            self.entries[at],
        )

    def applied(self, state: StorageState) -> None:
        """A worker's storage half has applied an ordered command."""
        log = state.renderings.log
        known = self._digests.setdefault(log.length, log.digest)
        hold(known == log.digest, "order", "worker {}: {} changes differ", state.index, log.length)


class WantedChecker:
    """*wanted*: what worker 0 has rendered or dropped of the storage half is what its client's
    commands, taken in order, come to: nothing that was dropped, refused, or said by a former client
    is rendered, nothing that is to run is dropped. A dataflow has the number that the commands in
    the one order give it, on every worker, and only what they drop is dropped. When all is quiet,
    every worker has just that: each thing once, at the time that was allowed last.

    Does not cover: the delays of retries; which of two tasks of one rendering does the work.
    """

    def __init__(self, of_storage: StorageTruth, of_compute: ComputeTruth) -> None:
        self._storage = of_storage
        self._compute = of_compute

    def offered(self, command: internal.InternalCommand) -> None:
        """Worker 0 has a command of the storage half ordered."""
        running, wish = self._storage.running, self._storage.wish
        match command:
            case internal.CreateIngestionDataflow(description) | internal.RunSinkDataflow(
                description
            ):
                found = running.get(description.id)
                same = found is not None and timeless(found) == timeless(description)
                hold(same, "wanted", "{} is rendered, to run is {}", description, found)
            case internal.RunOneshotIngestionDataflow(oneshot):
                hold(wish.oneshots.get(oneshot.uuid) == oneshot, "wanted", "{} is run", oneshot)
            case internal.DropDataflow(ids):
                wrong = set(ids) & self._storage.ids()
                hold(not wrong, "wanted", "{} are dropped, and are to run", sorted(wrong))

    def rendered(self, worker: int, number: int, id_: ObjectId) -> None:
        """A worker renders a dataflow."""
        found = self._compute.numbers.get(number)
        hold(
            found == id_,
            "wanted",
            "worker {} renders {} as {}, which is {}",
            worker,
            id_,
            number,
            found,
        )

    def dropped(self, worker: int, number: int) -> None:
        """A worker drops one."""
        hold(
            number in self._compute.dropped, "wanted", "worker {} drops dataflow {}", worker, number
        )

    def at_rest(self, states: Sequence[tuple[Any, StorageState]]) -> None:
        """All is delivered."""
        wish = self._storage.wish
        wanted = {id_: timeless(what) for id_, what in self._storage.running.items()}
        expected: dict[str, Any] = {**wanted, **wish.oneshots}
        flows = {
            id_: (flow.number, flow.allowed, flow.scheduled)
            for id_, flow in self._compute.flows.items()
        }
        tasks: Counter[str] = Counter()
        for of_compute, of_storage in states:
            which = f"worker {of_storage.index}"
            heard = of_storage.client.wanted
            said = {id_: timeless(what) for id_, what in (heard.ingestions | heard.sinks).items()}
            meant = {id_: timeless(what) for id_, what in wish.objects.items()}
            right = said == meant and heard.oneshots == wish.oneshots
            hold(right, "wanted", "{} has heard {}, meant is {}", which, said, meant)
            current = of_storage.renderings.current
            found = {
                id_: each.what
                if isinstance(each.what, storage.RunOneshotIngestion)
                else timeless(each.what)
                for id_, each in current.items()
            }
            hold(found == expected, "wanted", "{} renders {}, to run is {}", which, found, expected)
            shown = {
                id_: (each.number, each.allowed, each.scheduled)
                for id_, each in of_compute.rendered.items()
            }
            hold(shown == flows, "wanted", "{} has dataflows {}, not {}", which, shown, flows)
            hold(of_compute.writes_allowed == self._compute.writes, "wanted", "{}: writes", which)
            for made in of_compute.rendered.values():
                waits = not made.is_index or of_compute.reads.pending.of(made.number)
                right = waits or made.compacted == made.allowed
                hold(bool(right), "wanted", "{} forgets nothing of {}", which, made)
            tasks.update(task.rendering.id for task in of_storage.tasks.running.values())
            expected_here = {id_ for id_, each in current.items() if each.complete}
            tasks.update(expected_here if of_storage.index == 0 else ())
        once = tasks == Counter(dict.fromkeys(expected, 1))
        hold(once, "wanted", "tasks run {}, wanted are {}", dict(tasks), sorted(expected))


class ToldChecker:
    """*told*: a worker answers nobody but the client it serves, when that has said all; an adapter
    passes on nothing but what is meant for its connection. A client is told a frontier only when
    all workers have told one as far under its nonce; and none beyond what is durable in the shard
    that it means by the id, or what its dataflow has reached. What is staged is what a task gave,
    and is not discarded. Counts are not above what was measured.

    Does not cover: rows (nobody reads any here), and how soon something is told.
    """

    def __init__(self, workers: int, durable: Mapping[Shape, Frontier]) -> None:
        self._workers = workers
        self._durable = durable
        self._sent: dict[tuple[str, ObjectId, str], list[Frontier]] = {}
        self.measured: Counter[ObjectId] = Counter()
        """What tasks have counted of each object."""
        self.staged: dict[str, list[storage.StagingResult]] = {}
        """By uuid, what tasks have given."""
        self._kept: set[bytes] = set()
        """Parts that a client was told of."""

    def answered(self, served: str | None, outbox: str | None, muted: bool, what: Any) -> None:
        """A worker answers."""
        right = not muted and served is not None and outbox == served
        hold(
            right,
            "told",
            "a worker that serves {} (muted: {}) tells {} {}",
            served,
            muted,
            outbox,
            what,
        )

    def sent(self, nonce: str, part: int, response: Any) -> None:
        """Under that nonce."""
        if isinstance(response, storage.FrontierUpper):
            self._send(nonce, part, response.id, "upper", response.upper)
        elif isinstance(response, compute.Frontiers):
            for kind in KINDS:
                frontier = getattr(response, kind)
                if frontier is not None:
                    self._send(nonce, part, response.id, kind, frontier)

    def _send(self, nonce: str, part: int, id_: ObjectId, kind: str, frontier: Frontier) -> None:
        uppers = self._sent.setdefault((nonce, id_, kind), [0] * self._workers)
        uppers[part] = max(uppers[part], frontier)

    def passed(self, connection: str | None, nonce: str) -> None:
        """An adapter passes a response on."""
        hold(connection == nonce, "told", "{} hears what {} was told", connection, nonce)

    def reached(self, outside: Outside, state: ComputeState, response: Any) -> None:
        """A worker tells frontiers: as far as its dataflow has come, unless it is over."""
        made = state.rendered.get(response.id) if isinstance(response, compute.Frontiers) else None
        if made is None:
            return
        upper = outside.flows[made.number].upper
        told = [getattr(response, kind) for kind in KINDS]
        hold(max(each or 0 for each in told) <= upper, "told", "{}, it is at {}", response, upper)

    def storage_told(
        self, nonce: str, shape: Shape | None, response: storage.Response | None
    ) -> None:
        """The client of that nonce is told; `shape`: what it means by the id."""
        match response:
            case storage.FrontierUpper(id=id_, upper=upper):
                self._all_have(nonce, id_, "upper", upper)
                durable = self._durable.get(shape or (), 0)
                hold(
                    upper <= durable,
                    "told",
                    "{} below {}: {} is below {}",
                    id_,
                    upper,
                    shape,
                    durable,
                )
            case storage.StagedBatches(uuid=uuid, result=storage.Staged(batches=batches)):
                given = self.staged.get(uuid, [])
                hold(response.result in given, "told", "{}, given was {}", response, given)
                self._kept |= {batch.part for batch in batches}
            case storage.StagedBatches(uuid=uuid, result=storage.StagingFailed() as failed):
                given = self.staged.get(uuid, [])
                right = failed.code == Canceled.__name__ or failed in given
                hold(right, "told", "{}, given was {}", response, given)
            case storage.StatisticsUpdates():
                for each in (*response.sources, *response.sinks, *response.oneshots):
                    most = self.measured[each.id]
                    hold(each.messages <= most, "told", "{}: {} were measured", each, most)

    def discarded(self, batches: Iterable[storage.StagedBatch]) -> None:
        """A worker throws away what was staged."""
        wrong = {batch.part for batch in batches} & self._kept
        hold(not wrong, "told", "{} are discarded, and a client has them", wrong)

    def compute_told(self, nonce: str, response: compute.Response | None) -> None:
        """The client of that nonce is told."""
        if isinstance(response, compute.Frontiers):
            for kind in KINDS:
                frontier = getattr(response, kind)
                if frontier is not None:
                    self._all_have(nonce, response.id, kind, frontier)

    def _all_have(self, nonce: str, id_: ObjectId, kind: str, frontier: Frontier) -> None:
        uppers = self._sent.get((nonce, id_, kind), [0])
        hold(
            min(uppers) >= frontier,
            "told",
            "{} of {}: {}, workers sent {}",
            kind,
            id_,
            frontier,
            uppers,
        )


class HoldsChecker:
    """*holds*: nobody loses what it still needs. A sink is started no later than where it stands
    outside, however often it is rendered again; a task is told only of compactions that its client
    has allowed; a partition of an index is compacted beyond no read that waits or is under way, and
    beyond nothing that its client has not allowed.

    Does not cover: the holds on shards themselves, which are not in these states.
    """

    def sink(self, description: storage.SinkDescription, outside: Frontier, first: int) -> None:
        """A sink's task starts; `outside`: how far it is there; `first`: where sinks begin."""
        most = max(outside, first)
        right = description.as_of <= most
        hold(
            right, "holds", "{} begins at {}, it is at {}", description.id, description.as_of, most
        )

    def compaction(self, id_: ObjectId, frontier: Frontier, allowed: Frontier) -> None:
        """A task, or a partition, may forget."""
        hold(frontier <= allowed, "holds", "{} below {}, allowed is {}", id_, frontier, allowed)

    def reads(self, number: int, since: int, times: Iterable[int]) -> None:
        """A partition forgets, with these reads open."""
        early = [time for time in times if time < since]
        hold(not early, "holds", "dataflow {} forgets below {}, {} are read", number, since, early)


class BlameChecker:
    """*blame*: a failure is its object's own. Only a rendering that has failed is suspended; a task
    is stopped or started only by a command in the one order that names its object, or because its
    own former has stopped; who is said to have stalled has failed, or its source or export has.

    Does not cover: one worker's tasks sharing its time.
    """

    def __init__(self) -> None:
        self.failed: set[tuple[ObjectId, int]] = set()

    def suspended(self, command: internal.SuspendAndRestart) -> None:
        """A worker wants it."""
        right = (command.id, command.number) in self.failed
        hold(right, "blame", "{} of an object that has not failed", command)

    def touched(self, id_: ObjectId, named: frozenset[ObjectId], what: str) -> None:
        """A task is started or stopped, `named` are the objects that this is about."""
        hold(id_ in named, "blame", "{} is {} by what is about {}", id_, what, sorted(named))

    def status(self, status: storage.StatusUpdate) -> None:
        """A worker tells of an object's health: errors name who has failed."""
        if status.status == "stalled":
            error, source = status.error or "", status.id[:2]
            right = f"<{source}" in error or error.startswith(f"{source} runs already")
            hold(right, "blame", "{} is said to have stalled: {}", status.id, error)


class DelayChecker:
    """*delay*: while one half is flooded, few of its commands come before one of the other half:
    between a command's coming to worker 0 and its place in the one order, at most as many of the
    other half's as its lane lets be under way at once.

    Does not cover: what waits before the lane, where only commands of the same half stand, and what
    tasks and look-ups lead to (bounded by the number of objects).
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._ordered: dict[Half, int] = {"compute": 0, "storage": 0}
        self.most = 0

    def came(self, half: Half) -> list[Any]:
        """A command comes to worker 0: what is remembered of it."""
        other: Half = "storage" if half == "compute" else "compute"
        return [half, other, self._ordered[other], False]

    def ordered(self, came: list[Any] | None) -> None:
        """A proposal that a command led to (None: something else) has its place."""
        if came is None or came[3]:
            return
        half, other, before, _ = came
        came[3] = True
        self._ordered[half] += 1
        passed = self._ordered[other] - before
        self.most = max(self.most, passed)
        hold(
            passed <= self._window,
            "delay",
            "{} commands of {} came before one of {}, the window is {}",
            passed,
            other,
            half,
            self._window,
        )


def nothing_is_left(compute_state: Any, state: StorageState) -> None:
    """*left*: when clients want nothing, and all is delivered, a worker has nothing.

    Does not cover: memory that is no state (logs and digests stay)."""
    found = {
        "dataflows": compute_state.rendered,
        "dropping": compute_state.dropping,
        "reads": compute_state.reads.pending.all(),
        "renderings": state.renderings.current,
        "tasks": state.tasks.running,
        "stopping": state.tasks.stopping,
        "pursuits": state.pursuits.running(),
        "look-ups": state.pursuits.looked_up(),
        "one-shots": state.pursuits.oneshots,
        "known": state.client.known,
    }
    left = {name: what for name, what in found.items() if what}
    hold(not left, "left", "worker {} has {}", state.index, left)
