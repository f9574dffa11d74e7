"""`penstock` with the in-memory engine, for pages that show how to start a service."""

from __future__ import annotations

import functools

import actors.service
from actors.doors.commands import cli
from actors.testing.engine import in_memory_engine

actors.service.Service = functools.partial(  # type: ignore[misc, assignment]
    actors.service.Service, engine=in_memory_engine()
)
cli.main()
