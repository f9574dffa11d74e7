"""Factories through which the storage half of a worker connects to external systems."""

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
    """Factories of connections to external systems. Tests replace them."""

    source: Callable[[ConnectorConfiguration, ObjectId], SourceConnector]
    """Makes a source from its configuration and id. Raises `InvalidUsage`."""
    sink: Callable[[SinkDescription, int, ActorAddress[Any]], Actor[Any]]
    """Makes the task of a sink from (description, rendering number, owner). The task may write.
    Raises `InvalidUsage`."""
    scratch: Path
    """Folder for files that need not survive the process."""
    oneshot: Callable[[RunOneshotIngestion], OneshotReading] = refuse_oneshot
    """Makes the reader of a one-shot ingestion's files. Raises `InvalidUsage`."""
