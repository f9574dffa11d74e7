"""Names of objects and columns: all that Spark can quote."""

from __future__ import annotations

import pytest

from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.relations import NAME_CHARACTERS_MAX, check_name
from actors.runtime.errors import InvalidUsage
from actors.testing.parsed.parse import read_tables


@pytest.mark.parametrize(
    "name", ["orders", "Branch Offices", "select", "a.b", "1st", "x`y", "t;--x", "日本", '"q"']
)
def test_any_visible_name_is_taken(name: str) -> None:
    assert check_name("table", name) == name


@pytest.mark.parametrize(
    "name", ["", " ", " a", "a ", "a\nb", "a\0", "a\u200bb", "__a", "penstock.steps", "x" * 129]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidUsage, match="table"):
        check_name("table", name)
    assert len("x" * 128) == NAME_CHARACTERS_MAX


@pytest.mark.parametrize("name", ["Branch Offices", "a.b", "x`y", "select", "t;--x"])
def test_a_text_that_does_not_parse_still_reads_a_table_of_any_name(name: str) -> None:
    tables = {
        name: TableSchema((TableColumn("a", "int"),)),
        "other": TableSchema((TableColumn("a", "int"),)),
    }
    quoted = name.replace("`", "``")
    tree, _, sources = read_tables(f"FROM `{quoted}` |> NONSENSE ((", tables)
    assert tree is None
    assert sources == (name,)
