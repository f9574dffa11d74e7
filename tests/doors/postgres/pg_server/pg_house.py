"""A service on the in-memory engine with a door for PostgreSQL's clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg

from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.check_views import for_short_lives
from actors.testing.engine import in_memory_engine


@asynccontextmanager
async def pg_service(
    folder: Path, *, on_spark: bool = False, **changed: Any
) -> AsyncIterator[Service]:
    """A service whose door has a free port."""
    places = {"listen": "127.0.0.1:0", "pg_listen": "127.0.0.1:0"}
    settings = Settings(state_dir=str(folder / "state"), **(places | changed))
    if on_spark:
        async with Service(for_short_lives(settings)) as service:
            yield service
        return
    async with Service(settings, engine=in_memory_engine()) as service:
        yield service


def dsn_of(service: Service, user: str = "tester") -> str:
    """What psycopg and asyncpg connect to."""
    return f"postgresql://{user}@{service.pg_address}/penstock"


async def as_role(
    service: Service, role: str, password: str | None = None
) -> psycopg.AsyncConnection[Any]:
    """A connection of a role that commits each statement."""
    given: dict[str, Any] = {} if password is None else {"password": password}
    return await psycopg.AsyncConnection.connect(dsn_of(service, role), autocommit=True, **given)


async def connected(service: Service) -> psycopg.AsyncConnection[Any]:
    """A connection that commits each statement."""
    return await psycopg.AsyncConnection.connect(dsn_of(service), autocommit=True)


@asynccontextmanager
async def pg_table(
    folder: Path, table: str, **changed: Any
) -> AsyncIterator[tuple[Service, psycopg.AsyncConnection[Any]]]:
    """A service, and a connection that has made a table."""
    async with pg_service(folder, **changed) as service, await connected(service) as db:
        await db.execute(table.encode())
        yield service, db
