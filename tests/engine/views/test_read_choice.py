"""Which way a read goes, and why."""

from __future__ import annotations

import pytest

from actors.engine.views.read_choice import (
    NOT_PLAIN,
    KnownIndex,
    ReadChoice,
    choose_query,
    choose_ways,
    explain_read,
    explain_spark,
)
from actors.model.plan.schema import TableColumn, TableSchema

COLUMNS = (TableColumn("id", "bigint"), TableColumn("kind", "int"), TableColumn("name", "string"))
FLOATS = TableSchema((TableColumn("x", "double"), TableColumn("n", "int")), ("x",))
TABLES = {"goods": TableSchema(COLUMNS, ("id",)), "bag": TableSchema(COLUMNS), "floats": FLOATS}
BY_KIND = KnownIndex("u7", "by_kind", ("kind",))
BY_NAME = KnownIndex("u8", "by_name", ("name", "kind"))
LAID_OVER = "the open transaction has changed "


@pytest.mark.parametrize(
    ("primary", "fixed", "by_key", "ways"),
    [
        (("id",), {"id"}, True, ["memory (id)", "shard"]),
        (("id",), {"id"}, False, ["memory (id)", "u7", "u8", "shard"]),
        (("id", "kind"), {"id"}, True, ["shard"]),
        (("id",), {"kind"}, True, ["u7 (kind)", "shard"]),
        (("id",), {"kind", "id"}, True, ["memory (id)", "u7 (kind)", "shard"]),
        ((), {"kind", "name"}, True, ["u7 (kind)", "u8 (name, kind)", "shard"]),
        ((), {"kind"}, False, ["u7 (kind)", "u7", "u8", "shard"]),
        ((), set(), False, ["u7", "u8", "shard"]),
        ((), {"name"}, True, ["shard"]),
    ],
)
def test_the_cheapest_way_is_first(
    primary: tuple[str, ...], fixed: set[str], by_key: bool, ways: list[str]
) -> None:
    found = choose_ways(primary, [BY_KIND, BY_NAME], fixed, by_key=by_key)
    shown = [
        (each.index.id if each.index else each.way)
        + (f" ({', '.join(each.key)})" if each.key else "")
        for each in found
    ]
    assert shown == ways
    assert all((each.way == "index") == (each.index is not None) for each in found)


@pytest.mark.parametrize(
    ("sql", "conf", "changed", "reason"),
    [
        ("SELECT name FROM goods WHERE id = 1", [], [], ""),
        ("SELECT name FROM goods WHERE id = 1", ["spark.sql.shuffle.partitions"], ["bag"], ""),
        ("SELECT name FROM goods WHERE id = 1 AND kind > 2", [], ["goods"], ""),
        ("SELECT name FROM goods WHERE id > 1", [], ["goods"], f"{LAID_OVER}goods"),
        ("SELECT name FROM goods WHERE id = 1 LIMIT 1", [], ["goods"], f"{LAID_OVER}goods"),
        ("SELECT name FROM bag WHERE id = 1", [], ["bag"], f"{LAID_OVER}bag"),
        ("SELECT n FROM floats WHERE x = 1.5D", [], ["floats"], f"{LAID_OVER}floats"),
        ("SELECT n FROM floats WHERE x = 1.5D", [], [], ""),
        ("SELECT count(*) FROM goods", [], [], NOT_PLAIN),
        (
            "SELECT name FROM goods",
            ["spark.sql.caseSensitive"],
            [],
            "the setting spark.sql.caseSensitive may change the meaning of the query",
        ),
    ],
)
def test_a_query_is_a_plain_read_or_runs_by_spark(
    sql: str, conf: list[str], changed: list[str], reason: str
) -> None:
    found = choose_query(sql, TABLES, conf, changed)
    assert (found.read is None, found.reason) == (bool(reason), reason)


def test_a_choice_is_explained() -> None:
    read = choose_query("SELECT name FROM goods WHERE id = 1 ORDER BY kind LIMIT 2", TABLES).read
    assert read is not None
    for way, line in [
        (ReadChoice("memory", ("id",)), "  from memory: by PRIMARY KEY (id)"),
        (ReadChoice("index", ("kind",), BY_KIND), "  from index: by_kind (kind)"),
        (
            ReadChoice("index", (), BY_KIND),
            "  from index: by_kind, full scan: its rows are already consolidated",
        ),
        (ReadChoice("shard"), "  from shard: no index on these columns is ready"),
    ]:
        assert explain_read(read, way) == [
            "Read of goods, without Spark",
            line,
            "  columns: name",
            "  filter: id = 1",
            "  order: kind; limit: 2",
        ]
    assert explain_spark([], NOT_PLAIN) == [
        "Run by Spark, over no table",
        f"  reason: {NOT_PLAIN}",
    ]
