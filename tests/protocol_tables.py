"""How dataflows, peeks, responses and sources live, as tables: tests lead the code through every
line, and the pages of the protocol draw them.

A table maps (state, event) to the next state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from actors.replica.cluster import rules, storage_rules
from actors.replica.cluster.rules import StageTable

DATAFLOW: Final[StageTable] = {
    ("absent", "CreateDataflow"): "suspended",
    ("suspended", "Schedule"): "running",
    ("suspended", "AllowCompaction"): "suspended",
    ("running", "AllowCompaction"): "running",
    ("suspended", "AllowCompaction (empty)"): "dropping",
    ("running", "AllowCompaction (empty)"): "dropping",
    ("suspended", "reconciled: kept"): "suspended",
    ("running", "reconciled: kept"): "running",
    ("suspended", "reconciled: not kept"): "dropping",
    ("running", "reconciled: not kept"): "dropping",
    ("dropping", "actor and tasks stopped"): "absent",
}
"""States of a dataflow on a worker. A dropped one may be created again while it stops: the new one
is another, which starts when the former has stopped."""

PEEK: Final[StageTable] = {
    ("asked", "time not sealed"): "waiting",
    ("asked", "time sealed"): "reading",
    ("asked", "refused"): "answered",
    ("waiting", "time sealed"): "reading",
    ("waiting", "CancelPeek"): "answered",
    ("waiting", "index dropped"): "answered",
    ("waiting", "connection lost"): "forgotten",
    ("reading", "rows or error"): "answered",
    ("reading", "snapshot replaced"): "waiting",
    ("reading", "CancelPeek"): "answered",
    ("reading", "index dropped"): "answered",
    ("reading", "connection lost"): "forgotten",
}
"""States of a peek on a worker."""

ADAPTER: Final[StageTable] = {
    ("current nonce, client there", "response"): "forwarded",
    ("current nonce, client gone", "response"): "dropped",
    ("served before", "response"): "dropped",
    ("not served yet, room", "response"): "stashed",
    ("not served yet, no room", "response"): "held",
}
"""Handling of a worker's response at its channel adapter, by its nonce."""

SOURCE: Final[StageTable] = {
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


TABLES: Final[Mapping[str, StageTable]] = {
    "A connection": rules.STAGES,
    "A dataflow on a worker": DATAFLOW,
    "A peek on a worker": PEEK,
    "A response at the adapter": ADAPTER,
}
"""Drawn in docs/internals/protocol.md."""

STORAGE_TABLES: Final[Mapping[str, StageTable]] = {
    "A connection of the storage half": storage_rules.STAGES,
    "A source": SOURCE,
}
"""Drawn in docs/internals/protocol-storage.md."""


def mermaid(table: StageTable) -> str:
    """Return a state diagram of a table, without fences."""
    names: dict[str, str] = {}
    for (state, _), following in table.items():
        for name in (state, following):
            names.setdefault(name, f"s{len(names)}")
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{name}" as {short}' for name, short in names.items()]
    first = next(iter(names.values()))
    lines.append(f"    [*] --> {first}")
    lines += [
        f"    {names[state]} --> {names[following]}: {event}"
        for (state, event), following in table.items()
    ]
    return "\n".join(lines)
