"""The second engine, for queries and clients of Spark Connect, so that these cannot bring down the
views: whether there is one, and its settings. Pure.

A query that fills the heap ends its JVM. In a separate engine it ends no step of a view, and
waits for none. The engine starts at the first query, and shares only the machine with the engine of
the views.
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
"""Divisor of the machine's memory: the heaps of both engines together may take this share."""
QUERY_NICENESS: Final = 5
"""Niceness that makes queries yield to the steps of views if both need the cores."""


def has_query_engine(settings: Settings, memory_bytes: int) -> bool:
    """Return whether queries have their own engine on a machine with this much memory.

    Raises `BadSettings` for a `query_engine` that is not one of `MODES`.

    >>> has_query_engine(Settings(spark_driver_memory="2g"), 16 << 30)
    True
    >>> has_query_engine(Settings(spark_driver_memory="2g"), 4 << 30)
    False
    """
    mode = settings.query_engine
    if mode not in MODES:
        raise BadSettings(f"invalid query_engine {mode!r}: expected one of {', '.join(MODES)}")
    # A Spark behind Connect is a single server for everyone.
    if mode == SHARED or is_remote(settings.spark_master):
        return False
    views = heap_bytes(settings.spark_driver_memory)
    queries = heap_bytes(query_memory(settings), "query_engine_memory")
    return mode == OWN or (views + queries) * MEMORY_SHARE <= memory_bytes


def query_memory(settings: Settings) -> str:
    """Return the heap size of the queries' engine, in the notation of
    `Settings.spark_driver_memory`."""
    return settings.query_engine_memory or settings.spark_driver_memory


def view_settings(settings: Settings) -> Settings:
    """Return the settings of the views' engine if queries have their own."""
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
        # A query that ended its engine while it ran alone is given up immediately, since its user
        # can send it again.
        engine_attempts_max=1,
    )
