"""Who shares a dataflow: everybody sees what a single subscriber would, whoever comes or goes."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.control.controller.reads.fanout import FanoutDelivery, FanoutMember, SubscribeFanout
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.compute import (
    AllowCompaction,
    Command,
    CreateDataflow,
    DataflowDescription,
    ScheduleDataflow,
    ShardImport,
    SubscribeBatch,
    SubscribeExport,
)
from actors.runtime.progress import EMPTY, ObjectId
from suite_lanes import examples  # type: ignore[import-not-found]

SCHEMA = TableSchema((TableColumn("id", "bigint"),))
SOURCE = ShardImport("s1", SCHEMA)
LAST = 60
"""One row comes at every time from 1 on, its id is the time; at every third another goes."""


def row_at(time: int) -> list[tuple[int, int, int]]:
    """(id, time, diff)."""
    gone = [(time - 2, time, -1)] if time % 3 == 0 and time > 2 else []
    return [(time, time, 1), *gone]


def ipc(rows: list[tuple[int, int, int]]) -> bytes | None:
    if not rows:
        return None
    columns = list(zip(*rows, strict=True))
    types = pa.int64()
    arrays = [pa.array(column, types) for column in columns]
    return to_ipc(pa.table(arrays, names=["id", TIME, DIFF]))


def contents(time: int) -> Counter[int]:
    """The rows at a time."""
    found: Counter[int] = Counter()
    for at in range(1, time + 1):
        for id_, _, diff in row_at(at):
            found[id_] += diff
    return +found


class Replica:
    """Runs the dataflows that it is told to, and starts over at any moment."""

    def __init__(self) -> None:
        self.flows: dict[ObjectId, DataflowDescription] = {}
        self.uppers: dict[ObjectId, int] = {}
        self.reached: dict[ObjectId, int] = {}
        """The furthest upper ever told."""
        self.created = 0

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case CreateDataflow(dataflow):
                    assert dataflow.id not in self.flows
                    self.flows[dataflow.id], self.created = dataflow, self.created + 1
                case AllowCompaction(id, frontier) if frontier == EMPTY:
                    del self.flows[id]
                    self.uppers.pop(id, None)
                case AllowCompaction(id, frontier):
                    flow = self.flows[id]
                    assert frontier > flow.as_of
                    assert frontier < self.reached[id], "it still needs that"
                    export = SubscribeExport(SCHEMA, snapshot=False)
                    self.flows[id] = DataflowDescription(
                        id, flow.name, flow.imports, export, frontier
                    )
                case ScheduleDataflow():
                    pass
                case _:
                    raise AssertionError(command)

    def start_over(self) -> None:
        """As after a lost connection: every dataflow from its as_of."""
        self.uppers.clear()

    def batch(self, id: ObjectId, far: int) -> SubscribeBatch:
        """The next step of a dataflow, over at most `far` times."""
        made = self._batch(id, far)
        self.reached[id] = max(made.upper, self.reached.get(id, 0))
        return made

    def _batch(self, id: ObjectId, far: int) -> SubscribeBatch:
        flow = self.flows[id]
        export = flow.export
        assert isinstance(export, SubscribeExport)
        upper = self.uppers.get(id)
        if upper is None and export.snapshot:
            self.uppers[id] = flow.as_of + 1
            held = [(row, flow.as_of, n) for row, n in contents(flow.as_of).items()]
            return SubscribeBatch(0, flow.as_of + 1, ipc(held))
        lower = flow.as_of + 1 if upper is None else upper
        self.uppers[id] = min(lower + far, LAST + 1)
        rows = [row for time in range(lower, self.uppers[id]) for row in row_at(time)]
        return SubscribeBatch(lower, self.uppers[id], ipc(rows))


class Client:
    """What one subscriber was told."""

    def __init__(self, member: FanoutMember) -> None:
        self.member = member
        self.begin = member.as_of if member.snapshot else member.delivered
        self.upper = self.begin
        self.bag: Counter[int] = Counter() if member.snapshot else contents(member.delivered - 1)
        self.paused = False

    def told(self, told: FanoutDelivery) -> None:
        assert told.lower == self.upper < told.upper
        self.upper = told.upper
        if told.arrow is not None:
            rows = from_ipc(told.arrow).to_pylist()
            assert rows
            for row in rows:
                assert told.lower <= row[TIME] < told.upper
                self.bag[row["id"]] += row[DIFF]
        assert told.upper <= self.member.up_to
        assert {k: n for k, n in self.bag.items() if n} == contents(told.upper - 1)


class House:
    """A fan-out, its replica and its subscribers."""

    def __init__(self) -> None:
        self.numbers = 0
        self.fanout = SubscribeFanout(self.fresh)
        self.replica = Replica()
        self.clients: list[Client] = []

    def fresh(self) -> ObjectId:
        self.numbers += 1
        return f"t{self.numbers}"

    def come(self, time: int, *, snapshot: bool, up_to: int = EMPTY) -> Client:
        made = FanoutMember(
            id=self.fresh(),
            name="v",
            imported=SOURCE,
            as_of=time,
            snapshot=snapshot,
            delivered=time if snapshot else time + 1,
            up_to=up_to,
            hold=time,
        )
        client = Client(made)
        self.clients.append(client)
        self.replica.take(self.fanout.join(made))
        return client

    def step(self, which: int, far: int) -> None:
        ids = list(self.replica.flows)
        if ids:
            id = ids[which % len(ids)]
            told, commands = self.fanout.batch(id, self.replica.batch(id, far))
            self.replica.take(commands)
            for each in told:
                client = next(c for c in self.clients if c.member is each.member)
                client.told(each)
                if each.upper == client.member.up_to:
                    self.clients.remove(client)
                    self.replica.take(self.fanout.leave(client.member))

    def pause(self, which: int) -> None:
        client = self.clients[which % len(self.clients)]
        self.replica.take(self.fanout.leave(client.member))
        client.paused = True

    def resume(self, which: int) -> None:
        client = self.clients[which % len(self.clients)]
        if client.paused and not client.member.snapshot:
            client.paused = False
            self.replica.take(self.fanout.join(client.member))

    def go(self, which: int) -> None:
        self.pause(which)
        self.clients.pop(which % len(self.clients))

    def move_holds(self) -> None:
        for client in self.clients:
            client.member.hold = client.member.since()
        self.replica.take(self.fanout.compact())

    def check(self) -> None:
        members = [client.member for client in self.clients]
        self.fanout.validate(members)
        assert len(self.fanout) == len(self.replica.flows)
        for id, flow in self.replica.flows.items():
            holds = [m.hold for m in self.fanout.members(id)]
            assert min(holds) <= flow.as_of, "its history may be gone when it starts over"


numbers = st.integers(0, 30)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("come"), numbers, st.booleans()),
        st.tuples(st.just("come for a while"), numbers, st.integers(2, 20)),
        st.tuples(st.just("step"), numbers, st.integers(1, 6)),
        st.tuples(st.just("step"), numbers, st.integers(1, 6)),
        st.tuples(st.sampled_from(["pause", "resume", "resume", "go"]), numbers, st.just(0)),
        st.tuples(st.sampled_from(["holds", "restart"]), st.just(0), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=examples(400), deadline=None)
@given(actions)
def test_everybody_sees_what_a_single_one_would(actions: list[tuple[str, int, int]]) -> None:
    house = House()
    for what, number, other in actions:
        if what == "come":
            house.come(number, snapshot=bool(other))
        elif what == "come for a while":
            house.come(number, snapshot=other % 2 == 0, up_to=number + other)
        elif what == "step":
            house.step(number, other)
        elif what == "holds":
            house.move_holds()
        elif what == "restart":
            house.replica.start_over()
        elif house.clients:
            {"pause": house.pause, "resume": house.resume, "go": house.go}[what](number)
        house.check()
    for number in range(len(house.clients)):
        house.resume(number)
    for client in house.clients:
        client.paused = False
        if client.member.stream is None:
            house.replica.take(house.fanout.join(client.member))
    # All reach the end, and then hear one dataflow.
    for _ in range(4 * LAST):
        house.move_holds()
        for which in range(len(house.replica.flows)):
            house.step(which, 6)
        house.check()
    assert all(client.upper == LAST + 1 for client in house.clients)
    assert len(house.fanout) <= 1


def test_a_hundred_share_one_dataflow_and_its_bytes() -> None:
    house = House()
    clients = [house.come(5, snapshot=True) for _ in range(100)]
    assert house.replica.created == 1
    house.step(0, 1)
    late = house.come(6, snapshot=True)
    assert house.replica.created == 2
    (id,) = [flow for flow in house.replica.flows if flow == late.member.id]
    house.step(0, 1)
    told, commands = house.fanout.batch(id, house.replica.batch(id, 1))
    assert [each.member for each in told] == [late.member]
    house.replica.take(commands)
    assert list(house.replica.flows) == [clients[0].member.id], "both stand at the same frontier"
    told, _ = house.fanout.batch(clients[0].member.id, SubscribeBatch(7, 9, ipc(row_at(8))))
    assert len(told) == 101
    assert len({id_of(each.arrow) for each in told}) == 1


def id_of(arrow: bytes | None) -> int:
    return id(arrow)


def test_three_that_meet_at_once_go_over_to_the_oldest() -> None:
    house = House()
    oldest = house.come(21, snapshot=True)
    for time in (20, 26):
        house.come(time, snapshot=False)
    for _ in range(20):
        house.move_holds()
        for which in range(3):
            house.step(which, 6)
    assert list(house.replica.flows) == [oldest.member.id]


def test_who_knows_other_columns_shares_no_dataflow() -> None:
    """A table was given a column between two subscribes, which stand at the same frontier then."""
    house = House()
    wider = ShardImport("s1", TableSchema((*SCHEMA.columns, TableColumn("more", "bigint"))))
    first = house.come(5, snapshot=True)
    second = FanoutMember(
        id=house.fresh(),
        name="v",
        imported=wider,
        as_of=5,
        snapshot=True,
        delivered=5,
        hold=5,
    )
    house.replica.take(house.fanout.join(second))
    assert second.stream is not first.member.stream
    for which in (0, 1):
        told, commands = house.fanout.batch(
            [first.member.id, second.id][which], SubscribeBatch(5, 9, ipc(row_at(6)))
        )
        assert [each.member for each in told] == [[first.member, second][which]]
        assert commands == []
    assert second.stream is not first.member.stream
    house.fanout.validate([first.member, second])


def test_a_far_subscriber_does_not_hold_the_others_back() -> None:
    house = House()
    far = house.come(1, snapshot=False)
    near = house.come(40, snapshot=True)
    house.step(1, 1)
    house.step(1, 1)
    assert near.upper > far.upper + 30
    assert near.member.stream is not far.member.stream
