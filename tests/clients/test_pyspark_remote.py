"""A remote PySpark before the service, and what docs/compatibility.md says of it."""

from __future__ import annotations

import pytest
from client_house import ClientHouse, page_differences, run_python


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_a_remote_pyspark_can_do(
    spark_house: ClientHouse, pytestconfig: pytest.Config
) -> None:
    sight = run_python("pyspark_program", [spark_house.connect_address])
    assert page_differences(sight, pytestconfig) == []
