"""The data source in a plain session of its own, over what a service wrote:
docs/guides/spark-source.md.

The stream of that guide is run by tests/proof/stream_on_spark.py: Spark starts another Python for
it, and gives up when that takes ten seconds. test_source_streams.py has its rules.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from users_service import serve, users_spark  # type: ignore[import-not-found]

from actors.engine.spark.java import JavaHome


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_users_own_spark(tmp_path: Path, java: JavaHome) -> None:
    folder = tmp_path / "state"
    anyio.run(serve, folder, "first")
    found = users_spark(folder, tmp_path, "rows", java)
    assert found["schema"] == "struct<carrier:string,n:bigint>"
    assert found["rows"] == found["again"] == [["AA", 24], ["UA", 25]]
    assert found["joined"] == [["AA", 24], ["UA", 25]]
    assert [row[0] for row in found["filtered"]] == [47, 48, 49]
    assert "ReadTooFarAhead" in found["beyond"]
    assert "UnknownObject" in found["nothing"]
    assert "similar tables and views: flights" in found["nothing"]
    assert found["many"] > 2
    assert sorted(row[0] for row in found["divided"]) == [n for n in range(50) if n != 4]
