"""One child process for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_child import ChildProcess  # type: ignore[import-not-found]

from actors.engine.spark.java import JavaHome, find_java
from actors.runtime.settings import Settings
from actors.testing.check_views import for_short_lives


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> JavaHome:
    found = find_java(tmp_path_factory.mktemp("java"))
    if not isinstance(found, JavaHome):
        raise found
    return found


@pytest.fixture(scope="session")
def child(tmp_path_factory: pytest.TempPathFactory, java: JavaHome) -> Iterator[ChildProcess]:
    settings = Settings(
        spark_master="local[2]",
        engine_jobs_in_flight_max=2,
        engine_spare_tasks_max=0,  # a task that does not end must be noticed
        engine_inline_bytes_max=64 * 1024,
        engine_collected_bytes_max=4 * 1024 * 1024,  # a million numbers are a large answer
    )
    settings = for_short_lives(settings)
    made = ChildProcess(tmp_path_factory.mktemp("engine"), settings, java)
    yield made
    made.close()
