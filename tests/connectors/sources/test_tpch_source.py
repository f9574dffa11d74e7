"""TPC-H as a source: the benchmark's own data, then refresh functions; exact wherever it stops."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter as Bag
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_lab import Contents, drive  # type: ignore[import-not-found]

from actors.connectors.sources.generators import GeneratorSource
from actors.connectors.sources.kinds import decode, encode, make_source
from actors.connectors.sources.random_draws import numbered
from actors.connectors.sources.source import ConnectorContext, SourceUnreachable
from actors.connectors.sources.tpch import SCHEMAS, NewOrders, TpchConfig, TpchSeries, order_keys
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SCALE = 0.001
ORDERS = 1_500


def source(tmp_path: Path, **more: Any) -> GeneratorSource:
    config = TpchConfig(**{"scale": SCALE, "orders_per_refresh": 100} | more)
    made = make_source(config, ConnectorContext(SystemClock(), Settings(), tmp_path / "of" / "it"))
    assert isinstance(made, GeneratorSource)
    return made


async def run(tmp_path: Path, contents: Contents, *names: str, **more: Any) -> GeneratorSource:
    marks = more.pop("marks", None)
    made = source(tmp_path, **more)
    wanted = dict.fromkeys(names, ()) or None
    await drive(made, await made.describe(wanted), contents, marks=marks)
    return made


def rows(contents: Contents, name: str) -> list[dict[str, Any]]:
    columns = contents.columns[name]
    return [dict(zip(columns, row, strict=True)) for row in contents.bags[name].elements()]


async def test_it_begins_with_the_benchmarks_own_data(tmp_path: Path) -> None:
    contents = Contents()
    await run(tmp_path, contents, up_to=0)
    assert len(contents.marks) == 1
    assert all(given.snapshot for given in contents.given)
    assert {name: bag.total() for name, bag in contents.bags.items()} == {
        "customer": 150,
        "lineitem": 6_005,
        "nation": 25,
        "orders": ORDERS,
        "part": 200,
        "partsupp": 800,
        "region": 5,
        "supplier": 10,
    }
    for name, schema in SCHEMAS.items():
        shape = next(g.updates.schema for g in contents.given if g.export == name)
        assert shape.types[:-1] == schema.arrow().types
        if schema.key:
            keys = {tuple(row[column] for column in schema.key) for row in rows(contents, name)}
            assert len(keys) == contents.bags[name].total()
    regions = {row["r_name"] for row in rows(contents, "region")}
    assert regions == {"AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST"}
    assert os.listdir(tmp_path / "of" / "it") == []  # what was made for it is gone


def cents_of(money: str) -> int:
    return int(Decimal(money) * 100)


def check_orders(contents: Contents, count: int) -> set[int]:
    """Returns the keys of the orders, which are right."""
    orders = {row["o_orderkey"]: row for row in rows(contents, "orders")}
    assert len(orders) == contents.bags["orders"].total() == count
    lines: dict[int, list[dict[str, Any]]] = {}
    for line in rows(contents, "lineitem"):
        lines.setdefault(line["l_orderkey"], []).append(line)
    assert lines.keys() == orders.keys()
    for key, of in lines.items():
        assert sorted(line["l_linenumber"] for line in of) == list(range(1, len(of) + 1))
        cents = sum(
            cents_of(line["l_extendedprice"])
            * (100 - cents_of(line["l_discount"]))
            // 100
            * (100 + cents_of(line["l_tax"]))
            // 100
            for line in of
        )
        assert cents == cents_of(orders[key]["o_totalprice"])
        status = {line["l_linestatus"] for line in of}
        assert orders[key]["o_orderstatus"] == (status.pop() if len(status) == 1 else "P")
        ordered = orders[key]["o_orderdate"]
        assert all(ordered < line["l_shipdate"] < line["l_receiptdate"] for line in of)
    return set(orders)


async def test_refreshed_tables_hold_together(tmp_path: Path) -> None:
    """Through the time when all first orders are gone, and on to where keys are used again."""
    contents = Contents()
    keys: dict[int, set[int]] = {}
    for up_to, count in ((0, 1_500), (1, 2_000), (2, 1_500), (7, 2_000), (40, 1_500)):
        await run(tmp_path, contents, "orders", "lineitem", orders_per_refresh=500, up_to=up_to)
        keys[up_to] = check_orders(contents, count)
    assert keys[0] < keys[1]
    assert keys[7].isdisjoint(keys[0])
    assert keys[40] & keys[1]


@pytest.mark.long
async def test_stopped_anywhere_it_goes_on_to_the_same_contents(tmp_path: Path) -> None:
    whole, parts = Contents(), Contents()
    more = {"orders_per_refresh": 700, "up_to": 7, "rate": 400.0, "every_ms": 1}
    await run(tmp_path, whole, "orders", "lineitem", "nation", **more)
    for marks in (1, 3):
        await run(tmp_path, parts, "orders", "lineitem", "nation", marks=marks, **more)
    await run(tmp_path, parts, "orders", "lineitem", "nation", **more)
    assert parts.bags == whole.bags
    assert parts.position == whole.position


async def test_tables_that_come_later_are_filled(tmp_path: Path) -> None:
    contents, whole = Contents(), Contents()
    await run(tmp_path, contents, "orders", up_to=5, orders_per_refresh=500)
    names = ("orders", "lineitem", "region")
    await run(tmp_path, contents, *names, up_to=6, orders_per_refresh=500)
    await run(tmp_path, whole, *names, up_to=6, orders_per_refresh=500)
    assert contents.bags == whole.bags
    check_orders(contents, ORDERS)


def test_what_is_there_is_the_sum_of_all_changes_of_new_orders(tmp_path: Path) -> None:
    """From where no file is needed any more."""
    config = TpchConfig(scale=SCALE, orders_per_refresh=300)
    series = TpchSeries(config, SystemClock(), tmp_path)
    names = {"orders", "lineitem"}

    def bag(pieces: Any) -> Bag[tuple[Any, ...]]:
        found: Bag[tuple[Any, ...]] = Bag()
        for piece in pieces:
            for *row, diff in zip(*(c.to_pylist() for c in piece.updates.columns), strict=True):
                found[(piece.export, *row)] += diff
        return Bag({row: count for row, count in found.items() if count})

    before, after = bag(series.contents(10, names)), bag(series.contents(17, names))
    for row, diff in bag(series.changes(10, 17, names)).items():
        before[row] += diff
    assert Bag({row: count for row, count in before.items() if count}) == after


@given(st.integers(1, 40), st.integers(0, 200))
def test_keys_of_orders_that_are_there_together_differ(orders: int, start: int) -> None:
    keys = order_keys(numbered(start, start + 2 * orders), orders)
    assert len(set(keys.tolist())) == 2 * orders
    first = order_keys(numbered(0, orders), orders).tolist()
    assert all(key & 0b11000 == 0 for key in first)


def test_new_orders_have_the_benchmarks_distributions() -> None:
    made = NewOrders(3, 1.0, 1_500_000).rows(1_500_000, 1_520_000)
    orders, lines = made["orders"], made["lineitem"]
    assert lines.num_rows / orders.num_rows == pytest.approx(4, rel=0.02)
    customers = orders["o_custkey"].to_numpy()
    assert (customers % 3 != 0).all()
    assert 0 < customers.min() < 1_000
    assert 149_000 < customers.max() <= 150_000
    quantity = lines["l_quantity"].cast("double").to_numpy()
    assert (quantity.min(), quantity.max()) == (1, 50)
    flags = Bag(lines["l_returnflag"].to_pylist())
    assert flags["N"] / lines.num_rows == pytest.approx(0.506, abs=0.02)
    assert flags["R"] / flags["A"] == pytest.approx(1, rel=0.05)
    assert np.unique(lines["l_suppkey"].to_numpy()).size > 9_900
    assert max(map(len, lines["l_comment"].to_pylist())) <= 44
    again = NewOrders(3, 1.0, 1_500_000).rows(1_507_000, 1_507_100)
    assert again["orders"].equals(orders.slice(7_000, 100))


async def test_without_the_tool_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InvalidUsage, match=r"penstock-views\[tpch\]"):
        await run(tmp_path, Contents())


async def test_a_tool_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "tpchgen-cli"
    tool.write_text("#!/bin/sh\necho no space >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SourceUnreachable, match="no space"):
        await run(tmp_path, Contents())


def test_the_rows_are_those_of_the_files(tmp_path: Path) -> None:
    """No file is read in part when orders are told by their numbers."""
    from actors.connectors.sources.tpch import _Table

    path = tmp_path / "orders.parquet"
    made = NewOrders(1, SCALE, ORDERS).rows(0, ORDERS)["orders"]
    pq.write_table(made, path, row_group_size=100)
    table = _Table(path, "orders")
    keys = made["o_orderkey"].to_pylist()
    for start, stop in ((0, 1), (50, 250), (99, 100), (1_400, 1_500), (0, 1_500)):
        found = table.between("o_orderkey", keys[start], keys[stop - 1])
        assert found.equals(made.slice(start, stop - start))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"scale": 0.0}, "invalid scale 0"),
        ({"orders_per_refresh": 0}, "invalid orders_per_refresh 0"),
        ({"orders_per_refresh": 2_000}, "there are only 1500 orders"),
    ],
)
def test_what_is_out_of_range_is_refused(tmp_path: Path, more: Any, said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        source(tmp_path, **more)
    config = TpchConfig(scale=0.5)
    assert decode(encode(config)) == config
