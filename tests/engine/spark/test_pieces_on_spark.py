"""A view whose plan goes in pieces: large first contents stay in Spark between them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from actors import Client, Service, Settings
from actors.testing.check_views import for_short_lives

pytestmark = [pytest.mark.spark, pytest.mark.long]

ROWS = 18_000
SMALL_BYTES = 1_000_000
"""What the rows take is more, so that they are no small job."""
KEYS = 300
DEADLINE_MS = 400_000
NESTED = """
  SELECT a.n AS n, count(*) AS groups, max(b.total) AS most
  FROM (SELECT k, count(*) AS n, count(text) AS texts FROM t GROUP BY k) a
  LEFT JOIN (SELECT k, sum(x) AS total FROM t GROUP BY k) b ON a.k = b.k
  WHERE EXISTS (SELECT 1 FROM t AS other WHERE other.k = a.k)
  GROUP BY a.n
"""


def rows(start: int, count: int) -> pa.Table:
    numbers = range(start, start + count)
    return pa.table(
        {
            "k": pa.array([number % KEYS for number in numbers], pa.int64()),
            "x": pa.array(numbers, pa.int64()),
            "text": [f"{number:0>120}" for number in numbers],
        }
    )


def expected(count: int) -> set[tuple[int, int, int]]:
    sizes: dict[int, list[int]] = {}
    for key in range(KEYS):
        mine = range(key, count, KEYS)
        sizes.setdefault(len(mine), []).append(sum(mine))
    return {(size, len(totals), max(totals)) for size, totals in sizes.items()}


async def test_a_nested_view_of_many_rows_is_computed_in_pieces(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        engine_plan_nodes_max=8,
        engine_inline_bytes_max=SMALL_BYTES,
    )
    assert rows(0, ROWS).nbytes > 2 * SMALL_BYTES
    async with (
        Service(for_short_lives(settings)) as service,
        await Client.in_process(service) as client,
    ):
        await client.create_table("t", {"k": "bigint", "x": "bigint", "text": "string"})
        await client.insert("t", rows(0, ROWS))
        await client.create_materialized_view("v", NESTED)
        count = ROWS
        for more in (0, 40):
            written = await client.insert("t", rows(count, more)) if more else None
            count += more
            at = written if written is not None else await client.write({})
            await client.wait_for("v", at, deadline_ms=DEADLINE_MS)
            found = await client.peek("v", deadline_ms=DEADLINE_MS)
            assert {(r["n"], r["groups"], r["most"]) for r in found.to_pylist()} == expected(count)
