"""Leases of guests: processes that read and compact shards alongside the owner of the stores.

A service that is the only owner of its stores keeps much in memory: leases of its readers that no
document contains, parts that it wrote and has not appended, and which leases belong to dead
processes. A *guest* (the command line, a user's Spark) knows none of this. It does no harm because

- A guest never moves the since, and never drops a lease that is not a guest's, expired or not. The
  owner's readers that no document contains are promised ``reader.since >= state.since``, and a
  since that stays put keeps this promise.
- A guest never deletes a blob. It only retires what its compaction replaced, and the owner deletes
  it when none of its own readers uses it.
- The owner preserves a guest's lease as long as it is renewed (`reader.py`; its name ends in ``@``
  and the guest's name), and so the blobs that the guest uses.
- Both write by compare-and-set, so a stale view is detected and read again.

To the owner, parts that a guest wrote and has not appended yet are orphans: they are linked within
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
"""Maximum number per shard. They are in its document, at about 100 bytes each."""
NO_BLOB: Final = 2**53
"""Seqno of a lease that pins a time but no blobs: no part is retired that late."""
CLOCKS_APART_MS_MAX: Final = 3_600_000
"""How long after their expiry a guest spares other guests' leases, to allow for clock skew."""


def guest_lease(guest: str, name: str) -> str:
    """Return the name of a guest's lease in the document."""
    return f"{PREFIX}{name}@{guest}"


def is_guest(lease: str) -> bool:
    """Return whether this is the name of a guest's lease."""
    return lease.startswith(PREFIX)


def renewed_by_guest(
    state: ShardState, own: Mapping[str, ReaderLease], gone: Iterable[str], now_ms: int
) -> ShardState:
    """Return the state with the guest's own leases renewed, and without the `gone` ones and those
    of guests that expired long ago.

    Neither the since nor holds change. Raises `ResourceBusy`.
    """
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
    # Renewals always pass; only a new lease may be refused.
    if count > GUEST_LEASES_MAX and own.keys() - state.leases.keys():
        raise ResourceBusy(
            f"too many external readers of shard {state.id}: {count - len(own)} leases (limit "
            f"{GUEST_LEASES_MAX}); try again when some have ended or expired"
        )
    return replace(state, leases=leases)
