"""Fixtures: one PostgreSQL server for the tests that compare with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.testing.postgres_server import NotInstalled, PostgresServer, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server that keeps nothing safe, for speed."""
    try:
        with postgres_server(fsync="off") as server:
            yield server
    except NotInstalled as missing:
        pytest.skip(str(missing))
