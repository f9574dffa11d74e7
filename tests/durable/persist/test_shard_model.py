"""Whatever is appended, held and compacted, nothing readable ever changes."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.durable.persist.compaction import UpdateMerger, choose_batches, input_rows
from actors.durable.persist.parts import decode, encode
from actors.durable.persist.shard import (
    BatchPart,
    NewShard,
    ReaderLease,
    ShardAppend,
    ShardBatch,
    ShardState,
    appended,
    compact_to,
    compacted,
    created,
    renewed,
    with_hold,
    without_hold,
)
from actors.durable.persist.shard_invariants import validate
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from suite_lanes import examples  # type: ignore[import-not-found]

SCHEMA = TableSchema((TableColumn("a", "bigint"),))
Update = tuple[int | None, int, int]

update_values = st.tuples(
    st.sampled_from([None, 1, 2, 3]), st.integers(0, 4), st.sampled_from([-2, -1, 1, 1, 2])
)
actions = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 5), st.lists(update_values, max_size=4)),
    st.tuples(st.just("hold"), st.sampled_from("xy"), st.integers(0, 6)),
    st.tuples(st.just("drop"), st.sampled_from("xy"), st.none()),
    st.tuples(st.just("lease"), st.integers(0, 4), st.none()),
    st.tuples(st.just("merge"), st.integers(0, 5), st.integers(1, 4)),
    st.tuples(st.just("tidy"), st.integers(1, 4), st.none()),
)


class World:
    """A shard with its parts inline, and beside it every update that was ever appended."""

    def __init__(self) -> None:
        self.state = created(NewShard("s", SCHEMA, holds={"x": 0}), "w", 0)
        self.updates: list[Update] = []
        self.since = 0

    def become(self, state: ShardState) -> None:
        validate(state)
        assert state.since >= self.state.since
        assert state.upper >= self.state.upper
        state = renewed(state, {}, frozenset(), 0)
        validate(state)
        self.state = replace(state, seqno=self.state.seqno + 1)

    def append(self, width: int, values: list[tuple[int | None, int, int]]) -> None:
        lower = self.state.upper
        new = [(a, lower + offset % width, diff) for a, offset, diff in values]
        parts = made(new)
        append = ShardAppend("s", lower, lower + width, parts)
        after = appended(self.state, append, 0, "w", len(self.updates))
        assert isinstance(after, ShardState)
        self.updates += new
        self.become(after)

    def merge(self, inputs: tuple[ShardBatch, ...]) -> None:
        if not inputs:
            return
        merger = UpdateMerger(
            SCHEMA,
            to=compact_to(self.state, inputs[-1].upper),
            rows=input_rows(inputs),
            errors=False,
            bytes_max=1 << 20,
            scratch=None,
        )
        for batch in inputs:
            for part in batch.parts:
                merger.add(read(part))
        parts = tuple(part for table in iter(merger.take, None) for part in made_of(table))
        after = compacted(self.state, inputs, parts)
        assert after is not None
        self.become(after)

    def check(self) -> None:
        state = self.state
        for time in range(state.since, state.upper):
            expected = sums((a, 0, d) for a, t, d in self.updates if t <= time)
            found = sums(
                (a, 0, d)
                for batch in state.batches
                if batch.lower <= time
                for part in batch.parts
                for a, t, d in rows(part)
                if t <= time
            )
            assert found == expected, time
        for frontier in range(state.since, state.upper + 1):
            expected = sums(u for u in self.updates if u[1] >= frontier)
            found = sums(
                (a, t, d)
                for batch in state.batches
                if batch.upper > frontier
                for part in batch.parts
                if part.time_max >= frontier
                for a, t, d in rows(part)
                if t >= frontier
            )
            assert found == expected, frontier


def sums(updates: object) -> dict[tuple[int | None, int], int]:
    total: Counter[tuple[int | None, int]] = Counter()
    for a, time, diff in updates:  # type: ignore[attr-defined]
        total[(a, time)] += diff
    return {key: diff for key, diff in total.items() if diff}


def made(updates: list[Update]) -> tuple[BatchPart, ...]:
    columns = list(zip(*updates, strict=True)) or [(), (), ()]
    arrays = [pa.array(values, pa.int64()) for values in columns]
    return made_of(pa.table(arrays, names=["a", TIME, DIFF]))


def made_of(table: pa.Table) -> tuple[BatchPart, ...]:
    pieces = encode(table, SCHEMA, inline_bytes_max=1 << 20, bytes_target=1 << 20)
    return tuple(piece.part for piece in pieces)


def read(part: BatchPart) -> pa.Table:
    assert part.inline is not None
    return decode(part, part.inline, SCHEMA)


def rows(part: BatchPart) -> list[Update]:
    columns = [column.to_pylist() for column in read(part).columns]
    return list(zip(*columns, strict=True))


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(actions, max_size=25))
def test_contents_never_change(steps: list[tuple[str, object, object]]) -> None:
    world = World()
    for step in steps:
        match step:
            case ("append", int(width), list(values)):
                world.append(width, values)
            case ("hold", str(holder), int(ahead)):
                since = max(world.state.since, world.state.upper - 3) + ahead
                world.become(with_hold(world.state, holder, since))
            case ("drop", str(holder), _):
                world.become(without_hold(world.state, holder))
            case ("lease", int(ahead), _):
                lease = ReaderLease(world.state.since + ahead, 0, 1)
                world.become(renewed(world.state, {"r": lease}, frozenset(), 0))
            case ("merge", int(first), int(count)):
                world.merge(world.state.batches[first : first + count])
            case ("tidy", int(most), _):
                chosen = choose_batches(world.state, most, 1 << 20)
                if chosen is not None:
                    world.merge(chosen[0])
                    assert len(world.state.batches) <= most
    world.check()
