"""All workers render alike: both halves' clients, displacement included, over 1 to 5 workers.

A world without a loop: clients' commands reach each worker when hypothesis says so, proposals of
worker 0 are ordered by the real `Order`, ordered commands reach each worker when it says so, and so
do look-ups' answers, tasks' ends and failures. The render logs are equal as far as each worker has
come, whatever was delivered first. When everything was delivered, what runs is what the clients
want, each thing once, by its owner; and what the clients were told kept the rules all along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings
from storage_house import (  # type: ignore[import-not-found]
    drop,
    oneshot,
    sink,
    source,
)

from actors.cluster.storage_partitioned import StoragePartitioned
from actors.cluster.storage_rules import StorageCommandRules, StorageResponseRules
from actors.compute import events as ce
from actors.compute.state import ComputeState
from actors.errors import PenstockError
from actors.plan.schema import Column, Schema
from actors.progress import EMPTY
from actors.protocol import compute, storage
from actors.protocol.internal import Propose, Sequenced
from actors.protocol.storage import Staged, StagedBatch, Statistics
from actors.protocol.storage_internal import Forwarded, ResumeState
from actors.sequencer import Order
from actors.settings import Settings
from actors.storage import events as e
from actors.storage.history import StorageHistory
from actors.storage.renderings import owner_of
from actors.storage.state import StorageState

SCHEMA = Schema((Column("k", "bigint"),))
SETTINGS = Settings()
BATCHES = (StagedBatch(b"part", 1, 1),)


commands: st.SearchStrategy[storage.Command] = st.one_of(
    st.builds(
        lambda id, exports, remap: storage.RunIngestion(source(id, exports, remap=remap)),
        st.sampled_from(["u1", "u2", "u3"]),
        st.sampled_from(["", "a", "b", "ab"]),
        st.sampled_from(["", "", "", "r9"]),
    ),
    st.builds(
        lambda id, name: storage.RunSink(msgspec.structs.replace(sink(id), name=name)),
        st.sampled_from(["k1", "k2"]),
        st.sampled_from("xy"),
    ),
    st.builds(drop, st.sampled_from(["u1", "u2", "u3", "u1a", "u1b", "u2a", "k1", "k2"])),
    st.builds(compute.AllowCompaction, st.sampled_from(["u1a", "k1"]), st.integers(5, 30)),
    st.builds(oneshot, st.sampled_from(["o1", "o2"])),
    st.builds(storage.CancelOneshotIngestion, st.sampled_from(["o1", "o2"])),
    st.builds(storage.UpdateConfiguration, st.integers(1, 3)),
)


class Worker:
    """Both halves of one worker, what is on its way to it, and what its tasks are doing."""

    def __init__(self, index: int, count: int) -> None:
        self.compute = ComputeState(index, count, result_bytes_max=1000, peeks_max=10)
        self.storage = StorageState(index, count)
        self.to_storage: deque[e.Event] = deque()
        self.to_compute: deque[compute.Tagged] = deque()
        self.ordered: deque[Sequenced] = deque()
        self.stopping: list[int] = []
        self.delayed: list[int] = []
        self.log: list[tuple[int, str]] = []
        """Of both halves: place in the one order, and what was rendered there."""


class Connection:
    """One client of the storage half, with its side of the rules."""

    def __init__(self, nonce: str, count: int) -> None:
        self.nonce = nonce
        self.commands = StorageCommandRules(SETTINGS)
        self.responses = StorageResponseRules()
        self.parts = StoragePartitioned(count)
        self.told: dict[str, int] = {}
        self.said: list[storage.Command] = []

    def hear(self, part: int, response: storage.Response) -> None:
        merged = self.parts.absorb(part, response)
        if merged is None:
            return
        self.responses.check(merged)
        for id in self.responses.ended:
            self.commands.ended(id)
            self.told.pop(id, None)
        self.responses.ended.clear()
        if isinstance(merged, storage.FrontierUpper):
            self.told[merged.id] = merged.upper


class World:
    """See the module's text."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.workers = [Worker(index, count) for index in range(count)]
        self.order = Order()
        self.proposals: deque[Propose] = deque()
        self.forwarded: deque[Forwarded] = deque()
        self.look_ups: dict[int, e.LookUp] = {}
        self.connections: dict[str, Connection] = {}
        self.client: Connection | None = None
        self.compute_nonce = ""
        self.clock = 0
        self.connect_storage([0] * 5, False)
        self.connect_compute()

    # -- what the world does with effects ----------------------------------------------------------

    def feed(self, worker: Worker, event: e.Event) -> None:
        state = worker.storage
        before = state.renderings.log.length
        effects = state.handle(event)
        state.validate()
        new = state.renderings.log.length - before
        if new:
            entries = list(state.renderings.log.entries)[-new:]
            worker.log += ((x.index, f"{x.change} {x.id} {x.number}") for x in entries)
        for effect in effects:
            self.perform(worker, effect)

    def perform(self, worker: Worker, effect: e.Effect) -> None:
        match effect:
            case e.Offer(propose=propose):
                assert worker.storage.index == 0
                self.proposals.append(propose)
            case e.Forward(forwarded=forwarded):
                assert worker.storage.index != 0
                self.forwarded.append(forwarded)
            case e.LookUp(ticket=ticket):
                self.look_ups[ticket] = effect
            case e.CancelLookUp(ticket=ticket):
                del self.look_ups[ticket]
            case e.Stop(number=number):
                worker.stopping.append(number)
            case e.RestartLater(number=number):
                worker.delayed.append(number)
            case e.Respond(response=response):
                nonce = worker.storage.client.nonce
                assert nonce is not None
                self.connections[nonce].hear(worker.storage.index, response)

    def feed_compute(self, worker: Worker, event: ce.Event) -> None:
        place = worker.compute.next_index
        for effect in worker.compute.handle(event):
            match effect:
                case ce.Offer(propose=propose):
                    self.proposals.append(propose)
                case ce.Render() | ce.DropDataflow() | ce.Tell():
                    worker.log.append((place, repr(effect)))
                    if isinstance(effect, ce.DropDataflow):
                        stopped = worker.compute.handle(ce.Stopped(effect.number))
                        assert not [x for x in stopped if not isinstance(x, ce.Respond)]
        worker.compute.validate()

    # -- deliveries --------------------------------------------------------------------------------

    def ways(self) -> list[Callable[[], None]]:
        """All that can go on: messages on their way, each way in its order."""
        ways: list[Callable[[], None]] = []
        if self.proposals:
            ways.append(self.sequence)
        queues: list[tuple[Worker, deque[Any], Callable[[Worker, Any], None]]] = [
            (self.workers[0], self.forwarded, self.feed)
        ]
        for worker in self.workers:
            queues.append((worker, worker.to_storage, self.feed))
            queues.append((worker, worker.to_compute, self.feed_compute))
            queues.append((worker, worker.ordered, self.apply))
        ways += [partial(self.take, *queue) for queue in queues if queue[1]]
        ways += [partial(self.look_up, ticket) for ticket in sorted(self.look_ups)]
        for worker in self.workers:
            ways += [partial(self.delay_is_over, worker, n) for n in worker.delayed]
            ways += [partial(self.task_stops, worker, n) for n in worker.stopping]
        return ways

    def take(self, worker: Worker, queue: deque[Any], give: Callable[[Worker, Any], None]) -> None:
        give(worker, queue.popleft())

    def sequence(self) -> None:
        ordered = self.order.propose(self.proposals.popleft())
        assert ordered is not None, "worker 0 proposes in order: nothing is dropped"
        for worker in self.workers:
            worker.ordered.append(ordered)

    def apply(self, worker: Worker, ordered: Sequenced) -> None:
        self.feed(worker, ordered)
        self.feed_compute(worker, ordered)

    def go_on(self, numbers: list[int]) -> None:
        for number in numbers:
            ways = self.ways()
            if ways:
                ways[number % len(ways)]()

    # -- the storage half's clients ----------------------------------------------------------------

    def displace_storage(
        self,
        lost: list[int],
        told: bool,
        again: list[storage.Command],
        complete: bool,
        replays: bool,
    ) -> None:
        """A client takes over; it says what its former wanted, or not, and something else."""
        assert self.client is not None
        history = StorageHistory(self.client.said if replays else ())
        history.reduce()
        self.connect_storage(lost, told)
        for command in history.commands():
            if not isinstance(command, compute.Hello | compute.InitializationComplete):
                self.say(command)
        for command in again:
            self.say(command)
        if complete:
            self.say(compute.InitializationComplete())

    def connect_storage(self, lost: list[int], told: bool) -> None:
        """A client takes over; commands of the former may be lost, or come late."""
        former = self.client
        for worker, count in zip(self.workers, lost, strict=False):
            for _ in range(count):
                last = worker.to_storage[-1] if worker.to_storage else None
                if isinstance(last, storage.StorageTagged) and last.command != compute.Hello(
                    last.nonce
                ):
                    worker.to_storage.pop()
            if former is not None and told:
                worker.to_storage.append(e.ClientLost(former.nonce))
        nonce = f"n{len(self.connections)}"
        self.client = self.connections[nonce] = Connection(nonce, self.count)
        self.say(compute.Hello(nonce))
        if former is not None:  # as if an adapter had let them through
            for worker, count in zip(self.workers, lost, strict=False):
                for late in former.said[1:][-count:] if count else ():
                    worker.to_storage.append(storage.StorageTagged(former.nonce, late))

    def say(self, command: storage.Command) -> None:
        """What breaks a rule is not said."""
        client = self.client
        if client is None:
            return
        try:
            client.commands.check(command)
        except PenstockError:
            return
        client.said.append(command)
        client.responses.heard(command)
        for part, split in client.parts.split(command):
            tagged = storage.StorageTagged(client.nonce, split)
            self.workers[part].to_storage.append(tagged)

    def command_storage(self, commands: list[storage.Command], complete: bool) -> None:
        for command in commands:
            self.say(command)
        if complete:
            self.say(compute.InitializationComplete())

    # -- the compute half's clients ----------------------------------------------------------------

    def connect_compute(self) -> None:
        self.compute_nonce = f"c{self.order.next_index}-{len(self.workers[0].to_compute)}"
        self.say_compute(compute.Hello(self.compute_nonce))

    def say_compute(self, command: compute.Command) -> None:
        if self.compute_nonce:
            tagged = compute.Tagged(self.compute_nonce, command)
            self.workers[0].to_compute.append(tagged)

    def command_compute(self, steps: list[tuple[str, bool]], complete: bool) -> None:
        export = compute.IndexExport(("k",), SCHEMA)
        imports = (compute.SourceImport("s1", SCHEMA),)
        for id, created in steps:
            flow = compute.DataflowDescription(id, id, imports, export, 5)
            self.say_compute(compute.CreateDataflow(flow) if created else drop(id))
        if complete:
            self.say_compute(compute.InitializationComplete())

    # -- what happens below the workers ------------------------------------------------------------

    def look_up(self, ticket: int) -> None:
        asked = self.look_ups.pop(ticket)
        uppers = tuple((export.id, 0) for export in asked.description.exports)
        self.feed(self.workers[0], e.ResumeFound(ticket, ResumeState(0, 0, uppers)))

    def delay_is_over(self, worker: Worker, number: int) -> None:
        worker.delayed.remove(number)
        self.feed(worker, e.RestartDue(number))

    def task_stops(self, worker: Worker, number: int) -> None:
        worker.stopping.remove(number)
        self.feed(worker, e.Stopped(number))

    def look_up_fails(self, number: int) -> None:
        if self.look_ups:
            ticket = sorted(self.look_ups)[number % len(self.look_ups)]
            del self.look_ups[ticket]
            self.feed(self.workers[0], e.ResumeFailed(ticket, "no store"))

    def task_says(self, number: int, what: str) -> None:
        tasks = [(w, n) for w in self.workers for n in sorted(w.storage.tasks.running)]
        if not tasks:
            return
        worker, running = tasks[number % len(tasks)]
        rendering = worker.storage.tasks.running[running].rendering
        self.clock += 1
        match what:
            case "fail" if isinstance(rendering.what, storage.RunOneshotIngestion):
                self.feed(worker, e.OneshotDone(running, Staged(BATCHES)))
            case "fail":
                self.feed(worker, e.Failed(running, "broken"))
            case "reach":
                for id in rendering.ids:
                    self.feed(worker, e.Reached(running, id, self.clock))
            case "run":
                seen = tuple(e.Observation(id, "running") for id in rendering.ids)
                self.feed(worker, e.Observed(running, self.clock, seen))
            case "measure":
                self.feed(worker, e.Measured(running, Statistics(rendering.id, self.clock)))

    def tell_statistics(self) -> None:
        for worker in self.workers:
            self.feed(worker, e.StatisticsDue())

    # -- what holds --------------------------------------------------------------------------------

    def render_logs_are_equal_as_far_as_each_has_come(self) -> None:
        longest = max((worker.log for worker in self.workers), key=len)
        for worker in self.workers:
            assert worker.log == longest[: len(worker.log)]
            assert worker.log == sorted(worker.log, key=lambda entry: entry[0])

    def end(self) -> None:
        """All is delivered, and as it should be."""
        self.say(compute.InitializationComplete())
        while ways := self.ways():
            ways[0]()
        self.render_logs_are_equal_as_far_as_each_has_come()
        logs = [worker.storage.renderings.log for worker in self.workers]
        assert len({(log.length, log.digest) for log in logs}) == 1
        assert len({len(worker.log) for worker in self.workers}) == 1
        assert self.client is not None
        self.what_runs_is_what_is_wanted(self.client)

    def what_runs_is_what_is_wanted(self, client: Connection) -> None:
        first = self.workers[0].storage
        wanted = first.client.wanted
        refused = {
            what.id for what in wanted.ingestions.values() if first.pursuits.get(what.id) != what
        }
        expected: dict[str, Any] = {**wanted.ingestions, **wanted.oneshots}
        expected |= {x.id: msgspec.structs.replace(x, as_of=0) for x in wanted.sinks.values()}
        for worker in self.workers:
            state = worker.storage
            assert state.client.wanted.commands() == wanted.commands()
            found: dict[str, Any] = {}
            for id, rendering in state.renderings.current.items():
                what = rendering.what
                if isinstance(what, storage.SinkDescription):
                    what = msgspec.structs.replace(what, as_of=0)
                found[id] = what
            assert found.keys() == expected.keys()
            for id in expected.keys() - refused:
                assert found[id] == expected[id]
        running = [
            task.rendering.id
            for worker in self.workers
            for task in worker.storage.tasks.running.values()
        ]
        assert sorted(running) == sorted(expected)
        self.reports_come_through(client, refused)

    def reports_come_through(self, client: Connection, refused: set[str]) -> None:
        """What a task reaches now is what the client is told, over all workers."""
        self.clock += 1000
        for worker in self.workers:
            for number, task in sorted(worker.storage.tasks.running.items()):
                assert owner_of(task.rendering.id, self.count) == worker.storage.index
                for id in task.rendering.ids:
                    self.feed(worker, e.Reached(number, id, self.clock))
                if isinstance(task.rendering.what, storage.RunOneshotIngestion):
                    self.feed(worker, e.OneshotDone(number, Staged(BATCHES)))
                elif task.rendering.id not in refused:
                    for id in task.rendering.ids:
                        assert client.told[id] == self.clock
        assert all(upper < EMPTY for upper in client.told.values())


steps = st.one_of(
    *[st.tuples(st.just("go_on"), st.lists(st.integers(0, 99), min_size=10, max_size=30))] * 6,
    *[
        st.tuples(
            st.just("task_says"),
            st.integers(0, 20),
            st.sampled_from(["fail", "fail", "reach", "run", "measure"]),
        )
    ]
    * 3,
    *[
        st.tuples(
            st.just("command_storage"), st.lists(commands, min_size=1, max_size=4), st.booleans()
        )
    ]
    * 3,
    *[
        st.tuples(
            st.just("command_compute"),
            st.lists(
                st.tuples(st.sampled_from(["i1", "i2"]), st.booleans()), min_size=1, max_size=4
            ),
            st.booleans(),
        )
    ]
    * 2,
    st.tuples(
        st.just("displace_storage"),
        st.lists(st.integers(0, 3), min_size=5, max_size=5),
        st.booleans(),
        st.lists(commands, max_size=3),
        st.booleans(),
        st.booleans(),
    ),
    st.tuples(st.just("connect_compute")),
    st.tuples(st.just("look_up_fails"), st.integers(0, 20)),
    st.tuples(st.just("tell_statistics")),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.lists(steps, min_size=40, max_size=80))
def test_all_workers_render_alike_and_what_runs_is_what_is_wanted(
    count: int, script: list[tuple[Any, ...]]
) -> None:
    world = World(count)
    for name, *args in script:
        getattr(world, name)(*args)
        world.render_logs_are_equal_as_far_as_each_has_come()
    world.end()
