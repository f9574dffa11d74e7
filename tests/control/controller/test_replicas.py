"""Several replicas of one instance: one history, and one answer out of theirs. Pure."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.control.controller.replicas.replica_merge import (
    MergedResponses,
    ReplicaMerge,
    of_replica,
)
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CopyDone,
    CopyToExport,
    CopyToResponse,
    CreateDataflow,
    CreateInstance,
    DataflowDescription,
    Export,
    Frontiers,
    IndexExport,
    IndexTarget,
    InitializationComplete,
    LogTarget,
    Peek,
    PeekError,
    PeekResponse,
    PeekResult,
    PeekRows,
    PeekStashed,
    Response,
    ScheduleDataflow,
    ShardImport,
    StashPart,
    StatusResponse,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeExport,
    SubscribeResponse,
    ViewExport,
)
from actors.replica.compute.history import reduced
from actors.runtime.progress import EMPTY
from suite_lanes import examples  # type: ignore[import-not-found]

SCHEMA = TableSchema((TableColumn("id", "bigint"),))
PLAN = DeltaPlan(("table",), (SCHEMA,), SCHEMA, "SELECT id FROM table", "incremental", "")
START: list[Command] = [CreateInstance(2), InitializationComplete(), AllowWrites()]
AHEAD, DATA = "ReadBelowSince", "ViewInError"


def create(id_: str, export: Export, as_of: int = 10) -> CreateDataflow:
    imports = (ShardImport("table", SCHEMA),)
    return CreateDataflow(DataflowDescription(id_, id_, imports, export, as_of))


def index(id_: str) -> CreateDataflow:
    return create(id_, IndexExport(("id",), SCHEMA))


def view(id_: str) -> CreateDataflow:
    return create(id_, ViewExport(PLAN, f"{id_}-out"))


def subscribe(id_: str) -> CreateDataflow:
    return create(id_, SubscribeExport(SCHEMA))


def replicas(*names: str) -> ReplicaMerge:
    made = ReplicaMerge(START)
    for name in names:
        made.add(name)
        made.connected(name, 1)
    return made


def peek(made: ReplicaMerge, uuid: str = "p") -> None:
    made.command(Peek(uuid, IndexTarget("u"), 5))


def answered(
    made: ReplicaMerge, name: str, result: PeekResult, uuid: str = "p", incarnation: int = 1
) -> MergedResponses:
    return made.responded(name, incarnation, PeekResponse(uuid, result))


def batch(lower: int, upper: int) -> SubscribeBatch:
    """One row a time."""
    times = list(range(lower, upper))
    rows = pa.table({"id": times, TIME: times, DIFF: [1] * len(times)})
    return SubscribeBatch(lower, upper, to_ipc(rows))


def times_of(answer: SubscribeBatch) -> list[int]:
    found: list[int] = [] if answer.arrow is None else from_ipc(answer.arrow)[TIME].to_pylist()
    return found


def test_the_first_answer_counts_and_the_others_are_asked_no_more() -> None:
    made = replicas("r1", "r2", "r3")
    peek(made)
    first = answered(made, "r2", PeekRows(b"rows", 1))
    assert first.responses == [PeekResponse("p", PeekRows(b"rows", 1))]
    assert first.sent == [("r1", CancelPeek("p")), ("r3", CancelPeek("p"))]
    assert answered(made, "r1", PeekRows(b"rows", 1)) == MergedResponses()
    stashed = PeekStashed((StashPart("a", 1, 1), StashPart("b", 1, 1)), 2, 2)
    assert answered(made, "r3", stashed).unread == ["a", "b"]
    # Nobody who comes later is asked.
    made.add("r4")
    commands, _ = made.connected("r4", 1)
    assert commands == START


@pytest.fixture
def made() -> ReplicaMerge:
    """Two replicas."""
    return replicas("r1", "r2")


def test_an_error_of_a_replica_counts_when_nobody_is_left_to_answer(made: ReplicaMerge) -> None:
    peek(made)
    assert answered(made, "r1", PeekError(AHEAD, "begun later")) == MergedResponses()
    assert made.lost("r2", 1).responses == [PeekResponse("p", PeekError(AHEAD, "begun later"))]
    peek(made, "q")
    made.connected("r2", 2)
    assert answered(made, "r1", PeekError("ResourceBusy", "full"), "q") == MergedResponses()
    assert answered(made, "r2", PeekRows(b"", 0), "q", 2).responses
    assert not of_replica(DATA)
    assert not of_replica("InvalidUsage")
    assert of_replica("ActorDead")
    assert of_replica("UnknownObject")


def test_an_error_of_the_data_counts_at_once(made: ReplicaMerge) -> None:
    peek(made)
    assert answered(made, "r2", PeekError(DATA, "it fails")).responses


def ids(answer: PeekResponse) -> list[int]:
    assert isinstance(answer.result, PeekRows)
    found: list[int] = from_ipc(answer.result.arrow)["id"].to_pylist()
    return found


def rows_of(*ids: int) -> PeekRows:
    return PeekRows(to_ipc(pa.table({"id": list(ids), DIFF: [1] * len(ids)})), len(ids))


def test_of_what_replicas_keep_of_themselves_all_rows_count() -> None:
    made = replicas("r1", "r2", "r3")
    made.command(Peek("p", LogTarget("penstock.steps"), 5))
    assert answered(made, "r3", rows_of(7)) == MergedResponses()
    assert answered(made, "r1", rows_of(1, 2)) == MergedResponses()
    made.validate()
    # One that is lost is not waited for; what it has said goes with it.
    assert made.lost("r3", 1) == MergedResponses()
    done = answered(made, "r2", rows_of(3))
    assert ids(done.responses[0]) == [1, 2, 3]  # type: ignore[arg-type]
    assert done.sent == [], "all have answered"
    made.validate()
    assert answered(made, "r1", rows_of(1)) == MergedResponses()


def test_a_replica_that_comes_meanwhile_answers_too(made: ReplicaMerge) -> None:
    made.command(Peek("p", LogTarget("penstock.steps"), 5))
    answered(made, "r1", rows_of(1))
    made.add("r3")
    commands, _ = made.connected("r3", 1)
    assert Peek("p", LogTarget("penstock.steps"), 5) in commands
    assert answered(made, "r3", rows_of(3)) == MergedResponses()
    assert ids(answered(made, "r2", rows_of()).responses[0]) == [1, 3]  # type: ignore[arg-type]


def test_of_replicas_with_errors_of_their_own_the_others_rows_count(made: ReplicaMerge) -> None:
    for uuid, last in (("p", rows_of(4)), ("q", PeekError("ResourceBusy", "too"))):
        made.command(Peek(uuid, LogTarget("penstock.steps"), 5))
        assert answered(made, "r1", PeekError("ResourceBusy", "full"), uuid) == MergedResponses()
        assert answered(made, "r2", last, uuid).responses == [PeekResponse(uuid, last)]
    # What is wrong with the question is answered at once, and blobs of other answers are removed.
    made.command(Peek("s", LogTarget("penstock.steps"), 5))
    stashed = PeekStashed((StashPart("a", 1, 1),), 1, 1)
    assert answered(made, "r1", stashed, "s") == MergedResponses()
    answer = answered(made, "r2", PeekError("InvalidUsage", "no such column"), "s")
    assert (answer.responses, answer.unread) == (
        [PeekResponse("s", PeekError("InvalidUsage", "no such column"))],
        ["a"],
    )
    # So are those of one that is canceled, and of one that is lost.
    for uuid, keys in (("t", ["a"]), ("u", [])):
        made.command(Peek(uuid, LogTarget("penstock.steps"), 5))
        answered(made, "r1", stashed, uuid)
        if keys:
            made.command(CancelPeek(uuid))
            assert answered(made, "r2", rows_of(1), uuid).unread == keys
        else:
            assert made.lost("r1", 1).unread == ["a"]
    # Blobs stay with the answer that counts, and too many rows are an error.
    made.connected("r1", 2)
    made.command(Peek("v", LogTarget("penstock.steps"), 5))
    answered(made, "r1", stashed, "v", 2)
    done = answered(made, "r2", rows_of(1), "v")
    assert isinstance(done.responses[0], PeekResponse)
    assert isinstance(done.responses[0].result, PeekStashed)
    assert done.unread == []


def test_that_all_are_gone_is_no_answer(made: ReplicaMerge) -> None:
    peek(made)
    answered(made, "r1", PeekError(AHEAD, "begun later"))
    assert made.lost("r1", 1) == MergedResponses()
    assert made.lost("r2", 1) == MergedResponses()
    commands, merged = made.connected("r1", 2)
    assert Peek("p", IndexTarget("u"), 5) in commands
    assert merged == MergedResponses()
    assert answered(made, "r1", PeekRows(b"", 0), incarnation=2).responses


def test_what_an_earlier_connection_said_does_not_count(made: ReplicaMerge) -> None:
    peek(made)
    made.lost("r1", 1)
    made.connected("r1", 2)
    stashed = PeekStashed((StashPart("a", 1, 1),), 1, 1)
    assert answered(made, "r1", stashed) == MergedResponses(unread=["a"])
    assert made.lost("r1", 1) == MergedResponses()
    assert made.connected_names == ["r1", "r2"]


def test_frontiers_are_joined_and_an_indexs_falls_with_its_replica(made: ReplicaMerge) -> None:
    for id_ in ("view", "index"):
        made.command(index(id_) if id_ == "index" else view(id_))
    for id_ in ("view", "index"):
        assert made.responded("r1", 1, Frontiers(id_, write=20)).responses
        assert not made.responded("r2", 1, Frontiers(id_, write=15)).responses
        assert made.responded("r2", 1, Frontiers(id_, write=30)).responses
        assert not made.responded("r1", 1, Frontiers(id_, write=25)).responses
        assert made.upper(id_) == 30
    assert made.lost("r2", 1).regressed == [("index", 25)]
    assert (made.upper("view"), made.upper("index")) == (30, 25)
    assert made.lost("r1", 1).regressed == [("index", 0)]


def test_batches_are_cut_where_the_other_replica_ended(made: ReplicaMerge) -> None:
    made.command(subscribe("t"))

    def says(
        name: str, lower: int, upper: int, incarnation: int = 1
    ) -> list[tuple[int, int, list[int]]]:
        response = SubscribeResponse("t", batch(lower, upper))
        found = []
        for answer in made.responded(name, incarnation, response).responses:
            assert isinstance(answer, SubscribeResponse)
            assert isinstance(answer.batch, SubscribeBatch)
            found.append((answer.batch.lower, answer.batch.upper, times_of(answer.batch)))
        return found

    assert says("r1", 0, 11) == [(0, 11, list(range(11)))]
    assert says("r2", 0, 9) == []
    assert says("r2", 9, 13) == [(11, 13, [11, 12])]
    assert says("r1", 11, 13) == []
    made.lost("r2", 1)
    assert says("r1", 13, 14) == [(13, 14, [13])]
    made.command(AllowCompaction("t", 12))
    commands, _ = made.connected("r2", 2)
    again = next(each for each in commands if isinstance(each, CreateDataflow))
    assert again.dataflow.as_of == 12, "a replica that comes later begins where all have been"
    assert says("r2", 13, 16, 2) == [(14, 16, [14, 15])]


def test_the_blobs_of_a_batch_that_does_not_count_are_nobodys(made: ReplicaMerge) -> None:
    made.command(subscribe("t"))
    large = SubscribeBatch(0, 11, parts=(StashPart("a", 1, 1), StashPart("b", 1, 1)))
    first = made.responded("r1", 1, SubscribeResponse("t", large))
    assert (len(first.responses), first.unread) == (1, [])
    late = SubscribeBatch(0, 11, parts=(StashPart("c", 1, 1),))
    assert made.responded("r2", 1, SubscribeResponse("t", late)) == MergedResponses(unread=["c"])
    longer = SubscribeBatch(0, 14, parts=(StashPart("d", 1, 1),))
    (answer,) = made.responded("r2", 1, SubscribeResponse("t", longer)).responses
    assert isinstance(answer, SubscribeResponse)
    assert answer.batch == SubscribeBatch(11, 14, parts=longer.parts), (
        "the reader cuts what is in it"
    )


def test_a_subscribe_outlives_its_dataflow_on_one_replica(made: ReplicaMerge) -> None:
    made.command(subscribe("t"))
    dead = SubscribeResponse("t", SubscribeBatch(0, 11, None, ("ActorDead", "it crashed")))
    assert made.responded("r1", 1, dead) == MergedResponses()
    assert made.responded("r2", 1, SubscribeResponse("t", batch(0, 11))).responses
    assert made.responded("r2", 1, SubscribeResponse("t", SubscribeDropped(11))).responses
    # An error of the data ends it, whoever says it first.
    made.command(subscribe("s"))
    wrong = SubscribeResponse("s", SubscribeBatch(0, 11, None, (DATA, "it fails")))
    assert made.responded("r2", 1, wrong).responses == [wrong]
    assert made.responded("r1", 1, wrong) == MergedResponses()
    made.command(AllowCompaction("s", EMPTY))
    assert made.responded("r1", 1, SubscribeResponse("s", SubscribeDropped(3))) == MergedResponses()


def test_a_gap_is_never_told(made: ReplicaMerge) -> None:
    made.command(subscribe("t"))
    made.responded("r1", 1, SubscribeResponse("t", batch(0, 11)))
    assert made.responded("r2", 1, SubscribeResponse("t", batch(12, 14))) == MergedResponses()
    assert made.responded("r1", 1, SubscribeResponse("t", batch(11, 14))).responses
    (answer,) = made.lost("r1", 1).responses
    assert isinstance(answer, SubscribeResponse)
    assert isinstance(answer.batch, SubscribeBatch)
    assert answer.batch.error is not None


def test_one_replica_makes_a_copy_and_another_when_that_is_lost() -> None:
    made = replicas("r1", "r2", "r3")
    export = CopyToExport(SCHEMA, "/somewhere", "csv", 1_000)
    copy = create("c", export)
    assert made.command(copy) == ["r1"]
    assert made.command(ScheduleDataflow("c")) == ["r1"]
    assert made.lost("r1", 1).sent == [("r2", copy), ("r2", ScheduleDataflow("c"))]
    commands, _ = made.connected("r1", 2)
    assert copy not in commands
    done = CopyToResponse("c", CopyDone(1, 1, "manifest"))
    assert made.responded("r2", 1, done).responses == [done]
    assert made.responded("r1", 2, done) == MergedResponses()
    commands, _ = made.connected("r2", 2)
    assert copy not in commands, "it was made"


def test_the_status_is_that_of_whoever_is_furthest(made: ReplicaMerge) -> None:
    made.command(index("u"))
    assert made.responded("r1", 1, StatusResponse("u", "running", hi=5)).responses
    assert not made.responded("r2", 1, StatusResponse("u", "hydrating", hi=0)).responses
    assert made.responded("r2", 1, StatusResponse("u", "running", hi=6)).responses
    assert not made.responded("r1", 1, StatusResponse("u", "running", hi=6)).responses
    made.lost("r2", 1)
    assert made.responded("r1", 1, StatusResponse("u", "running", hi=6)).responses


class Merging(RuleBasedStateMachine):
    """Any interleaving of answers, deaths and returns, of three replicas.

    Each replica is modelled: what it was told, in order, and what it may still say. Every peek is
    told at most once, and once when a replica that can answer has answered; batches of a
    subscribe are contiguous and hold each time once; frontiers of a view never go back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.core = ReplicaMerge(START)
        self.incarnations = dict.fromkeys(("r1", "r2", "r3"), 0)
        self.said: dict[str, list[Command]] = {}
        """By connected replica: all it was told."""
        for name in self.incarnations:
            self.core.add(name)
        self.told: dict[str, int] = {}
        self.canceled: set[str] = set()
        self.uppers: dict[str, int] = {}
        """How far each subscribe was told."""
        self.ended: set[str] = set()
        self.sent: dict[tuple[str, str], int] = {}
        """By replica and subscribe: how far that one has said."""
        self.views: dict[str, int] = {}
        self.count = 0

    def fresh(self, what: str) -> str:
        self.count += 1
        return f"{what}{self.count}"

    def take(self, merged: MergedResponses) -> None:
        for name, command in merged.sent:
            self.said[name].append(command)
        for response in merged.responses:
            match response:
                case PeekResponse(uuid=uuid):
                    assert uuid not in self.canceled
                    self.told[uuid] += 1
                    assert self.told[uuid] == 1
                case SubscribeResponse(id=id_, batch=SubscribeBatch() as batch):
                    assert id_ not in self.ended
                    if batch.error is not None:
                        self.ended.add(id_)
                        continue
                    assert batch.lower == self.uppers[id_]
                    assert times_of(batch) == list(range(batch.lower, batch.upper))
                    self.uppers[id_] = batch.upper
                case Frontiers(id=id_, write=int() as write):
                    assert write > self.views[id_]
                    self.views[id_] = write
                case _:
                    raise AssertionError(response)

    def command(self, command: Command) -> None:
        for name in self.core.command(command):
            self.said[name].append(command)

    def respond(self, name: str, response: Response) -> None:
        self.take(self.core.responded(name, self.incarnations[name], response))

    @rule(name=st.sampled_from(("r1", "r2", "r3")))
    def connect(self, name: str) -> None:
        self.incarnations[name] += 1
        self.sent = {key: at for key, at in self.sent.items() if key[0] != name}
        commands, merged = self.core.connected(name, self.incarnations[name])
        self.said[name] = []
        self.take(merged)
        self.said[name] = commands

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        del self.said[name]
        self.sent = {key: at for key, at in self.sent.items() if key[0] != name}
        self.take(self.core.lost(name, self.incarnations[name]))

    @rule()
    def ask(self) -> None:
        uuid = self.fresh("p")
        self.told[uuid] = 0
        self.command(Peek(uuid, IndexTarget("u"), 5))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uuid = data.draw(st.sampled_from(sorted(self.told)))
        if not self.told[uuid]:
            self.canceled.add(uuid)
            self.command(CancelPeek(uuid))

    @precondition(lambda self: self.said)
    @rule(data=st.data(), code=st.sampled_from(("", "", DATA, AHEAD, "ResourceBusy")))
    def answer(self, data: st.DataObject, code: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        asked = {each.uuid for each in self.said[name] if isinstance(each, Peek)}
        open_ = sorted(asked - self.done(name))
        if open_:
            uuid = data.draw(st.sampled_from(open_))
            # What the replica says it says once; a cancel may be on its way.
            self.said[name].append(CancelPeek(uuid))
            result: PeekResult = PeekError(code, "") if code else PeekRows(b"", 0)
            was = self.told[uuid]
            self.respond(name, PeekResponse(uuid, result))
            if not code and uuid not in self.canceled:
                assert self.told[uuid] == 1
            assert self.told[uuid] >= was

    def done(self, name: str) -> set[str]:
        return {each.uuid for each in self.said[name] if isinstance(each, CancelPeek)}

    @rule()
    def listen(self) -> None:
        id_ = self.fresh("t")
        self.uppers[id_] = 0
        self.command(subscribe(id_))
        self.command(ScheduleDataflow(id_))

    @precondition(lambda self: self.said and self.uppers)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def emit(self, data: st.DataObject, steps: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        id_ = data.draw(st.sampled_from(sorted(self.uppers)))
        if (name, id_) not in self.sent:
            made = [
                each.dataflow
                for each in reduced(self.said[name])
                if isinstance(each, CreateDataflow) and each.dataflow.id == id_
            ]
            if not made:
                return
            export = made[0].export
            assert isinstance(export, SubscribeExport)
            lower, first = (0, made[0].as_of + 1) if export.snapshot else (made[0].as_of + 1,) * 2
            self.sent[name, id_] = upper = max(first, lower + 1)
        else:
            lower = self.sent[name, id_]
            self.sent[name, id_] = upper = lower + steps
        self.respond(name, SubscribeResponse(id_, batch(lower, upper)))

    @precondition(lambda self: self.uppers)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        """As `SubscribeFanout` does: nobody needs what all have had."""
        id_ = data.draw(st.sampled_from(sorted(self.uppers)))
        if self.uppers[id_]:
            self.command(AllowCompaction(id_, self.uppers[id_] - 1))

    @precondition(lambda self: self.uppers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.uppers)))
        del self.uppers[id_]
        self.command(AllowCompaction(id_, EMPTY))
        self.ended.add(id_)

    @rule()
    def maintain(self) -> None:
        id_ = self.fresh("v")
        self.views[id_] = 0
        self.command(view(id_))

    @precondition(lambda self: self.said and self.views)
    @rule(data=st.data(), upper=st.integers(1, 50))
    def report(self, data: st.DataObject, upper: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        id_ = data.draw(st.sampled_from(sorted(self.views)))
        self.respond(name, Frontiers(id_, write=upper))

    @invariant()
    def holds(self) -> None:
        self.core.validate()
        assert self.core.connected_names == sorted(self.said)

    def teardown(self) -> None:
        """A replica that comes and answers all leaves nothing unanswered."""
        for name in list(self.said):
            del self.said[name]
            self.take(self.core.lost(name, self.incarnations[name]))
        self.connect("r2")
        for each in [each for each in self.said["r2"] if isinstance(each, Peek)]:
            self.respond("r2", PeekResponse(each.uuid, PeekRows(b"", 0)))
        for uuid, times in self.told.items():
            assert times == (0 if uuid in self.canceled else 1), uuid


TestMerging = Merging.TestCase
TestMerging.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
