"""The sessions that have changed something, durably: none of them is opened a second time.

A client whose answer was lost sends its operation again, with the same id: to the service that was
started meanwhile, too, which knows neither the session nor the operation. So a session is noted
here before its first change is carried out. A name that was noted and is not open is answered
`SESSION_CHANGED`, as Spark's own server answers a session of the one before it. Within an open
session the operations are remembered one by one (`SessionTable`).
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
    """The durable document: the digests of the sessions, one after the other, oldest first."""

    format: int
    digests: bytes


def digest_of(key: SessionKey) -> bytes:
    """Return the digest of a session's name."""
    # Names are a client's texts of any length; these are all as long, and few bytes.
    name = msgspec.msgpack.encode((key.user_id, key.session_id))
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()


def encode_ledger(digests: Iterable[bytes]) -> bytes:
    """Return the document to store."""
    return msgspec.msgpack.encode(LedgerRecord(FORMAT_VERSION, b"".join(digests)))


def decode_ledger(data: bytes) -> list[bytes]:
    """Return the digests of a document. Raises `StateDirectoryError` for a newer format,
    `CorruptData`.

    >>> decode_ledger(encode_ledger([b"a" * 16, b"b" * 16])) == [b"a" * 16, b"b" * 16]
    True
    """
    what = "the record of Spark Connect's sessions"
    record = decode_document(LEDGER_KEY, data, LedgerRecord, what=what, format=FORMAT_VERSION)
    found = record.digests
    return [found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES)]


class SessionLedger:
    """The record, and what is known of it."""

    def __init__(self, persist: PersistClient | None, sessions_max: int) -> None:
        """Take the stores (None: nothing is durable), and how many sessions are remembered."""
        self._persist = persist
        self._sessions_max = sessions_max
        self._lock = anyio.Lock()
        self._digests: dict[bytes, None] | None = None
        """Oldest first; None: the record must be read."""
        self._seqno: int | None = None

    async def is_noted(self, key: SessionKey) -> bool:
        """Return whether a session of this name has changed something. Raises `StorageError`."""
        async with self._lock:
            return digest_of(key) in await self._known()

    async def note(self, key: SessionKey) -> None:
        """Note a session. It is durable when this returns. Raises `StorageError`."""
        digest = digest_of(key)
        # One after the other: each stores the whole record.
        async with self._lock:
            for _ in range(ATTEMPTS_MAX):
                known = await self._known()
                if digest in known or await self._store({**known, digest: None}):
                    return
        raise StorageError(
            f"consensus key {LEDGER_KEY!r} is changed by another service", determinate=True
        )

    async def _known(self) -> dict[bytes, None]:
        if self._digests is None:
            head = None if self._persist is None else await self._persist.head(LEDGER_KEY)
            self._seqno = None if head is None else head.seqno
            self._digests = dict.fromkeys([] if head is None else decode_ledger(head.data))
        return self._digests

    async def _store(self, digests: dict[bytes, None]) -> bool:
        """Make these the noted sessions, but for the oldest of too many. Return False if the record
        was another one than is known."""
        kept = dict.fromkeys(list(digests)[-self._sessions_max :])
        change = CompareAndSet(LEDGER_KEY, self._seqno, encode_ledger(kept))
        # Read again unless it surely succeeds: a set that failed may have been carried out.
        self._digests = None
        if self._persist is not None and not await self._persist.compare_and_set([change]):
            return False
        self._digests, self._seqno = kept, change.seqno
        return True
