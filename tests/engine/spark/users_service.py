"""A service that fills and changes what a user's own Spark reads, and the run of that program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from actors import Client, Service, Settings
from actors.durable.persist import PersistClient
from actors.durable.persist.catalog_objects import CATALOG, objects_of, shard_of
from actors.engine.spark.java import JavaHome
from actors.runtime.kernel import SystemClock
from actors.testing.engine import in_memory_engine

PROGRAM = Path(__file__).with_name("users_spark.py")


async def serve(folder: Path, phase: str) -> None:
    settings = Settings(state_dir=str(folder), listen="127.0.0.1:0", inline_part_bytes_max=1)
    async with (
        Service(settings, engine=in_memory_engine()) as service,
        await Client.connect(service.address) as client,
    ):
        if phase == "first":
            await client.create_table("flights", {"id": "bigint", "carrier": "string"}, ["id"])
            await client.create_materialized_view(
                "by_carrier", "SELECT carrier, count(*) AS n FROM flights GROUP BY carrier"
            )
        for number in range(5) if phase == "first" else ():
            rows = [{"id": number * 10 + n, "carrier": "UA" if n % 2 else "AA"} for n in range(10)]
            await client.insert("flights", rows)
        time = await client.delete("flights", [{"id": 4 if phase == "first" else 5}])
        await client.wait_for("by_carrier", time)


def users_spark(folder: Path, work: Path, phase: str, java: JavaHome) -> dict[str, Any]:
    environment = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(java.home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(work), phase],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-12000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def upkeep(folder: Path) -> dict[str, int]:
    """Compacts and collects all that may be; the holds of the table."""
    client = await PersistClient.open(folder, Settings(blob_orphan_grace_ms=1), SystemClock())
    try:
        shard = shard_of(objects_of(await client.head(CATALOG)), "flights")
        await client.upkeep.compact(shard)
        await client.upkeep.collect(shard)
        return (await client.state(shard)).holds
    finally:
        await client.close()
