"""Test pgjdbc against the service and docs/reference/compatibility.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_house import ClientHouse, needed, page_differences, run_java

DRIVER = "/usr/share/java/postgresql.jar"


@pytest.mark.second
def test_what_pgjdbc_can_do(
    house: ClientHouse, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    jar = needed(DRIVER, "libpostgresql-jdbc-java")
    sight = run_java("PgJdbcProgram", [jar], [house.pg_address], tmp_path)
    assert page_differences(sight, pytestconfig) == []
