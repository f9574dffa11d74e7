"""Guests: processes that read and compact shards beside those that own the stores.

A service that is alone on its stores keeps much in memory: leases of its readers that no document
names, parts that it wrote and has not appended, which leases are of dead processes. A *guest* comes
from outside (the command line, somebody's Spark) and knows none of that. It does no harm because

- a guest never moves the since and never drops a lease of another that is no guest, expired or not:
  a reader of the owner that no document names is promised ``reader.since >= state.since``, and a
  since that stays keeps that promise;
- a guest never deletes a blob: what its compaction replaced is retired, and the owner deletes it
  when none of its own readers uses it;
- the owner keeps the lease of a guest as long as it is renewed (`reader.py`: its name ends in ``@``
  and the guest's own). So what a guest was told of is there while its lease lasts;
- both write by compare-and-set, so whoever's view is old is told and reads again. A part is retired
  only by a write on top of the lease, or before it was taken: then the guest never saw the part.

What a guest wrote and has not appended yet is an orphan to the owner: it is linked within half of
`blob_orphan_grace_ms`, or not at all (`part_store.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from actors.errors import Busy
from actors.persist.shard import Lease, ShardState

PREFIX: Final = "guest/"
GUEST_LEASES_MAX: Final = 512
"""On one shard: they stand in its document, about 100 bytes each."""
NO_BLOB: Final = 2**53
"""The seqno of a lease that holds a time and no blob: no part is retired so late."""
CLOCKS_APART_MS_MAX: Final = 3_600_000
"""A guest leaves leases of other guests alone for so long after they expired by its own clock."""


def guest_lease(guest: str, name: str) -> str:
    """What the lease `name` of a guest is called in the document."""
    return f"{PREFIX}{name}@{guest}"


def is_guest(lease: str) -> bool:
    """Whether a lease of that name is a guest's."""
    return lease.startswith(PREFIX)


def renewed_by_guest(
    state: ShardState, own: Mapping[str, Lease], gone: Iterable[str], now_ms: int
) -> ShardState:
    """The state with a guest's leases as they are now; `gone` ones are dropped, and those of guests
    that expired long ago. Neither the since nor what others hold is touched. Raises `Busy`."""
    dropped = set(gone)
    leases = {
        name: lease
        for name, lease in state.leases.items()
        if name not in dropped
        and not (is_guest(name) and lease.expires_ms + CLOCKS_APART_MS_MAX <= now_ms)
    }
    leases |= {n: replace(lease, since=max(lease.since, state.since)) for n, lease in own.items()}
    count = sum(map(is_guest, leases))
    if count > GUEST_LEASES_MAX and own.keys() - state.leases.keys():
        raise Busy(
            f"shard {state.id} has {count - len(own)} leases of readers from outside, at most"
            f" {GUEST_LEASES_MAX} may be: try again when they have ended or expired"
        )
    return replace(state, leases=leases)
