"""The PostgreSQL side of a relay: a connection in replication mode, physical.

The server is asked only what a standby asks (IDENTIFY_SYSTEM, its slot, its log from an LSN on), so
a role with REPLICATION is enough. Bytes come in order and without a gap, or `MalformedFrame` is
raised. Bytes that are not read wait at the server: one buffer of `BUFFER_BYTES` at most is held
here. `report` may be called while `next` waits.

Sources: PostgreSQL's documentation, "Streaming Replication Protocol"; xlog_internal.h, whose format
`wal.records` describes.
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
    """Searches the first record of a log that is fed from a page's begin on. Raises `CorruptData`
    for an unknown version.

    A log of acceptors begins at a record, while a server's log is read from a segment's begin on,
    where a record of the segment before may continue. Each page's header has the number of its
    bytes still to come, so only headers are read.
    """

    def __init__(self, page_lsn: int, pg_version: int) -> None:
        if page_lsn % PAGE_BYTES:
            raise InvalidUsage(f"{lsn_text(page_lsn)} is no begin of a page")
        self._magics = magics_of(pg_version)
        self._page_lsn = page_lsn
        """LSN of the page whose header is read, or awaited."""
        self._lsn = page_lsn
        self._header = b""

    def feed(self, wal: bytes) -> int | None:
        """Take the log's next bytes, and return the LSN of the first record once it is known.
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
                f"no page of the log begins at {lsn_text(page_lsn)}: its magic is {magic:04X}, and"
                f" it says that it is the one of {lsn_text(address)}",
                determinate=True,
            )
        # Without a continued record the log is whole from the page's own header on.
        if not info & CONTINUED:
            return page_lsn
        header = LONG_HEADER_BYTES if page_lsn % SEGMENT_BYTES == 0 else SHORT_HEADER_BYTES
        behind = aligned(page_lsn + header + to_come)
        self._page_lsn += PAGE_BYTES
        self._header = b""
        return behind if behind <= self._page_lsn else None


class ServerIdentity(msgspec.Struct, frozen=True):
    """A server's log and its end."""

    system_id: int
    timeline: int
    flush_lsn: int
    version: int
    """150018 for 15.18."""


class ReplicationServer:
    """One connection; `connect` makes it."""

    def __init__(self, wire: PostgresConnection, clock: ActorClock) -> None:
        self._wire = wire
        self._clock = clock
        self._copy: CopyStream | None = None
        self._first = True
        self.next_lsn = 0
        """LSN of the next byte."""
        self.known_lsn = 0
        """End of the server's log, by its last report."""
        self.wants_report = False
        """True if the server asked for a report."""

    @classmethod
    async def connect(cls, dsn: str, clock: ActorClock) -> Self:
        """Connect; `dsn` as libpq takes it, a URI or ``key=value``. Raises `SourceUnreachable`."""
        return cls(await PostgresConnection.open(replication_dsn(dsn)), clock)

    async def identify(self) -> ServerIdentity:
        """Return the server's identity. Raises `InvalidUsage` for a log that acceptors cannot take,
        `SourceUnreachable`."""
        [(system_id, timeline, flush, *_)] = await self._wire.query("IDENTIFY_SYSTEM")
        [(segment,)] = await self._wire.query("SHOW wal_segment_size")
        found = ServerIdentity(
            int(str(system_id)), int(str(timeline)), parse_lsn(str(flush)),
            self._wire.server_version,
        )  # fmt: skip
        magics_of(found.version)
        if segment != "16MB":
            raise InvalidUsage(f"the server's segments have {segment}: acceptors take 16MB alone")
        if found.timeline != PG_TIMELINE:
            raise InvalidUsage(
                f"the server is on timeline {found.timeline}: it was promoted or restored, and"
                f" acceptors take timeline {PG_TIMELINE} alone"
            )
        return found

    async def make_slot(self, slot: str) -> None:
        """Create a physical slot that keeps the log from now on, unless it exists. Raises
        `ServerRefused`, `SourceUnreachable`."""
        if self._tells_slots and (await self._slot(slot))[0] is not None:
            return
        try:
            await self._wire.query(
                f"CREATE_REPLICATION_SLOT {quote_name(slot)} PHYSICAL RESERVE_WAL"
            )
        except ServerRefused as error:
            # Older servers cannot be asked for the slot first.
            if error.sqlstate != _EXISTS:
                raise

    async def begin(self, identity: ServerIdentity, slot: str) -> int:
        """Return where a new log can begin: the first record of the segment from which the slot
        keeps the log, or in which the server writes. May wait until the server writes it."""
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
        """Return the LSN from which a slot keeps the log, if it can be known. Raises `InvalidUsage`
        where there is no such slot."""
        if not self._tells_slots:
            return None
        kind, lsn = await self._slot(slot)
        if kind is None:
            raise InvalidUsage(f"the server has no slot {slot}: make it, or give --create-slot")
        return None if lsn is None else parse_lsn(lsn)

    @property
    def _tells_slots(self) -> bool:
        """Return whether the server has READ_REPLICATION_SLOT: older ones show slots by SQL
        alone."""
        return self._wire.server_version >= 150_000

    async def _slot(self, slot: str) -> tuple[str | None, str | None]:
        """Return (kind, LSN from which it keeps the log); None where there is none. Raises
        `ServerRefused` for a logical one."""
        [(kind, lsn, _)] = await self._wire.query(f"READ_REPLICATION_SLOT {quote_name(slot)}")
        return kind, lsn

    async def start(self, lsn: int, slot: str) -> None:
        """Start the stream at `lsn`. Raises `InvalidUsage` where the server has it no more, or not
        yet; `SourceUnreachable`."""
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
                f"the server has its log from {lsn_text(lsn)} no more ({error}): a slot would have"
                " kept it; relay it into a new timeline"
            )
        if error.sqlstate.startswith("55"):  # the slot is in use: its last user may be ending
            return SourceUnreachable(f"PostgreSQL: {error}", "it is tried again")
        return InvalidUsage(f"the server refuses its log from {lsn_text(lsn)}: {error}")

    async def next(self) -> list[bytes]:
        """Return the next bytes, in pieces; none for a keepalive. If it is cancelled, nothing is
        lost. Raises `SourceUnreachable`, `InvalidUsage`, `MalformedFrame`."""
        copy = self._copy
        assert copy is not None, "started"
        try:
            if self._first:
                frames = copy.frames()  # bytes that came with the server's reply
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
            raise SourceUnreachable("PostgreSQL ended the stream", "it is opened again")
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
                        f"log at {lsn_text(begin)} came, and {lsn_text(self.next_lsn)} is next"
                    )
                pieces.append(bytes(frame[_DATA.size :]))
                self.next_lsn += len(pieces[-1])
                self.known_lsn = max(self.known_lsn, known, self.next_lsn)
            elif kind == b"k" and len(frame) == _KEEPALIVE.size:
                _, known, _, asked = _KEEPALIVE.unpack(frame)
                self.known_lsn = max(self.known_lsn, known)
                self.wants_report = self.wants_report or bool(asked)
            else:
                raise MalformedFrame(f"{kind!r} of {len(frame)} bytes is no message of a stream")
        return pieces

    def report(self, lsn: int) -> None:
        """Report that all before `lsn` is durable (0: unknown). Raises `SourceUnreachable`."""
        self.wants_report = False
        if self._copy is not None:
            now = pg_time(self._clock.now_ms())
            # Applied is always 0, as PostgreSQL's own receivers of log report it.
            self._copy.send(_STATUS.pack(b"r", lsn, lsn, 0, now, 0))

    def close(self) -> None:
        """Close the connection; a slot stays."""
        self._copy = None
        self._wire.close()


def replication_dsn(dsn: str) -> str:
    """Return the DSN of a standby's connection to the same server."""
    more = {"replication": "true", "fallback_application_name": "penstock"}
    if dsn.startswith(("postgresql://", "postgres://")):
        sign = "&" if "?" in dsn else "?"
        return dsn + sign + "&".join(f"{name}={value}" for name, value in more.items())
    return " ".join([dsn, *(f"{name}={value}" for name, value in more.items())])
