"""A temporary PostgreSQL on the loopback interface, for the benchmarks that compare with one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from actors.testing.postgres_server import NoPostgres as NoPostgres
from actors.testing.postgres_server import postgres_server


@contextlib.contextmanager
def postgres() -> Iterator[int]:
    """Run a server while the block lasts, and yield its port. Raises `NoPostgres`."""
    with postgres_server(fsync="off") as server:
        yield server.port
