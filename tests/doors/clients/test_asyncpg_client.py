"""Test asyncpg against the service and docs/reference/compatibility.md."""

from __future__ import annotations

import pytest
from client_house import ClientHouse, page_differences, run_python


@pytest.mark.second
def test_what_asyncpg_can_do(house: ClientHouse, pytestconfig: pytest.Config) -> None:
    assert page_differences(run_python("asyncpg_program", [house.pg_address]), pytestconfig) == []
