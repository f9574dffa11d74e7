"""Transitions of a shard's state, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from actors.durable.persist import shard
from actors.durable.persist.documents import decode_shard, encode, unsealed
from actors.durable.persist.shard import (
    FORMAT,
    WRITERS_MAX,
    BatchPart,
    IdempotencyToken,
    NewShard,
    ReaderLease,
    RetiredBlob,
    ShardAppend,
    ShardBatch,
    ShardState,
    UpperMismatch,
    compact_to,
    deletable,
    is_applied,
    record_token,
    sealed,
)
from actors.durable.persist.shard_invariants import validate
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import (
    CorruptData,
    InvalidUsage,
    ReadBelowSince,
    StorageError,
    WriterFenced,
)
from actors.runtime.progress import EMPTY, TIME_MAX

P = ParamSpec("P")
S = TypeVar("S")

SCHEMA = TableSchema((TableColumn("a", "bigint"),))


def checked(transition: Callable[P, S]) -> Callable[P, S]:
    """The transition; the state that it makes holds the invariants."""

    def call(*args: P.args, **fields: P.kwargs) -> S:
        after = transition(*args, **fields)
        if isinstance(after, ShardState):
            validate(after)
        return after

    return call


appended = checked(shard.appended)
collected = checked(shard.collected)
compacted = checked(shard.compacted)
created = checked(shard.created)
renewed = checked(shard.renewed)
with_hold = checked(shard.with_hold)
without_hold = checked(shard.without_hold)


def part(key: str, low: int, high: int | None = None) -> BatchPart:
    high = low if high is None else high
    return BatchPart(f"s/{key}", 1, 10, 0, None, False, low, high, 1)


def new(**fields: object) -> ShardState:
    return created(NewShard("s", SCHEMA, **fields), "w", 1)  # type: ignore[arg-type]


def settled(state: ShardState) -> ShardState:
    return renewed(state, {}, frozenset(), 10)


def grown(state: ShardState, upper: int, *parts: BatchPart, call: int = 9) -> ShardState:
    after = appended(state, ShardAppend("s", state.upper, upper, parts), 0, "w", call)
    assert isinstance(after, ShardState)
    validate(after)
    return replace(after, seqno=state.seqno + 1)


def test_append_checks_the_upper_and_marks_the_call() -> None:
    state = grown(new(), 5, part("a", 2), call=7)
    assert state.upper == 5
    assert is_applied(state, "w", 7)
    assert not is_applied(state, "w", 6)
    assert not is_applied(state, "other", 7)
    assert appended(state, ShardAppend("s", 4, 9, ()), 0, "w", 8) == UpperMismatch("s", 4, 5)
    closed = grown(state, EMPTY)
    assert appended(closed, ShardAppend("s", 5, 9, ()), 0, "w", 9) == UpperMismatch("s", 5, EMPTY)


def test_idle_appends_do_not_add_batches() -> None:
    state = grown(grown(new(), 5), 6)
    assert state.batches == (ShardBatch(0, 6, ()),)
    state = grown(grown(state, 8, part("a", 7)), 20)
    assert [(b.lower, b.upper, len(b.parts)) for b in state.batches] == [(0, 6, 0), (6, 20, 1)]


@pytest.mark.parametrize(
    ("append", "floor", "text"),
    [
        (ShardAppend("s", 5, 5, ()), 0, "holds no time"),
        (ShardAppend("s", 5, EMPTY + 1, ()), 0, "not an interval"),
        (ShardAppend("s", 5, 9, (part("b", 4),)), 0, r"the interval \[5, 9\)"),
        (ShardAppend("s", 5, 9, (part("b", 9),)), 0, r"the interval \[5, 9\)"),
        (ShardAppend("s", 5, 9, (part("b", 6),)), 7, r"the interval \[7, 9\)"),
        (ShardAppend("s", 5, 9, (part("a", 6),)), 0, "already appended"),
        (ShardAppend("s", 5, 9, (part("b", 6), part("b", 6))), 0, "already appended"),
        (ShardAppend("s", 5, 9, (replace(part("b", 6), key="t/b"),)), 0, "another"),
        (ShardAppend("s", 5, 9, (replace(part("b", 6), rows=0),)), 0, "0 rows"),
    ],
)
def test_an_append_that_can_never_be_right(append: ShardAppend, floor: int, text: str) -> None:
    state = grown(new(), 5, part("a", 2))
    with pytest.raises(InvalidUsage, match=text):
        appended(state, append, floor, "w", 9)


def test_since_is_the_least_hold_or_lease_and_never_goes_back() -> None:
    state = settled(with_hold(with_hold(new(), "h1", 3), "h2", 8))
    assert state.since == 3
    state = renewed(state, {"r": ReaderLease(5, 0, 100)}, frozenset(), 10)
    state = settled(with_hold(state, "h1", 9))
    assert state.since == 5
    assert renewed(state, {}, frozenset(), 99).since == 5
    state = renewed(state, {}, frozenset(), 100)
    assert (state.since, state.leases) == (8, {})
    state = settled(without_hold(settled(without_hold(state, "h2")), "h1"))
    assert (state.since, state.holds) == (9, {})
    assert without_hold(state, "h1") is state
    with pytest.raises(ReadBelowSince, match="cannot hold 4 for h3, its since is 9"):
        with_hold(state, "h3", 4)
    state = with_hold(state, "h3", 9)
    assert with_hold(state, "h3", 2) is state, "one that exists stops at the since"


def test_a_closed_shard_stays_readable_at_its_last_time() -> None:
    closed = without_hold(grown(new(), EMPTY), "h")
    read = renewed(closed, {"r": ReaderLease(EMPTY, 0, 100)}, frozenset(), 10)
    assert read.since == TIME_MAX
    assert renewed(read, {"r": ReaderLease(EMPTY, 0, 100)}, frozenset(), 10).since == TIME_MAX


def test_own_leases_are_renewed_and_given_up_ones_go() -> None:
    state = replace(new(), leases={"mine": ReaderLease(0, 0, 5), "theirs": ReaderLease(0, 0, 50)})
    state = renewed(state, {"mine": ReaderLease(2, 1, 90)}, frozenset(), 10)
    assert state.leases == {"mine": ReaderLease(2, 1, 90), "theirs": ReaderLease(0, 0, 50)}
    state = renewed(state, {}, frozenset({"mine"}), 10)
    assert set(state.leases) == {"theirs"}


def test_compaction_replaces_adjacent_batches_only_while_they_are_there() -> None:
    state = new()
    for index in range(4):
        state = grown(state, 10 * (index + 1), part(f"p{index}", 10 * index))
    inputs = state.batches[1:3]
    merged = compacted(state, inputs, (part("m", 25),))
    assert merged is not None
    validate(merged)
    assert [(b.lower, b.upper) for b in merged.batches] == [(0, 10), (10, 30), (30, 40)]
    assert merged.retired == (RetiredBlob("s/p1", 5), RetiredBlob("s/p2", 5))
    assert compacted(merged, inputs, (part("n", 25),)) is None
    last = state.batches[3:]
    extended = grown(state, 99)
    merged = compacted(extended, last, ())
    assert merged is not None
    assert merged.batches[-1] == ShardBatch(30, 99, ())
    validate(merged)


def test_compaction_keeps_one_time_below_the_since() -> None:
    state = replace(new(), since=20, upper=50)
    assert compact_to(state, 50) == 19
    assert compact_to(state, 10) == 9
    assert compact_to(replace(state, since=0), 10) == 0


def test_a_retired_part_waits_for_leases_that_may_know_it() -> None:
    state = replace(
        new(),
        seqno=9,
        retired=(RetiredBlob("s/a", 4), RetiredBlob("s/b", 7)),
        leases={"old": ReaderLease(0, 5, 99), "own": ReaderLease(0, 1, 99)},
    )
    assert deletable(state, frozenset({"own"})) == ("s/a",)
    assert deletable(state, frozenset()) == ()
    assert deletable(state, frozenset({"own", "old"})) == ("s/a", "s/b")
    assert collected(state, frozenset({"s/a"})).retired == (RetiredBlob("s/b", 7),)
    assert collected(state, frozenset({"s/x"})) is state


def test_tables_are_sealed_by_the_shared_upper() -> None:
    assert sealed(replace(new(tables=True), upper=5), 9) == 9
    assert sealed(replace(new(tables=True), upper=10), 9) == 10
    assert sealed(replace(new(), upper=5), 9) == 5


def test_writers_are_few() -> None:
    marks: dict[str, IdempotencyToken] = {}
    for number in range(2 * WRITERS_MAX):
        marks = record_token(marks, f"w{number}", 1, number)
    assert len(marks) == WRITERS_MAX
    assert f"w{2 * WRITERS_MAX - 1}" in marks
    assert "w0" not in marks


def test_a_hold_below_the_since_of_a_new_shard() -> None:
    with pytest.raises(InvalidUsage, match="hold h at 3 is below its since 5"):
        new(since=5, holds={"h": 3})


# Written by a version that had holds with fencing tokens (`tokens`): one hold, named "c".
WITH_TOKENS = (
    b"\x83\xa7version\x02\xa8checksum\xce%\xbb\xe0H\xa8document\xc4\xe2\xde\x00\x10\xa7version\x03"
    b"\xa2id\xa1s\xa6schema\x82\xa7columns\x91\x83\xa4name\xa1a\xa4type\xa6bigint\xa8nullable\xc3"
    b"\xa3key\x90\xa5seqno\xcf\x00\x00\xa8\xb60<\xe1\xc4\xa5since\x02\xa5upper\x02\xa7batches\x90"
    b"\xa5holds\x81\xa1c\x02\xa6leases\x80\xa6tables\xc2\xa7retired\x90\xa7writers\x81"
    b"\xb063e702cc517e3376\x82\xa4call\x01\xa5seqno\x01\xa6copies\x90"
    b"\xa4born\xcf\x00\x00\xa8\xb60<\xe1\xc3\xa6tokens\x81\xa1c\xc4\x03one\xa5older\x90"
)


def test_a_hold_that_had_a_fencing_token_is_an_ordinary_hold() -> None:
    state = decode_shard("shard/s", WITH_TOKENS)
    assert (state.schema, state.since, state.holds) == (SCHEMA, 2, {"c": 2})
    assert with_hold(state, "c", 5).holds == {"c": 5}
    assert without_hold(state, "c").holds == {}
    assert b"tokens" not in encode(state)
    assert decode_shard("shard/s", encode(state)) == state


def test_an_older_document_is_read_and_written_as_the_newest() -> None:
    older = msgspec.msgpack.decode(unsealed("shard/s", WITH_TOKENS)) | {"version": 1}
    del older["tokens"], older["born"], older["copies"]
    state = decode_shard("shard/s", msgspec.msgpack.encode(older))
    assert (state.version, state.born, state.copies) == (FORMAT, 0, ())
    assert msgspec.msgpack.decode(unsealed("shard/s", encode(state)))["version"] == FORMAT


def test_documents_are_checked_when_read() -> None:
    state = grown(new(holds={"h": 1}), 5, part("a", 2))
    assert decode_shard("shard/s", encode(state)) == state
    with pytest.raises(StorageError, match=f"has format {FORMAT + 1}"):
        decode_shard("shard/s", encode(replace(state, version=FORMAT + 1)))
    with pytest.raises(CorruptData, match="cannot decode"):
        decode_shard("shard/s", encode(state)[:-3])


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        ({"upper": 6}, "the last batch ends at upper"),
        ({"since": 2}, "since <= hold"),
        ({"batches": (ShardBatch(0, 2, ()), ShardBatch(3, 5, ()))}, "contiguous"),
        ({"batches": (ShardBatch(0, 5, (part("a", 5),)),)}, "time_max < upper"),
        ({"batches": (ShardBatch(0, 5, (part("a", 2), part("a", 2))),)}, "named once"),
        ({"leases": {"r": ReaderLease(0, 0, 0)}}, "since <= lease.since"),
    ],
)
def test_a_broken_rule_is_named(broken: dict[str, object], rule: str) -> None:
    state = replace(new(since=1, holds={"h": 1}), upper=5, batches=(ShardBatch(0, 5, ()),))
    validate(state)
    with pytest.raises(CorruptData, match=rule):
        validate(replace(state, **broken))


def test_an_append_for_other_columns_than_there_are_now_is_refused() -> None:
    wide = TableSchema((*SCHEMA.columns, TableColumn("b", "string")))
    grown = replace(new(), schema=wide, older=(SCHEMA,))
    append = ShardAppend("s", 0, 5, (), schema=SCHEMA)
    assert isinstance(appended(new(), append, 0, "w", 2), ShardState)
    with pytest.raises(WriterFenced, match="its schema is now `a` bigint, `b` string") as caught:
        appended(grown, append, 0, "w", 2)
    assert caught.value.determinate
    for schema in (wide, None):
        assert isinstance(appended(grown, replace(append, schema=schema), 0, "w", 2), ShardState)
