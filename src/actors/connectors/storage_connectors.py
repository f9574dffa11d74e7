"""Factories by which the storage half of a worker reaches external systems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from actors.connectors.oneshot_task import OneshotReading, refuse_oneshot
from actors.connectors.sources.source import SourceConnector
from actors.model.protocol.storage import (
    ConnectorConfiguration,
    RunOneshotIngestion,
    SinkDescription,
)
from actors.runtime.kernel import Actor, ActorAddress
from actors.runtime.progress import ObjectId


class StorageConnectors(msgspec.Struct, frozen=True, gc=False):
    """Factories for connections to external systems (tests replace them)."""

    source: Callable[[ConnectorConfiguration, ObjectId], SourceConnector]
    """Opens a source. Raises `InvalidUsage`."""
    sink: Callable[[SinkDescription, int, ActorAddress[Any]], Actor[Any]]
    """Takes (description, number, owner), and returns a sink's task, which may write. Raises
    `InvalidUsage`."""
    scratch: Path
    """Folder for files that need not survive the process."""
    oneshot: Callable[[RunOneshotIngestion], OneshotReading] = refuse_oneshot
    """Returns the reading of a one-shot ingestion's files. Raises `InvalidUsage`."""
