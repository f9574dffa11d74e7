"""Spark Connect's clients in one process with the service that they speak to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from pyspark.sql.connect.client import core
from pyspark.sql.connect.session import SparkSession


@pytest.fixture(scope="session", autouse=True)
def collected_sessions_stay_open() -> Iterator[None]:
    """A session closes itself when it is collected, and waits for the service to answer. On the
    thread of the service's own loop, where the collector may find it, that is for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(SparkSession, "__del__")
        yield


@pytest.fixture(scope="session", autouse=True)
def ended_clients_ask_nothing() -> Iterator[None]:
    """An older client asks its server for something when its process ends, and goes on asking for
    many minutes where the server is gone: here it went before the process did."""

    def register(call: Callable[[], object]) -> None:
        """Leave the call out."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "atexit", SimpleNamespace(register=register), raising=False)
        yield
