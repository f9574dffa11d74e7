"""Test dbt-spark against the service and docs/reference/compatibility.md.

The project has sources, seeds, tables, materialized views and tests.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import py4j
import pyspark
import pytest
from client_house import HERE, ClientHouse, clients_python, page_differences, run_program


@pytest.mark.spark
@pytest.mark.second
def test_what_dbt_spark_can_do(
    client_house_on_spark: ClientHouse, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    python = clients_python("dbt.adapters.spark", "grpc_status", "zstandard")
    # PySpark of the service's own version: no wheel has the client alone.
    lent = tmp_path / "lent"
    lent.mkdir()
    for package in (pyspark, py4j):
        (lent / package.__name__).symlink_to(Path(package.__file__).parent)
    # dbt writes its logs and artefacts into the project.
    project = tmp_path / "project"
    shutil.copytree(HERE / "dbt_project", project)
    environ = {
        "SPARK_REMOTE": f"sc://{client_house_on_spark.connect_address}",
        "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
        "DBT_LOG_PATH": str(tmp_path / "logs"),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, lent))),
    }
    command = [python, str(HERE / "dbt_program.py"), str(project)]
    assert page_differences(run_program(command, environ), pytestconfig) == []
