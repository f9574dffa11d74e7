"""Leases of guests: processes that read and compact shards beside those that own the stores.

A service that is alone on its stores keeps much in memory: leases of its readers that no document
names, parts that it wrote and has not appended, which leases are of dead processes. A *guest* (the
command line, a user's Spark) knows none of that. It does no harm because

- a guest never moves the since and never drops a lease of another that is no guest, expired or not:
  a reader of the owner that no document names is promised ``reader.since >= state.since``, and a
  since that stays keeps that promise;
- a guest never deletes a blob: it only retires what its compaction replaced, and the owner deletes
  it when none of its own readers uses it;
- the owner keeps the lease of a guest as long as it is renewed (`reader.py`: its name ends in ``@``
  and the guest's own), and so the blobs that the guest was given;
- both write by compare-and-set, so a stale view is detected and read again.

Parts that a guest wrote and has not appended yet are orphans to the owner: they are linked within
half of `blob_orphan_grace_ms`, or not at all (`part_store.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from actors.durable.persist.shard import ReaderLease, ShardState
from actors.runtime.errors import ResourceBusy

PREFIX: Final = "guest/"
GUEST_LEASES_MAX: Final = 512
"""Bound for one shard: its document holds them, about 100 bytes each."""
NO_BLOB: Final = 2**53
"""Seqno of a lease that holds a time and no blob: no part is retired so late."""
CLOCKS_APART_MS_MAX: Final = 3_600_000
"""Time for which a guest spares leases of other guests that expired by its own clock."""


def guest_lease(guest: str, name: str) -> str:
    """Return the name in the document of a guest's lease `name`."""
    return f"{PREFIX}{name}@{guest}"


def is_guest(lease: str) -> bool:
    """Return whether a lease of that name is a guest's."""
    return lease.startswith(PREFIX)


def renewed_by_guest(
    state: ShardState, own: Mapping[str, ReaderLease], gone: Iterable[str], now_ms: int
) -> ShardState:
    """Return the state with the guest's leases renewed, without the `gone` ones and those of guests
    that expired long ago. Neither the since nor holds change. Raises `ResourceBusy`."""
    dropped = set(gone)
    leases = {
        name: lease
        for name, lease in state.leases.items()
        if name not in dropped
        and not (is_guest(name) and lease.expires_ms + CLOCKS_APART_MS_MAX <= now_ms)
    }
    # Never below the since, which may have passed a lease that had expired.
    leases |= {n: replace(lease, since=max(lease.since, state.since)) for n, lease in own.items()}
    count = sum(map(is_guest, leases))
    # Renewals always pass: only a new lease is refused.
    if count > GUEST_LEASES_MAX and own.keys() - state.leases.keys():
        raise ResourceBusy(
            f"shard {state.id} has {count - len(own)} leases of readers from outside, at most"
            f" {GUEST_LEASES_MAX} may be: try again when they have ended or expired"
        )
    return replace(state, leases=leases)
