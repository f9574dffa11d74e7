"""A replica: its workers behind one connection, and the transport that every connection uses.

Public names are re-exported here and imported on first use. A program that uses only the transport,
such as an acceptor of the WAL, therefore does not load the workers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.replica.cluster.client import ClusterClient as ClusterClient
    from actors.replica.cluster.client import LocalClient as LocalClient
    from actors.replica.cluster.client import WireClient as WireClient
    from actors.replica.cluster.client import connect as connect
    from actors.replica.cluster.cluster import ClusterStatistics as ClusterStatistics
    from actors.replica.cluster.cluster import WorkerCluster as WorkerCluster

_LAZY = {
    "WorkerCluster": "actors.replica.cluster.cluster",
    "ClusterClient": "actors.replica.cluster.client",
    "ClusterStatistics": "actors.replica.cluster.cluster",
    "LocalClient": "actors.replica.cluster.client",
    "WireClient": "actors.replica.cluster.client",
    "connect": "actors.replica.cluster.client",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
