"""The protocol's state machines as data, for the code, its tests and docs/protocol.md.

A table maps (state, event) to the next state; a pair that it lacks violates the protocol.
`cluster.rules` runs `STAGES`. `LIFE` is the life of one dataflow on a worker, `PEEK` that of one
peek, `ADAPTER` that of a response (`channel_adapter.StashRules`); tests check that the code follows
them. `mermaid` draws a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

Table: TypeAlias = Mapping[tuple[str, str], str]

OTHER: Final = "any other command"

STAGES: Final[Table] = {
    ("opened", "Hello"): "greeted",
    ("greeted", "CreateInstance"): "initializing",
    ("initializing", OTHER): "initializing",
    ("initializing", "InitializationComplete"): "computing",
    ("computing", OTHER): "computing",
}
"""Stages of a connection, by its commands."""

LIFE: Final[Table] = {
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

PEEK: Final[Table] = {
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

ADAPTER: Final[Table] = {
    ("current nonce, client there", "response"): "forwarded",
    ("current nonce, client gone", "response"): "dropped",
    ("served before", "response"): "dropped",
    ("not served yet, room", "response"): "stashed",
    ("not served yet, no room", "response"): "held",
}
"""Handling of a worker's response at its channel adapter, by its nonce."""

TABLES: Final[Mapping[str, Table]] = {
    "A connection": STAGES,
    "A dataflow on a worker": LIFE,
    "A peek on a worker": PEEK,
    "A response at the adapter": ADAPTER,
}


def mermaid(table: Table) -> str:
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
