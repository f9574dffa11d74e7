"""Test psqlODBC, through pyodbc, against the service and docs/reference/compatibility.md."""

from __future__ import annotations

import pytest
from client_house import ClientHouse, clients_python, needed, page_differences, run_python

DRIVER = "/usr/lib/*/odbc/psqlodbcw.so"


@pytest.mark.second
def test_what_psqlodbc_can_do(house: ClientHouse, pytestconfig: pytest.Config) -> None:
    driver = needed(DRIVER, "odbc-postgresql")
    python = clients_python("pyodbc")
    sight = run_python("odbc_program", [driver, house.pg_address], python=python)
    assert page_differences(sight, pytestconfig) == []
