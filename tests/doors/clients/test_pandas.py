"""Test pandas against the service and docs/reference/compatibility.md."""

from __future__ import annotations

import pytest
from client_house import ClientHouse, clients_python, page_differences, run_python


@pytest.mark.second
def test_what_pandas_can_do(house: ClientHouse, pytestconfig: pytest.Config) -> None:
    python = clients_python("pandas", "sqlalchemy", "adbc_driver_postgresql")
    sight = run_python("pandas_program", [house.pg_address], python=python)
    assert page_differences(sight, pytestconfig) == []
