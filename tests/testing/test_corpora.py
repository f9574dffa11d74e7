"""The public corpora: that their texts are there, their rows sound, and their changes possible."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage
from tests.kit.corpora import (
    CORPORA,
    CorpusQuery,
    asked_literals,
    make_tables,
    read_queries,
    sharpen_values,
    tables_of,
)
from tests.kit.query_conformance import TIMES, QueryJudgement, divide_rows, summary, write_page

FOLDER = Path(__file__).parent.parent / "corpora"
COUNTS = {"tpch": 22, "nexmark": 24, "tpcds": 103}
KEYED = TableSchema(
    (TableColumn("k", "int", False), TableColumn("v", "string"), TableColumn("d", "decimal(7,2)")),
    ("k",),
)


@pytest.mark.parametrize("corpus", CORPORA)
def test_every_text_says_its_shape_and_reads_tables(corpus: str) -> None:
    queries = read_queries(FOLDER, corpus)
    assert len(queries) == COUNTS[corpus]
    for query in queries:
        assert query.shape.endswith("."), query.name
        assert tables_of(query), query.name
        assert not query.sql.endswith(";"), query.name


def test_the_queries_of_tpcds_are_all_there() -> None:
    numbers = Counter(int(re.sub(r"\D", "", query.name)) for query in read_queries(FOLDER, "tpcds"))
    assert sorted(numbers) == list(range(1, 100))
    assert [number for number, count in numbers.items() if count == 2] == [14, 23, 24, 39]


def test_a_text_without_its_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tpch").mkdir()
    (tmp_path / "tpch" / "q1.sql").write_text("select 1\n")
    with pytest.raises(InvalidUsage, match="the first line"):
        read_queries(tmp_path, "tpch")


def test_literals_that_texts_ask_for() -> None:
    texts = ["where a = 1 and x.b in ('p', 'q') and c between 0.5 and 2", "or (b = 'r' or a = -3)"]
    assert asked_literals(texts) == {
        "a": ["1", "-3"],
        "b": ["'p'", "'q'", "'r'"],
        "c": ["0.5", "2"],
    }


def test_every_other_value_is_one_that_the_texts_ask_for() -> None:
    rows = pa.table(
        {
            "k": pa.array(range(100), pa.int32()),
            "v": ["own"] * 100,
            "d": pa.array([Decimal("1.00")] * 100, pa.decimal128(7, 2)),
        }
    )
    made = sharpen_values(rows, KEYED, {"k": ["5"], "v": ["'a'", "'b'"], "d": ["9.5"]}, 1)
    assert made["k"].to_pylist() == list(range(100))
    assert Counter(made["v"].to_pylist())["own"] == 50
    assert set(made["v"].to_pylist()) == {"own", "a", "b"}
    assert Counter(made["d"].to_pylist())[Decimal("9.50")] == 50
    assert made.equals(sharpen_values(rows, KEYED, {"v": ["'a'", "'b'"], "d": ["9.5"]}, 1))


def test_rows_of_nexmark_are_the_same_again(tmp_path: Path) -> None:
    made = make_tables("nexmark", 0.0001, 3, tmp_path)
    assert {name: rows.num_rows for name, rows in made.items()} == {
        "person": 20,
        "auction": 60,
        "bid": 920,
    }
    for name, rows in made.items():
        assert rows.equals(make_tables("nexmark", 0.0001, 3, tmp_path)[name])


def test_returns_of_a_share_of_tpcds_have_their_sales(tmp_path: Path) -> None:
    made = make_tables("tpcds", 0.0005, 3, tmp_path)
    for prefix, sales, returns, number in (
        ("s", "store_sales", "store_returns", "ticket_number"),
        ("c", "catalog_sales", "catalog_returns", "order_number"),
        ("w", "web_sales", "web_returns", "order_number"),
    ):
        sold = set(made[sales][f"{prefix}s_{number}"].to_pylist())
        returned = set(made[returns][f"{prefix}r_{number}"].to_pylist())
        assert returned
        assert returned <= sold
    days = set(made["date_dim"]["d_date_sk"].to_pylist())
    assert set(made["store_sales"]["ss_sold_date_sk"].to_pylist()) - {None} <= days


@pytest.mark.parametrize("key", [("k",), ()])
def test_changes_take_away_only_what_is_there(key: tuple[str, ...]) -> None:
    schema = TableSchema(KEYED.columns, key)
    rows = pa.table(
        {
            "k": pa.array(range(60), pa.int32()),
            "v": [f"v{n % 7}" for n in range(60)],
            "d": pa.array([Decimal(n) for n in range(60)], pa.decimal128(7, 2)),
        }
    )
    base, updates = divide_rows({"t": schema}, {"t": rows}, 40, 1)
    assert 0 < base["t"].num_rows < 60
    kept = set(base["t"]["k"].to_pylist())
    held: Counter[tuple[Any, ...]] = Counter()
    for time in TIMES:
        at = [update for update in updates if update.time == time]
        assert len(at) >= (40 if time != TIMES[0] else 1)
        for update in at:
            held[update.row] += update.diff
            assert held[update.row] >= 0
        keys = Counter(row[0] for row, weight in held.items() if weight)
        if key:
            assert max(keys.values()) == 1
            assert not kept & keys.keys()
    assert divide_rows({"t": schema}, {"t": rows}, 40, 1) == (base, updates)


def test_the_page_tells_each_query() -> None:
    judged = [
        QueryJudgement("tpch", "q01", "Sums.", "exact", "incremental", reads=[4, 40]),
        QueryJudgement("tpch", "q03", "Ten.", "exact", "opaque", "LIMIT | OFFSET", reads=[-1, -1]),
        QueryJudgement("nexmark", "q00", "All.", "WRONG", "keyed", detail="at 10"),
    ]
    page = write_page(judged, "Made by hand.")
    assert "| TPC-H | 2 | 2 | 0 | 0 | 1 | 0 | 1 |" in page
    assert "| q01 | Sums. | exact | incremental | 4, 40 |  |" in page
    assert "| q03 | Ten. | exact | opaque | all, all | LIMIT \\| OFFSET |" in page
    assert "| q00 | All. | WRONG | keyed | – | at 10 |" in page
    assert summary(judged) == (
        "3 queries: 2 exact, 1 wrong, 0 refused; 1 incremental, 1 keyed, 1 opaque"
    )


def test_tables_are_found_by_whole_words() -> None:
    query = CorpusQuery("tpcds", "x", "", "select * from store_sales join item on true")
    assert sorted(tables_of(query)) == ["item", "store_sales"]
