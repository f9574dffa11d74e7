"""Several clients that displace one another, over 1 to 5 workers, in any order of delivery.

The pure rules are put together as the actors have them, with a queue between any two; which queue
delivers next is hypothesis' choice, so that adapters and workers learn of a client in different
orders, and late answers of one client meet the next. Only the adapters are the real actors.

Every client holds what it hears against `ResponseRules`: exactly its own answers, once, in order.
In the end everything is delivered: then the last client has every answer it is owed, nothing is
held back anywhere, and every window is open.
"""

from __future__ import annotations

from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from actors.channel_adapter import (
    ChannelAdapter,
    ClientGone,
    ConnectClient,
    DisconnectClient,
    FromClient,
    FromWorker,
    ResponsesAcked,
    ResponsesForwarded,
)
from actors.model.protocol.compute import (
    AllowCompaction,
    CancelPeek,
    Command,
    CreateDataflow,
    CreateInstance,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    PeekRows,
    ScheduleDataflow,
    ShardTarget,
    SubscribeBatch,
    SubscribeExport,
)
from actors.model.protocol.internal import (
    BatchEmitted,
    DataflowProgress,
    EmitBatch,
    ProposeCommand,
    SequencedCommand,
    TaggedCommand,
    TaggedResponse,
)
from actors.replica.cluster.partitioned import ConnectionLimits, PartitionedState
from actors.replica.cluster.rules import CommandRules, ResponseRules
from actors.replica.cluster.sequencer import CommandOrder
from actors.replica.compute import events as e
from actors.replica.compute.outbox import ResponseOutbox
from actors.replica.compute.state import ComputeState
from actors.runtime.errors import PenstockError
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from cluster_house import SOURCE, index, subscribe  # type: ignore[import-not-found]
from suite_lanes import examples  # type: ignore[import-not-found]

SETTINGS = Settings()
DATAFLOWS = [index(f"i{n}") for n in range(3)] + [subscribe(f"t{n}") for n in range(2)]
NEVER = 10**9


class Queue:
    """An address whose messages wait until they are delivered."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    def reply(self, message: Any) -> bool:
        self.messages.append(message)
        return True


def finish(coroutine: Any) -> None:
    """Runs what never waits."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


class IgnoredReply:
    """Commands are sent without waiting for it: the adapter's mailbox keeps their order."""

    def set(self, value: None) -> None:
        pass

    def fail(self, error: PenstockError) -> None:
        pass


class Client:
    """One client and its connection in the cluster."""

    def __init__(self, nonce: str, workers: int, limits: ConnectionLimits) -> None:
        self.nonce = nonce
        self.mine = CommandRules(None, SETTINGS)
        self.rules = CommandRules(CreateInstance(workers), SETTINGS)
        self.parts = PartitionedState(workers, limits)
        self.responses = ResponseRules()
        self.complete = False
        self.asked: set[str] = set()
        self.answered: set[str] = set()


class WorkerModel:
    """A worker's shell: what `worker.Worker` does with events and effects."""

    def __init__(self, number: int, count: int) -> None:
        self.state = ComputeState(number, count, result_bytes_max=1 << 20, peeks_max=3)
        self.outbox: ResponseOutbox[int] = ResponseOutbox(2, 100)
        self.started: dict[int, Peek] = {}
        self.stopping: list[int] = []
        self.emitting: set[int] = set()


class Conversations(RuleBasedStateMachine):
    @initialize(workers=st.integers(1, 5), stash=st.integers(1, 3))
    def begin(self, workers: int, stash: int) -> None:
        self.count = workers
        self.queues: defaultdict[tuple[str, int], Queue] = defaultdict(Queue)
        self.order = CommandOrder()
        self.workers = [WorkerModel(number, workers) for number in range(workers)]
        self.adapters = [
            ChannelAdapter(number, self.to("worker", number), stash) for number in range(workers)
        ]
        for adapter in self.adapters:
            context: Any = SimpleNamespace(now_ms=lambda: 1)
            adapter.ctx = context
        self.limits = ConnectionLimits(1 << 20)
        self.client: Client | None = None
        self.clients = 0
        self.names = 0
        self.time = 1

    def to(self, kind: str, number: int) -> Any:
        return self.queues[kind, number]

    # -- what clients do ---------------------------------------------------------------------------

    @rule(replay=st.lists(st.sampled_from(DATAFLOWS), max_size=4, unique_by=lambda d: d.id))
    def connects(self, replay: list[Any]) -> None:
        self.leaves_now()
        self.clients += 1
        self.client = client = Client(f"n{self.clients}", self.count, self.limits)
        for number in range(self.count):
            attached: Any = IgnoredReply()
            client_address = self.to("client", number)
            self.to("adapter", number).reply(ConnectClient(client.nonce, client_address, attached))
        self.say(Hello(client.nonce))
        self.say(CreateInstance(self.count))
        for dataflow in replay:
            self.say(CreateDataflow(dataflow))
            self.say(ScheduleDataflow(dataflow.id))

    @rule()
    def leaves(self) -> None:
        self.leaves_now()

    def leaves_now(self) -> None:
        if self.client is not None:
            for number in range(self.count):
                self.to("adapter", number).reply(DisconnectClient(self.client.nonce))
        self.client = None

    @precondition(lambda self: self.client is not None and not self.client.complete)
    @rule()
    def completes(self) -> None:
        assert self.client is not None
        self.say(InitializationComplete())
        self.client.complete = True

    @precondition(lambda self: self.client is not None)
    @rule(dataflow=st.sampled_from(DATAFLOWS), drop=st.booleans())
    def changes(self, dataflow: Any, drop: bool) -> None:
        self.say(AllowCompaction(dataflow.id, EMPTY) if drop else CreateDataflow(dataflow))

    @precondition(lambda self: self.client is not None)
    @rule(id=st.sampled_from(["i0", "i1", "i2", ""]), late=st.booleans())
    def peeks(self, id: str, late: bool) -> None:
        assert self.client is not None
        self.names += 1
        target = IndexTarget(id) if id else ShardTarget("s1", SOURCE)
        uuid = f"{self.client.nonce}/{self.names}"
        if self.say(Peek(uuid, target, self.time + (5 if late else 0))):
            self.client.asked.add(uuid)

    @precondition(lambda self: self.client is not None and self.client.asked)
    @rule(data=st.data())
    def cancels(self, data: st.DataObject) -> None:
        assert self.client is not None
        uuid = data.draw(st.sampled_from(sorted(self.client.asked)))
        if self.say(CancelPeek(uuid)) and not self.client.complete:
            self.client.asked.discard(uuid)  # never begun

    def say(self, command: Command) -> bool:
        """The client says it, if it may."""
        client = self.client
        assert client is not None
        try:
            client.mine.check(command)
        except PenstockError:
            return False
        client.responses.note_command(command)
        client.rules.check(command)  # what the client's side lets through, the cluster's does
        for part, split in client.parts.split(command):
            self.to("adapter", part).reply(FromClient(client.nonce, split))
        return True

    # -- what dataflows do -------------------------------------------------------------------------

    @rule(data=st.data(), step=st.integers(1, 3))
    def moves_on(self, data: st.DataObject, step: int) -> None:
        """Something that runs makes progress on one worker."""
        worker = data.draw(st.sampled_from(self.workers))
        self.time += step
        rendered = list(worker.state.rendered.values())
        if not rendered:
            return
        chosen = data.draw(st.sampled_from(rendered), label="rendered")
        if isinstance(chosen.description.export, SubscribeExport):
            self.emit(worker, chosen, self.time)
            return
        self.event(worker, e.IndexSealed(chosen.number, max(chosen.sealed, self.time)))
        progress = DataflowProgress(chosen.id, self.time, self.time, self.time)
        self.event(worker, e.DataflowProgressed(chosen.number, progress))

    def emit(self, worker: WorkerModel, chosen: Any, upper: int) -> None:
        """A subscribe sends one batch and waits until it is taken."""
        if worker.state.index != 0 or chosen.number in worker.emitting:
            return
        worker.emitting.add(chosen.number)
        batch = SubscribeBatch(chosen.emitted, upper, b"x" * 60)
        self.event(worker, e.SubscribeBatchReady(chosen.number, EmitBatch(chosen.id, 1, batch)))

    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        """A peek has its rows, or a dropped dataflow has stopped."""
        worker = data.draw(st.sampled_from(self.workers))
        if data.draw(st.booleans()) and worker.stopping:
            self.event(worker, e.DropCompleted(worker.stopping.pop(0)))
        elif worker.started:
            ticket = data.draw(st.sampled_from(sorted(worker.started)))
            del worker.started[ticket]
            self.event(worker, e.PeekDone(ticket, PeekRows(b"", 0)))

    def event(self, worker: WorkerModel, event: Any) -> None:
        for effect in worker.state.handle(event):
            self.perform(worker, effect)
        worker.state.validate()
        self.flush(worker)

    def perform(self, worker: WorkerModel, effect: Any) -> None:
        match effect:
            case e.OfferCommand(propose=propose):
                self.to("sequencer", 0).reply(propose)
            case e.SwitchComputeClient(nonce=nonce):
                worker.emitting.difference_update(worker.outbox.switch(nonce))
            case e.SendComputeResponse(response=response, number=number, receipt=receipt):
                worker.outbox.push(response, number if isinstance(receipt, BatchEmitted) else None)
            case e.AcknowledgeBatch(number=number):
                worker.emitting.discard(number)
            case e.StopDataflow(number=number):
                worker.stopping.append(number)
            case e.StartPeek(ticket=ticket, peek=peek):
                worker.started[ticket] = peek
            case e.StopPeek(ticket=ticket):
                worker.started.pop(ticket, None)

    def flush(self, worker: WorkerModel) -> None:
        nonce = worker.outbox.nonce
        if nonce is not None:
            for serial, response in worker.outbox.take():
                tagged = TaggedResponse(nonce, response, serial)
                self.to("adapter up", worker.state.index).reply(tagged)

    # -- delivery ----------------------------------------------------------------------------------

    @rule(data=st.data(), several=st.integers(1, 6))
    def delivers(self, data: st.DataObject, several: int) -> None:
        waiting = sorted(key for key, queue in self.queues.items() if queue.messages)
        if not waiting:
            return
        chosen = data.draw(st.sampled_from(waiting))
        for _ in range(min(several, len(self.queues[chosen].messages))):
            self.deliver(chosen)

    @rule(data=st.data())
    def delivers_all_but(self, data: st.DataObject) -> None:
        """Everything, again and again; but some queues stand still."""
        kinds = ("adapter", "adapter up", "worker", "ordered", "client")
        keys = [(kind, number) for kind in kinds for number in range(self.count)]
        still = data.draw(st.sets(st.sampled_from(keys), max_size=3))
        while waiting := [k for k, queue in self.queues.items() if queue.messages]:
            if not set(waiting) - still:
                return
            for key in waiting:
                if key not in still:
                    self.deliver(key)

    def deliver(self, key: tuple[str, int]) -> None:
        kind, number = key
        message = self.queues[key].messages.popleft()
        match message:
            case ProposeCommand():
                ordered = self.order.propose(message)
                if ordered is not None:
                    for each in range(self.count):
                        self.to("ordered", each).reply(ordered)
            case SequencedCommand() | TaggedCommand():
                self.event(self.workers[number], message)
            case ClientGone(nonce=nonce):
                self.event(self.workers[number], e.ComputeClientLost(nonce))
            case ResponsesForwarded(nonce=nonce, serials=serials):
                worker = self.workers[number]
                worker.emitting.difference_update(worker.outbox.acknowledge(nonce, serials))
                self.flush(worker)
            case FromWorker():
                self.hears(message)
            case _:
                assert kind.startswith("adapter")
                finish(self.adapters[number].receive(message))

    def hears(self, message: FromWorker) -> None:
        """The connection merges what a worker says; the client checks what leaves."""
        client = self.client
        if client is None or message.nonce != client.nonce:
            return
        response: Any = message.response
        merged = client.parts.absorb(message.worker, response)
        for id in client.parts.ended:
            client.rules.ended(id)
        client.parts.ended.clear()
        took = ResponsesAcked(client.nonce, (message.serial,))
        self.to("adapter", message.worker).reply(took)
        if merged is None:
            return
        client.responses.check(merged)
        for id in client.responses.ended:
            client.mine.ended(id)
        client.responses.ended.clear()
        if isinstance(merged, PeekResponse):
            assert merged.uuid.startswith(f"{client.nonce}/")
            assert merged.uuid not in client.answered
            client.answered.add(merged.uuid)
            client.rules.answered(merged.uuid)
            client.mine.answered(merged.uuid)

    # -- the end -----------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Everything is delivered, everything that was started ends."""
        if not hasattr(self, "workers"):
            return
        if self.client is not None and not self.client.complete:
            self.completes()
        busy = True
        while busy:
            busy = False
            for key in list(self.queues):
                while self.queues[key].messages:
                    self.deliver(key)
                    busy = True
            for worker in self.workers:
                for rendered in list(worker.state.rendered.values()):
                    if rendered.is_index and rendered.sealed < NEVER:
                        self.event(worker, e.IndexSealed(rendered.number, NEVER))
                        busy = True
                while worker.stopping:
                    self.event(worker, e.DropCompleted(worker.stopping.pop(0)))
                    busy = True
                while worker.started:
                    ticket, _ = worker.started.popitem()
                    self.event(worker, e.PeekDone(ticket, PeekRows(b"", 0)))
                    busy = True
        for worker, adapter in zip(self.workers, self.adapters, strict=True):
            assert len(worker.outbox) == 0
            assert not worker.emitting
            assert not adapter._held
            adapter._rules.validate()
            adapter._turns.validate()
            assert worker.state.next_index == self.order.next_index
            assert worker.state.connected == (self.client is not None)
            assert len(worker.state.reads.pending) == 0
        if self.client is not None:
            assert self.client.answered == self.client.asked
            assert [worker.state.nonce for worker in self.workers] == [
                self.client.nonce
            ] * self.count


Conversations.TestCase.settings = settings(
    max_examples=examples(150),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestConversations = Conversations.TestCase
