"""Test a remote PySpark against the service and docs/reference/compatibility.md."""

from __future__ import annotations

import pytest
from client_house import ClientHouse, page_differences, run_python


@pytest.mark.spark
@pytest.mark.second
def test_what_a_remote_pyspark_can_do(
    client_house_on_spark: ClientHouse, pytestconfig: pytest.Config
) -> None:
    sight = run_python("pyspark_program", [client_house_on_spark.connect_address])
    assert page_differences(sight, pytestconfig) == []
