"""Fixtures: one server for the whole session, and a database for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio
import uvloop
from postgres_house import House, house  # type: ignore[import-not-found]

from actors.testing.postgres_server import PostgresServer, postgres_server

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server that keeps nothing safe, for speed."""
    with postgres_server(
        wal_level="logical",
        fsync="off",
        max_replication_slots="20",
        max_wal_senders="20",
        wal_sender_timeout="30s",
    ) as server:
        yield server


@pytest_asyncio.fixture
async def db(postgres: PostgresServer) -> AsyncIterator[House]:
    """A database of one test's own."""
    async with house(postgres, f"db{next(_NUMBERS)}") as made:
        yield made


@pytest.fixture
def uvloop_run() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Runs something on a loop of uvloop's, in a separate thread."""

    def run(scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await scenario()

        with ThreadPoolExecutor(1) as threads:
            threads.submit(lambda: uvloop.run(whole())).result()

    return run
