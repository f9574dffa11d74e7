"""Which types find one another by key: as the arrangements do it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from actors.durable.arrangement.key_conversion import conform
from actors.engine.views.operators import is_key_comparable
from actors.model.plan.schema import arrow_type

KINDS = [
    "tinyint",
    "int",
    "bigint",
    "float",
    "double",
    "decimal(6,2)",
    "decimal(20,0)",
    "decimal(38,20)",
    "string",
    "varchar(3)",
    "binary",
    "boolean",
    "date",
    "timestamp",
    "timestamp_ntz",
]


@pytest.mark.parametrize("given", KINDS)
def test_types_are_found_by_key_where_the_arrangements_narrow(given: str) -> None:
    """An arrangement that cannot narrow reads everything: the label must say so."""
    values = pa.chunked_array([pa.array([None], arrow_type(given))])
    for held in KINDS:
        narrows = conform(values, arrow_type(held)) is not None
        assert is_key_comparable(given, held) == narrows, (given, held)


def test_names_of_one_type_are_one() -> None:
    assert is_key_comparable("LONG", "bigint")
    assert is_key_comparable("numeric(6,2)", "decimal(6,2)")
    assert is_key_comparable("struct<a:int>", "struct<a:int>")
    assert not is_key_comparable("struct<a:int>", "struct<a:bigint>")
    assert is_key_comparable("void", "string")
