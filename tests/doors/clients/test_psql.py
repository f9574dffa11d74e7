"""Test psql against the service and docs/reference/compatibility.md."""

from __future__ import annotations

import pytest
from client_house import ClientHouse, needed, page_differences, run_python


@pytest.mark.second
def test_what_psql_can_do(house: ClientHouse, pytestconfig: pytest.Config) -> None:
    psql = needed("psql", "postgresql-client")
    sight = run_python("psql_program", [psql, house.pg_address])
    assert page_differences(sight, pytestconfig) == []
