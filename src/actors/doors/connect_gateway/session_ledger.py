"""A durable record of sessions that have changed state, so that none of them is opened twice.

A client that missed a response repeats its operation with the same id. If the service was restarted
meanwhile, it knows neither the session nor the operation. So a session is recorded here before its
first change is executed. A request that names a recorded session that is not open gets
`SESSION_CHANGED`, as Spark's own server responds after a restart. Within an open session,
`SessionTable` records the operations individually.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import anyio
import msgspec

from actors.doors.connect_gateway.gateway_sessions import SessionKey
from actors.durable.persist import CompareAndSet, PersistClient
from actors.durable.persist.small_documents import decode_document
from actors.runtime.errors import StorageError

LEDGER_KEY: Final = "connect_sessions"
FORMAT_VERSION: Final = 1
DIGEST_BYTES: Final = 16
ATTEMPTS_MAX: Final = 3


class LedgerRecord(msgspec.Struct, frozen=True):
    """The stored document."""

    format: int
    digests: bytes
    """The concatenated digests of the sessions, oldest first."""


def digest_of(key: SessionKey) -> bytes:
    """Return the digest of a session's key."""
    # Clients choose the names, of any length. Digests have a small, fixed length.
    name = msgspec.msgpack.encode((key.user_id, key.session_id))
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()


def encode_ledger(digests: Iterable[bytes]) -> bytes:
    """Encode the document."""
    return msgspec.msgpack.encode(LedgerRecord(FORMAT_VERSION, b"".join(digests)))


def decode_ledger(data: bytes) -> list[bytes]:
    """Decode the digests in a document. Raises `StateDirectoryError` for a newer format, and
    `CorruptData`.

    >>> decode_ledger(encode_ledger([b"a" * 16, b"b" * 16])) == [b"a" * 16, b"b" * 16]
    True
    """
    what = "the record of Spark Connect's sessions"
    record = decode_document(LEDGER_KEY, data, LedgerRecord, what=what, format=FORMAT_VERSION)
    found = record.digests
    return [found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES)]


class SessionLedger:
    """The durable record of sessions."""

    def __init__(self, persist: PersistClient | None, sessions_max: int) -> None:
        """Set up the record. `persist`: the stores; None: keep the record in memory only.
        `sessions_max`: how many sessions are recorded; the oldest are dropped."""
        self._persist = persist
        self._sessions_max = sessions_max
        self._lock = anyio.Lock()
        self._digests: dict[bytes, None] | None = None
        """Digests of the recorded sessions, oldest first; None: not read yet."""
        self._seqno: int | None = None
        """Sequence number of the stored document; None: there is none."""

    async def is_noted(self, key: SessionKey) -> bool:
        """Return whether a session of this name has changed state. Raises `StorageError`."""
        async with self._lock:
            return digest_of(key) in await self._known()

    async def note(self, key: SessionKey) -> None:
        """Record a session durably. Raises `StorageError`."""
        digest = digest_of(key)
        # One at a time, because each call stores the whole record.
        async with self._lock:
            for _ in range(ATTEMPTS_MAX):
                known = await self._known()
                if digest in known or await self._store({**known, digest: None}):
                    return
        raise StorageError(
            f"consensus key {LEDGER_KEY!r} is being changed by another service", determinate=True
        )

    async def _known(self) -> dict[bytes, None]:
        if self._digests is None:
            head = None if self._persist is None else await self._persist.head(LEDGER_KEY)
            self._seqno = None if head is None else head.seqno
            self._digests = dict.fromkeys([] if head is None else decode_ledger(head.data))
        return self._digests

    async def _store(self, digests: dict[bytes, None]) -> bool:
        """Store these digests, except for the oldest if there are too many. Return False if the
        stored document has changed meanwhile."""
        kept = dict.fromkeys(list(digests)[-self._sessions_max :])
        change = CompareAndSet(LEDGER_KEY, self._seqno, encode_ledger(kept))
        # Read again unless this succeeds: a failed write may have taken effect.
        self._digests = None
        if self._persist is not None and not await self._persist.compare_and_set([change]):
            return False
        self._digests, self._seqno = kept, change.seqno
        return True
