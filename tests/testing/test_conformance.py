"""Queries judged on the in-memory engine: right ones are exact, and lies are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from actors.model.plan.delta import DeltaPlan, FilterRows
from actors.model.plan.jobs import PreparePlan
from actors.runtime.kernel import ActorSystem
from actors.runtime.settings import Settings
from actors.testing.checking import CheckPlace
from actors.testing.engine import InMemoryExecutor
from tests.kit.corpora import CorpusQuery, make_tables
from tests.kit.query_conformance import (
    WHOLE,
    ConformanceCheck,
    QueryJudgement,
    compile_queries,
    judge_corpus,
)

SALES = CorpusQuery(
    "nexmark",
    "sales",
    "A join.",
    "select p.state, a.category, count(*) as n from auction as a join person as p "
    "on p.id = a.seller group by p.state, a.category",
)
BIDS = CorpusQuery(
    "nexmark", "bids", "A filter.", "select auction, price from bid where auction > 1010"
)
REFUSED = CorpusQuery("nexmark", "drawn", "Volatile.", "select auction, rand() as r from bid")


class Liar(InMemoryExecutor):
    """Leaves out a few auctions."""

    def plan_of(self, job: PreparePlan) -> DeltaPlan:
        stratum = job.plan.strata[0]
        names = job.plan.output.names
        if "auction" not in names:
            return job.plan
        node = FilterRows(stratum.node, "auction < 1015")
        changed = msgspec.structs.replace(stratum, node=node)
        return msgspec.structs.replace(job.plan, strata=(changed,))


async def judged(
    tmp_path: Path,
    engine: Callable[[], InMemoryExecutor],
    *queries: CorpusQuery,
    brief: bool = False,
) -> dict[str, QueryJudgement]:
    with anyio.fail_after(100):
        async with ActorSystem(seed=1) as system:
            executor = system.spawn(engine, "engine")
            place = CheckPlace(system, executor, Settings(), tmp_path)
            tables = make_tables("nexmark", 0.00005, 1, tmp_path)
            found = await ConformanceCheck("nexmark", tables, place, 30, 1).judge(
                queries, brief=brief
            )
            return {each.query: each for each in found}


@pytest.mark.parametrize("brief", [False, True])
async def test_right_views_are_exact(tmp_path: Path, brief: bool) -> None:
    found = await judged(tmp_path, InMemoryExecutor, SALES, BIDS, REFUSED, brief=brief)
    assert [found[name].verdict for name in ("sales", "bids", "drawn")] == [
        "exact", "exact", "refused",
    ]  # fmt: skip
    assert found["sales"].mode == "incremental"
    assert found["sales"].reads[0] > 0
    assert found["bids"].reads in ([0], [WHOLE])
    assert found["drawn"].reads == []
    assert found["bids"].line() == "exact  incremental  nexmark/bids"


async def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    found = await judged(tmp_path, Liar, SALES, BIDS)
    assert found["sales"].verdict == "exact"
    assert found["bids"].verdict == "WRONG"
    assert "too few" in found["bids"].detail


async def test_rows_read_are_told_at_each_scale(tmp_path: Path) -> None:
    shown: list[str] = []
    with anyio.fail_after(100):
        async with ActorSystem(seed=1) as system:
            executor = system.spawn(InMemoryExecutor, "engine")
            place = CheckPlace(system, executor, Settings(), tmp_path)
            found = await judge_corpus(
                [SALES, REFUSED],
                place,
                [0.00002, 0.00005],
                20,
                1,
                lambda each: shown.append(each.line()),
            )
            compiled = await compile_queries([SALES, REFUSED], place)
    assert [len(each.reads) for each in found] == [2, 0]
    assert [each.verdict for each in compiled] == ["compiled", "refused"]
    assert shown[0] == "exact  incremental  nexmark/sales"
    assert shown[1].startswith("refused")
