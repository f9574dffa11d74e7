"""Texts that are cast to a type, beside a real PostgreSQL: the same value, or both refuse."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.doors.sql_session.typed_literals import typed_literal
from actors.engine.sql.type_names import WrittenType
from actors.model.pgwire.sqlstate import InvalidClientData
from actors.model.pgwire.type_oids import ARRAY_OF, BYTEA, INT4, JSON, TEXT, UUID
from actors.model.pgwire.value_parsing import parse_text_value
from actors.testing.postgres_server import PostgresServer

EDGES = '\u00a0\u2003\u0085\x1c\x1d\x1e\x1f\t\v\f\r\n \\"{},aAé0_-'
edges = st.text(st.sampled_from(EDGES), max_size=6)
hexed = st.text(st.sampled_from("0aAf \n\tg\v\\x"), max_size=8)
plain = st.uuids().map(str)
cuts = st.integers(0, 40)
uuids = st.one_of(
    plain,
    plain.map(str.upper),
    plain.map(lambda text: "{" + text.replace("-", "") + "}"),
    st.tuples(plain, cuts, st.sampled_from("-_{} \u00a0１")).map(
        lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] :]
    ),
)
jsons = st.one_of(
    edges,
    st.sampled_from(["NaN", "[1, Infinity]", "[1,]", "01", "1e999999", '"\\u00e9"', "9" * 5000]),
    st.lists(edges).map(lambda words: "[" + ",".join(f'"{word}"' for word in words) + "]"),
)
KINDS: dict[str, tuple[int, Any]] = {
    "bytea": (BYTEA, st.one_of(edges, hexed.map(lambda text: "\\x" + text))),
    "uuid": (UUID, uuids),
    "json": (JSON, jsons),
    "int": (INT4, st.tuples(edges, st.integers(-9, 9), edges).map(lambda d: f"{d[0]}{d[1]}{d[2]}")),
    "text[]": (
        ARRAY_OF[TEXT],
        st.lists(st.one_of(edges, edges.map(lambda text: f'"{text}"')), max_size=3).map(
            lambda words: "{" + ",".join(words) + "}"
        ),
    ),
    "bytea[]": (ARRAY_OF[BYTEA], hexed.map(lambda text: '{"\\\\x' + text + '"}')),
}


@pytest.fixture(scope="module")
def wire(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.conninfo(), autocommit=True) as made:
        yield made


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_texts_mean_what_they_mean_to_postgresql(
    wire: psycopg.Connection, name: str, data: st.DataObject
) -> None:
    oid, texts = KINDS[name]
    text = data.draw(texts)
    try:
        shown = "::json::text" if name == "json" else f"::{name}"
        row = wire.execute(f"SELECT %t::text{shown}".encode(), (text,)).fetchone()
        assert row is not None
        wanted = str(row[0]) if isinstance(row[0], uuid.UUID) else row[0]
    except psycopg.errors.DataError:
        with pytest.raises(InvalidClientData):
            parse_text_value(text, oid)
        return
    found = parse_text_value(text, oid)
    if isinstance(wanted, list) and any(isinstance(each, list) for each in wanted):
        raise AssertionError("no array of arrays is drawn")
    assert found == wanted


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        (r"h\151\\", WrittenType("binary", "bytea", False), "X'68695C'"),
        ("1.50", WrittenType("decimal(38,18)", "numeric", False), "1.50BD"),
        ("1.50", WrittenType("decimal(3,1)", "numeric", True), ""),
        ("x", WrittenType("string", "text", False), ""),
        ("{abcd,e}", WrittenType("array<varchar(2)>", "varchar", True), "array('ab', 'e')"),
        ("{e}", WrittenType("array<char(2)>", "char", True), "array('e ')"),
        ("{}", WrittenType("array<int>", "int4", False), "CAST(CAST(array() AS array<int>) AS "),
    ],
)
def test_typed_texts_are_literals_of_spark(text: str, kind: WrittenType, wanted: str) -> None:
    found = typed_literal(text, kind)
    assert found.startswith(wanted)
    assert bool(found) == bool(wanted)


@pytest.mark.parametrize(
    ("text", "kind", "state"),
    [
        ("9" * 39, WrittenType("decimal(38,18)", "numeric", False), "22003"),
        ("{{1}}", WrittenType("array<array<int>>", "int4", False), "0A000"),
        ("{1,x}", WrittenType("array<int>", "int4", False), "22P02"),
    ],
)
def test_texts_that_are_no_values_are_refused(text: str, kind: WrittenType, state: str) -> None:
    with pytest.raises(InvalidClientData) as caught:
        typed_literal(text, kind)
    assert caught.value.sqlstate == state
    assert re.search("invalid|more than|one-dimension", str(caught.value))
