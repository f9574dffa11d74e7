"""A worker's storage half, event by event, with no loop."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from storage_house import (  # type: ignore[import-not-found]
    Room,
    drop,
    of,
    oneshot,
    responses,
    run,
    sink,
    source,
)

from actors.model.protocol.compute import AllowCompaction, AllowWrites, Hello
from actors.model.protocol.internal import ProposeCommand, SequencedCommand, TaggedCommand
from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import (
    CancelOneshotIngestion,
    DroppedId,
    FilesStaged,
    FrontierUpper,
    RetryDelays,
    StagedBatch,
    StagedBatches,
    StagingFailed,
    StatisticsUpdates,
    StatusUpdate,
    UpdateStorageConfiguration,
)
from actors.model.protocol.storage_internal import (
    CreateIngestionDataflow,
    DropObjects,
    ForStorage,
    ForwardedCommand,
    ResumeState,
    RunOneshotIngestionDataflow,
    RunSinkDataflow,
    StatisticsMeasurement,
    StatisticsUpdate,
    SuspendAndRestart,
)
from actors.replica.storage import events as e
from actors.replica.storage.renderings import owner_of
from actors.replica.storage.state import StorageState
from actors.runtime.errors import LocalProtocolError
from actors.runtime.progress import EMPTY

BATCHES = (StagedBatch(b"part", 3, 4),)


def room_of(id: str, count: int, *, owner: bool) -> Any:
    """A worker that owns an object, or one that does not and is not worker 0."""
    mine = owner_of(id, count)
    index = mine if owner else next(n for n in range(1, count) if n != mine)
    return Room(index, count)


def started(*whats: Any) -> Any:
    """A room where these run."""
    room = Room()
    room.connect("a")
    for command in run(*whats):
        room.running(command)
    return room


def test_an_ingestion_is_looked_up_before_it_is_rendered() -> None:
    room = Room()
    room.connect("a")
    effects = room.do(*run(source("u1", "a")))
    assert effects == [e.LookUp(1, source("u1", "a"), 0)]
    resume = ResumeState(3, 9, (("u1a", 9), ("gone", 1)))
    effects = room.event(e.ResumeFound(1, resume))
    kept = ResumeState(3, 9, (("u1a", 9),))
    create = CreateIngestionDataflow(source("u1", "a"), 1, kept)
    assert effects == [
        e.OfferStorageCommand(ProposeCommand(1, ForStorage(create))),
        e.StartIngestion(1, source("u1", "a"), kept),
        e.SendStorageResponse(StatusUpdate("u1", "starting", time_ms=77)),
        e.SendStorageResponse(StatusUpdate("u1a", "starting", time_ms=77)),
    ]
    assert room.event(e.ResumeFound(1, resume)) == []


def test_external_commands_render_nothing_on_the_other_workers() -> None:
    room = room_of("u1", 3, owner=False)
    room.connect("a")
    effects = room.do(*run(source("u1", "a"), sink("k1")))
    assert of(e.OfferStorageCommand, effects) == of(e.LookUp, effects) == []
    assert not room.numbers
    assert [r for r in responses(effects) if r.id != "k1"] == [
        FrontierUpper("u1", EMPTY),
        FrontierUpper("u1a", EMPTY),
    ]
    assert room.apply(CreateIngestionDataflow(source("u1", "a"), 1)) == []  # not mine
    assert room.numbers == {"u1": 1}
    assert responses(room.do(drop("u1"))) == [DroppedId("u1"), DroppedId("u1a")]
    assert room.numbers == {"u1": 1}  # until it comes in its order
    assert room.apply(DropObjects(("u1",))) == []
    assert room.numbers == {}


def test_an_object_is_not_reported_before_the_command_that_runs_it() -> None:
    room = room_of("u1", 3, owner=True)
    room.connect("a")
    room.apply(CreateIngestionDataflow(source("u1", "a"), 1))  # it has overtaken the command
    assert room.event(e.FrontierReached(1, "u1a", 7)) == []
    assert room.event(e.HealthObserved(1, 1, (e.HealthObservation("u1", "running"),))) == []
    assert (
        room.do(*run(source("u1", "a")))
        == [
            e.SendStorageResponse(FrontierUpper("u1a", 7)),
            e.SendStorageResponse(StatusUpdate("u1", "running", time_ms=77)),
            e.SendStorageResponse(StatusUpdate("u1a", "starting", time_ms=77)),
        ]
        or room.index == 0
    )
    assert responses(room.event(e.FrontierReached(1, "u1a", 7))) == []
    assert responses(room.event(e.FrontierReached(1, "u1a", 6))) == []
    assert responses(room.event(e.FrontierReached(1, "u1a", 8))) == [FrontierUpper("u1a", 8)]
    assert responses(room.event(e.FrontierReached(9, "u1a", 9))) == []


def test_frontiers_start_afresh_after_a_reconciliation_and_keep_what_was_reached() -> None:
    room = started(source("u1", "a"))
    room.event(e.FrontierReached(1, "u1a", 8))
    room.event(
        e.HealthObserved(
            1, 1, (e.HealthObservation("u1", "running"), e.HealthObservation("u1a", "running"))
        )
    )
    room.hello("b")
    assert room.event(e.FrontierReached(1, "u1", 9)) == []  # nothing is told while it initializes
    effects = room.do(*run(source("u1", "a")))
    assert effects == []
    effects = room.connect("c", *run(source("u1", "a")))
    assert responses(effects) == [
        FrontierUpper("u1", 9),
        FrontierUpper("u1a", 8),
        StatusUpdate("u1", "running", time_ms=77),
        StatusUpdate("u1a", "running", time_ms=77),
    ]
    assert of(e.OfferStorageCommand, effects) == of(e.LookUp, effects) == []
    assert of(e.LogStorageReconciliation, effects) == [
        e.LogStorageReconciliation("c", 1, 0, 0, 0, ())
    ]


def test_an_uppers_shard_is_what_it_belongs_to() -> None:
    room = started(source("u1", "a"))
    room.event(e.FrontierReached(1, "u1", 8))
    room.held = True  # the drop has not come in its order yet
    room.do(drop("u1"))
    assert responses(room.do(*run(source("u1", remap="r9"))), FrontierUpper) == []
    room.held = False
    room.order()
    effects = room.found([e.LookUp(2, source("u1", remap="r9"), 0)])
    assert of(e.StartIngestion, effects) == []  # the former must stop first
    assert of(e.StartIngestion, room.event(e.TaskStopped(1))) == [
        e.StartIngestion(2, source("u1", remap="r9"), ResumeState())
    ]
    assert responses(room.event(e.FrontierReached(2, "u1", 5))) == [FrontierUpper("u1", 5)]


# -- updates ---------------------------------------------------------------------------------------


def test_an_update_is_rendered_afresh_and_its_removed_exports_are_dropped() -> None:
    room = started(source("u1", "ab"))
    effects = room.running(*run(source("u1", "bc")))
    assert responses(effects, DroppedId) == [DroppedId("u1a")]
    assert of(e.StopTask, effects) == [e.StopTask(1, forget=False)]
    assert of(e.StartIngestion, effects) == []
    assert room.event(e.TaskStopped(1)) == [e.StartIngestion(2, source("u1", "bc"), ResumeState())]
    told = responses(effects, StatusUpdate)
    assert {(t.id, t.status) for t in told} == {
        ("u1a", "dropped"),
        *((id, "starting") for id in ("u1", "u1b", "u1c")),
    }


def test_an_update_that_may_not_be_is_refused_and_what_runs_goes_on() -> None:
    room = started(source("u1", "a"), source("u2", "a"))
    effects = room.do(*run(source("u1", "a", remap="r9")))
    (told,) = responses(effects, StatusUpdate)
    assert (told.id, told.status) == ("u1", "stalled")
    assert "remap shard ru1 → r9" in told.error
    assert [unfit.refusal.id for unfit in of(e.LogRefusedUpdate, effects)] == ["u1"]
    assert room.numbers == {"u1": 1, "u2": 2}
    assert responses(room.event(e.FrontierReached(1, "u1a", 5))) == [FrontierUpper("u1a", 5)]
    assert responses(room.do(drop("u1")), DroppedId) == [DroppedId("u1"), DroppedId("u1a")]


def test_an_update_during_a_look_up_takes_its_place() -> None:
    room = Room()
    room.connect("a")
    room.do(*run(source("u1", "a")))
    assert room.do(*run(source("u1", "ab"))) == [
        e.CancelLookUp(1),
        e.LookUp(2, source("u1", "ab"), 0),
    ]
    assert room.event(e.ResumeFound(1, ResumeState())) == []
    assert room.event(e.ResumeFailed(1, "late")) == []
    effects = room.event(e.ResumeFound(2, ResumeState()))
    assert of(e.StartIngestion, effects) == [e.StartIngestion(1, source("u1", "ab"), ResumeState())]


def test_a_look_up_that_fails_is_tried_again_and_says_so_once() -> None:
    room = Room()
    room.connect("a")
    room.do(*run(source("u1")))
    again = e.LookUp(1, source("u1"), 1)
    told = e.SendStorageResponse(StatusUpdate("u1", "stalled", "no store", "wait", 77))
    assert room.event(e.ResumeFailed(1, "no store", "wait")) == [told, again]
    assert room.event(e.ResumeFailed(1, "no store")) == [e.LookUp(1, source("u1"), 2)]
    assert of(e.StartIngestion, room.event(e.ResumeFound(1, ResumeState())))


def test_a_failing_look_up_is_told_to_each_client_once() -> None:
    room = Room()
    room.connect("a")
    room.do(*run(source("u1")))
    told = StatusUpdate("u1", "stalled", "no store", "wait", 77)
    assert responses(room.event(e.ResumeFailed(1, "no store", "wait"))) == [told]
    assert responses(room.connect("b", *run(source("u1"))), StatusUpdate) == [told]
    assert responses(room.event(e.ResumeFailed(1, "no store", "wait"))) == []
    room.event(e.ResumeFound(1, ResumeState()))
    assert "stalled" not in {
        each.status for each in responses(room.connect("c", *run(source("u1"))), StatusUpdate)
    }


def test_what_is_complete_has_no_task() -> None:
    room = Room()
    room.connect("a")
    effects = room.do(*run(source("u1", "a")))
    effects = room.found(effects, ResumeState(0, EMPTY, (("u1a", EMPTY),)))
    assert of(e.StartIngestion, effects) == []
    assert responses(effects, FrontierUpper) == [
        FrontierUpper("u1", EMPTY),
        FrontierUpper("u1a", EMPTY),
    ]
    assert {told.status for told in responses(effects, StatusUpdate)} == {"ceased"}
    assert of(e.CleanUpSource, room.do(drop("u1"))) == [e.CleanUpSource(-1, source("u1", "a"))]


# -- drops -----------------------------------------------------------------------------------------


def test_a_drop_is_told_at_once_and_ends_in_its_order() -> None:
    room = started(source("u1", "a"), sink("k1"))
    room.held = True
    effects = room.do(drop("u1"))
    assert [type(r).__name__ for r in responses(effects)] == ["StatusUpdate", "DroppedId"] * 2
    assert of(e.StopTask, effects) == []
    assert room.do(drop("u1")) == []  # unknown now
    assert room.state.ignored == 1
    assert room.event(e.FrontierReached(1, "u1", 50)) == []
    effects = room.order()
    assert effects == [e.StopTask(1, forget=True)]
    room.held = False
    assert responses(room.do(drop("k1")), DroppedId) == [DroppedId("k1")]
    assert room.event(e.TaskStopped(1)) == []


def test_an_export_may_be_dropped_alone() -> None:
    room = started(source("u1", "ab"))
    room.event(e.FrontierReached(1, "u1b", 8))
    effects = room.do(drop("u1a"))
    assert responses(effects, DroppedId) == [DroppedId("u1a")]
    assert of(e.StopTask, effects) == [e.StopTask(1, forget=False)]
    effects = room.event(e.TaskStopped(1))
    assert effects == [e.StartIngestion(2, source("u1", "b"), ResumeState())]
    assert responses(room.event(e.FrontierReached(2, "u1b", 8))) == []
    assert responses(room.event(e.FrontierReached(2, "u1b", 9))) == [FrontierUpper("u1b", 9)]


def test_a_drop_overtakes_no_look_up_and_is_forgotten_outside() -> None:
    room = Room()
    room.connect("a")
    room.do(*run(source("u1")))
    effects = room.do(drop("u1"))
    assert of(e.CancelLookUp, effects) == [e.CancelLookUp(1)]
    assert of(e.CleanUpSource, effects) == [e.CleanUpSource(-1, source("u1"))]
    assert room.event(e.ResumeFound(1, ResumeState())) == []
    assert room.numbers == {}


def test_a_dropped_object_that_comes_again_waits_for_its_former_task() -> None:
    room = started(sink("k1"))
    room.do(drop("k1"))
    effects = room.do(*run(sink("k1", 9)))
    assert of(e.StartSink, effects) == []
    assert room.event(e.TaskStopped(1)) == [e.StartSink(2, sink("k1", 9))]


# -- failures --------------------------------------------------------------------------------------


def test_a_failure_stalls_and_restarts_after_a_delay_that_grows() -> None:
    room = started(source("u1", "a", retry=5))
    for attempt, number in ((1, 1), (2, 2)):
        effects = room.event(e.TaskFailed(number, "no route", "look at the network"))
        assert of(e.RestartLater, effects) == [e.RestartLater(number, attempt, RetryDelays(5))]
        assert responses(effects) == [
            StatusUpdate(id, "stalled", "no route", "look at the network", 77)
            for id in ("u1", "u1a")
        ]
        assert room.event(e.TaskFailed(number, "again")) == []
        effects = room.event(e.RestartDue(number))
        assert of(e.StopTask, effects) == [e.StopTask(number, forget=False)]
        assert room.numbers == {}
        effects = room.found(effects)
        assert room.numbers == {"u1": number + 1}
        assert {told.status for told in responses(effects)} == {"starting"}
        assert of(e.StartIngestion, room.event(e.TaskStopped(number)))
    room.event(e.HealthObserved(3, 1, (e.HealthObservation("u1", "running"),)))
    assert of(e.RestartLater, room.event(e.TaskFailed(3, "x"))) == [
        e.RestartLater(3, 1, RetryDelays(5))
    ]


def test_a_source_all_of_whose_tables_failed_names_one_as_people_call_it() -> None:
    room = started(source("u1", "ab"))
    failed = tuple(e.HealthObservation(id, "stalled", "no column c") for id in ("u1a", "u1b"))
    well = e.HealthObservation("u1", "running")
    told = responses(room.event(e.HealthObserved(1, 1, (well, failed[0]))))
    assert {each.id: each.status for each in told} == {"u1": "running", "u1a": "stalled"}
    told = responses(room.event(e.HealthObserved(1, 2, (well, *failed))))
    assert told[0] == StatusUpdate("u1", "stalled", "table public.a: no column c", None, 77)


def test_a_task_whose_shards_are_dropped_ends_quietly_unless_the_drop_does_not_come() -> None:
    room = started(source("u1", "a"), source("u2", "a"))
    for number in (1, 2):
        effects = room.event(e.TaskFailed(number, "no shard", None, is_dropped=True))
        assert effects == [e.RestartLater(number, 1, RetryDelays())]
    told = responses(room.do(drop("u1")), StatusUpdate)
    assert {each.status for each in told} == {"dropped"}
    assert room.event(e.RestartDue(1)) == []
    (look_up,) = of(e.LookUp, room.event(e.RestartDue(2)))
    assert responses(room.event(e.ResumeFailed(look_up.ticket, "no shard"))) == [
        StatusUpdate("u2", "stalled", "no shard", None, 77)
    ]


def test_what_was_dropped_meanwhile_is_not_recreated() -> None:
    room = started(source("u1"), sink("k1"))
    room.event(e.TaskFailed(1, "x"))
    room.do(drop("u1"))
    assert room.event(e.RestartDue(1)) == []
    assert room.apply(SuspendAndRestart("u1", 1, "late")) == []
    assert room.state.renderings.ignored == 1
    assert room.numbers == {"k1": 2}


def test_a_restart_names_one_rendering_and_a_pending_update_is_enough() -> None:
    room = started(sink("k1"))
    room.held = True
    room.do(*run(msgspec.structs.replace(sink("k1"), name="other")))
    assert room.apply(SuspendAndRestart("k1", 1, "x")) == [e.StopTask(1, forget=False)]
    assert [type(command).__name__ for command in room.proposed] == ["RunSinkDataflow"]
    room.held = False
    room.order()
    assert room.numbers == {"k1": 2}
    assert room.apply(SuspendAndRestart("k1", 1, "x")) == []
    assert room.numbers == {"k1": 2}


def test_other_workers_ask_worker_0_to_restart() -> None:
    room = room_of("k9", 4, owner=True)
    assert room.state.index != 0
    room.connect("a", *run(sink("k9")))
    room.apply(RunSinkDataflow(sink("k9"), 1))
    room.event(e.TaskFailed(1, "x"))
    restart = ForwardedCommand(SuspendAndRestart("k9", 1, "x"))
    assert room.event(e.RestartDue(1)) == [e.ForwardCommand(restart)]
    first = Room(0, 4)
    first.connect("a", *run(sink("k9")))
    effects = first.event(restart)
    assert of(e.OfferStorageCommand, effects)[0].propose.command == ForStorage(restart.command)
    assert first.numbers == {"k9": 2}  # suspended, and rendered again


def test_a_sink_that_restarts_begins_where_it_may_be_compacted_to() -> None:
    room = started(sink("k1", 5))
    assert room.do(AllowCompaction("k1", 20)) == []
    room.event(e.TaskFailed(1, "x"))
    room.event(e.RestartDue(1))
    assert room.event(e.TaskStopped(1)) == [e.StartSink(2, sink("k1", 20))]


# -- one-shot ingestions ---------------------------------------------------------------------------


def test_a_oneshot_goes_on_when_its_client_comes_back_and_is_answered_once() -> None:
    room = started()
    room.do(oneshot())
    room.event(e.StorageClientLost("a"))
    effects = room.connect("b", oneshot())
    assert responses(effects) == of(e.StopTask, effects) == of(e.StartOneshot, effects) == []
    answer = StagedBatches("o1", FilesStaged(BATCHES))
    assert responses(room.event(e.OneshotDone(1, FilesStaged(BATCHES)))) == [answer]


def test_a_oneshot_of_the_same_name_that_reads_something_else_is_run_in_its_place() -> None:
    room = started()
    room.do(oneshot())
    room.event(e.OneshotDone(1, FilesStaged(BATCHES)))
    other = oneshot("o1", "t2")
    effects = room.connect("b", other)
    assert responses(effects) == []
    assert of(e.StopTask, effects) == [e.StopTask(1, forget=True)]
    assert of(e.StartOneshot, room.event(e.TaskStopped(1))) == [e.StartOneshot(2, other)]


def test_a_oneshot_is_answered_once_by_its_owner_and_at_once_by_the_others() -> None:
    room = room_of("o1", 3, owner=False)
    room.connect("a")
    assert room.do(oneshot()) == [e.SendStorageResponse(StagedBatches("o1", FilesStaged()))]
    assert room.do(CancelOneshotIngestion("o1")) == []
    room = started()
    effects = room.do(oneshot())
    assert of(e.StartOneshot, effects) == [e.StartOneshot(1, oneshot())]
    assert room.do(oneshot()) == []
    done = e.OneshotDone(1, FilesStaged(BATCHES))
    assert room.event(done) == [e.SendStorageResponse(StagedBatches("o1", FilesStaged(BATCHES)))]
    assert room.do(CancelOneshotIngestion("o1"))[-1] == e.StopTask(1, forget=True)
    assert room.do(CancelOneshotIngestion("o1")) == []


def test_a_canceled_oneshot_is_answered_so_and_its_parts_are_discarded() -> None:
    room = started()
    room.do(oneshot())
    (answer,) = responses(room.do(CancelOneshotIngestion("o1")))
    assert isinstance(answer.result, StagingFailed)
    assert answer.result.code == "OperationCanceled"
    assert room.event(e.OneshotDone(1, FilesStaged(BATCHES))) == [e.DiscardParts(BATCHES)]


def test_a_oneshot_that_is_done_while_nobody_is_there_waits_for_its_client() -> None:
    room = started()
    room.do(oneshot())
    assert room.event(e.StorageClientLost("a")) == [e.SwitchStorageClient(None)]
    assert room.event(e.OneshotDone(1, FilesStaged(BATCHES))) == []
    effects = room.connect("b", oneshot())
    assert responses(effects) == [StagedBatches("o1", FilesStaged(BATCHES))]
    assert of(e.StopTask, effects) == of(e.StartOneshot, effects) == []
    assert room.numbers == {"o1": 1}, "it is done, and not done again"
    assert of(e.DiscardParts, room.do(CancelOneshotIngestion("o1"))) == [], (
        "whoever took them has them"
    )
    room.do(oneshot("o2"))
    room.event(e.StorageClientLost("b"))
    number = room.numbers["o2"]
    room.event(e.OneshotDone(number, FilesStaged(BATCHES)))
    assert of(e.DiscardParts, room.connect("c")) == [e.DiscardParts(BATCHES)]


@pytest.mark.parametrize("answered", [False, True])
def test_a_oneshot_that_is_done_before_its_client_is_heard_of_is_answered_then(
    answered: bool,
) -> None:
    """Worker 0 heard of a new client first, and had it rendered; the owner was done with it, threw
    it away, and never answered (found by seed 1020)."""
    uuid = next(f"o{n}" for n in range(99) if owner_of(f"o{n}", 3))  # not worker 0's
    room = room_of(uuid, 3, owner=True)
    room.connect("a")
    if answered:  # by a rendering of before; the answer was lost with the connection
        room.do(oneshot(uuid))
        (start,) = of(e.StartOneshot, room.apply(RunOneshotIngestionDataflow(oneshot(uuid), 1)))
        room.event(e.OneshotDone(start.number, FilesStaged(BATCHES)))
        room.apply(DropObjects((uuid,)))
        room.event(e.TaskStopped(start.number))
    (start,) = of(e.StartOneshot, room.apply(RunOneshotIngestionDataflow(oneshot(uuid), 2)))
    assert room.event(e.OneshotDone(start.number, FilesStaged(BATCHES))) == []
    effects = room.connect("b", oneshot(uuid))
    assert responses(effects, StagedBatches) == [StagedBatches(uuid, FilesStaged(BATCHES))]


def test_an_answer_that_went_to_a_client_that_is_gone_is_given_again() -> None:
    """The owner had not heard yet that its client was displaced (found by seed 72000325)."""
    uuid = next(f"o{n}" for n in range(99) if owner_of(f"o{n}", 3))  # not worker 0's
    room = room_of(uuid, 3, owner=True)
    room.connect("a")
    room.do(oneshot(uuid))
    (start,) = of(e.StartOneshot, room.apply(RunOneshotIngestionDataflow(oneshot(uuid), 1)))
    answer = StagedBatches(uuid, FilesStaged(BATCHES))
    assert responses(room.event(e.OneshotDone(start.number, FilesStaged(BATCHES)))) == [answer]
    assert responses(room.connect("b", oneshot(uuid)), StagedBatches) == [answer]
    assert of(e.DiscardParts, room.apply(DropObjects((uuid,)))) == []  # whoever took them has them


# -- connections -----------------------------------------------------------------------------------


def test_commands_of_a_former_connection_are_discarded() -> None:
    room = started(source("u1"))
    room.connect("b", *run(source("u1")))
    assert room.event(TaggedCommand("a", drop("u1"), "storage")) == []
    assert room.state.ignored == 1
    assert room.numbers == {"u1": 1}


def test_what_a_new_client_does_not_mention_is_dropped_in_silence() -> None:
    room = started(source("u1", "a"), source("u2"), sink("k1"))
    assert room.hello("b") == [e.SwitchStorageClient("b")]
    assert room.do(Hello("b"))  # begins again
    effects = room.connect("c", *run(source("u2")), AllowCompaction("strange", 4))
    assert responses(effects, DroppedId) == []
    assert of(e.StopTask, effects) == [e.StopTask(1, forget=True), e.StopTask(3, forget=True)]
    assert of(e.LogStorageReconciliation, effects) == [
        e.LogStorageReconciliation("c", 1, 0, 2, 1, ())
    ]
    assert room.state.ignored == 1
    assert room.numbers == {"u2": 2}


def test_a_definition_that_has_changed_is_counted_as_replaced() -> None:
    room = started(source("u1", "a"), source("u2"))
    effects = room.connect("b", *run(source("u1", "ab"), source("u2"), source("u3")))
    [done] = of(e.LogStorageReconciliation, effects)
    assert (done.kept, done.run, done.replaced, done.dropped) == (1, 2, 1, 0)


def test_a_client_that_is_gone_hears_nothing_and_tasks_go_on() -> None:
    room = started(source("u1", "a"))
    room.event(e.StorageClientLost("a"))
    assert room.event(e.StorageClientLost("a")) == []
    assert room.event(e.FrontierReached(1, "u1a", 8)) == []
    assert of(e.RestartLater, room.event(e.TaskFailed(1, "x")))
    room.event(e.StorageClientLost("b"))  # its Hello is still to come
    effects = room.connect("b", *run(source("u1", "a")))
    assert responses(effects) == []
    assert of(e.SwitchStorageClient, effects) == [e.SwitchStorageClient(None)]
    assert room.numbers == {"u1": 1}


def test_configuration_goes_through_the_one_order() -> None:
    room = Room()
    effects = room.connect("a", UpdateStorageConfiguration(5))
    assert of(e.ConfigureTasks, effects) == [e.ConfigureTasks(UpdateStorageConfiguration(5))]
    effects = room.do(UpdateStorageConfiguration(None, 7))
    assert effects[-1] == e.ConfigureTasks(UpdateStorageConfiguration(5, 7))
    other = Room(1, 2)
    other.connect("a")
    assert other.do(UpdateStorageConfiguration(5)) == []


def test_writes_are_allowed_once_and_for_good() -> None:
    room = started(source("u1"))
    assert room.do(AllowWrites()) == [e.AllowTaskWrites()]
    assert room.do(AllowWrites()) == []
    assert of(e.AllowTaskWrites, room.connect("b", *run(source("u1")), AllowWrites())) == []
    assert room.state.writes_allowed


def test_a_gap_in_the_order_is_a_fault_and_the_other_half_has_its_place() -> None:
    state = StorageState(0, 1)
    assert state.handle(SequencedCommand(0, 1, AllowWrites())) == []
    with pytest.raises(LocalProtocolError, match="got command 2: expected 1"):
        state.handle(SequencedCommand(2, 1, AllowWrites()))


# -- statistics ------------------------------------------------------------------------------------


def test_statistics_go_through_the_one_order_and_are_told_by_worker_0() -> None:
    room = started(source("u1", "a"))
    assert room.event(e.StatisticsDue()) == [
        e.SendStorageResponse(StatisticsUpdates((ObjectStatistics("u1"), ObjectStatistics("u1a"))))
    ]
    room.event(e.StatisticsMeasured(1, ObjectStatistics("u1a", rows_inserted=4, lag_ms=9)))
    effects = room.event(e.StatisticsDue())
    measured = StatisticsMeasurement(1, ObjectStatistics("u1a", rows_inserted=4, lag_ms=9))
    assert effects == [
        e.OfferStorageCommand(ProposeCommand(1, ForStorage(StatisticsUpdate(0, (measured,)))))
    ]
    # Of whatever had this id before:
    room.apply(StatisticsUpdate(3, (msgspec.structs.replace(measured, epoch=0),)))
    assert room.event(e.StatisticsDue()) == [
        e.SendStorageResponse(
            StatisticsUpdates((ObjectStatistics("u1a", rows_inserted=4, lag_ms=9),))
        )
    ]
    other = Room(1, 2)
    other.event(e.StatisticsMeasured(1, ObjectStatistics("u1a", rows_inserted=4)))
    assert other.event(e.StatisticsDue()) == [
        e.ForwardCommand(
            ForwardedCommand(
                StatisticsUpdate(
                    1, (StatisticsMeasurement(1, ObjectStatistics("u1a", rows_inserted=4)),)
                )
            )
        )
    ]
