"""Spark Connect's clients in one process with the service that they speak to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql.connect.session import SparkSession


@pytest.fixture(scope="session", autouse=True)
def collected_sessions_stay_open() -> Iterator[None]:
    """A session closes itself when it is collected, and waits for the service to answer. On the
    thread of the service's own loop, where the collector may find it, that is for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(SparkSession, "__del__")
        yield
