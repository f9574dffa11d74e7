"""Each node of a statement's tree stands where it says, in whatever text the statement came."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from actors.engine.sql.expressions import (
    ExpressionNode,
    UnknownExpression,
    read_whole_expression,
)
from actors.engine.sql.grammar import parse_statement, parse_statements
from actors.engine.sql.reader import StatementReader
from actors.engine.sql.statements import TextSpan, parts_in
from actors.engine.sql.tokens import LexedText, SqlDialect, lex_text
from suite_lanes import examples  # type: ignore[import-not-found]

blanks = st.sampled_from([" ", "  ", "\n", " /* it's; ( */ ", " -- a\n"])
columns = st.sampled_from(["a", "t.b", "c1"])
literals = st.sampled_from(["1", "2.5", "'it''s; ('", "NULL", "true", "DATE '2024-01-02'"])
# Of these the tree of an expression knows nothing.
others = st.sampled_from(["f(a, ')')", "CASE WHEN a THEN 1 ELSE 2 END", "a || 'x'", "a[1]"])


def joined(*parts: SearchStrategy[str] | str) -> SearchStrategy[str]:
    """Parts with a drawn blank between them."""
    drawn = [part if isinstance(part, SearchStrategy) else st.just(part) for part in parts]
    pairs = [each for part in drawn for each in (part, blanks)][:-1]
    return st.tuples(*pairs).map("".join)


def around(inner: SearchStrategy[str]) -> SearchStrategy[str]:
    signs = st.sampled_from(["+", "-", "*", "=", "<>", "<=", "AND"])
    return st.one_of(
        joined("(", inner, ")"),
        joined(inner, signs, inner),
        joined("-", inner),
        joined("NOT", inner),
        joined(inner, "IS", "NOT", "NULL"),
        joined(inner, "IN", "(", inner, ",", inner, ")"),
        joined(inner, "BETWEEN", inner, "AND", inner),
        joined("CAST", "(", inner, "AS", "bigint", ")"),
    )


expressions = st.recursive(st.one_of(columns, literals, others), around, max_leaves=4)
plain_queries = st.one_of(
    joined("SELECT", expressions, "FROM", "t"),
    joined("SELECT", "*", "FROM", "t", "WHERE", expressions, "ORDER", "BY", "a"),
)
queries = st.one_of(
    plain_queries, joined("SELECT", "*", "FROM", "t", "TIMESTAMP", "AS", "OF", "5", "AS", "x")
)
rows = joined("(", expressions, ",", expressions, ")")
merges = joined(
    "MERGE INTO t USING (SELECT * FROM (VALUES", rows, ",", rows, ") AS v(x, y)) AS s ON",
    expressions, "WHEN MATCHED AND", expressions, "THEN UPDATE SET a =", expressions,
    "WHEN NOT MATCHED THEN INSERT (a) VALUES (", expressions, ")",
)  # fmt: skip
statements = st.one_of(
    queries,
    joined("INSERT INTO t VALUES", rows, ",", rows),
    joined("INSERT INTO t", queries),
    joined("UPDATE t SET a =", expressions, ", b =", expressions, "WHERE", expressions),
    joined("DELETE FROM t WHERE", expressions),
    joined("CREATE MATERIALIZED VIEW v AS", plain_queries),
    merges,
)


def words_of(lexed: LexedText) -> list[tuple[str, str]]:
    return [(token.kind, token.text) for token in lexed.tokens]


def nodes_in(node: ExpressionNode) -> Iterator[ExpressionNode]:
    yield node
    for each in node.operands:
        yield from nodes_in(each)


def unplaced(node: ExpressionNode) -> ExpressionNode:
    return msgspec.structs.replace(
        node, first=0, last=0, operands=tuple(map(unplaced, node.operands))
    )


@given(statements, st.sampled_from(SqlDialect))
@settings(max_examples=examples(200))
def test_the_place_of_a_part_is_its_text(text: str, dialect: SqlDialect) -> None:
    spans = list(parts_in(parse_statement(text, dialect), TextSpan))
    assert spans
    for span in spans:
        assert span.text == text[span.start : span.end]
        assert span.place_of(0) == span.start
        alone, again = span.as_text(), lex_text(span.text, dialect)
        assert alone.text == span.text
        assert alone.tokens == again.tokens
        assert alone.partners == again.partners


@given(st.lists(statements, min_size=1, max_size=4), st.sampled_from(SqlDialect))
@settings(max_examples=examples(100))
def test_a_statement_of_a_script_is_the_one_of_its_text(
    texts: list[str], dialect: SqlDialect
) -> None:
    script = " ;\n; ".join(texts) + ";"
    found = parse_statements(script, dialect)
    assert len(found) == len(texts)
    at = 0
    for text, parsed in zip(texts, found, strict=True):
        at = script.index(text, at)
        statement, alone = parsed.statement(), parse_statement(text, dialect)
        assert type(statement) is type(alone)
        assert statement.position == alone.position + at
        for one, other in zip(
            *(parts_in(each, TextSpan) for each in (statement, alone)), strict=True
        ):
            assert (one.start, one.end, one.text) == (other.start + at, other.end + at, other.text)
        at += len(text)


@given(expressions, st.sampled_from(SqlDialect))
@settings(max_examples=examples(300))
def test_the_place_of_a_node_is_its_expression(text: str, dialect: SqlDialect) -> None:
    """The text at a node's place, read alone, is the same tree."""
    lexed = lex_text(text, dialect)
    try:
        tree = read_whole_expression(StatementReader(lexed))
    except UnknownExpression:
        return
    assert (tree.first, tree.last) == (0, len(lexed.tokens))
    for node in nodes_in(tree):
        part = lexed.part(node.first, node.last)
        assert unplaced(read_whole_expression(StatementReader(part))) == unplaced(node)
        assert words_of(part) == words_of(lexed)[node.first : node.last]
