"""Fixtures: one catalog, in a real PostgreSQL and as a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from catalog_lab import create_objects, lab_snapshot  # type: ignore[import-not-found]

from actors.doors.postgres.pg_catalog.catalog_queries import CatalogQueries
from actors.testing.postgres_server import postgres_server


@pytest.fixture(scope="session")
def real() -> Iterator[psycopg.Connection[Any]]:
    """A connection to a PostgreSQL with the objects of `catalog_lab`."""
    with postgres_server(fsync="off") as server:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            create_objects(connection)
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            yield connection


@pytest.fixture(scope="session")
def queries() -> CatalogQueries:
    """Our answers, over the same objects."""
    made = CatalogQueries()
    made.apply_snapshot(lab_snapshot())
    return made
