"""The worker's state machine, event by event, with no loop."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Frontiers,
    Hello,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    LogTarget,
    Peek,
    PeekCanceled,
    PeekError,
    PeekResponse,
    PeekRows,
    ScheduleDataflow,
    ShardImport,
    ShardTarget,
    StatusResponse,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeExport,
    SubscribeResponse,
    UpdateConfiguration,
)
from actors.model.protocol.internal import (
    BatchEmitted,
    CompactionAllowed,
    DataflowProgress,
    DataflowScheduled,
    EmitBatch,
    ProposeCommand,
    SequencedCommand,
    TaggedCommand,
    WritesAllowed,
)
from actors.model.protocol.message_parts import RowSetFinishing
from actors.model.protocol.storage_internal import DropObjects as StorageDrop
from actors.model.protocol.storage_internal import ForStorage
from actors.replica.compute import events as e
from actors.replica.compute.peeks import NOTHING, chosen_worker
from actors.replica.compute.reconciliation import ReconcileObstacle
from actors.replica.compute.state import ComputeState
from actors.runtime.errors import LocalProtocolError
from actors.runtime.progress import EMPTY

SCHEMA = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "string")))
SOURCE = ShardImport("s1", SCHEMA)
ROWS = PeekRows(b"rows")


def index(id: str = "i1", as_of: int = 10) -> DataflowDescription:
    return DataflowDescription(id, id, (SOURCE,), IndexExport(("k",), SCHEMA), as_of)


def subscribe(id: str = "t1", as_of: int = 10) -> DataflowDescription:
    return DataflowDescription(id, id, (SOURCE,), SubscribeExport(SCHEMA), as_of)


class Room:
    """A state machine with a client; checks the invariants after every event."""

    def __init__(self, index: int = 0, count: int = 1, peeks_max: int = 10) -> None:
        self.state = ComputeState(index, count, result_bytes_max=1000, peeks_max=peeks_max)
        self.reconciled: list[e.LogReconciliation] = []

    def event(self, event: e.Event) -> list[e.Effect]:
        effects = self.state.handle(event)
        self.state.validate()
        self.reconciled += of(e.LogReconciliation, effects)
        return [effect for effect in effects if not isinstance(effect, e.LogReconciliation)]

    def do(self, *commands: Command) -> list[e.Effect]:
        effects: list[e.Effect] = []
        for command in commands:
            effects += self.event(SequencedCommand(self.state.next_index, 1, command))
        return effects

    def connect(self, nonce: str, *commands: Command) -> list[e.Effect]:
        """A whole replay of a client's history."""
        self.do(Hello(nonce), CreateInstance(self.state.count))
        return self.do(*commands, InitializationComplete())

    def sealed(self, number: int, upper: int, since: int = 0) -> list[e.Effect]:
        return self.event(e.IndexSealed(number, upper, since))

    def progress(self, number: int, id: str, frontier: int) -> list[e.Effect]:
        progress = DataflowProgress(id, frontier, frontier, frontier)
        return self.event(e.DataflowProgressed(number, progress))


def responses(effects: list[e.Effect]) -> list[Any]:
    return [effect.response for effect in effects if isinstance(effect, e.SendComputeResponse)]


def of(kind: type[Any], effects: list[e.Effect]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_worker_0_offers_its_clients_commands_and_no_others() -> None:
    room = Room(0, 2)
    assert room.event(TaggedCommand("a", AllowWrites())) == []
    assert room.event(TaggedCommand("a", Hello("a"))) == [
        e.OfferCommand(ProposeCommand(1, Hello("a")))
    ]
    assert room.event(TaggedCommand("a", AllowWrites())) == [
        e.OfferCommand(ProposeCommand(1, AllowWrites()))
    ]
    assert room.event(TaggedCommand("b", Hello("b"))) == [
        e.OfferCommand(ProposeCommand(2, Hello("b")))
    ]
    assert room.event(TaggedCommand("a", AllowWrites())) == []
    assert room.state.ignored == 2
    assert Room(1, 2).event(TaggedCommand("a", Hello("a"))) == []


def test_a_gap_in_the_order_is_a_fault() -> None:
    with pytest.raises(LocalProtocolError, match="expected 0"):
        ComputeState(0, 1, result_bytes_max=1, peeks_max=1).handle(
            SequencedCommand(1, 1, Hello("a"))
        )


@pytest.fixture
def room() -> Room:
    return Room()


def test_nothing_renders_before_the_initialization_is_complete(room: Room) -> None:
    assert room.do(Hello("a")) == [e.SwitchComputeClient("a")]
    assert room.do(CreateInstance(1), CreateDataflow(index()), ScheduleDataflow("i1")) == []
    effects = room.do(InitializationComplete())
    assert effects == [e.RenderDataflow(1, index()), e.SendToDataflow(1, DataflowScheduled())]
    assert room.do(AllowWrites()) == [e.SendToDataflow(1, WritesAllowed())]
    assert room.do(AllowWrites()) == []
    assert room.do(CreateDataflow(index("i2"))) == [
        e.RenderDataflow(2, index("i2")),
        e.SendToDataflow(2, WritesAllowed()),
    ]
    assert room.state.commands_for(1) == [WritesAllowed(), DataflowScheduled()]


def test_frontiers_of_an_index_are_its_partitions_and_never_go_back(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    assert responses(room.sealed(1, 5)) == []  # below the as_of
    assert responses(room.sealed(1, 12)) == [Frontiers("i1", write=12, output=12)]
    assert responses(room.sealed(1, 0)) == []
    assert responses(room.sealed(1, 11)) == []
    assert responses(room.progress(1, "i1", 30)) == [Frontiers("i1", input=30)]
    assert responses(room.sealed(1, 13)) == [Frontiers("i1", write=13, output=13)]
    assert responses(room.event(e.DataflowProgressed(9, DataflowProgress("x", 1, 1, 1)))) == []


def test_a_subscribe_reports_no_frontiers(room: Room) -> None:
    room.connect("a", CreateDataflow(subscribe()))
    assert room.progress(1, "t1", 30) == []


def test_a_drop_is_reported_when_all_has_stopped(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    room.sealed(1, 12)
    assert room.do(AllowCompaction("i1", EMPTY)) == [e.StopDataflow(1)]
    assert room.progress(1, "i1", 30) == []  # no longer known
    assert responses(room.event(e.DropCompleted(1))) == [Frontiers("i1", EMPTY, EMPTY, EMPTY)]


def test_compaction_moves_on_and_never_back(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    assert room.do(AllowCompaction("i1", 20)) == [
        e.SendToDataflow(1, CompactionAllowed(20)),
        e.CompactIndex(1, 20),
    ]
    assert room.do(AllowCompaction("i1", 15)) == []
    assert room.do(AllowCompaction("nobody", 15)) == []


# -- peeks -----------------------------------------------------------------------------------------


def ask(uuid: str = "p1", time: int = 11, id: str = "i1") -> Peek:
    return Peek(uuid, IndexTarget(id), time)


def test_a_peek_waits_until_its_time_is_sealed_and_holds_back_compaction(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    room.sealed(1, 11)
    assert room.do(ask()) == []
    assert room.do(AllowCompaction("i1", 50)) == [
        e.SendToDataflow(1, CompactionAllowed(50)),
        e.CompactIndex(1, 11),
    ]
    started = of(e.StartPeek, room.sealed(1, 12))
    assert started == [e.StartPeek(1, 1, ask(), 1000)]
    assert of(e.StartPeek, room.sealed(1, 13)) == []
    assert room.event(e.PeekDone(1, ROWS)) == [
        e.CompactIndex(1, 50),
        e.SendComputeResponse(PeekResponse("p1", ROWS)),
    ]
    assert room.event(e.PeekDone(1, ROWS)) == []  # answered once


@pytest.mark.parametrize(
    ("peek", "code"),
    [
        (ask(time=9), "ReadBelowSince"),
        (ask(id="nobody"), "UnknownObject"),
        (ask(id="t1"), "UnknownObject"),
    ],
)
def test_peeks_refused_at_once(room: Room, peek: Peek, code: str) -> None:
    room.connect("a", CreateDataflow(index()), CreateDataflow(subscribe()))
    (answer,) = responses(room.do(peek))
    assert answer.result.code == code


def test_too_many_peeks_are_refused() -> None:
    room = Room(peeks_max=1)
    room.connect("a", CreateDataflow(index()))
    assert room.do(ask("p1")) == []
    assert room.do(ask("p1")) == []  # the same again: ignored
    (answer,) = responses(room.do(ask("p2")))
    assert answer.result.code == "ResourceBusy"


def test_a_cancelled_peek_is_answered_once_and_its_late_rows_are_nobodys(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    room.sealed(1, 20)
    room.do(ask())
    assert room.do(CancelPeek("p1")) == [
        e.StopPeek(1),
        e.SendComputeResponse(PeekResponse("p1", PeekCanceled())),
    ]
    assert room.do(CancelPeek("p1")) == []
    room.do(ask())  # the same uuid again, under another ticket
    assert room.event(e.PeekDone(1, ROWS)) == []
    assert responses(room.event(e.PeekDone(2, ROWS))) == [PeekResponse("p1", ROWS)]


def test_a_peek_of_a_shard_is_read_by_one_worker() -> None:
    peek = Peek("some-uuid", ShardTarget("u1", SOURCE), 11)
    reads: list[int] = []
    for number in range(3):
        room = Room(number, 3)
        room.connect("a")
        effects = room.do(peek)
        if of(e.StartPeek, effects):
            reads.append(number)
            assert effects == [e.StartPeek(1, 0, peek, 1000)]
        else:
            assert responses(effects) == [PeekResponse("some-uuid", NOTHING)]
    assert reads == [chosen_worker("some-uuid", 3)]


def test_a_snapshot_that_replaces_the_index_makes_peeks_wait_or_fail(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    room.sealed(1, 20, 10)
    room.do(ask("p1", 12), ask("p2", 30))
    room.sealed(1, 0)  # the snapshot is on its way in
    assert room.event(e.PeekDone(1, None)) == []  # what it read was replaced: it waits again
    effects = room.sealed(1, 16, 15)  # and history now begins at 15
    (answer,) = responses(effects)
    assert (answer.uuid, answer.result.code) == ("p1", "ReadBelowSince")
    assert of(e.StartPeek, room.sealed(1, 31)) == [e.StartPeek(2, 1, ask("p2", 30), 1000)]


def test_dropping_an_index_answers_its_peeks(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    room.do(ask())
    effects = room.do(AllowCompaction("i1", EMPTY))
    (answer,) = responses(effects)
    assert isinstance(answer.result, PeekError)
    assert answer.result.code == "UnknownObject"
    assert effects[-1] == e.StopDataflow(1)


def test_configuration_changes_at_once(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    room.sealed(1, 20)
    room.do(UpdateConfiguration(77), UpdateConfiguration(None))
    assert room.do(ask()) == [e.StartPeek(1, 1, ask(), 77)]


# -- subscribes ------------------------------------------------------------------------------------


def emit(lower: int, upper: int, arrow: bytes | None = None) -> e.SubscribeBatchReady:
    return e.SubscribeBatchReady(1, EmitBatch("t1", 1, SubscribeBatch(lower, upper, arrow)))


def test_subscribe_batches_carry_their_receipts(room: Room) -> None:
    room.connect("a", CreateDataflow(subscribe()))
    batch = SubscribeBatch(0, 11, b"x")
    assert room.event(emit(0, 11, b"x")) == [
        e.SendComputeResponse(SubscribeResponse("t1", batch), 1, BatchEmitted("t1", 1, 11))
    ]
    assert room.do(AllowCompaction("t1", EMPTY)) == [
        e.SendComputeResponse(SubscribeResponse("t1", SubscribeDropped(11))),
        e.StopDataflow(1),
    ]
    assert room.event(e.DropCompleted(1)) == []


def test_a_finished_subscribe_is_not_reported_dropped(room: Room) -> None:
    room.connect("a", CreateDataflow(subscribe()))
    room.event(emit(0, EMPTY))
    assert room.do(AllowCompaction("t1", EMPTY)) == [e.StopDataflow(1)]


def test_other_workers_say_that_theirs_is_empty() -> None:
    room = Room(1, 2)
    effects = room.connect("a", CreateDataflow(subscribe()))
    assert responses(effects) == [SubscribeResponse("t1", SubscribeBatch(0, EMPTY))]
    assert responses(room.do(AllowCompaction("t1", EMPTY))) == []


def test_an_oversized_batch_becomes_an_error(room: Room) -> None:
    room.connect("a", CreateDataflow(subscribe()))
    (answer,) = responses(room.event(emit(0, 11, bytes(1001))))
    assert answer.batch.arrow is None
    assert answer.batch.error[0] == "InvalidUsage"


# -- crashes ---------------------------------------------------------------------------------------


def test_a_crashed_dataflow_starts_afresh_and_says_why(room: Room) -> None:
    room.connect("a", CreateDataflow(index()), ScheduleDataflow("i1"))
    room.do(AllowCompaction("i1", 30))
    effects = room.event(e.DataflowCrashed(1, "boom"))
    assert responses(effects) == [StatusResponse("i1", "stalled", "boom")]
    assert effects[-1] == e.RespawnDataflow(1)
    assert room.state.commands_for(1) == [CompactionAllowed(30), DataflowScheduled()]
    assert room.state.commands_for(9) == []


def test_a_crashed_subscribe_ends_with_an_error(room: Room) -> None:
    room.connect("a", CreateDataflow(subscribe()))
    room.event(emit(0, 11))
    (answer,) = responses(room.event(e.DataflowCrashed(1, "boom")))
    assert answer.batch == SubscribeBatch(11, EMPTY, None, ("ActorDead", "boom"))
    assert room.event(e.DataflowCrashed(1, "boom")) == []


# -- connections -----------------------------------------------------------------------------------


def test_a_client_that_is_gone_gets_nothing_and_dataflows_go_on(room: Room) -> None:
    room.connect("a", CreateDataflow(index()), CreateDataflow(subscribe()))
    room.sealed(1, 12)
    room.do(ask("p1", 11), ask("p2", 99))
    assert room.event(e.ComputeClientLost("b")) == []
    assert room.event(e.ComputeClientLost("a")) == [e.StopPeek(1), e.SwitchComputeClient(None)]
    assert room.event(e.ComputeClientLost("a")) == []
    assert room.sealed(1, 50) == []
    assert room.event(e.PeekDone(1, ROWS)) == []
    assert room.do(ask("p3", 20)) == []
    assert room.event(e.SubscribeBatchReady(2, EmitBatch("t1", 1, SubscribeBatch(0, 9)))) == [
        e.AcknowledgeBatch(2, BatchEmitted("t1", 1, 9))
    ]


def test_an_unchanged_client_keeps_its_dataflows_and_hears_frontiers_afresh(room: Room) -> None:
    room.connect("a", CreateDataflow(index()), ScheduleDataflow("i1"))
    room.sealed(1, 30)
    room.event(e.StatusSeen(1, StatusResponse("i1", "gathering")))
    room.do(ask("p1", 99))
    assert room.do(Hello("b")) == [e.SwitchComputeClient("b")]  # the peek is gone, silently
    assert room.sealed(1, 31) == []  # nothing is said before the initialization is complete
    moved = msgspec.structs.replace(index(), as_of=20)
    effects = room.do(
        CreateInstance(1), CreateDataflow(moved), ScheduleDataflow("i1"), InitializationComplete()
    )
    assert of(e.RenderDataflow, effects) == of(e.StopDataflow, effects) == []
    assert effects == [
        e.SendToDataflow(1, CompactionAllowed(20)),
        e.CompactIndex(1, 20),
        e.SendComputeResponse(Frontiers("i1", write=31, output=31)),
        e.SendComputeResponse(StatusResponse("i1", "gathering")),
    ]


def test_changed_and_unmentioned_dataflows_are_replaced_and_dropped_silently(room: Room) -> None:
    room.connect("a", *[CreateDataflow(index(id)) for id in ("i1", "i2", "i3")])
    changed = msgspec.structs.replace(index("i2"), export=IndexExport((), SCHEMA))
    effects = room.connect("b", CreateDataflow(index("i1")), CreateDataflow(changed))
    assert effects == [e.StopDataflow(2), e.StopDataflow(3), e.RenderDataflow(4, changed)]
    assert room.event(e.DropCompleted(2)) == room.event(e.DropCompleted(3)) == []
    assert responses(room.sealed(4, 12)) == [Frontiers("i2", write=12, output=12)]
    assert room.sealed(2, 40) == []  # a former rendering of the same object


def test_a_hello_during_the_initialization_begins_again(room: Room) -> None:
    room.do(Hello("a"), CreateInstance(1), CreateDataflow(index("i1")))
    effects = room.connect("b", CreateDataflow(index("i2")))
    assert effects == [e.RenderDataflow(1, index("i2"))]


def test_a_drop_under_way_at_the_reconnection_is_not_reported_to_the_new_client(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    room.do(AllowCompaction("i1", EMPTY))
    room.connect("b")
    assert room.event(e.DropCompleted(1)) == []


# -- all workers alike -----------------------------------------------------------------------------

ids = st.sampled_from(["i1", "i2"])
steps = st.one_of(
    st.builds(lambda id, t: CreateDataflow(index(id, t)), ids, st.integers(5, 8)),
    st.builds(AllowCompaction, ids, st.one_of(st.integers(5, 20), st.just(EMPTY))),
    st.builds(ScheduleDataflow, ids),
    st.builds(lambda uuid, id, t: ask(uuid, t, id), st.sampled_from("pq"), ids, st.integers(5, 20)),
    st.builds(CancelPeek, st.sampled_from("pq")),
    st.builds(Hello, st.sampled_from("ab")),
    st.just(InitializationComplete()),
    st.builds(e.IndexSealed, st.integers(1, 4), st.integers(0, 25), st.integers(0, 10)),
    st.builds(e.PeekDone, st.integers(1, 6), st.sampled_from([ROWS, None])),
    st.builds(e.ComputeClientLost, st.sampled_from("ab")),
)


@given(st.lists(steps, max_size=60), st.lists(st.booleans(), min_size=60, max_size=60))
def test_all_workers_render_alike_whatever_their_progress(
    script: list[Any], skipped: list[bool]
) -> None:
    """Worker 1 sees other local events than worker 0; what they render is the same."""
    rendered: list[list[e.Effect]] = []
    for number in range(2):
        room = Room(number, 2)
        effects: list[e.Effect] = room.do(Hello("z"))
        for step, skip in zip(script, skipped, strict=False):
            if isinstance(step, e.IndexSealed | e.PeekDone | e.ComputeClientLost):
                if not (number and skip):
                    effects += room.event(step)
            else:
                effects += room.do(step)
            for dropped in list(room.state.dropping)[:1] if skip else []:
                effects += room.event(e.DropCompleted(dropped))
        rendered.append(
            [
                x
                for x in effects
                if isinstance(x, e.RenderDataflow | e.StopDataflow | e.SendToDataflow)
            ]
        )
    assert rendered[0] == rendered[1]


def test_what_this_worker_cannot_do_with_rows_is_refused_by_name(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    room.sealed(1, 20)
    finished = Peek("p1", IndexTarget("i1"), 12, finishing=RowSetFinishing(limit=-1))
    [answer] = responses(room.do(finished))
    assert answer.result.code == "InvalidUsage"
    [answer] = responses(room.do(Peek("p2", LogTarget("nothing"), 0)))
    assert (answer.result.code, "nothing" in answer.result.text) == ("UnknownObject", True)


def test_a_configuration_says_only_what_changes(room: Room) -> None:
    room.connect("a", UpdateConfiguration(7, 5), UpdateConfiguration(maintenance_ms=3))
    reads = room.state.reads
    assert (reads.result_bytes_max, reads.inline_bytes_max, room.state.maintenance_ms) == (7, 5, 3)


def test_a_client_that_went_before_its_hello_came_is_not_served() -> None:
    room = Room(1, 2)
    room.connect("a", CreateDataflow(index()))
    room.event(e.ComputeClientLost("b"))
    room.event(e.ComputeClientLost("a"))
    effects = room.do(Hello("b"), CreateInstance(2), CreateDataflow(index()))
    assert of(e.SwitchComputeClient, effects) == [e.SwitchComputeClient(None)]
    effects = room.do(InitializationComplete(), Peek("p", IndexTarget("i1"), 50))
    assert responses(effects) == []
    assert len(room.state.reads.pending) == 0
    room.connect("c", CreateDataflow(index()))
    assert responses(room.sealed(1, 20))[0].write == 20


def test_an_end_that_was_told_is_not_told_again(room: Room) -> None:
    room.connect("a", CreateDataflow(index("i1")), CreateDataflow(index("i2")))
    room.sealed(1, EMPTY)  # write and output
    for id in ("i1", "i2"):
        room.do(AllowCompaction(id, EMPTY))
    assert responses(room.event(e.DropCompleted(1))) == [Frontiers("i1", input=EMPTY)]
    assert responses(room.event(e.DropCompleted(2))) == [Frontiers("i2", EMPTY, EMPTY, EMPTY)]
    room.do(CreateDataflow(index("i3")))
    room.sealed(3, EMPTY)
    room.progress(3, "i3", EMPTY)
    room.do(AllowCompaction("i3", EMPTY))
    assert responses(room.event(e.DropCompleted(3))) == []


def test_what_is_kept_holds_one_description_only(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    old = room.state.rendered["i1"].description
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(index(as_of=12)), type=type(old))
    room.connect("b", CreateDataflow(again))
    kept = room.state.rendered["i1"].description
    assert kept.as_of == 12
    assert kept.export is old.export
    assert kept.imports is old.imports


def test_a_reconciliation_tells_what_it_did_and_why(room: Room) -> None:
    room.connect("a", CreateDataflow(index("i1")), CreateDataflow(index("i2")))
    changed = msgspec.structs.replace(index("i2"), export=IndexExport(("v",), SCHEMA))
    room.connect("b", CreateDataflow(index("i1")), CreateDataflow(changed))
    first, second = room.reconciled
    assert (first.reused, first.created, first.dropped, first.replaced) == (0, 2, 0, ())
    assert (second.nonce, second.reused, second.created, second.dropped) == ("b", 1, 1, 1)
    [replaced] = second.replaced
    assert replaced.flags == (ReconcileObstacle.EXPORT,)
    assert (replaced.running.description, replaced.wanted) == (index("i2"), changed)


def test_what_is_kept_is_compacted_before_orphans_are_dropped_and_the_rest_follows(
    room: Room,
) -> None:
    """In the order in which a client would have said it: compactions, the empty ones last."""
    room.connect("a", CreateDataflow(index("i1")), CreateDataflow(index("i2")))
    orphan, kept = (room.state.rendered[id].number for id in ("i1", "i2"))
    effects = room.connect("b", CreateDataflow(index("i2", 12)), CreateDataflow(index("i3")))
    order = [
        effect
        for effect in effects
        if isinstance(effect, e.StopDataflow | e.RenderDataflow)
        or effect == e.SendToDataflow(kept, CompactionAllowed(12))
    ]
    made = room.state.rendered["i3"].number
    assert order[:2] == [e.SendToDataflow(kept, CompactionAllowed(12)), e.StopDataflow(orphan)]
    assert made == orphan + 2
    assert len(order) == 3


def test_commands_of_the_other_half_have_their_place_and_lead_to_nothing(room: Room) -> None:
    room.connect("a", CreateDataflow(index()))
    before = room.state.next_index
    assert room.event(SequencedCommand(before, 9, ForStorage(StorageDrop(("i1",))))) == []
    assert room.state.next_index == before + 1
    assert set(room.state.rendered) == {"i1"}
