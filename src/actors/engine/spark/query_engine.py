"""The second engine, for queries and clients of Spark Connect, so that none of them takes the views
with it: whether there is one, and its settings. Pure.

A query that fills the heap ends its JVM. In an engine of its own it ends no step of a view, and
waits for none. The engine is started at the first query, and shares nothing with that of the views
but the machine.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from actors.engine.spark.engine_memory import heap_bytes
from actors.engine.spark.remote_address import is_remote
from actors.runtime.errors import BadSettings
from actors.runtime.settings import Settings

OWN: Final = "own"
SHARED: Final = "shared"
AUTO: Final = "auto"
MODES: Final = (AUTO, OWN, SHARED)
MEMORY_SHARE: Final = 2
"""Divisor of the machine's memory: the heaps of both engines may take one such part."""
QUERY_NICENESS: Final = 5
"""By so much queries give way to the steps of views where both want the cores."""


def has_query_engine(settings: Settings, memory_bytes: int) -> bool:
    """Return whether queries have an engine of their own on a machine with so much memory.

    Raises `BadSettings` for a `query_engine` that is not one of `MODES`.

    >>> has_query_engine(Settings(spark_driver_memory="2g"), 16 << 30)
    True
    >>> has_query_engine(Settings(spark_driver_memory="2g"), 4 << 30)
    False
    """
    mode = settings.query_engine
    if mode not in MODES:
        raise BadSettings(f"invalid query_engine {mode!r}: expected one of {', '.join(MODES)}")
    # A Spark behind Connect is one server, whoever asks it.
    if mode == SHARED or is_remote(settings.spark_master):
        return False
    views = heap_bytes(settings.spark_driver_memory)
    queries = heap_bytes(query_memory(settings), "query_engine_memory")
    return mode == OWN or (views + queries) * MEMORY_SHARE <= memory_bytes


def query_memory(settings: Settings) -> str:
    """Return the heap of the queries' engine, written as `Settings.spark_driver_memory` is."""
    return settings.query_engine_memory or settings.spark_driver_memory


def view_settings(settings: Settings) -> Settings:
    """Return the settings of the views' engine where queries have their own."""
    return replace(settings, connect_listen="")


def query_settings(settings: Settings) -> Settings:
    """Return the settings of the queries' engine.

    >>> query_settings(Settings(query_engine_memory="512m")).spark_driver_memory
    '512m'
    """
    return replace(
        settings,
        query_engine=OWN,
        spark_driver_memory=query_memory(settings),
        engine_disk_bytes_max=settings.query_disk_bytes_max,
        engine_niceness=QUERY_NICENESS,
        # A query that ended its engine alone is given up at once: its user can send it again.
        engine_attempts_max=1,
    )
