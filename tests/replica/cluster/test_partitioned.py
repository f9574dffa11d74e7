"""Splitting and merging for 1 to 5 parts: what comes out equals what one part would have said."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.schema import DIFF, TIME
from actors.model.plan.updates import consolidate, from_ipc, to_ipc
from actors.model.protocol.compute import (
    AllowWrites,
    CopyDone,
    CopyDropped,
    CopyFailed,
    CopyToResponse,
    Frontiers,
    Hello,
    InitializationComplete,
    PeekCanceled,
    PeekError,
    PeekResponse,
    PeekResult,
    PeekRows,
    PeekStashed,
    Response,
    StashPart,
    StatusResponse,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeResponse,
    UpdateConfiguration,
)
from actors.replica.cluster.partitioned import ConnectionLimits, PartitionedState
from actors.runtime.errors import RemoteProtocolError
from actors.runtime.progress import EMPTY

parts_count = st.integers(1, 5)


def rows(*values: int) -> PeekRows:
    return PeekRows(to_ipc(pa.table({"k": pa.array(values, pa.int64()), DIFF: [1] * len(values)})))


def changes(*updates: tuple[int, int, int]) -> bytes:
    columns = [pa.array([update[i] for update in updates], pa.int64()) for i in range(3)]
    return to_ipc(pa.table(columns, names=["k", TIME, DIFF]))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_split(count: int) -> None:
    parts = PartitionedState(count, ConnectionLimits(1000))
    assert parts.addressed == range(1)
    for command in (Hello("a"), UpdateConfiguration(5), AllowWrites()):
        assert parts.split(command) == [(0, command)]


@given(parts_count, st.data())
def test_frontiers_are_the_meet_of_the_parts_and_advance_strictly(
    count: int, data: st.DataObject
) -> None:
    parts = PartitionedState(count, ConnectionLimits(1000))
    frontier = st.one_of(st.integers(0, 20), st.just(EMPTY))
    reports = data.draw(st.lists(st.tuples(st.integers(0, count - 1), frontier), max_size=40))
    reached = [0] * count
    known = 0
    for part, value in reports:
        if known == EMPTY:
            break  # the object is forgotten: nothing follows the empty frontier
        reached[part] = max(reached[part], value)
        merged = parts.absorb(part, Frontiers("v", value, value, value))
        meet = min(reached)
        if meet > known:
            known = meet
            assert merged == Frontiers("v", meet, meet, meet)
        else:
            assert merged is None
    assert parts.idle() == (not reports or known == EMPTY)


def test_kinds_of_frontiers_are_apart() -> None:
    parts = PartitionedState(2, ConnectionLimits(1000))
    assert parts.absorb(0, Frontiers("v", write=5)) is None
    assert parts.absorb(1, Frontiers("v", input=7)) is None
    assert parts.absorb(1, Frontiers("v", write=6)) == Frontiers("v", write=5)
    assert parts.absorb(0, Frontiers("v", input=9)) == Frontiers("v", input=7)


@given(parts_count, st.data())
def test_a_peek_is_answered_once_with_all_rows(count: int, data: st.DataObject) -> None:
    parts = PartitionedState(count, ConnectionLimits(1 << 20))
    order = data.draw(st.permutations(range(count)))
    values = [data.draw(st.lists(st.integers(0, 9), max_size=3)) for _ in range(count)]
    answers = [parts.absorb(part, PeekResponse("p", rows(*values[part]))) for part in order]
    assert answers[:-1] == [None] * (count - 1)
    last = answers[-1]
    assert isinstance(last, PeekResponse)
    assert isinstance(last.result, PeekRows)
    found = from_ipc(last.result.arrow)["k"].to_pylist()
    assert sorted(found) == sorted(value for part in values for value in part)
    assert parts.idle()


def stashed(*values: int, key: str = "b") -> PeekStashed:
    inline = rows(*values).arrow if values else None
    part = StashPart(key, 10, 1000)
    return PeekStashed((part,), 10 + len(values), 1000 + len(inline or b""), inline)


results = st.one_of(
    st.just(PeekCanceled()),
    st.builds(PeekError, st.just("ViewInError"), st.sampled_from("xy")),
    st.builds(PeekError, st.just("InvalidUsage"), st.just("large"), st.just("bytes")),
    st.builds(
        PeekError,
        st.just("InvalidUsage"),
        st.just("many"),
        st.just("rows"),
        st.one_of(st.none(), st.integers(1, 9)),
    ),
    st.lists(st.integers(0, 9), max_size=3).map(lambda values: rows(*values)),
    st.just(PeekRows(b"", 0)),
    st.lists(st.integers(0, 9), max_size=3).map(lambda values: stashed(*values)),
)


def values_of(result: PeekResult) -> list[int]:
    arrow = result.arrow if isinstance(result, PeekRows) else None
    if isinstance(result, PeekStashed):
        arrow = result.inline
    return [] if not arrow else list(from_ipc(arrow)["k"].to_pylist())


@given(st.lists(results, min_size=1, max_size=5), st.data())
def test_precedence_of_peek_answers(given_: list[PeekResult], data: st.DataObject) -> None:
    """Canceled beats all, an error of the data beats limits, bytes beat rows, errors beat rows;
    of row limits the smallest; stashed parts and rows make one stashed result."""
    parts = PartitionedState(len(given_), ConnectionLimits(1 << 20))
    order = data.draw(st.permutations(range(len(given_))))
    answers = [parts.absorb(part, PeekResponse("p", given_[part])) for part in order]
    assert answers[:-1] == [None] * (len(given_) - 1)
    last = answers[-1]
    assert isinstance(last, PeekResponse)
    result = last.result
    errors = [r for r in given_ if isinstance(r, PeekError)]
    plain = [r for r in errors if not r.limit]
    if PeekCanceled() in given_:
        assert result == PeekCanceled()
    elif plain:
        assert result == plain[0]
    elif [r for r in errors if r.limit == "bytes"]:
        assert isinstance(result, PeekError)
        assert result.limit == "bytes"
    elif errors:
        limits = [r.limit_rows for r in errors if r.limit_rows is not None]
        assert isinstance(result, PeekError)
        assert result.limit_rows == min(limits, default=None)
    else:
        assert sorted(values_of(result)) == sorted(v for r in given_ for v in values_of(r))
        held = [part for r in given_ if isinstance(r, PeekStashed) for part in r.parts]
        assert isinstance(result, PeekStashed) == bool(held)
        if isinstance(result, PeekStashed):
            assert list(result.parts) == held
            assert result.rows == 10 * len(held) + len(values_of(result))
            assert result.size_bytes == 1000 * len(held) + len(result.inline or b"")
    assert parts.idle()


def test_the_size_is_checked_over_all_parts() -> None:
    one = rows(*range(50))
    parts = PartitionedState(2, ConnectionLimits(len(one.arrow) + 100))
    parts.absorb(0, PeekResponse("p", one))
    answer = parts.absorb(1, PeekResponse("p", one))
    assert isinstance(answer, PeekResponse)
    assert isinstance(answer.result, PeekError)
    assert "result_bytes_max" in answer.result.text
    parts.split(InitializationComplete())
    parts.split(UpdateConfiguration(1 << 20))
    parts.absorb(0, PeekResponse("p", one))
    answer = parts.absorb(1, PeekResponse("p", one))
    assert isinstance(answer, PeekResponse)
    assert isinstance(answer.result, PeekRows)


def test_a_second_answer_of_a_part_breaks_the_protocol() -> None:
    parts = PartitionedState(2, ConnectionLimits(1000))
    parts.absorb(1, PeekResponse("p", rows()))
    with pytest.raises(RemoteProtocolError):
        parts.absorb(1, PeekResponse("p", rows()))


def test_hello_forgets_what_was_being_merged() -> None:
    parts = PartitionedState(2, ConnectionLimits(1000))
    parts.absorb(0, PeekResponse("p", rows()))
    parts.absorb(0, Frontiers("v", write=5))
    parts.absorb(0, SubscribeResponse("s", SubscribeBatch(0, 5)))
    parts.split(Hello("b"))
    assert parts.idle()


def test_statuses_pass_through() -> None:
    assert PartitionedState(3, ConnectionLimits(10)).absorb(
        1, StatusResponse("v", "x")
    ) == StatusResponse("v", "x")


# -- subscribes ------------------------------------------------------------------------------------


def batch(lower: int, upper: int, arrow: bytes | None = None) -> Response:
    return SubscribeResponse("s", SubscribeBatch(lower, upper, arrow))


@given(parts_count, st.data())
def test_batches_are_contiguous_and_hold_every_update_once(count: int, data: st.DataObject) -> None:
    parts = PartitionedState(count, ConnectionLimits(1000))
    queues: list[list[tuple[int, int, list[tuple[int, int, int]]]]] = []
    sent: list[tuple[int, int, int]] = []
    blobs: dict[str, pa.Table] = {}
    keys = (f"b{n}" for n in itertools.count())
    for _ in range(count):
        uppers = [*sorted(data.draw(st.sets(st.integers(1, 9), max_size=4))), EMPTY]
        lower, batches = 0, []
        for upper in uppers:
            times = st.integers(lower, min(upper, 12) - 1)
            updates = data.draw(st.lists(st.tuples(st.integers(0, 3), times, st.just(1))))
            sent += updates
            batches.append((lower, upper, updates))
            lower = upper
        queues.append(batches)
    reached, received = 0, []
    while any(queues):
        part = data.draw(st.sampled_from([n for n in range(count) if queues[n]]))
        lower, upper, updates = queues[part].pop(0)
        arrow = changes(*updates) if updates else None
        stash: tuple[StashPart, ...] = ()
        stashed: bool = data.draw(st.booleans())
        if updates and stashed:  # too many for a response, or for some of it
            half = data.draw(st.integers(0, len(updates) - 1))
            arrow = changes(*updates[:half]) if half else None
            key = next(keys)
            blobs[key] = from_ipc(changes(*updates[half:]))
            stash = (StashPart(key, len(updates) - half, 1000),)
        said = SubscribeBatch(lower, upper, arrow, None, None, stash)
        merged = parts.absorb(part, SubscribeResponse("s", said))
        if merged is None:
            continue
        assert isinstance(merged, SubscribeResponse)
        assert isinstance(merged.batch, SubscribeBatch)
        assert merged.batch.lower == reached < merged.batch.upper
        reached = merged.batch.upper
        tables = [blobs.pop(part.key) for part in merged.batch.parts]  # each is told once
        if merged.batch.arrow is not None:
            tables.append(from_ipc(merged.batch.arrow))
        for table in tables:
            assert all(merged.batch.lower <= t < reached for t in table[TIME].to_pylist())
            received.append(table)
    assert reached == EMPTY
    assert not blobs
    assert parts.idle()
    if sent:
        found = consolidate(pa.concat_tables(received))
        expected = consolidate(from_ipc(changes(*sent)))
        assert sorted(found.to_pylist(), key=str) == sorted(expected.to_pylist(), key=str)


def test_one_part_with_data_passes_as_it_is() -> None:
    parts = PartitionedState(2, ConnectionLimits(1000))
    data = changes((1, 11, 1))
    assert parts.absorb(0, batch(11, 12, data)) is None
    assert parts.absorb(1, batch(0, EMPTY)) == batch(11, 12, data)
    assert parts.absorb(0, batch(12, 15)) == batch(12, 15)


def test_the_first_error_poisons() -> None:
    parts = PartitionedState(2, ConnectionLimits(1000))
    parts.absorb(1, batch(0, EMPTY))
    parts.absorb(0, batch(0, 5))
    error = ("ViewInError", "boom")
    merged = parts.absorb(0, SubscribeResponse("s", SubscribeBatch(5, 6, None, error)))
    assert merged == SubscribeResponse("s", SubscribeBatch(5, 6, None, error))
    assert parts.absorb(0, batch(6, 7)) is None
    assert parts.absorb(0, SubscribeResponse("s", SubscribeDropped(7))) is None
    assert parts.idle()


def test_an_error_that_comes_before_anything_has_left_begins_where_its_part_began() -> None:
    """The other part has told nothing yet, so a batch waits: the error takes its place."""
    parts = PartitionedState(2, ConnectionLimits(1000))
    error = ("ActorDead", "boom")
    assert parts.absorb(0, batch(8, 12)) is None
    merged = parts.absorb(0, SubscribeResponse("s", SubscribeBatch(12, EMPTY, None, error)))
    assert merged == SubscribeResponse("s", SubscribeBatch(8, EMPTY, None, error))


def test_the_end_is_told_once() -> None:
    parts = PartitionedState(3, ConnectionLimits(1000))
    for part in (1, 2):
        parts.absorb(part, batch(0, 9))
    parts.absorb(0, batch(0, 5))
    ends = [parts.absorb(part, SubscribeResponse("s", SubscribeDropped(5))) for part in range(3)]
    assert ends == [SubscribeResponse("s", SubscribeDropped(5)), None, None]
    assert parts.idle()


def test_a_configuration_counts_when_the_replay_is_complete_and_outlives_its_client() -> None:
    limits = ConnectionLimits(1000)
    first = PartitionedState(2, limits)
    first.split(Hello("a"))
    first.split(UpdateConfiguration(5))
    first.split(UpdateConfiguration(inline_bytes_max=7))
    assert limits.result_bytes_max == 1000
    first.split(InitializationComplete())
    assert limits.result_bytes_max == 5
    first.split(UpdateConfiguration(6))
    second = PartitionedState(2, limits)
    second.split(Hello("b"))
    second.absorb(0, PeekResponse("p", rows(1)))
    answer = second.absorb(1, PeekResponse("p", rows(2)))
    assert isinstance(answer, PeekResponse)
    assert isinstance(answer.result, PeekError)
    assert answer.result.limit == "bytes"
    assert "result_bytes_max: 6" in answer.result.text


copy_results = st.one_of(
    st.just(CopyDropped()),
    st.builds(CopyFailed, st.just("StoreFull"), st.sampled_from("xy")),
    st.builds(CopyDone, st.integers(0, 9), st.integers(0, 3), st.sampled_from(["", "m"])),
)


@given(parts_count, st.data())
def test_a_copy_is_answered_once(count: int, data: st.DataObject) -> None:
    """Dropped before Failed before the sum."""
    parts = PartitionedState(count, ConnectionLimits(1000))
    given = data.draw(st.lists(copy_results, min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    answers = [parts.absorb(part, CopyToResponse("c", given[part])) for part in order]
    assert answers[:-1] == [None] * (count - 1)
    last = answers[-1]
    assert isinstance(last, CopyToResponse)
    assert parts.idle()
    assert parts.ended == ["c"]
    for kind in (CopyDropped, CopyFailed):
        first = next((result for result in given if isinstance(result, kind)), None)
        if first is not None:
            assert last.result == first
            return
    done = [result for result in given if isinstance(result, CopyDone)]
    rows, files = sum(d.rows for d in done), sum(d.files for d in done)
    manifest = "m" if any(d.manifest for d in done) else ""
    assert last.result == CopyDone(rows, files, manifest)


def test_a_part_answers_a_copy_once() -> None:
    parts = PartitionedState(2, ConnectionLimits(1000))
    parts.absorb(1, CopyToResponse("c", CopyDone(0, 0, "")))
    with pytest.raises(RemoteProtocolError, match="worker 1 answered copy c twice"):
        parts.absorb(1, CopyToResponse("c", CopyDone(0, 0, "")))
    parts.split(Hello("b"))
    assert parts.idle()
