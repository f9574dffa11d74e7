"""Shared arrangements against a list: random users, steps, fillings, merges, threads."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.durable.arrangement import ArrangementHandle, ArrangementLimits, SharedArrangements
from actors.durable.persist.part_filter import PartCondition, PartFilter
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, ReadBelowSince, ResourceClosed
from suite_lanes import examples  # type: ignore[import-not-found]

PAIRS = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "bigint")))
TINY = ArrangementLimits(
    memory_run_bytes_max=300, memory_bytes_max=900, memory_runs_max=2, block_bytes=200
)

KEYS = TableSchema(PAIRS.columns[:1])
LARGE = PartFilter(PAIRS, [PartCondition("v", ">=", (pa.scalar(1, pa.int64()),))])
KINDS: tuple[tuple[TableSchema, PartFilter | None], ...] = (
    (PAIRS, None),
    (KEYS, None),
    (PAIRS, LARGE),
)
"""What users look at: all, one column, some rows."""

Update = tuple[int, int, int, int]
"""k, v, time, diff."""


def table(updates: list[Update]) -> pa.Table:
    names = [*PAIRS.names, TIME, DIFF]
    rows = [dict(zip(names, update, strict=True)) for update in updates]
    return pa.Table.from_pylist(rows, schema=PAIRS.arrow_updates())


def keys(*values: int | None) -> pa.Table:
    return pa.table({"k": pa.array(values, pa.int64())})


def sums(found: pa.Table, names: Sequence[str] = PAIRS.names) -> Counter[tuple[int, ...]]:
    counted: Counter[tuple[int, ...]] = Counter()
    for row in found.to_pylist():
        counted[tuple(row[name] for name in names)] += row[DIFF]
    return Counter({row: diff for row, diff in counted.items() if diff})


class Shard:
    """What the handles' users read: updates, how far they are sealed, what is compacted."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.upper = 1
        self.since = 0

    def write(self, updates: list[Update], upper: int) -> None:
        self.updates += updates
        self.upper = upper

    def between(self, lower: int, upper: int) -> pa.Table:
        return table([update for update in self.updates if lower <= update[2] < upper])

    def compact(self, since: int) -> None:
        """As shards do: times are raised to one below the since."""
        self.since = max(self.since, since)
        to = self.since - 1
        self.updates = [(k, v, max(time, to, 0), diff) for k, v, time, diff in self.updates]

    def at(self, before: int, kind: int = 0) -> Counter[tuple[int, ...]]:
        schema, rows = KINDS[kind]
        found = self.between(0, before)
        kept = found if rows is None else found.filter(pc.greater_equal(found["v"], 1))
        return sums(kept, schema.names)

    def check(self, handle: ArrangementHandle, some: list[int], kind: int = 0) -> None:
        """What the user reads is the shard before its `lo`, as far as it looks at it."""
        whole, names = self.at(handle.lo, kind), KINDS[kind][0].names
        assert sums(handle.scan(), names) == whole
        found = handle.lookup([keys(*some[:1]), keys(*some[1:], *some[:1])])
        assert found.num_rows == 0 or found[TIME].to_numpy().max() < handle.lo
        wanted = {row: diff for row, diff in whole.items() if row[0] in some}
        read = sums(found, names).items()
        assert {row: diff for row, diff in read if row[0] in some} == wanted


def fill(handle: ArrangementHandle, shard: Shard) -> bool:
    """As a dataflow does; False when another is at it."""
    filling = handle.claim()
    if filling is None:
        return False
    filling.start(shard.since)
    half = shard.upper // 2
    filling.insert(shard.between(half, shard.upper))
    filling.insert(shard.between(0, half))
    filling.publish(shard.upper)
    return True


def ready(handle: ArrangementHandle, shard: Shard) -> bool:
    """As a dataflow does before it reads; False when it has to begin anew."""
    if not handle.upper and not fill(handle, shard):
        return False
    if handle.upper < handle.lo:
        if shard.since > handle.upper:
            handle.retire()
            return False
        handle.offer(shard.between(handle.upper, handle.lo), handle.upper, handle.lo)
    return handle.ready


@contextmanager
def registry(**options: Any) -> Iterator[SharedArrangements]:
    """A registry that must have nothing left in the end."""
    with tempfile.TemporaryDirectory() as directory:
        made = SharedArrangements(Path(directory), limits=TINY, **({"slack": 0} | options))
        yield made
        assert made.statistics() == []
        assert [path for path in Path(directory).rglob("*") if path.is_file()] == []
        assert list(Path(directory).iterdir()) == []


# -- against a list --------------------------------------------------------------------------------

rows = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.sampled_from([1, -1]))
users = st.integers(0, 2)
actions = st.one_of(
    st.tuples(st.just("write"), st.lists(rows, max_size=8), st.just(0)),
    st.tuples(st.just("write"), st.lists(rows, max_size=8), st.just(0)),
    st.tuples(st.just("open"), users, st.integers(0, 6)),
    st.tuples(st.just("step"), users, st.integers(1, 5)),
    st.tuples(st.just("step"), users, st.integers(1, 5)),
    st.tuples(st.just("read"), users, st.integers(0, 3)),
    st.tuples(st.just("read"), users, st.integers(0, 3)),
    st.tuples(st.just("run ahead"), users, st.integers(2, 6)),
    st.tuples(st.just("give up a filling"), users, st.just(0)),
    st.tuples(st.just("close"), users, st.just(0)),
    st.tuples(st.just("compact"), st.just(0), st.integers(0, 6)),
    st.tuples(st.just("merge"), st.just(0), st.just(0)),
)


class Play:
    """Users at a shard; each is a dataflow in small. `kinds`: what each looks at."""

    def __init__(self, shared: SharedArrangements, kinds: Sequence[int]) -> None:
        self.shared = shared
        self.shard = Shard()
        self.kinds = kinds
        self.handles = {user: self.open(user, 1) for user in range(2)}
        self.detached = 0
        self.front = 1
        assert fill(self.handles[0], self.shard)

    def act(self, word: str, first: Any, second: int) -> None:
        shard = self.shard
        if word == "write":
            made = [(k, v, shard.upper + late, diff) for k, v, late, diff in first]
            shard.write(made, shard.upper + 3)
        elif word == "merge":
            self.shared.merge([a for handle in self.handles.values() for a in handle.merging()])
        elif word == "compact":
            most = [shard.upper - 1, *(handle.lo - 1 for handle in self.handles.values())]
            shard.compact(min(shard.since + second, *most))
        elif word == "open":
            self.close(first)
            self.handles[first] = self.open(first, max(shard.since + 1, shard.upper - second))
        elif first in self.handles:
            self.use(word, first, second)

    def open(self, user: int, lo: int) -> ArrangementHandle:
        schema, rows = KINDS[self.kinds[user]]
        return self.shared.open("s", ("k",), schema, lo, rows)

    def close(self, user: int) -> None:
        if user in self.handles:
            self.handles.pop(user).close()

    def use(self, word: str, user: int, second: int) -> None:
        handle, shard = self.handles[user], self.shard
        try:
            if word == "step":
                hi = min(shard.upper, handle.lo + second)
                handle.step(shard.between(handle.lo, hi), hi)
                self.front = max(self.front, hi)
            elif word == "read":
                self.read(user, [second, 3 - second])
            elif word == "close":
                self.close(user)
            elif word == "run ahead":
                self.read(user, [0])
                for _ in range(second):
                    self.act("write", [(second, 0, 1, 1), (0, 1, 2, -1)], 0)
                    self.use("step", user, 9)
            else:
                filling = handle.claim()
                if filling is not None:
                    filling.start(shard.since)
                    filling.insert(shard.between(0, shard.upper // 2))
                    filling.abandon()
        except ReadBelowSince:
            assert handle.lo < self.front, "nobody was ahead of it"
            self.detached += 1
            self.again(user)

    def again(self, user: int) -> ArrangementHandle:
        """A new incarnation."""
        lo = self.handles[user].lo
        self.close(user)
        self.handles[user] = self.open(user, lo)
        return self.handles[user]

    def read(self, user: int, some: list[int]) -> None:
        handle = self.handles[user]
        if not ready(handle, self.shard):
            handle = self.again(user)
            assert ready(handle, self.shard)
        self.shard.check(handle, some, self.kinds[user])


@given(
    st.lists(actions, max_size=60),
    st.sampled_from([1 << 20, 60]),
    st.integers(0, 3),
    st.tuples(*[st.integers(0, len(KINDS) - 1)] * 3) | st.just((0, 0, 0)),
)
@settings(max_examples=examples(250), deadline=None)
def test_every_user_reads_what_its_shard_held(
    history: list[tuple[str, Any, int]],
    lag_bytes_max: int,
    slack: int,
    kinds: tuple[int, int, int],
) -> None:
    with registry(lag_bytes_max=lag_bytes_max, slack=slack) as shared:
        play = Play(shared, kinds)
        for word, first, second in history:
            play.act(word, first, second)
        for user in list(play.handles):
            play.use("read", user, 1)
        assert not play.detached or lag_bytes_max == 60
        for user in list(play.handles):
            play.close(user)


# -- who shares ------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_views_that_start_together_share_however_far_each_had_got(
    los: list[int], data: st.DataObject
) -> None:
    shard = Shard()
    shard.write([(time % 3, time, time, 1) for time in range(1, 20)], 20)
    with registry() as shared:
        handles = [shared.open("s", ("k",), PAIRS, lo) for lo in los]
        assert fill(data.draw(st.sampled_from(handles)), shard)
        (held,) = shared.statistics()
        assert (held.users, held.upper, held.since) == (len(los), 20, max(0, min(los) - 1))
        for handle in handles:
            assert handle.ready
            shard.check(handle, [0, 1])
            assert handle.claim() is None
        for handle in handles:
            handle.close()


def test_a_wider_arrangement_serves_who_needs_less() -> None:
    """It is taken when it is there, whole; a narrower one is made where there is none."""
    shard = Shard()
    shard.write([(1, 0, 1, 1), (1, 1, 1, 1), (2, 2, 1, 1)], 2)
    with registry() as shared:
        handles = []
        for kind in (1, 0, 1, 2):
            schema, rows = KINDS[kind]
            handles.append((kind, shared.open("s", ("k",), schema, 2, rows)))
        for kind, handle in handles:
            if not handle.ready:
                assert fill(handle, shard)
            shard.check(handle, [1, 2], kind)
        held = {(each.columns, each.filter): each.users for each in shared.statistics()}
        # The one of keys came first; the whole one serves large rows.
        assert held == {(("k",), ""): 2, (("k", "v"), ""): 2}
        for _, handle in handles:
            handle.close()


def test_changes_of_other_columns_and_rows_take_no_room() -> None:
    shard = Shard()
    shard.write([(1, 0, 1, 1), (2, 5, 1, 1)], 2)
    with registry() as shared:
        handles = [shared.open("s", ("k",), *KINDS[1][:1], 2), shared.open("s", ("k",), PAIRS, 2)]
        handles.append(shared.open("s", ("k",), PAIRS, 2, LARGE))
        for handle in handles[:2]:
            assert fill(handle, shard)
        shard.write([(1, 0, 3, -1), (1, 9, 3, 1)], 4)
        for handle in handles:
            handle.step(shard.between(2, 4), 4)
        rows = {each.columns: each.arrangement.rows for each in shared.statistics()}
        assert rows == {("k",): 2, ("k", "v"): 4}
        for handle in handles:
            handle.close()


def test_one_delta_is_inserted_once() -> None:
    shard = Shard()
    with registry() as shared:
        one, other = (shared.open("s", ("k",), PAIRS, 1) for _ in range(2))
        assert fill(one, shard)
        shard.write([(1, 1, 2, 1), (2, 2, 5, 1)], 6)
        one.step(shard.between(1, 4), 4)
        other.step(shard.between(1, 6), 6)
        one.step(shard.between(4, 6), 6)
        (held,) = shared.statistics()
        assert (held.users, held.upper, held.since, held.arrangement.rows) == (2, 6, 5, 2)
        one.close()
        shard.check(other, [1, 2])
        other.close()


def test_a_newcomer_for_whom_it_is_too_late_gets_its_own() -> None:
    shard = Shard()
    shard.write([(1, 1, 2, 1), (1, 1, 7, -1)], 9)
    with registry() as shared:
        old = shared.open("s", ("k",), PAIRS, 9)
        assert fill(old, shard)
        late = shared.open("s", ("k",), PAIRS, 5)
        assert late.upper == 0
        assert fill(late, shard)
        assert len(shared.statistics()) == 2
        assert shard.at(5) == {(1, 1): 1}
        shard.check(late, [1])
        shard.check(old, [1])
        # The next one takes the newest that is good for it.
        third = shared.open("s", ("k",), PAIRS, 9)
        old.close()
        assert [held.users for held in shared.statistics()] == [2]
        for handle in (late, third):
            handle.close()


def test_slack_lets_one_in_that_comes_a_little_late() -> None:
    shard = Shard()
    shard.write([(1, 1, time, 1) for time in range(1, 30)], 30)
    with registry(slack=10) as shared:
        one = shared.open("s", ("k",), PAIRS, 30)
        assert fill(one, shard)
        for lo, alone in ((20, False), (19, True)):
            other = shared.open("s", ("k",), PAIRS, lo)
            assert (other.upper == 0) == alone
            other.close()
        one.close()


def test_keys_shards_and_schemas_are_kept_apart() -> None:
    other_schema = TableSchema((TableColumn("k", "bigint"), TableColumn("v", "int")))
    with registry() as shared:
        handles = [
            shared.open("s", ("k",), PAIRS, 1),
            shared.open("s", ("v",), PAIRS, 1),
            shared.open("s", (), PAIRS, 1),
            shared.open("t", ("k",), PAIRS, 1),
            shared.open("s", ("k",), other_schema, 1),
        ]
        assert len(shared.statistics()) == len(handles)
        with pytest.raises(InvalidUsage, match="maps cannot be compared"):
            shared.open("s", ("m",), TableSchema((TableColumn("m", "map<string,int>"),)), 1)
        for handle in handles:
            handle.close()


# -- laggards, failures, ends ----------------------------------------------------------------------


def test_a_laggard_is_detached_and_does_not_hold_up_compaction() -> None:
    shard = Shard()
    with registry(lag_bytes_max=2_000) as shared:
        slow, fast = (shared.open("s", ("k",), PAIRS, 1) for _ in range(2))
        assert fill(slow, shard)
        step = 0
        while shared.statistics()[0].users == 2:
            step += 1
            assert step < 100
            # The same row comes and goes: compacted it is one row, else it is many.
            shard.write([(1, 1, step, 1 if step % 2 else -1)], step + 1)
            fast.step(shard.between(step, step + 1), step + 1)
            shard.check(fast, [1])
        assert step > 10, "a little is no lag"
        with pytest.raises(ReadBelowSince, match="advanced without"):
            slow.lookup([keys(1)])
        with pytest.raises(ReadBelowSince):
            slow.step(shard.between(1, 2), 2)
        shared.merge(fast.merging())
        (held,) = shared.statistics()
        assert held.since == step
        assert held.arrangement.rows <= 2
        slow.close()
        again = shared.open("s", ("k",), PAIRS, 1)
        assert again.upper == 0, "an arrangement of its own"
        assert fill(again, shard)
        shard.check(again, [1])
        shard.check(fast, [1])
        for handle in (again, fast):
            handle.close()


def test_who_has_not_done_the_last_step_yet_is_no_laggard() -> None:
    shard = Shard()
    with registry(lag_bytes_max=1) as shared:
        handles = [shared.open("s", ("k",), PAIRS, 1) for _ in range(3)]
        assert fill(handles[0], shard)
        shard.write([(k, k, 1, 1) for k in range(50)], 2)
        # One step is far beyond the limit; the others have merely not done it yet.
        for handle in handles:
            handle.step(shard.between(1, 2), 2)
        for handle in handles:
            shard.check(handle, [1])
            handle.close()


def test_a_filling_that_fails_can_be_begun_again_by_who_waits() -> None:
    shard = Shard()
    shard.write([(1, 1, 3, 1)], 5)
    with registry() as shared:
        one, other = (shared.open("s", ("k",), PAIRS, 5) for _ in range(2))
        filling = one.claim()
        assert filling is not None
        assert one.claim() is None
        assert other.claim() is None
        told: list[str] = []
        assert other.when_settled(lambda: told.append("settled"))
        filling.start(0)
        filling.insert(shard.between(0, 5))
        with pytest.raises(InvalidUsage, match="not filled"):
            other.scan()
        filling.abandon()
        assert told == ["settled"]
        assert not other.when_settled(lambda: told.append("never"))
        one.close()
        assert fill(other, shard)
        filling.abandon()  # nothing more
        shard.check(other, [1])
        other.close()
        with pytest.raises(ResourceClosed):
            other.scan()
        other.close()


def test_a_filling_that_nobody_waits_for_leaves_nothing() -> None:
    shard = Shard()
    with registry() as shared:
        handle = shared.open("s", ("k",), PAIRS, 1)
        filling = handle.claim()
        assert filling is not None
        filling.start(0)
        handle.close()
        assert shared.statistics() == []
        filling.insert(shard.between(0, 1))
        filling.publish(1)
        assert shared.statistics() == []
        handle = shared.open("s", ("k",), PAIRS, 1)
        filling = handle.claim()
        assert filling is not None
        filling.abandon()
        with pytest.raises(ResourceClosed, match="abandoned"):
            filling.start(0)  # a thread that was late
        handle.close()


def test_a_gap_is_not_jumped_over() -> None:
    shard = Shard()
    with registry() as shared:
        behind, ahead = shared.open("s", ("k",), PAIRS, 1), shared.open("s", ("k",), PAIRS, 9)
        assert fill(behind, shard)
        shard.write([(k, 1, 2 + k, 1) for k in range(8)], 12)
        ahead.offer(shard.between(9, 12), 9, 12)
        assert ahead.upper == 1
        ahead.step(shard.between(9, 12), 12)
        assert not ahead.ready
        with pytest.raises(InvalidUsage, match="not complete"):
            ahead.scan()
        assert ready(ahead, shard)
        shard.check(ahead, [1, 7])
        with pytest.raises(InvalidUsage, match="cannot go back"):
            ahead.move(3)
        for handle in (behind, ahead):
            handle.close()


def test_an_arrangement_that_was_retired_takes_nobody() -> None:
    shard = Shard()
    with registry() as shared:
        one = shared.open("s", ("k",), PAIRS, 1)
        assert fill(one, shard)
        one.retire()
        other = shared.open("s", ("k",), PAIRS, 1)
        assert other.upper == 0
        for handle in (one, other):
            handle.close()


# -- threads ---------------------------------------------------------------------------------------


def test_users_in_threads_read_what_their_shard_held() -> None:
    """Every thread is a dataflow: steps, reads, merges, and sometimes begins anew."""
    shard, ends, failures = Shard(), 150, []
    random = Random(5)
    for time in range(1, ends):
        k, v = random.randrange(5), random.randrange(3)
        shard.updates.append((k, v, time, random.choice([1, 1, -1])))
    shard.upper = ends

    def live(shared: SharedArrangements, handle: ArrangementHandle, seed: int) -> None:
        own = Random(seed)
        try:
            while handle.lo < ends:
                if not handle.ready:
                    assert ready(handle, shard), "filled before"
                shard.check(handle, [own.randrange(5), own.randrange(5)])
                hi = min(ends, handle.lo + own.randint(1, 9))
                handle.step(shard.between(handle.lo, hi), hi)
                shared.merge(handle.merging())
                if own.random() < 0.1:
                    left, handle = handle, shared.open("s", ("k",), PAIRS, handle.lo)
                    left.close()
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            handle.close()

    with registry(slack=2) as shared:
        first = shared.open("s", ("k",), PAIRS, 1)
        assert fill(first, Shard())
        handles = [shared.open("s", ("k",), PAIRS, 1) for _ in range(4)]
        threads = [
            threading.Thread(target=live, args=(shared, handle, seed))
            for seed, handle in enumerate(handles)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        assert failures == []
        assert [held.users for held in shared.statistics()] == [1]
        first.close()
