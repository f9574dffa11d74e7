"""How the decoder passes the snapshot of further columns: pure, with messages made up.

What is right: of transactions that the snapshot holds, rows have NULL in the further column, of the
others their value, with `ColumnsDue` between them, once, and before the first mark; however the
stream is cut into batches.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pyarrow as pa
import pytest
from test_pgoutput import frames, logged, told  # type: ignore[import-not-found]

from actors.connectors.sources import pgoutput
from actors.connectors.sources.postgres_changes import ColumnsDue, Decoded, DecodedChanges
from actors.connectors.sources.postgres_drift import FilledTable
from actors.connectors.sources.postgres_snapshot import SnapshotTable
from actors.connectors.sources.postgres_types import ColumnType, TypeFacts
from actors.connectors.sources.source import ExportFailed, PositionMark, SourceExport, SourceRows
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.runtime.errors import RemoteProtocolError

INT, TEXT, OID = 23, 25, 77
TYPES = {
    INT: TypeFacts(oid=INT, name="int4", output="int4out", base=0, base_modifier=-1, element=0,
        delimiter=",", labels=(), attributes=(), range_of=0),
    TEXT: TypeFacts(oid=TEXT, name="text", output="textout", base=0, base_modifier=-1, element=0,
        delimiter=",", labels=(), attributes=(), range_of=0),
}  # fmt: skip
EXPORT = SourceExport(
    "public.t",
    TableSchema((TableColumn("id", "int", False), TableColumn("note", "string")), ("id",)),
)
SNAPSHOT = 1000


def described(*columns: tuple[str, int], identity: bytes = b"f") -> bytes:
    parts = [b"R" + struct.pack(">I", OID), b"public\0t\0", identity]
    parts.append(struct.pack(">H", len(columns)))
    for name, kind in columns:
        parts.append(b"\1" + name.encode() + b"\0" + struct.pack(">Ii", kind, -1))
    return b"".join(parts)


NARROW, WIDE = described(("id", INT)), described(("id", INT), ("note", TEXT))


def inserted(*values: bytes | None) -> bytes:
    row: bytes = told(values)
    return b"I" + struct.pack(">I", OID) + b"N" + row


def transaction(lsn: int, *messages: bytes) -> list[bytes]:
    begin = b"B" + struct.pack(">QqI", lsn, 0, 1)
    return [begin, *messages, b"C\0" + struct.pack(">QQq", lsn, lsn + 5, 0)]


def decoder(lsn: int = 10) -> DecodedChanges:
    filled = {"public.t": FilledTable(OID, 5, (1,), 1, names=("id",))}
    wider = {"public.t": FilledTable(OID, SNAPSHOT, (1, 2), 2, names=("id", "note"))}
    return DecodedChanges([EXPORT], filled, TYPES, lsn, str, growing=wider)


def rows(given: Sequence[Decoded]) -> list[object]:
    """Rows as (id, note), and what else was given."""
    found: list[object] = []
    for each in given:
        if isinstance(each, SourceRows):
            table = each.updates
            assert set(table[DIFF].to_pylist()) == {1}
            found += zip(table["id"].to_pylist(), table["note"].to_pylist(), strict=True)
        elif isinstance(each, PositionMark):
            found.append(int(each.position))
        else:
            found.append(type(each).__name__)
    return found


def take(changes: DecodedChanges, messages: Sequence[bytes]) -> list[Decoded]:
    return changes.take(pgoutput.messages(frames([logged(each) for each in messages])))


STREAM = [
    *transaction(500, NARROW, inserted(b"1")),
    *transaction(900, WIDE, inserted(b"2", b"two"), inserted(b"3", None)),
    *transaction(1000, inserted(b"4", b"four")),
    *transaction(1500, inserted(b"5", None), inserted(b"6", b"six")),
]


@pytest.mark.parametrize("seed", range(30))
def test_rows_before_and_behind_the_snapshot(seed: int) -> None:
    dice = random.Random(seed)
    changes, given, at = decoder(), list[Decoded](), 0
    while at < len(STREAM):
        size = dice.randrange(1, len(STREAM))
        given += take(changes, STREAM[at : at + size])
        at += size
    found = rows(given)
    marks = [each for each in found if isinstance(each, int)]
    assert marks == sorted(marks)
    assert marks[-1] == 1505
    assert [each for each in found if not isinstance(each, int)] == [
        (1, None),
        (2, None),
        (3, None),
        "ColumnsDue",
        (4, "four"),
        (5, None),
        (6, "six"),
    ]
    # No mark tells of a place before the snapshot, and none comes before the columns are due.
    assert min(marks) >= SNAPSHOT
    assert found.index("ColumnsDue") < found.index(marks[0])


def test_an_idle_stream_passes_it_too() -> None:
    changes = decoder()
    assert rows(take(changes, transaction(500, NARROW, inserted(b"1")))) == [(1, None)]
    assert changes.idle(999) == []
    assert rows(changes.idle(1000)) == ["ColumnsDue", 1000]
    # The table is described again before its next row, since it was altered.
    assert rows(take(changes, transaction(1200, WIDE, inserted(b"2", b"b")))) == [(2, "b"), 1205]
    early = decoder(SNAPSHOT)
    assert rows(early.contents_given()) == ["ColumnsDue", SNAPSHOT]


def test_rows_without_their_columns_are_never_left_out() -> None:
    changes = decoder()
    take(changes, transaction(500, NARROW, inserted(b"1")))
    with pytest.raises(
        RemoteProtocolError, match=r"changes of public\.t arrived before its columns"
    ):
        take(changes, transaction(1200, inserted(b"2", b"b")))


def test_another_type_than_at_the_snapshot_is_told_again_or_ends_the_table() -> None:
    changes = decoder()
    other = described(("id", INT), ("note", INT))
    take(changes, transaction(500, other, inserted(b"1", b"7")))
    found = take(changes, transaction(1200, other, inserted(b"2", b"7")))
    (failed,) = (each for each in found if isinstance(each, ExportFailed))
    assert failed.error == "column note changed its type from string to int"


def test_one_that_has_ended_is_given_nothing() -> None:
    changes = decoder()
    take(changes, transaction(500, described(("other", INT)), inserted(b"1")))
    (due,) = (each for each in changes.idle(1100) if isinstance(each, ColumnsDue))
    assert due.exports == ()


def test_a_copy_of_further_columns_brings_only_rows_with_a_value() -> None:
    kinds = (ColumnType(INT, "int"), ColumnType(TEXT, "string"), ColumnType(TEXT, "string"))
    table = SnapshotTable(EXPORT, "ONLY t", kinds, ("id", "a", 'b"c'), held=1)
    assert table.select().endswith(
        ' FROM ONLY t WHERE "a" IS DISTINCT FROM NULL OR "b""c" IS DISTINCT FROM NULL'
    )
    copied = pa.table({"id": [1, 2], "a": ["x", None], 'b"c': [None, "y"]})
    updates = table.updates(copied)
    assert sorted(zip(*(each.to_pylist() for each in updates), strict=True), key=repr) == [
        (1, "x", None, 1),
        (1, None, None, -1),
        (2, None, "y", 1),
        (2, None, None, -1),
    ]
