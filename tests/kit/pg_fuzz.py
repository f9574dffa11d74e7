"""Sessions of PostgreSQL clients, changed so as to break a server.

`SESSIONS` are valid ones, message by message. `fuzzed_session` changes one with knowledge of the
protocol: incomplete messages, wrong lengths, messages out of order, other texts and numbers.
`read_session` feeds the bytes to the decoder alone (pure). `FuzzedDoor` sends them to a service and
meanwhile checks what other clients notice.

The test suite and ``tests/proof/fuzz_pgwire.py`` share this module.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Sequence
from random import Random
from typing import Final

import anyio
import anyio.abc
import msgspec

from actors.model.pgwire.decoder import FrontendDecoder
from actors.model.pgwire.messages import EncryptionRequest, StartupPacket, encode_message
from actors.runtime.errors import PenstockError, RemoteProtocolError
from actors.service import Service
from actors.testing.patience import PATIENCE_S
from penstock_flights.door import DoorConnection
from tests.kit.wire_fuzz import mutated

MESSAGE_BYTES_MAX: Final = 128 * 1024
TABLE: Final = "CREATE TABLE IF NOT EXISTS f (a BIGINT, b STRING, PRIMARY KEY (a))"
WITNESS: Final = "CREATE TABLE witness (a BIGINT)"
_LENGTHS: Final = (0, 1, 3, 4, 5, 7, 8, 0x7FFF, 10_001, MESSAGE_BYTES_MAX + 5, 1 << 30)
_MORE_LENGTHS: Final = (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_WORDS: Final = (
    *("SELECT", "FROM f", "WHERE", "a = 1", "NULL", "$1", "::int4", "(", ")", ";", "'", '"', "$$"),
    *("--", "/*", "COMMIT", "ROLLBACK", "BEGIN", "FETCH 1 c", "COPY f TO STDOUT", "SUBSCRIBE f"),
    *(
        "DECLARE c CURSOR FOR",
        "AS OF 5",
        "\u20ac",
        "pg_class",
        "999999999999999999999",
        "E'\\",
        "*",
    ),
)
QUIET_SECONDS: Final = 0.25
"""A server that sends nothing for this long is waiting for more."""
ANSWER_SECONDS: Final = PATIENCE_S
"""Time within which another client must get an answer."""


# -- valid sessions --------------------------------------------------------------------------------


def startup_packet(minor: int = 0, **parameters: str) -> bytes:
    """Return a startup packet."""
    texts = "".join(f"{name}\0{value}\0" for name, value in parameters.items()).encode()
    body = struct.pack("!I", 3 << 16 | minor) + texts + b"\0"
    return struct.pack("!I", len(body) + 4) + body


def cancel_packet(process_id: int, key: bytes) -> bytes:
    """Return a request to cancel the statement of another connection."""
    body = struct.pack("!II", 80877102, process_id) + key
    return struct.pack("!I", len(body) + 4) + body


def _query(text: str) -> bytes:
    return encode_message(b"Q", text.encode() + b"\0")


def _parse(name: str, text: str, *oids: int) -> bytes:
    counted = struct.pack(f"!H{len(oids)}I", len(oids), *oids)
    return encode_message(b"P", f"{name}\0{text}\0".encode() + counted)


def _bind(portal: str, name: str, *values: bytes | None, code: int = 0) -> bytes:
    body = f"{portal}\0{name}\0".encode() + struct.pack("!HhH", 1, code, len(values))
    for value in values:
        body += struct.pack("!i", -1) if value is None else struct.pack("!i", len(value)) + value
    return encode_message(b"B", body + struct.pack("!Hh", 1, code))


def _describe(kind: bytes, name: str) -> bytes:
    return encode_message(b"D", kind + name.encode() + b"\0")


def _execute(portal: str, rows_max: int = 0) -> bytes:
    return encode_message(b"E", portal.encode() + b"\0" + struct.pack("!i", rows_max))


_BEGIN: Final = startup_packet(user="fuzz", application_name="fuzz", options="-c my.a=1")
_SYNC, _FLUSH, _END = encode_message(b"S"), encode_message(b"H"), encode_message(b"X")
_EIGHT: Final = (5).to_bytes(8, "big")
SESSIONS: Final[tuple[tuple[bytes, ...], ...]] = (
    (_BEGIN, _query("SELECT a, b FROM f WHERE a = 1"), _query("SHOW TABLES; SHOW ALL"), _END),
    (
        _BEGIN,
        _query("BEGIN"),
        _query("INSERT INTO f VALUES (70, 'x'), (71, NULL)"),
        _query("SAVEPOINT s"),
        _query("UPDATE f SET b = 'y' WHERE a = 1"),
        _query("ROLLBACK TO s; RELEASE s"),
        _query("ROLLBACK"),
    ),
    (
        _BEGIN,
        _parse("", "SELECT a, b FROM f WHERE a = $1"),
        _bind("", "", b"1"),
        _describe(b"P", ""),
        _execute(""),
        _SYNC,
        _parse("s", "SELECT b FROM f WHERE a = $1", 20),
        _describe(b"S", "s"),
        _SYNC,
        _bind("p", "s", _EIGHT, code=1),
        _execute("p", 1),
        _execute("p", 1),
        _FLUSH,
        encode_message(b"C", b"Pp\0"),
        encode_message(b"C", b"Ss\0"),
        _SYNC,
        _END,
    ),
    (
        _BEGIN,
        _parse("", "INSERT INTO f VALUES ($1, $2)"),
        _bind("", "", b"80", None),
        _execute(""),
        _bind("", "", b"no number", b"x"),
        _execute(""),
        _SYNC,
        _parse("d", "DELETE FROM f WHERE a = 80"),
        _bind("", "d"),
        _execute(""),
        _SYNC,
    ),
    (
        _BEGIN,
        _query("COPY f FROM STDIN"),
        encode_message(b"d", b"90\tx\n91\t"),
        encode_message(b"d", b"\\N\n"),
        encode_message(b"c"),
        _query("COPY f (a) FROM STDIN WITH (FORMAT csv)"),
        encode_message(b"d", b'92\n"93"\n'),
        encode_message(b"f", b"enough\0"),
        _query("COPY f TO STDOUT WITH (FORMAT binary)"),
        _query("DELETE FROM f WHERE a = 90"),
        _query("DELETE FROM f WHERE a = 91"),
    ),
    (
        _BEGIN,
        _query("BEGIN"),
        _query("DECLARE c CURSOR FOR SELECT a FROM f ORDER BY a"),
        _query("FETCH 2 c"),
        _query("MOVE 1 c"),
        _query("CLOSE c"),
        _query("DECLARE s CURSOR FOR SUBSCRIBE (SELECT b FROM f WHERE a > 0)"),
        _query("FETCH 1 s"),
        _query("COMMIT"),
    ),
    (_BEGIN, _query("COPY (SUBSCRIBE f WITH (PROGRESS)) TO STDOUT"), _SYNC),
    (_BEGIN, _query("COPY (SUBSCRIBE (SELECT b, count(*) AS n FROM f GROUP BY b)) TO STDOUT")),
    (
        _BEGIN,
        _query("SELECT c.oid, c.relname FROM pg_catalog.pg_class c WHERE c.relname ~ '^f'"),
        _query("SELECT current_database(), version()"),
        _parse("", "SELECT typname FROM pg_type WHERE oid = $1", 26),
        _bind("", "", b"23"),
        _execute(""),
        _SYNC,
    ),
    (
        _BEGIN,
        _query("PREPARE q (int) AS SELECT a FROM f WHERE a = $1"),
        _query("EXECUTE q (1)"),
        _query("DEALLOCATE q"),
        _query("SET TimeZone = 'Europe/Paris'; SHOW TimeZone; RESET ALL"),
        encode_message(b"F", b"\0\0\0\1\0\0\0\0\0\0"),
    ),
    (struct.pack("!II", 8, 80877103), struct.pack("!II", 8, 80877104), _BEGIN, _query("SELECT 1")),
    (startup_packet(2, user="fuzz", database="other", _pq_x="1"), encode_message(b"p", b"me\0")),
    (cancel_packet(1, b"\0\0\0\0"),),
)


# -- changed sessions ------------------------------------------------------------------------------


class FuzzedSession(msgspec.Struct, frozen=True):
    """The bytes of a client, and the size of the pieces in which they arrive."""

    data: bytes
    piece_bytes: int


def fuzzed_session(rng: Random) -> FuzzedSession:
    """Return a session that is changed in one or a few places."""
    messages = list(rng.choice(SESSIONS))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 5))):
        _change(messages, rng)
    data = b"".join(messages)[: 4 * MESSAGE_BYTES_MAX]
    # Long sessions come in larger pieces, because each piece is a system call.
    size = max(rng.choice((1, 2, 7, 64, 1 << 20, 1 << 20)), len(data) // 2_000)
    return FuzzedSession(data, size)


def _change(messages: list[bytes], rng: Random) -> None:
    if not messages:
        messages.append(_BEGIN)
    at = rng.randrange(len(messages))
    message = messages[at]
    match rng.randrange(10):
        case 0:
            del messages[at]
        case 1:
            messages[at:at] = [message] * rng.choice((1, 3, 60))
        case 2:
            other = rng.randrange(len(messages))
            messages[at], messages[other] = messages[other], message
        case 3:
            messages.insert(at, rng.choice(rng.choice(SESSIONS)))
        case 4:
            # An incomplete message, at the end or followed by the next one.
            messages[at] = message[: rng.randrange(len(message) + 1)]
            if rng.random() < 0.5:
                del messages[at + 1 :]
        case 5:
            messages[at] = _with_length(message, rng.choice((*_LENGTHS, *_MORE_LENGTHS)))
        case 6:
            messages[at] = mutated(message, [_BEGIN, *rng.choice(SESSIONS)], rng)
        case 7 if at:
            messages[at] = _framed(message, mutated(message[5:], [message], rng))
        case 8 if at:
            messages[at] = _framed(message, _other_text(message[5:], rng))
        case _:
            # A message of the maximum length, or a little longer.
            fill = b" " * rng.choice((MESSAGE_BYTES_MAX - len(message), MESSAGE_BYTES_MAX, 70_000))
            messages[at] = _framed(message, message[5:-1] + fill + message[-1:])


def _with_length(message: bytes, length: int) -> bytes:
    # After the startup packet, a message has its type before the length; `place` may be wrong about
    # which one this is.
    start = 1 if message[:1].isalpha() else 0
    return message[:start] + length.to_bytes(4, "big") + message[start + 4 :]


def _framed(message: bytes, body: bytes) -> bytes:
    return message[:1] + struct.pack("!I", len(body) + 4) + body


def _other_text(body: bytes, rng: Random) -> bytes:
    """Return a body with a word replaced by another word of SQL."""
    words = body.split(b" ")
    at = rng.randrange(len(words))
    word = rng.choice(_WORDS).encode()
    if rng.random() < 0.5:
        words[at] = word
    else:
        words.insert(at, word)
    return b" ".join(words)


# -- the decoder alone -----------------------------------------------------------------------------


def read_session(session: FuzzedSession) -> tuple[int, PenstockError | None]:
    """Return how many messages were decoded, and the error that ended it.

    Raises any error that is not a `RemoteProtocolError`, and `AssertionError` if the decoder keeps
    too much.
    """
    decoder = FrontendDecoder(MESSAGE_BYTES_MAX)
    count = 0
    try:
        for start in range(0, len(session.data), session.piece_bytes):
            piece = session.data[start : start + session.piece_bytes]
            # Take messages one by one, because what may come next depends on the one before.
            found = decoder.feed(piece)
            while (message := next(found, None)) is not None:
                count += 1
                if isinstance(message, EncryptionRequest):
                    decoder.decline_encryption()
                elif isinstance(message, StartupPacket):
                    decoder.admit()
            assert decoder.buffered_bytes <= MESSAGE_BYTES_MAX + 5, decoder.buffered_bytes
    except RemoteProtocolError as error:
        return count, error
    return count, None


# -- a complete service ----------------------------------------------------------------------------


class FaultRecords(logging.Handler):
    """Keeps the records that the service logs as internal errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record with its exception."""
        self.texts.append(f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}")


class FuzzedDoor:
    """A service's PostgreSQL listener, and the clients that attack it."""

    def __init__(self, service: Service, witness: DoorConnection) -> None:
        self._service = service
        self._witness = witness
        self.faults = FaultRecords()
        self.answered = 0
        """Number of attacks to which the service sent anything."""
        self.let_in = 0
        """Number of attacks that got a backend key, so their session had started."""
        self._keys: list[tuple[int, bytes]] = []
        """Backend keys that the service gave to fuzzed connections."""

    @classmethod
    async def open(cls, service: Service) -> FuzzedDoor:
        """Create the tables, and start watching the log for internal errors."""
        witness = await DoorConnection.connect(service.pg_address)
        for statement in (WITNESS, TABLE, "INSERT INTO witness VALUES (1)"):
            await witness.query(statement)
        made = cls(service, witness)
        logging.getLogger("penstock").addHandler(made.faults)
        return made

    async def aclose(self) -> None:
        """Stop watching the log."""
        logging.getLogger("penstock").removeHandler(self.faults)
        await self._witness.aclose()

    async def attack(self, session: FuzzedSession, rng: Random) -> None:
        """Send a session, read the answers, and leave in one of several ways."""
        host, _, port = self._service.pg_address.rpartition(":")
        try:
            stream = await anyio.connect_tcp(host, int(port))
        except OSError:
            return  # the listener's queue is full for a moment
        leave_at = rng.randrange(len(session.data) + 1) if rng.random() < 0.2 else None
        async with stream, anyio.create_task_group() as group:
            group.start_soon(self._listen, stream, group.cancel_scope)
            for start in range(0, len(session.data), session.piece_bytes):
                if leave_at is not None and start >= leave_at:
                    break
                try:
                    await stream.send(session.data[start : start + session.piece_bytes])
                except (anyio.BrokenResourceError, OSError):
                    break
                if rng.random() < 0.02:
                    await self._cancel_one(rng)
            else:
                # Stay until the server has nothing more to say or ends the connection.
                await anyio.sleep(QUIET_SECONDS)
            await self._cancel_one(rng)
            if rng.random() < 0.3:
                raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
                # The connection was reset instead of ended.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            group.cancel_scope.cancel()

    async def _listen(self, stream: anyio.abc.SocketStream, scope: anyio.CancelScope) -> None:
        answered = False
        try:
            while True:
                data = await stream.receive()
                self.answered += not answered
                answered = True
                at = data.find(b"K\0\0\0\x0c")
                if at >= 0 and len(data) >= at + 13:
                    self.let_in += 1
                    (number,) = struct.unpack_from("!I", data, at + 5)
                    self._keys[-16:] = [*self._keys[-15:], (number, data[at + 9 : at + 13])]
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            scope.cancel()

    async def _cancel_one(self, rng: Random) -> None:
        """Cancel the statement of some connection, with its key or another one."""
        if not self._keys:
            return
        number, key = rng.choice(self._keys)
        if rng.random() < 0.3:
            key = rng.randbytes(4)
        host, _, port = self._service.pg_address.rpartition(":")
        try:
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(cancel_packet(number, key))
        except OSError:
            pass  # as above

    async def check(self) -> None:
        """Raise `AssertionError` unless another client gets an answer and no internal error was
        logged."""
        with anyio.fail_after(ANSWER_SECONDS):
            (found,) = await self._witness.query("SELECT a FROM witness WHERE a = 1")
        assert found.rows == [("1",)], found
        assert not self.faults.texts, self.faults.texts

    async def wait_alone(self) -> None:
        """Wait until only the witness's connection is left, whatever was sent on the others."""
        with anyio.fail_after(ANSWER_SECONDS):
            while self.connections() > 1:
                await anyio.sleep(0.05)

    def connections(self) -> int:
        """Return the number of clients of the service."""
        doing = next(each.doing for each in self._service.actors() if each.path == "/pg")
        return int(doing.rpartition(": ")[2].split()[0])


async def attack_together(door: FuzzedDoor, sessions: Sequence[FuzzedSession], rng: Random) -> None:
    """Run several sessions concurrently, each with its own random numbers, then check."""
    async with anyio.create_task_group() as group:
        for session in sessions:
            group.start_soon(door.attack, session, Random(rng.getrandbits(64)))
    await door.check()
