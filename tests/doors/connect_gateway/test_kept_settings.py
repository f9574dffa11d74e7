"""Settings of a session: obeyed, kept with what is made in it, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from gateway_world import fill, gateway_world  # type: ignore[import-not-found]
from pyspark.errors import PySparkException

from actors.doors.connect_gateway.session_settings import (
    FILE_SETTINGS,
    FIRST_SETTINGS,
    settings_table,
)
from actors.doors.connect_gateway.statement_execution import StatementAnswer

VIEW = "CREATE MATERIALIZED VIEW made TBLPROPERTIES ('retain_history_ms' = '1') AS SELECT 1 AS a"


async def test_a_statement_comes_with_the_settings_of_its_session(tmp_path: Path) -> None:
    seen: list[Mapping[str, str]] = []

    async def execute(text: str, who: Any, conf: Mapping[str, str]) -> StatementAnswer | None:
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
            with pytest.raises(PySparkException, match=r"reset spark\.sql\.session\.timeZone"):
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


CHANGES = (
    "INSERT INTO orders VALUES (70, 'x', 7)",
    "UPDATE orders SET n = n + 1 WHERE id = 1",
    "DELETE FROM orders WHERE id = 2",
    "MERGE INTO orders t USING (SELECT 3 AS id) s ON t.id = s.id WHEN MATCHED THEN DELETE",
    "CREATE TABLE copied AS SELECT id FROM orders",
    "SUBSCRIBE TO (SELECT id FROM orders)",
)
CHANGED = {"spark.sql.storeAssignmentPolicy": "LEGACY", "spark.sql.caseSensitive": "true"}


@pytest.mark.parametrize("name", CHANGED)
async def test_statements_that_would_not_obey_a_setting_are_refused(
    tmp_path: Path, name: str
) -> None:
    async with gateway_world(tmp_path) as world:
        await fill(world.client)
        spark = await world.session()
        # As Spark has it: each of its own settings has a value, also where nobody has set it.
        world.spark.settings[name] = "false"

        def change() -> None:
            spark.conf.set("spark.sql.shuffle.partitions", "3")
            spark.conf.set(name, CHANGED[name])
            for text in CHANGES:
                with pytest.raises(PySparkException, match=f"reset {name}, which"):
                    spark.sql(text)
            if name == "spark.sql.storeAssignmentPolicy":
                with pytest.raises(
                    PySparkException, match="a view cannot keep a setting of this kind"
                ):
                    spark.sql("CREATE MATERIALIZED VIEW made AS SELECT id FROM orders")
            # As it was at first: it is not changed any more.
            spark.conf.set(name, "false")
            spark.sql(CHANGES[0])

        before = await world.client.peek("orders")
        await world.run(change)
        assert len(await world.client.peek("orders")) == len(before) + 1
        assert "copied" not in {each.name for each in (await world.client.status()).objects}


@pytest.mark.parametrize("name", [*FIRST_SETTINGS, *FILE_SETTINGS])
async def test_settings_that_the_service_needs_are_refused(tmp_path: Path, name: str) -> None:
    async with gateway_world(tmp_path) as world:
        spark = await world.session()
        fixed = FIRST_SETTINGS | FILE_SETTINGS

        def change() -> None:
            calls: list[Callable[[], Any]] = [
                lambda: spark.conf.set(name, "other"),
                lambda: spark.conf.unset(name),
                lambda: spark.sql(f"SET {name} = other"),
                lambda: spark.sql(f"RESET {name}"),
            ]
            for call in calls:
                with pytest.raises(PySparkException, match=f"setting {name} cannot be changed"):
                    call()
            with pytest.raises(PySparkException, match="reset each setting by name"):
                spark.sql("RESET")
            # To say what holds anyway is no change.
            spark.conf.set(name, fixed[name])

        await world.run(change)
        assert world.spark.settings == FIRST_SETTINGS | {name: fixed[name]}


@pytest.mark.parametrize(
    "text",
    [
        "EXECUTE IMMEDIATE 'SET spark.sql.ansi.enabled = false'",
        "BEGIN SET spark.sql.ansi.enabled = false; END",
    ],
)
async def test_settings_that_a_text_computes_are_seen(tmp_path: Path, text: str) -> None:
    seen: list[Mapping[str, str]] = []

    async def execute(text: str, who: Any, conf: Mapping[str, str]) -> StatementAnswer | None:
        seen.append(conf)
        return StatementAnswer(pa.schema([])) if text.startswith("CREATE") else None

    async with gateway_world(tmp_path, execute_statement=execute) as world:
        spark = await world.session()
        await world.run(lambda: spark.sql(text))
        # What Spark does of it, which a server that stands for it does not.
        world.spark.settings["spark.sql.ansi.enabled"] = "false"
        await world.run(lambda: spark.sql(VIEW))
    assert seen[-1] == {"spark.sql.ansi.enabled": "false"}


def test_the_settings_stand_in_the_documentation() -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "spark-connect.md"
    assert settings_table() in page.read_text()
