"""Changes of objects as streams of an unmodified PySpark, before real Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.connect.streaming.readwriter import DataStreamReader

from actors.service import Service
from spark_house import SparkHouse, open_spark_house  # type: ignore[import-not-found]

pytestmark = [pytest.mark.spark, pytest.mark.long]

APIS = ("table", "changes")
"""An older PySpark has the first alone."""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkHouse]:
    with open_spark_house(tmp_path_factory.mktemp("streams")) as house:
        client = house.client
        house.call(client.create_table, "orders", {"id": "bigint", "name": "string"}, ["id"])
        rows = [{"id": number, "name": "ab"[number % 2]} for number in range(6)]
        house.call(client.insert, "orders", rows)
        house.call(
            client.create_materialized_view,
            "sums",
            "SELECT name, count(*) AS c FROM orders GROUP BY name",
        )
        house.call(client.peek, "sums")
        yield house


def drained(frame: Any, folder: Path, spark: Any) -> Counter[tuple[str, int]]:
    """What the changes that a stream has so far come to, by its own checkpoint in a folder."""
    query = (
        frame.writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found: Counter[tuple[str, int]] = Counter()
    for row in spark.read.parquet(str(folder / "out")).collect():
        found[row["name"], row.c] += row["_diff"]
    return +found


@pytest.mark.parametrize("api", [api for api in APIS if hasattr(DataStreamReader, api)])
def test_a_views_changes_are_a_stream(house: SparkHouse, tmp_path: Path, api: str) -> None:
    spark = house.session()
    try:
        frame = getattr(spark.readStream, api)("sums").select("sums.name", "c", "_diff", "_time")
        assert frame.isStreaming
        before = house.call(house.client.peek, "sums").to_pylist()
        assert drained(frame, tmp_path, spark) == {(row["name"], row["c"]): 1 for row in before}
        key = {"table": 100, "changes": 101}[api]
        time = house.call(house.client.insert, "orders", [{"id": key, "name": "a"}])
        after = house.call(house.client.peek, "sums", time).to_pylist()
        # It goes on where it was: the former count went, the new one came.
        assert drained(frame, tmp_path, spark) == {(row["name"], row["c"]): 1 for row in after}
    finally:
        spark.stop()


def test_what_a_stream_of_changes_is_not(house: SparkHouse) -> None:
    spark = house.session()
    try:
        with pytest.raises(PySparkException, match="unknown option 'stateDir'"):
            spark.readStream.option("stateDir", "elsewhere").table("sums").schema  # noqa: B018
        with pytest.raises(PySparkException, match="only be read as a stream"):
            spark.readStream.table("sums").createOrReplaceTempView("kept")
    finally:
        spark.stop()


async def described(service: Service) -> str:
    found = [each for each in service.actors() if each.path == "/connect"]
    return str(found[0].doing)


def test_streams_are_bounded_and_keep_their_session(tmp_path: Path) -> None:
    with open_spark_house(tmp_path, connect_streams_max=1, connect_session_idle_ms=30_000) as house:
        spark = house.session()
        try:
            house.session().range(1).toArrow()
            rate = spark.readStream.format("rate").load()
            running = rate.writeStream.format("noop").option(
                "checkpointLocation", str(tmp_path / "checkpoint")
            )
            query = running.start()
            with pytest.raises(PySparkException, match="connect_streams_max"):
                running.start()
            # The other session is idle, and is released by a sweep; this one has its stream.
            while "; 1 sessions, 0 operations" not in house.call(described, house.service):
                pass
            assert query.isActive, query.exception()
            query.stop()
            query.awaitTermination()
        finally:
            spark.stop()
