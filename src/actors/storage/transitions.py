"""The storage half's state machines as data, as in `compute.transitions`.

A table maps (state, event) to the next state; a pair that it lacks violates the protocol.
`cluster.storage_rules` runs `STAGES`. `LIFE` is the life of a source or sink on all workers; tests
check that `storage.state` follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

Table: TypeAlias = Mapping[tuple[str, str], str]

OTHER: Final = "any other command"

STAGES: Final[Table] = {
    ("opened", "Hello"): "initializing",
    ("initializing", OTHER): "initializing",
    ("initializing", "InitializationComplete"): "storing",
    ("storing", OTHER): "storing",
}
"""Stages of a connection, by its commands."""

LIFE: Final[Table] = {
    ("absent", "Run"): "looked up",
    ("looked up", "look-up failed"): "looked up",
    ("looked up", "look-up answered"): "running",
    ("looked up", "dropped"): "stopping",
    ("running", "update"): "looked up",
    ("running", "reconciled: kept"): "running",
    ("running", "task failed"): "stalled",
    ("stalled", "SuspendAndRestart"): "looked up",
    ("stalled", "dropped"): "stopping",
    ("running", "dropped"): "stopping",
    ("running", "reconciled: not mentioned"): "stopping",
    ("stopping", "task stopped"): "absent",
}
"""States of a source. During the look-up for an update the former rendering goes on. (A sink is
rendered at once, without a look-up.)"""

TABLES: Final[Mapping[str, Table]] = {
    "A connection of the storage half": STAGES,
    "A source": LIFE,
}
