"""Lists garbage blobs, and why each may not be deleted yet: pure, over documents and a listing.

- *retired*: a compaction replaced it; deletable when no lease was taken before that.
- *unnamed*: no document names it: about to be appended, or its writer is dead; deletable when older
  than the grace.
- *stashed*: a result on its way to a reader; deletable when not taken in time.

It predicts, for operators, what the collection (`upkeep.py`) would do. A collector also spares what
its own process writes and reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from actors.persist.location import BlobInfo
from actors.persist.shard import ShardState
from actors.persist.stashed import FOLDER
from actors.progress import ShardId

RETIRED = "retired"
UNNAMED = "unnamed"
STASHED = "stashed"


class GarbageBlob(msgspec.Struct, frozen=True):
    """One garbage blob, and why it is kept ("": deletable)."""

    key: str
    bytes: int
    age_ms: int
    kind: str
    kept: str = ""


def list_garbage(
    states: Mapping[ShardId, ShardState],
    infos: Sequence[BlobInfo],
    now_ms: int,
    *,
    grace_ms: int,
    stash_ms: int,
    ignored: frozenset[str] = frozenset(),
) -> list[GarbageBlob]:
    """Return all garbage blobs, by key; leases in `ignored` (of dead processes) hold nothing.

    `states` must have been read after the listing: else a blob that was appended in between looks
    unnamed.
    """
    live: set[str] = set()
    retired: dict[str, str] = {}
    for state in states.values():
        # Retired blobs are named, too, but may go.
        live |= state.blob_keys() - {gone.key for gone in state.retired}
        for gone in state.retired:
            holders = [
                name
                for name, lease in state.leases.items()
                # A lease taken before the retirement may still use the blob.
                if name not in ignored and lease.seqno < gone.seqno
            ]
            retired[gone.key] = f"lease {', '.join(sorted(holders))}" if holders else ""
    found = []
    for info in infos:
        age = now_ms - info.modified_ms
        if info.key in live:
            continue
        if info.key in retired:
            found.append(GarbageBlob(info.key, info.bytes, age, RETIRED, retired[info.key]))
        elif info.key.startswith(f"{FOLDER}/"):
            kept = "" if age >= stash_ms else f"taken within {stash_ms} ms"
            found.append(GarbageBlob(info.key, info.bytes, age, STASHED, kept))
        else:
            kept = "" if age >= grace_ms else f"younger than {grace_ms} ms"
            found.append(GarbageBlob(info.key, info.bytes, age, UNNAMED, kept))
    return found
