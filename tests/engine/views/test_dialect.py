"""Reading Spark's text: what the parser would rewrite comes through as it was written."""

from __future__ import annotations

import re

import pytest
import sqlglot
from sqlglot.dialects.spark import Spark

from actors.testing.parsed.dialect import VERBATIM, VerbatimSpark
from actors.testing.parsed.grouping import normalize_aggregates
from actors.testing.parsed.trees import column_id, text, tree_of


def test_functions_that_pass_verbatim_are_ones_that_the_parser_knows() -> None:
    """Others need no exception, and a misspelt name would be none."""
    assert sorted(VERBATIM - set(Spark.Parser.FUNCTIONS)) == []


@pytest.mark.parametrize(
    "written",
    [
        "ARRAY_SIZE(l)",
        "SIZE(l)",
        "TO_DATE(s, 'yyyy-MM-dd')",
        "TO_TIMESTAMP(s, 'yyyy')",
        "DATE_FORMAT(at, 'y-MM')",
        "DATE_SUB(d, n + 1)",
        "SPACE(n)",
        "LOG10(x)",
        "NAMED_STRUCT('a', x)",
        "MAP('a', x)",
    ],
)
def test_a_text_comes_back_as_written(written: str) -> None:
    once = text(tree_of(written))
    assert once == written
    assert text(tree_of(once)) == written


def test_fields_of_a_struct_keep_the_names_of_their_columns() -> None:
    tree = sqlglot.parse_one("SELECT struct(t.a, b + 1, p.x) AS s FROM t", dialect=VerbatimSpark)
    assert text(tree.expressions[0].this) == "STRUCT(t.a AS a, b + 1 AS col2, p.x AS x)"


@pytest.mark.parametrize(
    ("literal", "written"),
    [
        ("-128Y", "CAST(-128 AS TINYINT)"),
        ("-9223372036854775808L", "CAST(-9223372036854775808 AS BIGINT)"),
        ("5 - 3S", "5 - CAST(3 AS SMALLINT)"),
        ("-cast('7' as int)", "-CAST('7' AS INT)"),
    ],
)
def test_the_sign_of_a_typed_literal_goes_inside_its_cast(literal: str, written: str) -> None:
    tree = sqlglot.parse_one(f"SELECT {literal} AS x FROM t", dialect=VerbatimSpark)
    assert text(normalize_aggregates(tree).expressions[0].this) == written


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it''s'", "it's"),
        ('"a""b"', 'a"b'),
        ("'it\\'s'", "it's"),
        ('"it\'s"', "it's"),
        ("''", ""),
    ],
)
def test_a_doubled_quote_is_one(literal: str, value: str) -> None:
    once = tree_of(literal)
    assert once.this == value
    assert tree_of(text(once)).this == value


@pytest.mark.parametrize("name", ["größe", "日付", "a b", "a😀b"])
def test_ids_of_columns_need_no_quotes(name: str) -> None:
    made = column_id("i0", name, ("x", name))
    assert re.fullmatch(r"[A-Za-z0-9_]+", made), made
    assert made != column_id("i0", name, (name, "x")), "names that differ in signs alone keep apart"
