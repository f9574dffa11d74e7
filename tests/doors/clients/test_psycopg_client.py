"""Test psycopg 3 against the service and docs/reference/compatibility.md."""

from __future__ import annotations

import pytest
from client_house import ClientHouse, page_differences, run_python


@pytest.mark.second
def test_what_psycopg_can_do(house: ClientHouse, pytestconfig: pytest.Config) -> None:
    assert page_differences(run_python("psycopg_program", [house.pg_address]), pytestconfig) == []
