"""The rendering of plans without Spark: columns, hints, and what is refused."""

from __future__ import annotations

import pytest

from actors.errors import InvalidUsage
from actors.plan.delta import (
    Accumulate,
    Input,
    Measure,
    Node,
    Pair,
    Reduce,
    Select,
    Where,
    columns_of,
)
from actors.plan.relational import Named
from actors.plan.schema import Column, Schema
from actors.spark.translate import Relation, Translator, leaves, quote, times_diff

SCHEMA = Schema((Column("k", "bigint"), Column("a b", "char(3)")))
SOURCE = Input("d0", ("k", "a b"))
OTHER = Select(Input("s1", ("k",)), (Named("j", "k"),))
PAIR = Pair(SOURCE, OTHER, (("k", "j"),))


def translator(*, small: bool, size: int = 10) -> Translator:
    relations = {"d0": Relation(SCHEMA, "__d0", 10), "s1": Relation(SCHEMA, "__s1", size)}
    return Translator(relations, lambda node: {}, interval=(1, 2), small=small)


def test_columns_and_leaves() -> None:
    assert columns_of(PAIR) == ("k", "a b", "j")
    assert list(leaves(PAIR)) == ["d0", "s1"]
    reduce = Reduce(PAIR, (Named("g", "j"),), (Measure("m", "sum", "k", "bigint"),))
    assert columns_of(reduce) == ("g", "n", "m")
    total = Accumulate(reduce, Input("h", ("g", "n", "m")), ("g",), ("m",))
    assert columns_of(total) == ("g", "n", "m")
    assert list(leaves(total)) == ["d0", "s1", "h"]


def test_small_steps_have_no_exchange_and_large_ones_broadcast_what_is_small() -> None:
    assert "COALESCE(1), SHUFFLE_HASH(__r)" in translator(small=True).text(PAIR)
    large = translator(small=False, size=1 << 30).text(PAIR)
    assert "BROADCAST(__l)" in large
    assert "COALESCE" not in large


def test_an_input_without_rows_is_an_empty_select() -> None:
    empty = Translator({"d0": Relation(SCHEMA)}, lambda node: {}, interval=(1, 2), small=True)
    text = empty.text(SOURCE)
    assert "CAST(NULL AS string) AS `a b`" in text
    assert "WHERE false" in text


def test_a_predicate_that_is_one_name_is_no_alias() -> None:
    assert ") AS __t WHERE (\nflag\n)" in translator(small=True).text(Where(SOURCE, "flag"))


@pytest.mark.parametrize(
    "node", [Input("d0", ("nope",)), Reduce(SOURCE, (), (Measure("m", "max", "k", "bigint"),))]
)
def test_what_cannot_be_is_refused_by_name(node: Node) -> None:
    with pytest.raises(InvalidUsage, match=r"nope|max"):
        translator(small=True).text(node)


def test_quoting_and_products() -> None:
    assert quote("a`b") == "`a``b`"
    assert times_diff("v", None) == "v * __diff"
    assert "decimal(19,0)" in times_diff("v", "decimal(38,2)")
    assert "% CAST(1 AS decimal(1,0))" in times_diff("v", "decimal(38,18)")
