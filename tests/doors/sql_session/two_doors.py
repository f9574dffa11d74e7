"""A service on real Spark, by both of its doors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import psycopg
import pytest
from anyio.from_thread import start_blocking_portal
from pyspark.sql.connect.session import SparkSession

from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.check_views import for_short_lives


class TwoDoors:
    """One service, by psycopg and by PySpark."""

    def __init__(self, service: Service) -> None:
        dsn = f"postgresql://tester@{service.pg_address}/penstock"
        self.pg = psycopg.connect(dsn, autocommit=True)
        self.spark: Any = SparkSession(f"sc://{service.connect_address}")

    def rows(self, text: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self.pg.execute(text.encode()).fetchall()

    def alike(self, text: str) -> list[tuple[Any, ...]]:
        """The rows of a query, in their order, which both doors answer alike."""
        by_pg = sorted(self.rows(text))
        assert sorted(tuple(row) for row in self.spark.sql(text).collect()) == by_pg
        return by_pg

    def run(self, text: str) -> None:
        self.pg.execute(text.encode())

    def refused(self, text: str, *, match: str) -> None:
        with pytest.raises(psycopg.Error, match=match):
            self.pg.execute(text.encode())


@contextmanager
def two_doors(folder: Path) -> Iterator[TwoDoors]:
    """Run a service."""
    settings = Settings(
        state_dir=str(folder / "state"),
        spark_master="local[2]",
        listen="127.0.0.1:0",
        pg_listen="127.0.0.1:0",
        connect_listen="127.0.0.1:0",
    )
    with start_blocking_portal("asyncio") as portal:
        service = Service(for_short_lives(settings))
        with portal.wrap_async_context_manager(service):
            made = portal.call(partial(anyio.to_thread.run_sync, TwoDoors, service))
            yield made
            made.pg.close()
            made.spark.stop()
