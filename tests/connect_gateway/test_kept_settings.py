"""Settings of a session that change what a text means: a view that is made in it keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from gateway_world import fill, gateway_world  # type: ignore[import-not-found]
from pyspark.errors import PySparkException

from actors.connect_gateway.statement_execution import StatementAnswer

VIEW = "CREATE MATERIALIZED VIEW made TBLPROPERTIES ('retain_history_ms' = '1') AS SELECT 1 AS a"


async def test_a_statement_comes_with_the_settings_of_its_session(tmp_path: Path) -> None:
    seen: list[Mapping[str, str]] = []

    async def execute(text: str, who: Any, conf: Mapping[str, str] = {}) -> StatementAnswer | None:
        seen.append(conf)
        return StatementAnswer(pa.schema([])) if text.startswith("CREATE") else None

    async with gateway_world(tmp_path, execute_statement=execute) as world:
        spark = await world.session()

        def make() -> None:
            spark.sql(VIEW)
            spark.conf.set("spark.sql.shuffle.partitions", "3")
            spark.sql(VIEW)
            spark.conf.set("spark.sql.session.timeZone", "Europe/Prague")
            spark.sql(VIEW)
            # Spark executes these; a server that stands for it knows only what it was told.
            spark.sql("SET spark.sql.ansi.enabled = false")
            spark.sql("SET TIME ZONE 'Europe/Prague'")
            world.spark.settings["spark.sql.ansi.enabled"] = "false"
            spark.sql(VIEW)
            spark.cloneSession().sql(VIEW)

        await world.run(make)
    zone = {"spark.sql.session.timeZone": "Europe/Prague"}
    both = {**zone, "spark.sql.ansi.enabled": "false"}
    made = [conf for conf in seen if conf != both][:2], seen[2], seen[-2], seen[-1]
    assert made == ([{}, {}], zone, both, both)


async def test_a_view_keeps_the_settings_and_a_plain_view_is_refused(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        await fill(world.client)
        spark = await world.session()

        def make() -> None:
            spark.conf.set("spark.sql.session.timeZone", "Europe/Prague")
            spark.sql("CREATE MATERIALIZED VIEW made AS SELECT id FROM orders")
            spark.sql(
                "CREATE MATERIALIZED VIEW own TBLPROPERTIES ('spark.sql.session.timeZone' = "
                "'UTC') AS SELECT id FROM orders"
            )
            with pytest.raises(PySparkException, match=r"spark\.sql\.session\.timeZone: reset"):
                spark.sql("CREATE VIEW plain AS SELECT id FROM orders")

        await world.run(make)
        found = {each.name: each.spark_conf for each in (await world.client.status()).objects}
        assert found["made"] == {"spark.sql.session.timeZone": "Europe/Prague"}
        assert found["own"] == {"spark.sql.session.timeZone": "UTC"}


async def test_the_ansi_mode_of_a_plain_view_is_its_readers(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        await fill(world.client)
        spark = await world.session()

        def make() -> None:
            spark.conf.set("spark.sql.ansi.enabled", "false")
            spark.sql("CREATE VIEW plain AS SELECT id FROM orders")

        await world.run(make)
        assert "plain" in {each.name for each in (await world.client.status()).objects}
