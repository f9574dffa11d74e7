"""The decoder of pgoutput: known bytes, any bytes that an encoder here makes, and broken ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.connectors.sources import pgoutput
from actors.connectors.sources.pgoutput import PgRelation, PgRelationColumn
from actors.connectors.sources.postgres_copy import CopyFrames, chain
from actors.model.pgwire.encoded_values import PAD_BYTES
from actors.model.pgwire.type_oids import MS_TO_2000
from actors.runtime.errors import RemoteProtocolError


def frames(payloads: Sequence[bytes]) -> CopyFrames:
    """As a copy hands them out."""
    ends = np.cumsum([len(each) for each in payloads], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
    data = np.frombuffer(b"".join(payloads) + bytes(PAD_BYTES), np.uint8)
    return CopyFrames(data, starts, ends)


def logged(message: bytes, lsn: int = 7) -> bytes:
    """As XLogData."""
    return b"w" + struct.pack(">QQQ", lsn, lsn, 0) + message


def told(values: Sequence[object]) -> bytes:
    """A tuple: bytes, None, or ``...`` for unchanged."""
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if isinstance(value, bytes):
            parts.append(b"t" + struct.pack(">I", len(value)) + value)
        else:
            parts.append(b"n" if value is None else b"u")
    return b"".join(parts)


def test_messages_of_a_real_server() -> None:
    """``INSERT INTO t VALUES (1, 'a')`` into ``t (id int PRIMARY KEY, v text)``, as 15 sends it."""
    stream = [
        "6b0000000001924bc8000303dd832e62fa00",
        "770000000001924bc80000000001924bc8000303dd832e63cf420000000001924ca8000303dd832e5409"
        "000002d7",
        "7700000000000000000000000000000000000303dd832e641452000040017075626c6963007400640002"
        "0169640000000017ffffffff00760000000019ffffffff",
        "770000000001924bc80000000001924bc8000303dd832e643549000040014e0002740000000131740000"
        "000161",
        "770000000001924cd80000000001924cd8000303dd832e643743000000000001924ca80000000001924c"
        "d8000303dd832e5409",
        "6b0000000001924cd8000303dd832e644400",
    ]
    made = frames([bytes.fromhex(each) for each in stream])
    assert pgoutput.keepalive(made) == pgoutput.PrimaryKeepalive(end=0x1924CD8, wants_reply=False)
    assert pgoutput.late_ms(made, 4) == 4, "sent 4142 microseconds after the commit"
    batch = pgoutput.messages(made)
    assert batch.tags.tobytes() == b"BRIC"
    relation = pgoutput.relation(batch, 1)
    assert relation == PgRelation(
        oid=16385,
        name="public.t",
        identity="d",
        columns=(PgRelationColumn("id", 23, -1, True), PgRelationColumn("v", 25, -1, False)),
    )
    places, lsns = pgoutput.begins(batch)
    assert (places.tolist(), lsns.tolist()) == ([0], [0x1924CA8])
    commits = pgoutput.commits(batch)
    assert (commits.places.tolist(), commits.ends.tolist()) == ([3], [0x1924CD8])
    assert commits.times_ms.tolist() == [0x303DD832E5409 // 1000 + MS_TO_2000]
    assert pgoutput.relation_oids(batch)[2] == 16385
    values, ends = pgoutput.walk(batch.data, batch.places[2:3] + 6, 2)
    columns = [pgoutput.column(batch.data, each).to_pylist() for each in values]
    assert columns == [[b"1"], [b"a"]]
    assert ends.tolist() == batch.ends[2:3].tolist()


def test_keepalives_stand_between_messages() -> None:
    alive = b"k" + struct.pack(">QQB", 99, 0, 1)
    quiet = b"k" + struct.pack(">QQB", 120, 0, 0)
    commit = logged(b"C" + struct.pack(">BQQQ", 0, 40, 50, 0), lsn=50)
    made = frames([alive, commit, quiet])
    assert pgoutput.keepalive(made) == pgoutput.PrimaryKeepalive(end=120, wants_reply=True)
    assert pgoutput.is_commit(made).tolist() == [False, True, False]
    assert pgoutput.messages(made).tags.tobytes() == b"C"
    assert pgoutput.received(made) == 120
    assert pgoutput.keepalive(frames([commit])) is None


def test_a_truncate_names_all_its_tables() -> None:
    message = b"T" + struct.pack(">IBII", 2, 1, 16385, 4_000_000_000)
    batch = pgoutput.messages(frames([logged(message)]))
    assert pgoutput.truncated(batch, 0) == (16385, 4_000_000_000)


VALUES = st.one_of(st.none(), st.just(...), st.binary(max_size=40))


@given(
    st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(VALUES, min_size=width, max_size=width), min_size=1, max_size=30
        )
    )
)
def test_tuples_of_any_values(rows: list[list[object]]) -> None:
    """Every value is found where it stands, whatever stands before it."""
    made = frames([logged(b"I" + struct.pack(">I", 5) + b"N" + told(row)) for row in rows])
    batch = pgoutput.messages(made)
    values, ends = pgoutput.walk(batch.data, batch.places + 6, len(rows[0]))
    assert ends.tolist() == batch.ends.tolist()
    for at, column in enumerate(values):
        wanted = [row[at] for row in rows]
        unchanged = [each is ... for each in wanted]
        assert (column.kinds == pgoutput.UNCHANGED).tolist() == unchanged
        texts = [each if isinstance(each, bytes) else None for each in wanted]
        assert pgoutput.column(batch.data, column).to_pylist() == texts


@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.binary(max_size=20)), min_size=3, max_size=3),
        min_size=1,
        max_size=20,
    )
)
def test_rows_of_a_binary_copy(rows: list[list[bytes | None]]) -> None:
    payloads = []
    for row in rows:
        parts = (
            struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
            for value in row
        )
        payloads.append(struct.pack(">h", 3) + b"".join(parts))
    made = frames(payloads)
    values = pgoutput.walk_copied(made.data, made.starts, 3)
    found = [pgoutput.column(made.data, each).to_pylist() for each in values]
    assert [list(row) for row in zip(*found, strict=True)] == rows


@given(st.binary(max_size=60), st.integers(1, 4))
def test_broken_tuples_are_refused_or_end_inside(body: bytes, width: int) -> None:
    """Never a value from outside of what was read."""
    made = frames([logged(b"I" + bytes(4) + b"N" + struct.pack(">H", width) + body)])
    batch = pgoutput.messages(made)
    try:
        values, _ = pgoutput.walk(batch.data, batch.places + 6, width)
    except RemoteProtocolError:
        return
    for each in values:
        assert 0 <= int(each.starts[0]) <= int(each.ends[0]) <= len(made.data)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"x" + bytes(30), "frame of type 'x'"),
        (logged(b"?" + bytes(20)), "message of type '?'"),
    ],
)
def test_what_no_server_sends(payload: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words.replace("?", r"\?")):
        pgoutput.messages(frames([payload]))


def test_a_tuple_of_another_width() -> None:
    batch = pgoutput.messages(frames([logged(b"I" + bytes(4) + b"N" + told([b"1"]))]))
    with pytest.raises(RemoteProtocolError, match="a tuple has 1 columns, its relation 2"):
        pgoutput.walk(batch.data, batch.places + 6, 2)


def test_a_broken_description() -> None:
    batch = pgoutput.messages(frames([logged(b"R" + bytes(4) + b"public")]))
    with pytest.raises(RemoteProtocolError, match="invalid description"):
        pgoutput.relation(batch, 0)


BODIES = st.lists(
    st.binary(max_size=30) | st.sampled_from([b"d" * 9, b"d\0\0\0\4", b"d\0\0\0\x09dddd"]),
    min_size=1,
    max_size=12,
)


@given(BODIES, st.integers(0, 60), st.booleans())
def test_frames_that_follow_one_another(bodies: list[bytes], cut: int, other: bool) -> None:
    """Found at once, they are the first of those that going from one to the next finds; also where
    their contents look like frames, and where the last one is there in part."""
    many = [b"d" + struct.pack(">I", len(body) + 4) + body for body in bodies * 60]
    places = np.cumsum([0, *map(len, many)]).tolist()
    stream = b"".join(many) + (b"c\0\0\0\4" if other else b"")
    end = len(stream) - min(cut, len(stream) // 2)
    data = np.frombuffer(stream[:end] + b"d" * PAD_BYTES, np.uint8)
    found, behind = chain(data, 0, end)
    assert found.tolist() == places[: len(found)]
    assert behind == places[len(found)] <= end


def test_frames_of_plain_rows_are_all_found() -> None:
    many = [
        b"d" + struct.pack(">I", 34) + struct.pack(">hiqi", 2, 8, n, 8) + b"abcdefghijkl"
        for n in range(9000)
    ]
    stream = b"".join(many)
    found, behind = chain(np.frombuffer(stream + bytes(PAD_BYTES), np.uint8), 0, len(stream))
    assert (len(found), behind) == (9000, len(stream))
