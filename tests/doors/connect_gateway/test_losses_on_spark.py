"""Clients that go away, an engine that is killed, and the pool of clients, before real Spark."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.connect.proto import base_pb2
from pyspark.sql.types import StringType

from actors.doors.connect_gateway.object_rows import VIEW_PREFIX
from actors.testing.patience import PATIENCE_S
from spark_house import SparkHouse, open_spark_house  # type: ignore[import-not-found]

pytestmark = [pytest.mark.spark, pytest.mark.long]

LARGE = 40_000
ENDLESS = "SELECT sum(hash(a.id * b.id + o.id)) FROM range(10000000) a, range(10000000) b, big o"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkHouse]:
    with open_spark_house(tmp_path_factory.mktemp("losses"), connect_detached_ms=1_000) as house:
        client = house.client
        house.call(client.create_table, "big", {"id": "bigint", "s": "string"})
        rows = pa.table({"id": pa.array(range(LARGE), pa.int64()), "s": ["text"] * LARGE})
        house.call(client.insert, "big", rows)
        house.call(
            client.create_materialized_view, "sums", "SELECT s, count(*) AS c FROM big GROUP BY s"
        )
        yield house


@pytest.fixture
def spark(house: SparkHouse) -> Iterator[Any]:
    made = house.session()
    yield made
    made.stop()


def wait_until(holds: Any) -> None:
    """Wait until it holds; each look is a call of Spark's, so that this does not spin."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline


def lent_views(spark: Any) -> list[str]:
    found = (table.name for table in spark.catalog.listTables("global_temp"))
    return [name for name in found if name.startswith(VIEW_PREFIX)]


def test_the_tasks_of_clients_run_in_their_pool(spark: Any) -> None:
    # Without type hints, by which PySpark would take it for one over Arrow.
    spark.udf.register(
        "pool",
        lambda _: __import__("pyspark").TaskContext.get().getLocalProperty("spark.scheduler.pool"),
        StringType(),
    )

    def pools() -> set[str]:
        frame = spark.range(4, numPartitions=2).selectExpr("pool(id) AS pool")
        return {row.pool for row in frame.collect()}

    assert pools() == {"clients"}
    # A user's own choice could starve the steps of views.
    with pytest.raises(PySparkException, match=r"spark\.scheduler\.pool cannot be changed"):
        spark.conf.set("spark.scheduler.pool", "steps")
    with pytest.raises(PySparkException, match=r"spark\.scheduler\.pool cannot be changed"):
        spark.sql("SET spark.scheduler.pool = steps")
    assert pools() == {"clients"}


@pytest.mark.parametrize("reattachable", [False, True])
def test_a_client_that_goes_away_leaves_nothing_behind(
    house: SparkHouse, spark: Any, reattachable: bool
) -> None:
    channel = grpc.insecure_channel(house.service.connect_address)
    request = base_pb2.ExecutePlanRequest(
        session_id=str(uuid.uuid4()), operation_id=str(uuid.uuid4())
    )
    request.plan.root.sql.query = ENDLESS
    if reattachable:
        request.request_options.add().reattach_options.reattachable = True
    call = channel.unary_stream("/spark.connect.SparkConnectService/ExecutePlan")(
        request.SerializeToString()
    )
    wait_until(lambda: lent_views(spark))
    begun = time.monotonic()
    # Its connection breaks, as that of a process that was killed.
    channel.close()
    with pytest.raises(grpc.RpcError):
        next(call)
    # It held both cores of Spark: this can end only when its tasks are gone.
    assert spark.range(100, numPartitions=2).repartition(2).count() == 100
    wait_until(lambda: not lent_views(spark))
    wait_until(lambda: "connect/" not in str(holds(house)))
    assert time.monotonic() - begun < PATIENCE_S


def holds(house: SparkHouse) -> list[Any]:
    rows: list[Any] = house.call(house.client.peek, "penstock.holds").to_pylist()
    return rows


def test_a_killed_engine_is_told_and_another_one_serves(house: SparkHouse, spark: Any) -> None:
    ((pid,),) = spark.sql("SELECT reflect('java.lang.ProcessHandle', 'current')").collect()
    spark.range(3).createOrReplaceTempView("mine")
    failed: list[BaseException] = []

    def run() -> None:
        try:
            spark.sql(ENDLESS).collect()
        except PySparkException as error:
            failed.append(error)

    other = house.session()
    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: lent_views(other))
    begun = time.monotonic()
    os.kill(int(pid), signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert "Spark ended while" in str(failed[0])
    # The session has ended with the engine, and with it what was kept in it.
    with pytest.raises(PySparkException, match="create a new Spark session"):
        spark.table("mine").count()
    fresh = house.session()
    ((count,),) = fresh.sql("SELECT count(*) FROM big JOIN sums USING (s)").collect()
    assert count == LARGE
    assert time.monotonic() - begun < PATIENCE_S
    assert fresh.conf.get("spark.scheduler.pool") == "clients"
    ((again,),) = fresh.sql("SELECT reflect('java.lang.ProcessHandle', 'current')").collect()
    assert again != pid
    # Reads without Spark never needed it.
    assert fresh.table("sums").collect()[0].c == LARGE
    wait_until(lambda: "connect/" not in str(holds(house)))
