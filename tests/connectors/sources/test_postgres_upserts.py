"""Upserts into updates: any changes of keys, beside a dictionary that does them one by one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.connectors.ingest.contents import joined, keys_to_find, resolve
from actors.connectors.sources.source import KEPT, OP, UpsertOp
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.runtime.errors import RemoteProtocolError

SCHEMA = TableSchema(
    (
        TableColumn("k", "int"),
        TableColumn("a", "string"),
        TableColumn("b", "bigint"),
        TableColumn("l", "string"),
    ),
    ("k", "l"),
)
Key = tuple[int, str]
Contents = dict[Key, tuple[str | None, int | None]]
KEYS = st.tuples(st.integers(0, 4), st.sampled_from("xy"))
REST = st.tuples(st.sampled_from(["p", "q", None]), st.integers(0, 3))
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "update", "keep", "delete", "move", "move keeping"]),
        KEYS,
        KEYS,
        REST,
    ),
    max_size=25,
)


def row(
    key: Key, rest: tuple[Any, Any], op: UpsertOp, kept: list[int] | None = None
) -> dict[str, Any]:
    return {"k": key[0], "a": rest[0], "b": rest[1], "l": key[1], OP: int(op), KEPT: kept}


def play(contents: Contents, actions: list[tuple[str, Key, Key, Any]]) -> list[dict[str, Any]]:
    """Does what is possible, and tells it as a source would."""
    told = []
    for action, key, other, rest in actions:
        if action == "insert" and key not in contents:
            contents[key] = rest
            told.append(row(key, rest, UpsertOp.INSERTED))
        elif key not in contents or action == "insert":
            continue
        elif action == "update":
            contents[key] = rest
            told.append(row(key, rest, UpsertOp.UPDATED))
        elif action == "keep":
            contents[key] = (contents[key][0], rest[1])
            told.append(row(key, (None, rest[1]), UpsertOp.UPDATED, [1]))
        elif action == "delete":
            del contents[key]
            told.append(row(key, (None, None), UpsertOp.DELETED))
        elif other not in contents:
            old = contents.pop(key)
            told.append(row(key, (None, None), UpsertOp.DELETED))
            if action == "move":
                contents[other] = rest
                told.append(row(other, rest, UpsertOp.INSERTED))
            else:
                contents[other] = (old[0], rest[1])
                told.append(row(other, (None, rest[1]), UpsertOp.MOVED, [1]))
    return told


def table(contents: Contents) -> pa.Table:
    rows = [{"k": k, "a": a, "b": b, "l": side} for (k, side), (a, b) in contents.items()]
    return pa.Table.from_pylist(rows, SCHEMA.arrow())


@given(st.dictionaries(KEYS, REST, max_size=6), ACTIONS, st.integers(1, 5))
def test_any_changes(before: Contents, actions: list[tuple[str, Key, Key, Any]], size: int) -> None:
    after = dict(before)
    told = play(after, actions)
    shape = pa.schema(
        [*SCHEMA.arrow(), pa.field(OP, pa.int8()), pa.field(KEPT, pa.list_(pa.int16()))]
    )
    pieces = [pa.Table.from_pylist(told[at : at + size], shape) for at in range(0, len(told), size)]
    pieces = [
        piece.drop_columns([KEPT]) if piece[KEPT].null_count == len(piece) else piece
        for piece in pieces
    ]
    changes = joined(SCHEMA, pieces)
    wanted = {(each["k"], each["l"]) for each in keys_to_find(SCHEMA, changes).to_pylist()}
    assert wanted <= set(before)  # nobody looks for what is not there
    found = table({key: rest for key, rest in before.items() if key in wanted})
    counts: dict[tuple[Any, ...], int] = {
        tuple(each.values()): 1 for each in table(before).to_pylist()
    }
    for each in resolve(SCHEMA, changes, found).to_pylist():
        diff = each.pop(DIFF)
        values = tuple(each.values())
        counts[values] = counts.get(values, 0) + diff
    assert {values for values, count in counts.items() if count} == {
        tuple(each.values()) for each in table(after).to_pylist()
    }
    assert set(counts.values()) <= {0, 1}


def test_nothing_to_resolve() -> None:
    changes = joined(SCHEMA, [])
    assert keys_to_find(SCHEMA, changes).num_rows == 0
    assert resolve(SCHEMA, changes, table({})).num_rows == 0


def test_a_kept_value_of_a_row_that_is_not_there() -> None:
    told = [row((1, "x"), (None, 1), UpsertOp.UPDATED, [1])]
    shape = pa.schema(
        [*SCHEMA.arrow(), pa.field(OP, pa.int8()), pa.field(KEPT, pa.list_(pa.int16()))]
    )
    changes = joined(SCHEMA, [pa.Table.from_pylist(told, shape)])
    with pytest.raises(RemoteProtocolError, match=r"\(1, 'x'\), which does not exist"):
        resolve(SCHEMA, changes, table({}))
