"""psql before the service, and what docs/compatibility.md says of it."""

from __future__ import annotations

import pytest
from client_house import ClientHouse, hold_to_page, needed, run_python


@pytest.mark.second
def test_what_psql_can_do(house: ClientHouse, pytestconfig: pytest.Config) -> None:
    psql = needed("psql", "postgresql-client")
    hold_to_page(run_python("psql_program", [psql, house.pg_address]), pytestconfig)
