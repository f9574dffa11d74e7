"""A service with both doors on real Spark, in a separate thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pyspark.sql.connect.session import SparkSession

from actors.doors.client.client import Client
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.check_views import for_short_lives

OBJECTS: Final = "penstock.objects"


class SparkHouse:
    """A service in a separate thread, and clients of it.

    The fixture `spark_house` is one for all tests of a process; each file of tests finds it empty.
    """

    def __init__(self, portal: BlockingPortal, service: Service, client: Client) -> None:
        self.portal = portal
        self.service = service
        self.client = client

    @property
    def dsn(self) -> str:
        """The address for PostgreSQL's clients."""
        return f"postgresql://tester@{self.service.pg_address}/penstock"

    @property
    def remote(self) -> str:
        """The address for Spark's clients."""
        return f"sc://{self.service.connect_address}"

    def call(self, function: Any, *given: Any, **named: Any) -> Any:
        """Call a coroutine function in the service's thread."""
        return self.portal.call(partial(function, *given, **named))

    def drop_all(self) -> None:
        """Drop every table and view, Spark's own too."""
        while names := [each["name"] for each in self.call(self.client.peek, OBJECTS).to_pylist()]:
            self.call(self.client.drop, names[0], cascade=True)
        spark = self.session()
        for table in spark.catalog.listTables():
            spark.sql(
                f"DROP {table.tableType if table.tableType == 'VIEW' else 'TABLE'} `{table.name}`"
            )
        spark.stop()

    def session(self) -> Any:
        """A new session of an unmodified PySpark."""
        return SparkSession(self.remote)


@contextmanager
def open_spark_house(folder: Path, **changes: Any) -> Iterator[SparkHouse]:
    """A service whose engine is Spark."""
    given: dict[str, Any] = {
        "state_dir": str(folder / "state"),
        "listen": "127.0.0.1:0",
        "pg_listen": "127.0.0.1:0",
        "connect_listen": "127.0.0.1:0",
        "connect_inline_bytes_max": 64 * 1024,
        "spark_master": "local[2]",
        "engine_jobs_in_flight_max": 2,
        "engine_spare_tasks_max": 0,  # a task that does not end must be noticed
        # Large contents are files, which Spark scans.
        "inline_part_bytes_max": 1024,
    }
    settings = for_short_lives(Settings(**(given | changes)))
    with start_blocking_portal("asyncio") as portal:
        service = Service(settings)
        with portal.wrap_async_context_manager(service):
            client = portal.call(partial(Client.in_process, service))
            yield SparkHouse(portal, service, client)
            portal.call(client.aclose)
