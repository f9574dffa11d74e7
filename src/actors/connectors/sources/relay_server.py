"""The PostgreSQL side of a relay: a connection for physical replication.

The relay sends only the commands that a standby sends (IDENTIFY_SYSTEM, its slot, the log from an
LSN on), so a role with REPLICATION is sufficient. Bytes arrive in order and without gaps; otherwise
`MalformedFrame` is raised. Unread bytes wait at the server, except for one buffer of at most
`BUFFER_BYTES`. `report` may be called while `next` waits.

Sources: PostgreSQL's documentation, "Streaming Replication Protocol", and xlog_internal.h;
`wal.records` describes the format.
"""

from __future__ import annotations

import struct
from typing import Final, Self

import msgspec

from actors.connectors.sources.postgres_copy import CopyFrames, CopyStream
from actors.connectors.sources.postgres_errors import ServerRefused
from actors.connectors.sources.postgres_wire import PostgresConnection
from actors.connectors.sources.source import SourceUnreachable
from actors.model.pgwire.quoting import quote_name
from actors.runtime.errors import CorruptData, InvalidUsage, MalformedFrame
from actors.runtime.kernel import ActorClock
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES, aligned, lsn_text, parse_lsn
from actors.wal.records import CONTINUED, LONG_HEADER_BYTES, SHORT_HEADER_BYTES, magics_of
from actors.wal.replication import pg_time

BUFFER_BYTES: Final = 1024 * 1024
PG_TIMELINE: Final = 1
"""PostgreSQL's timeline in the segment names and page headers that acceptors write."""
_PAGE: Final = struct.Struct("<HHIQI")
_DATA: Final = struct.Struct(">cQQq")
_KEEPALIVE: Final = struct.Struct(">cQqB")
_STATUS: Final = struct.Struct(">cQQQqB")
_EXISTS: Final = "42710"
_GONE: Final = "58P01"


class FirstRecord:
    """Finds the first record in a log that is fed from the start of a page on.

    An acceptors' log starts with a record. A server's log is read from the start of a segment,
    where a record of the previous segment may continue. Each page header says how many bytes of
    that record follow, so only headers are read.
    """

    def __init__(self, page_lsn: int, pg_version: int) -> None:
        """Start at the page at `page_lsn`. Raises `InvalidUsage` if it is not the start of a page,
        and `CorruptData` for an unknown version."""
        if page_lsn % PAGE_BYTES:
            raise InvalidUsage(f"{lsn_text(page_lsn)} is not at the start of a page")
        self._magics = magics_of(pg_version)
        self._page_lsn = page_lsn
        """LSN of the page whose header is read next or in part."""
        # LSN of the next byte that `feed` gets.
        self._lsn = page_lsn
        # Bytes of the current page's header that have arrived.
        self._header = b""

    def feed(self, wal: bytes) -> int | None:
        """Process the log's next bytes, and return the LSN of the first record once it is known.
        Raises `CorruptData`."""
        while wal:
            if self._lsn < self._page_lsn:
                skipped = min(len(wal), self._page_lsn - self._lsn)
                self._lsn += skipped
                wal = wal[skipped:]
                continue
            missing = _PAGE.size - len(self._header)
            self._header += wal[:missing]
            self._lsn += len(wal[:missing])
            wal = wal[missing:]
            if len(self._header) == _PAGE.size:
                found = self._judge()
                if found is not None:
                    return found
        return None

    def _judge(self) -> int | None:
        page_lsn = self._page_lsn
        magic, info, _, address, to_come = _PAGE.unpack(self._header)
        if magic not in self._magics or address != page_lsn:
            raise CorruptData(
                f"no valid page of the log at {lsn_text(page_lsn)}: its magic is {magic:04X}, and "
                f"its header has the LSN {lsn_text(address)}",
                determinate=True,
            )
        # If no record continues here, the log can be read from this page's start.
        if not info & CONTINUED:
            return page_lsn
        header = LONG_HEADER_BYTES if page_lsn % SEGMENT_BYTES == 0 else SHORT_HEADER_BYTES
        behind = aligned(page_lsn + header + to_come)
        self._page_lsn += PAGE_BYTES
        self._header = b""
        return behind if behind <= self._page_lsn else None


class ServerIdentity(msgspec.Struct, frozen=True):
    """Identity of a server's log, and its current end."""

    system_id: int
    timeline: int
    flush_lsn: int
    version: int
    """Version of the server, such as 150018 for 15.18."""


class ReplicationServer:
    """A connection for physical replication; made by `connect`."""

    def __init__(self, wire: PostgresConnection, clock: ActorClock) -> None:
        self._wire = wire
        self._clock = clock
        # The replication COPY; None unless started.
        self._copy: CopyStream | None = None
        # True until the bytes that came with the reply to START_REPLICATION have been returned.
        self._first = True
        self.next_lsn = 0
        """LSN of the next byte that `next` returns."""
        self.known_lsn = 0
        """End of the server's log, as last reported by the server."""
        self.wants_report = False
        """True if the server has asked for a report."""

    @classmethod
    async def connect(cls, dsn: str, clock: ActorClock) -> Self:
        """Connect to a server. `dsn` is a URI or a ``key=value`` string, as in libpq. Raises
        `SourceUnreachable`."""
        return cls(await PostgresConnection.open(replication_dsn(dsn)), clock)

    async def identify(self) -> ServerIdentity:
        """Return the server's identity. Raises `InvalidUsage` for a log that acceptors cannot
        store, and `SourceUnreachable`."""
        [(system_id, timeline, flush, *_)] = await self._wire.query("IDENTIFY_SYSTEM")
        [(segment,)] = await self._wire.query("SHOW wal_segment_size")
        found = ServerIdentity(
            int(str(system_id)), int(str(timeline)), parse_lsn(str(flush)),
            self._wire.server_version,
        )  # fmt: skip
        magics_of(found.version)
        if segment != "16MB":
            raise InvalidUsage(
                f"the server's WAL segments have {segment}: acceptors support only 16MB"
            )
        if found.timeline != PG_TIMELINE:
            raise InvalidUsage(
                f"the server is on timeline {found.timeline}, because it was promoted or restored: "
                f"acceptors support only timeline {PG_TIMELINE}"
            )
        return found

    async def make_slot(self, slot: str) -> None:
        """Create a physical slot that retains the log from now on, unless the slot exists.

        Raises `ServerRefused` and `SourceUnreachable`.
        """
        if self._tells_slots and (await self._slot(slot))[0] is not None:
            return
        try:
            await self._wire.query(
                f"CREATE_REPLICATION_SLOT {quote_name(slot)} PHYSICAL RESERVE_WAL"
            )
        except ServerRefused as error:
            # Older servers cannot be asked whether the slot exists.
            if error.sqlstate != _EXISTS:
                raise

    async def begin(self, identity: ServerIdentity, slot: str) -> int:
        """Return where a new log can start: at the first record of the segment from which the slot
        retains the log, or else of the segment that the server writes at the moment.

        May wait until the server has written such a record.
        """
        kept = await self._slot_lsn(slot) if slot else None
        lsn = kept if kept is not None else identity.flush_lsn
        lsn -= lsn % SEGMENT_BYTES
        first = FirstRecord(lsn, identity.version)
        await self.start(lsn, "")
        while True:
            for piece in await self.next():
                if (found := first.feed(piece)) is not None:
                    return found

    async def _slot_lsn(self, slot: str) -> int | None:
        """Return the LSN from which a slot retains the log; None if it is unknown. Raises
        `InvalidUsage` if the slot does not exist."""
        if not self._tells_slots:
            return None
        kind, lsn = await self._slot(slot)
        if kind is None:
            raise InvalidUsage(f"the server has no slot {slot}: create it, or pass --create-slot")
        return None if lsn is None else parse_lsn(lsn)

    @property
    def _tells_slots(self) -> bool:
        """Return whether the server has READ_REPLICATION_SLOT. Older servers show slots only
        through SQL."""
        return self._wire.server_version >= 150_000

    async def _slot(self, slot: str) -> tuple[str | None, str | None]:
        """Return a slot's kind, and the LSN from which it retains the log; None where there is
        none.

        Raises `ServerRefused` for a logical slot.
        """
        [(kind, lsn, _)] = await self._wire.query(f"READ_REPLICATION_SLOT {quote_name(slot)}")
        return kind, lsn

    async def start(self, lsn: int, slot: str) -> None:
        """Start streaming at `lsn`. Raises `InvalidUsage` if the server no longer has that part of
        the log, or not yet, and `SourceUnreachable`."""
        named = f"SLOT {quote_name(slot)} " if slot else ""
        self.next_lsn = lsn
        self._first = True
        try:
            self._copy = await self._wire.copy(
                f"START_REPLICATION {named}PHYSICAL {lsn_text(lsn)} TIMELINE {PG_TIMELINE}",
                BUFFER_BYTES,
            )
        except ServerRefused as error:
            raise self._refused(error, lsn) from None

    def _refused(self, error: ServerRefused, lsn: int) -> Exception:
        if error.sqlstate == _GONE:
            return InvalidUsage(
                f"the server no longer has its log from {lsn_text(lsn)} on ({error}): use a slot "
                "to retain it, and relay into a new timeline"
            )
        if error.sqlstate.startswith(
            "55"
        ):  # the slot is in use; its last reader may be about to end
            return SourceUnreachable(f"PostgreSQL: {error}", "the relay will retry")
        return InvalidUsage(f"the server refused to send its log from {lsn_text(lsn)} on: {error}")

    async def next(self) -> list[bytes]:
        """Return the next bytes, in pieces; none for a keepalive. A cancelled call loses nothing.

        Raises `SourceUnreachable`, `InvalidUsage` and `MalformedFrame`.
        """
        copy = self._copy
        assert copy is not None, "started"
        try:
            if self._first:
                frames = copy.frames()  # bytes that arrived with the server's reply
                self._first = False
                if not len(frames):
                    frames = await copy.fill()
            else:
                frames = await copy.fill()
        except ServerRefused as error:
            raise self._refused(error, self.next_lsn) from None
        pieces = self._pieces(frames)
        copy.take(len(frames))
        if copy.ended and not pieces:
            raise SourceUnreachable("PostgreSQL ended the stream", "the relay will reconnect")
        return pieces

    def _pieces(self, frames: CopyFrames) -> list[bytes]:
        pieces: list[bytes] = []
        data = frames.data.data
        for start, end in zip(frames.starts.tolist(), frames.ends.tolist(), strict=True):
            frame = data[start:end]
            kind = bytes(frame[:1])
            if kind == b"w" and len(frame) >= _DATA.size:
                _, begin, known, _ = _DATA.unpack_from(frame)
                if begin != self.next_lsn:
                    raise MalformedFrame(
                        f"got log at {lsn_text(begin)}, expected {lsn_text(self.next_lsn)}"
                    )
                pieces.append(bytes(frame[_DATA.size :]))
                self.next_lsn += len(pieces[-1])
                self.known_lsn = max(self.known_lsn, known, self.next_lsn)
            elif kind == b"k" and len(frame) == _KEEPALIVE.size:
                _, known, _, asked = _KEEPALIVE.unpack(frame)
                self.known_lsn = max(self.known_lsn, known)
                self.wants_report = self.wants_report or bool(asked)
            else:
                raise MalformedFrame(
                    f"unexpected message {kind!r} of {len(frame)} bytes in a replication stream"
                )
        return pieces

    def report(self, lsn: int) -> None:
        """Report that everything before `lsn` is durable (0: unknown). Raises
        `SourceUnreachable`."""
        self.wants_report = False
        if self._copy is not None:
            now = pg_time(self._clock.now_ms())
            # "Applied" is always 0, as PostgreSQL's own WAL receivers report it.
            self._copy.send(_STATUS.pack(b"r", lsn, lsn, 0, now, 0))

    def close(self) -> None:
        """Close the connection. A slot stays."""
        self._copy = None
        self._wire.close()


def replication_dsn(dsn: str) -> str:
    """Return the DSN with the parameters of a replication connection added."""
    more = {"replication": "true", "fallback_application_name": "penstock"}
    if dsn.startswith(("postgresql://", "postgres://")):
        sign = "&" if "?" in dsn else "?"
        return dsn + sign + "&".join(f"{name}={value}" for name, value in more.items())
    return " ".join([dsn, *(f"{name}={value}" for name, value in more.items())])
