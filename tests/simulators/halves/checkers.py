"""Invariants of both halves of a replica, one checker per promise. Each begins a violation with its
name, and lists its gaps.

The states' own invariants (`validate`) are checked after every few events and whenever all messages
are delivered, responses to clients (`ResponseRules`, `StorageResponseRules`) with every response
(*rules*), the seal and since of a read with every read (`outside`). That ids in relations differ
between the halves cannot be checked here: clients give the ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actors.model.protocol import compute, storage
from actors.model.protocol import storage_internal as internal
from actors.model.protocol.internal import Half
from actors.runtime.errors import OperationCanceled
from actors.runtime.progress import Frontier, ObjectId
from tests.simulators.halves.wishes import (
    ComputeTruth,
    Shape,
    StorageTruth,
    timeless,
)
from tests.simulators.service.history import CheckerViolation

if TYPE_CHECKING:
    from actors.replica.compute.state import ComputeState
    from actors.replica.storage.state import StorageState
    from tests.simulators.halves.outside import SimulatedConnectors

KINDS = ("write", "input", "output")


def require(right: bool, rule: str, wrong: str, *operands: object) -> None:
    """Raise `CheckerViolation` unless `right`; the text is formatted only then."""
    if not right:
        raise CheckerViolation(f"{rule}: {wrong.format(*operands)}")


class OrderChecker:
    """*order*: each rendering, change or drop is at the same place of one order on all workers,
    both halves together: one worker's log is a prefix of another's, and so are the digests of the
    storage half's logs, which cover the descriptions too.

    Does not cover: descriptions of dataflows (`WantedChecker` compares what they became).
    """

    def __init__(self) -> None:
        self.entries: list[tuple[int, Any]] = []
        self.seen: Counter[int] = Counter()
        self._digests: dict[int, str] = {}

    def render(self, worker: int, place: int, what: Any) -> None:
        """Check a worker's next entry: `place` is that of the command that led to it."""
        entry, at = (place, what), self.seen[worker]
        self.seen[worker] += 1
        if at == len(self.entries):
            before = self.entries[-1][0] if self.entries else 0
            require(
                place >= before, "order", "worker {} renders {} after {}", worker, entry, before
            )
            self.entries.append(entry)
        require(
            self.entries[at] == entry,
            "order",
            "worker {} renders {}, another one {}",
            worker,
            entry,
            self.entries[at],
        )

    def applied(self, state: StorageState) -> None:
        """Check a worker's storage half after an ordered command."""
        log = state.renderings.log
        known = self._digests.setdefault(log.length, log.digest)
        require(
            known == log.digest, "order", "worker {}: {} changes differ", state.index, log.length
        )


class WantedChecker:
    """*wanted*: worker 0's renderings and drops of the storage half are those that its client's
    commands, taken in order, require: no object that was dropped, refused, or requested by a former
    client is rendered, no object that is to run is dropped. A dataflow has the number that the
    commands in the one order give it, on every worker, and only dataflows that they drop are
    dropped. At rest, every worker has exactly these: each once, at the latest allowed time.

    Does not cover: the delays of retries; which of two tasks of one rendering does the work.
    """

    def __init__(self, of_storage: StorageTruth, of_compute: ComputeTruth) -> None:
        self._storage = of_storage
        self._compute = of_compute

    def offered(self, command: internal.InternalCommand) -> None:
        """Check a command of the storage half that worker 0 proposes to the one order."""
        running, wish = self._storage.running, self._storage.wish
        match command:
            case internal.CreateIngestionDataflow(description) | internal.RunSinkDataflow(
                description
            ):
                found = running.get(description.id)
                same = found is not None and timeless(found) == timeless(description)
                require(same, "wanted", "{} is rendered, to run is {}", description, found)
            case internal.RunOneshotIngestionDataflow(oneshot):
                require(wish.oneshots.get(oneshot.uuid) == oneshot, "wanted", "{} is run", oneshot)
            case internal.DropObjects(ids):
                wrong = set(ids) & self._storage.ids()
                require(not wrong, "wanted", "{} are dropped, and are to run", sorted(wrong))

    def rendered(self, worker: int, number: int, id_: ObjectId) -> None:
        """Check a dataflow that a worker renders."""
        found = self._compute.numbers.get(number)
        require(
            found == id_,
            "wanted",
            "worker {} renders {} as {}, which is {}",
            worker,
            id_,
            number,
            found,
        )

    def dropped(self, worker: int, number: int) -> None:
        """Check a dataflow that a worker drops."""
        require(
            number in self._compute.dropped, "wanted", "worker {} drops dataflow {}", worker, number
        )

    def at_rest(self, states: Sequence[tuple[Any, StorageState]]) -> None:
        """Check all workers when all messages are delivered."""
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
            require(right, "wanted", "{} has heard {}, meant is {}", which, said, meant)
            current = of_storage.renderings.current
            found = {
                id_: each.what
                if isinstance(each.what, storage.RunOneshotIngestion)
                else timeless(each.what)
                for id_, each in current.items()
            }
            require(
                found == expected, "wanted", "{} renders {}, to run is {}", which, found, expected
            )
            shown = {
                id_: (each.number, each.allowed, each.scheduled)
                for id_, each in of_compute.rendered.items()
            }
            require(shown == flows, "wanted", "{} has dataflows {}, not {}", which, shown, flows)
            require(
                of_compute.writes_allowed == self._compute.writes, "wanted", "{}: writes", which
            )
            for made in of_compute.rendered.values():
                waits = not made.is_index or of_compute.reads.pending.of(made.number)
                right = waits or made.compacted == made.allowed
                require(bool(right), "wanted", "{} forgets nothing of {}", which, made)
            tasks.update(task.rendering.id for task in of_storage.tasks.running.values())
            expected_here = {id_ for id_, each in current.items() if each.complete}
            tasks.update(expected_here if of_storage.index == 0 else ())
        once = tasks == Counter(dict.fromkeys(expected, 1))
        require(once, "wanted", "tasks run {}, wanted are {}", dict(tasks), sorted(expected))


class HalvesToldChecker:
    """*told*: a worker answers only the client that it serves, after that client's initialization;
    an adapter passes on only responses for its connection. A client receives a frontier only when
    all workers have sent one as far under its nonce; and none beyond the durable upper of the shard
    that it means by the id, or the progress of its dataflow. A staged result is a task's, and is
    not discarded. Counts are not above the measured ones.

    Does not cover: rows (none are read here), and latency.
    """

    def __init__(self, workers: int, durable: Mapping[Shape, Frontier]) -> None:
        self._workers = workers
        self._durable = durable
        self._sent: dict[tuple[str, ObjectId, str], list[Frontier]] = {}
        self.measured: Counter[ObjectId] = Counter()
        """Number of messages that tasks have counted, by object."""
        self.staged: dict[str, list[storage.StagingResult]] = {}
        """Results that tasks have given, by uuid."""
        self._kept: set[bytes] = set()
        """Parts in results that a client has received."""

    def answered(self, served: str | None, outbox: str | None, muted: bool, what: Any) -> None:
        """Check a worker's answer."""
        right = not muted and served is not None and outbox == served
        require(
            right,
            "told",
            "a worker that serves {} (muted: {}) tells {} {}",
            served,
            muted,
            outbox,
            what,
        )

    def sent(self, nonce: str, part: int, response: Any) -> None:
        """Note a response that worker `part` sends under that nonce."""
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
        """Check a response that an adapter passes on."""
        require(connection == nonce, "told", "{} hears what {} was told", connection, nonce)

    def reached(self, outside: SimulatedConnectors, state: ComputeState, response: Any) -> None:
        """Check that a worker's frontiers are not beyond its dataflow's upper."""
        made = state.rendered.get(response.id) if isinstance(response, compute.Frontiers) else None
        if made is None:
            return
        upper = outside.flows[made.number].upper
        told = [getattr(response, kind) for kind in KINDS]
        require(
            max(each or 0 for each in told) <= upper, "told", "{}, it is at {}", response, upper
        )

    def storage_told(
        self, nonce: str, shape: Shape | None, response: storage.Response | None
    ) -> None:
        """Check a response that the client of that nonce receives; `shape`: what its id refers
        to."""
        match response:
            case storage.FrontierUpper(id=id_, upper=upper):
                self._all_have(nonce, id_, "upper", upper)
                durable = self._durable.get(shape or (), 0)
                require(
                    upper <= durable,
                    "told",
                    "{} below {}: {} is below {}",
                    id_,
                    upper,
                    shape,
                    durable,
                )
            case storage.StagedBatches(uuid=uuid, result=storage.FilesStaged(batches=batches)):
                given = self.staged.get(uuid, [])
                require(response.result in given, "told", "{}, given was {}", response, given)
                self._kept |= {batch.part for batch in batches}
            case storage.StagedBatches(uuid=uuid, result=storage.StagingFailed() as failed):
                given = self.staged.get(uuid, [])
                right = failed.code == OperationCanceled.__name__ or failed in given
                require(right, "told", "{}, given was {}", response, given)
            case storage.StatisticsUpdates():
                for each in (*response.sources, *response.sinks, *response.oneshots):
                    most = self.measured[each.id]
                    require(each.messages <= most, "told", "{}: {} were measured", each, most)

    def discarded(self, batches: Iterable[storage.StagedBatch]) -> None:
        """Check staged batches that a worker discards."""
        wrong = {batch.part for batch in batches} & self._kept
        require(not wrong, "told", "{} are discarded, and a client has them", wrong)

    def compute_told(self, nonce: str, response: compute.Response | None) -> None:
        """Check a response that the client of that nonce receives."""
        if isinstance(response, compute.Frontiers):
            for kind in KINDS:
                frontier = getattr(response, kind)
                if frontier is not None:
                    self._all_have(nonce, response.id, kind, frontier)

    def _all_have(self, nonce: str, id_: ObjectId, kind: str, frontier: Frontier) -> None:
        uppers = self._sent.get((nonce, id_, kind), [0])
        require(
            min(uppers) >= frontier,
            "told",
            "{} of {}: {}, workers sent {}",
            kind,
            id_,
            frontier,
            uppers,
        )


class HalvesHoldsChecker:
    """*holds*: no history is lost that is still needed. A sink is started no later than its
    committed upper, however often it is rendered again; a partition of an index is compacted beyond
    no read that waits or is under way, and not beyond the compaction that its client has allowed.

    Does not cover: the holds on shards themselves, which are not in these states.
    """

    def sink(self, description: storage.SinkDescription, outside: Frontier, first: int) -> None:
        """Check a sink's task that starts; `outside`: its committed upper; `first`: the as_of of
        sinks."""
        most = max(outside, first)
        right = description.as_of <= most
        require(
            right, "holds", "{} begins at {}, it is at {}", description.id, description.as_of, most
        )

    def compaction(self, id_: ObjectId, frontier: Frontier, allowed: Frontier) -> None:
        """Check a compaction of a partition."""
        require(frontier <= allowed, "holds", "{} below {}, allowed is {}", id_, frontier, allowed)

    def reads(self, number: int, since: int, times: Iterable[int]) -> None:
        """Check a compaction of a partition against its open reads."""
        early = [time for time in times if time < since]
        require(
            not early, "holds", "dataflow {} forgets below {}, {} are read", number, since, early
        )


class BlameChecker:
    """*blame*: a failure affects its own object only. Only a rendering that has failed is
    suspended; a task is stopped or started only by a command in the one order that names its
    object, or because its predecessor has stopped; an object is reported as stalled only if it, its
    source or its export has failed.

    Does not cover: one worker's tasks sharing its time.
    """

    def __init__(self) -> None:
        self.failed: set[tuple[ObjectId, int]] = set()

    def suspended(self, command: internal.SuspendAndRestart) -> None:
        """Check a suspension that a worker proposes."""
        right = (command.id, command.number) in self.failed
        require(right, "blame", "{} of an object that has not failed", command)

    def touched(self, id_: ObjectId, named: frozenset[ObjectId], what: str) -> None:
        """Check the start or stop of a task; `named`: the objects that the cause names."""
        require(id_ in named, "blame", "{} is {} by what is about {}", id_, what, sorted(named))

    def status(self, status: storage.StatusUpdate) -> None:
        """Check an object's status: an error must name the failed object."""
        if status.status == "stalled":
            error, source = status.error or "", status.id[:2]
            right = f"<{source}" in error or error.startswith(f"cannot alter {source}, ")
            require(right, "blame", "{} is said to have stalled: {}", status.id, error)


class DelayChecker:
    """*delay*: while one half is flooded, few of its commands overtake one of the other half:
    between a command's arrival at worker 0 and its place in the one order, at most as many commands
    of the other half get a place as its lane admits at once.

    Does not cover: commands before the lane, where only commands of the same half wait, and
    proposals of tasks and look-ups (bounded by the number of objects).
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._ordered: dict[Half, int] = {"compute": 0, "storage": 0}
        self.most = 0

    def came(self, half: Half) -> list[Any]:
        """Return a record of a command that arrives at worker 0, for `ordered`."""
        other: Half = "storage" if half == "compute" else "compute"
        return [half, other, self._ordered[other], False]

    def ordered(self, came: list[Any] | None) -> None:
        """Check a proposal that got its place; `came`: the record of its command (None: no
        command)."""
        if came is None or came[3]:
            return
        half, other, before, _ = came
        came[3] = True
        self._ordered[half] += 1
        passed = self._ordered[other] - before
        self.most = max(self.most, passed)
        require(
            passed <= self._window,
            "delay",
            "{} commands of {} came before one of {}, the window is {}",
            passed,
            other,
            half,
            self._window,
        )


def nothing_is_left(compute_state: Any, state: StorageState) -> None:
    """*left*: check that a worker is empty when clients want nothing, and all messages are
    delivered.

    Does not cover: memory that is no state (logs and digests stay).
    """
    found = {
        "dataflows": compute_state.rendered,
        "dropping": compute_state.dropping,
        "reads": compute_state.reads.pending.all(),
        "renderings": state.renderings.current,
        "tasks": state.tasks.running,
        "stopping": state.tasks.stopping,
        "desired": state.desired.running(),
        "look-ups": state.desired.looked_up(),
        "one-shots": state.desired.oneshots,
        "known": state.client.known,
    }
    left = {name: what for name, what in found.items() if what}
    require(not left, "left", "worker {} has {}", state.index, left)
