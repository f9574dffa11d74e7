"""Projects of `spark-pipelines` before the gateway, run by the command that PySpark has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.spark.spark_releases import pipeline_messages
from actors.testing.patience import PROGRAM_S
from spark_house import SparkHouse, open_spark_house  # type: ignore[import-not-found]

pytestmark = [pytest.mark.spark, pytest.mark.long]
if pipeline_messages() is None:
    pytest.skip("Spark has pipelines since 4.1", allow_module_level=True)

COMMAND = Path(sys.executable).parent / "spark-pipelines"
SPEC = """
name: shop
storage: file://{folder}/storage
database: default
libraries:
  - glob:
      include: sets/**
configuration:
  spark.sql.session.timeZone: UTC
  shop.smallest: "1"
"""
SQL = """-- The order in the file is not that of their dependencies.
CREATE MATERIALIZED VIEW top REFRESH POLICY FULL COMMENT 'the best; of all' AS
SELECT name, total FROM spark_catalog.default.totals ORDER BY total DESC LIMIT 1;

CREATE TEMPORARY VIEW kept AS SELECT * FROM default.orders WHERE n > 0;

CREATE MATERIALIZED VIEW totals
TBLPROPERTIES ('target_lag_ms' = '50')
AS SELECT name, sum(n) AS total FROM kept GROUP BY name;
"""
PYTHON = """
from pyspark import pipelines as dp


@dp.materialized_view(comment="by Python", table_properties={"refresh_policy": "incremental"})
def counted():
    return spark.sql("SELECT name, count(*) AS c FROM kept GROUP BY name")


@dp.temporary_view
def both():
    return spark.sql("SELECT t.name, total, c FROM totals t JOIN counted USING (name)")


@dp.materialized_view(name="default.joined")
def any_name():
    return spark.table("both")
"""


class Project:
    """A project of one test."""

    def __init__(self, house: SparkHouse, folder: Path) -> None:
        self._house = house
        self.folder = folder
        self.sets = folder / "sets"
        self.sets.mkdir()
        (folder / "spark-pipeline.yml").write_text(SPEC.format(folder=folder))

    def run(self, command: str = "run", *options: str) -> tuple[int, str]:
        """Run the command; return its exit status, and all that it printed."""
        found = subprocess.run(
            [COMMAND, "--remote", self._house.remote, command, *options],
            cwd=self.folder,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROGRAM_S,
            check=False,
        )
        return found.returncode, found.stdout


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkHouse]:
    with open_spark_house(tmp_path_factory.mktemp("pipelines")) as house:
        client = house.client
        house.call(
            client.create_table, "orders", {"id": "bigint", "name": "string", "n": "int"}, ["id"]
        )
        rows = [{"id": number, "name": "abc"[number % 3], "n": number} for number in range(6)]
        house.call(client.insert, "orders", rows)
        yield house


def views(house: SparkHouse) -> dict[str, Any]:
    found = house.call(house.client.status).objects
    return {each.name: each for each in found if each.kind == "view"}


def test_a_project_of_sql_and_python(house: SparkHouse, tmp_path: Path) -> None:
    project = Project(house, tmp_path)
    (project.sets / "a.sql").write_text(SQL)
    (project.sets / "b.py").write_text(PYTHON)

    status, printed = project.run("dry-run")
    assert status == 0, printed
    assert "Run is COMPLETED." in printed
    assert views(house) == {}

    status, printed = project.run()
    assert status == 0, printed
    for name in ("top", "totals", "counted", "joined"):
        assert f"Flow 'spark_catalog.default.{name}' has COMPLETED (created)." in printed
    assert set(views(house)) == {"top", "totals", "counted", "joined"}
    assert views(house)["totals"].target_lag_ms == 50
    assert views(house)["top"].comment == "the best; of all"
    joined = house.call(house.client.peek, "joined", order_by=["name"]).to_pylist()
    assert joined == [
        {"name": "a", "total": 3, "c": 1},
        {"name": "b", "total": 5, "c": 2},
        {"name": "c", "total": 7, "c": 2},
    ]
    time = house.call(house.client.insert, "orders", [{"id": 60, "name": "a", "n": 60}])
    assert house.call(house.client.peek, "top", time).to_pylist() == [{"name": "a", "total": 63}]

    before = {name: (each.id, each.sql, each.steps) for name, each in views(house).items()}
    status, printed = project.run()
    assert status == 0, printed
    assert printed.count("has COMPLETED (unchanged).") == 4
    assert {name: (each.id, each.sql, each.steps) for name, each in views(house).items()} == before

    (project.sets / "a.sql").write_text(SQL.replace("n > 0", "n > 50"))
    status, printed = project.run("run", "--refresh", "totals,default.joined")
    assert status == 0, printed
    assert "'spark_catalog.default.totals' has COMPLETED (changed)." in printed
    assert "'spark_catalog.default.joined' has COMPLETED (unchanged)." in printed
    assert "counted' has" not in printed
    assert house.call(house.client.peek, "totals").to_pylist() == [{"name": "a", "total": 60}]

    status, printed = project.run("run", "--full-refresh-all")
    assert status == 0, printed
    assert "A full refresh recomputes nothing" in printed
    assert "'spark_catalog.default.counted' has COMPLETED (changed)." in printed
    assert house.call(house.client.peek, "counted").to_pylist() == [{"name": "a", "c": 1}]


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (
            "s.sql",
            "CREATE STREAMING TABLE events AS SELECT * FROM STREAM orders",
            "The streaming table events (sets/s.sql:1) is not supported by Penstock",
        ),
        ("s.sql", "\n\nCREATE MATERIALIZED VIEW bad PARTITIONED BY (a) AS SELECT 1", "line 3"),
        (
            "s.sql",
            "CREATE MATERIALIZED VIEW bad AS SELECT nope FROM orders",
            "pipeline dataset bad (sets/s.sql:1)",
        ),
        (
            "s.py",
            "from pyspark import pipelines as dp\n"
            "@dp.materialized_view\n"
            "def framed():\n"
            "    return spark.table('orders').groupBy('name').count()\n",
            "whose changes Penstock cannot follow; return spark.sql(text)",
        ),
    ],
)
def test_what_is_refused_is_named(
    house: SparkHouse, tmp_path: Path, file: str, text: str, told: str
) -> None:
    project = Project(house, tmp_path)
    (project.sets / file).write_text(text)
    before = set(views(house))
    status, printed = project.run()
    assert status != 0, printed
    assert told in printed, printed
    assert set(views(house)) == before
    shutil.rmtree(project.folder, ignore_errors=True)
