"""A listener on a port of this machine, over files, and psycopg, PostgreSQL's receiver, ours."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import psycopg
import pytest
import trustme
from wal_wires import (  # type: ignore[import-not-found]
    GREETING,
    TENANT,
    TIMELINE,
    VOTE,
)

from actors.runtime.errors import (
    AuthenticationFailed,
    ConnectionBroken,
    PeerRejected,
    StateDirectoryError,
    WalRefused,
)
from actors.runtime.kernel import ActorSystem, SystemClock
from actors.runtime.kernel.clock import ThreadedClock
from actors.runtime.settings import Settings
from actors.runtime.transport.security import TransportSecurity
from actors.testing.patience import PATIENCE_MS
from actors.testing.postgres_server import binary
from actors.wal import codec_v3, dialling
from actors.wal.dialling import (
    AcceptorAddress,
    AcceptorConnection,
    dial,
    start_push,
    start_replication,
)
from actors.wal.feedback_codec import encode_feedback
from actors.wal.following import LogReader
from actors.wal.framing import (
    PG_VERSION,
    START_LSN,
    RecordDecoder,
    encode,
    framed_bytes_max,
)
from actors.wal.listener import WalListener
from actors.wal.lsn import lsn_text
from actors.wal.messages import (
    WAL_BYTES_MAX,
    AcceptorGreeting,
    AppendRequest,
    AppendResponse,
    PageserverFeedback,
    ProposerElected,
    ProposerMessage,
    TermEntry,
    VoteResponse,
)
from actors.wal.proposer import ProposerConfig
from actors.wal.proposing import propose
from actors.wal.startup import TenantGrant
from actors.wal.stream import PgStream
from actors.wal.timelines import FileTimelineStore, TimelineRegistry
from tests.simulators.wal.made_up import MadeUpLog

SETTINGS = Settings(wal_save_ms=10, wal_control_age_ms=10)
START = 0x100_0028
LOG = MadeUpLog(START, magic=0xD116, system_id=GREETING.system_id)
for _size in (100, 5000, 100_000, 30, 200_000):
    LOG.record(b"x" * _size)
ELECTED = ProposerElected(0, 1, START, (TermEntry(1, START),))


class Served:
    """A node of one folder, and the way to it."""

    def __init__(self, port: int, timelines: TimelineRegistry, listener: WalListener) -> None:
        self.address = AcceptorAddress("127.0.0.1", port)
        self.timelines = timelines
        self.listener = listener
        self.dialled: list[AcceptorConnection] = []

    async def dial(self, token: str = "", tls: ssl.SSLContext | None = None) -> AcceptorConnection:
        made = await dial(
            self.address, TENANT, TIMELINE, timeout_ms=PATIENCE_MS, token=token, tls=tls
        )
        self.dialled.append(made)
        return made

    async def lead(self) -> AcceptorConnection:
        """A proposer that was elected."""
        connection = await self.dial()
        await start_push(connection)
        await say(connection, GREETING, VOTE, ELECTED)
        assert isinstance(await hear(connection), AcceptorGreeting)
        assert isinstance(await hear(connection), VoteResponse)
        return connection

    def rows(self, query: str, **options: str) -> list[tuple[object, ...]]:
        """By psycopg, in a thread."""
        given: dict[str, Any] = {"options": f"-c timeline_id={TIMELINE} tenant_id={TENANT}"}
        given |= options
        with psycopg.connect(
            host="127.0.0.1", port=self.address.port, user="x", autocommit=True, **given
        ) as connection:
            return list(connection.execute(query.encode()).fetchall())


async def say(connection: AcceptorConnection, *messages: ProposerMessage) -> None:
    await connection.send([codec_v3.encode_proposer(message) for message in messages])


async def hear(connection: AcceptorConnection) -> object:
    return codec_v3.decode_acceptor(await connection.receive())


async def push(connection: AcceptorConnection, begin: int, commit: int = 0) -> None:
    """The whole log from `begin` on, and waits until it is durable."""
    end = LOG.end_lsn
    for at in range(begin, end, WAL_BYTES_MAX):
        piece = LOG.wal[at - START : at - START + WAL_BYTES_MAX]
        await say(connection, AppendRequest(0, 1, at, at + len(piece), commit, 0, bytes(piece)))
    while True:
        answer = await hear(connection)
        assert isinstance(answer, AppendResponse)
        if answer.flush_lsn == end:
            return


@asynccontextmanager
async def served(
    folder: Path,
    knows: Callable[[bytes], bool] | None = None,
    tls: ssl.SSLContext | None = None,
    check: Callable[[bytes], TenantGrant] | None = None,
) -> AsyncIterator[Served]:
    clock = ThreadedClock(4)
    timelines = TimelineRegistry(folder, 5, FileTimelineStore(), clock, SETTINGS)
    await timelines.open()
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    try:
        async with ActorSystem(clock=clock) as system, anyio.create_task_group() as group:
            listener = WalListener(
                timelines, system, clock, SETTINGS, knows=knows, tls=tls, check=check
            )
            group.start_soon(listener.serve, [sock])
            group.start_soon(timelines.run_maintenance)
            node = Served(sock.getsockname()[1], timelines, listener)
            try:
                yield node
            finally:
                for connection in node.dialled:
                    connection.abort()
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    finally:
        timelines.close()
        clock.close()
        sock.close()


async def test_a_log_is_pushed_asked_about_and_read_back(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        assert await asyncio.to_thread(node.rows, "TIMELINE_STATUS") == []
        proposer = await node.lead()
        await push(proposer, START)
        end = lsn_text(LOG.end_lsn)
        assert await asyncio.to_thread(node.rows, "TIMELINE_STATUS") == [(end, lsn_text(START))]
        # a reader begins where this says: at the commit, not at what is flushed
        begin = lsn_text(START)
        assert await asyncio.to_thread(node.rows, "IDENTIFY_SYSTEM") == [("7", 1, begin, None)]
        await say(proposer, AppendRequest(0, 1, LOG.end_lsn, LOG.end_lsn, LOG.end_lsn, 0))
        await hear(proposer)
        assert await asyncio.to_thread(node.rows, "TIMELINE_STATUS") == [(end, end)]
        assert await asyncio.to_thread(node.rows, "IDENTIFY_SYSTEM") == [("7", 1, end, None)]
        reader = await node.dial()
        await start_replication(reader, START)
        found = bytearray()
        while len(found) < len(LOG.wal):
            data = await reader.receive()
            if data[:1] == b"w":
                assert struct.unpack_from("!Q", data, 1)[0] == START + len(found)
                assert len(data) - 25 <= WAL_BYTES_MAX
                found += data[25:]
        assert found == LOG.wal
        told = PageserverFeedback(remote_consistent_lsn=LOG.end_lsn)
        body = encode_feedback(told)
        await reader.send([b"z" + struct.pack("!Q", len(body)) + body])
        answer = await hear(proposer)
        assert isinstance(answer, AppendResponse)
        assert answer.pageserver == told
        proposer.abort()
        with pytest.raises(ConnectionBroken):  # it has all, and nobody writes: it is let go
            while True:
                await reader.receive()


async def test_what_was_acknowledged_is_there_after_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        proposer = await node.lead()
        await push(proposer, START)
        await say(proposer, AppendRequest(0, 1, LOG.end_lsn, LOG.end_lsn, LOG.end_lsn, 0))
        await hear(proposer)
        proposer.abort()
    async with served(tmp_path) as node:
        end = lsn_text(LOG.end_lsn)
        [(flush, _)] = await asyncio.to_thread(node.rows, "TIMELINE_STATUS")
        assert flush == end


async def test_a_reader_of_another_term_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        proposer = await node.lead()
        await push(proposer, START)
        reader = await node.dial()
        await start_replication(reader, START, term=1)
        assert (await reader.receive())[:1] == b"w"
        other = await node.dial()
        await start_replication(other, START, term=9)
        with pytest.raises(WalRefused, match="term 1"):
            await other.receive()


async def test_what_is_wrong_is_told_to_its_own_connection(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        with pytest.raises(psycopg.Error, match="unknown command"):
            await asyncio.to_thread(node.rows, "SELECT 1")
        with pytest.raises(psycopg.Error, match="does not exist here"):
            await asyncio.to_thread(node.rows, "IDENTIFY_SYSTEM")
        proposer = await node.lead()
        await say(proposer, AppendRequest(0, 1, START + 8, START + 16, 0, 0, bytes(8)))
        with pytest.raises(WalRefused, match="WAL acceptor: WalRefused"):
            await hear(proposer)
        early = await node.dial()
        await start_push(early)
        await say(early, VOTE)
        with pytest.raises(WalRefused, match="expected a greeting"):
            await hear(early)


async def test_an_absent_timeline_that_may_not_be_made_has_no_answer(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        proposer = await node.dial()
        await proposer.command(
            "START_WAL_PUSH (proto_version '3', allow_timeline_creation 'false')"
        )
        await say(proposer, GREETING)
        with pytest.raises(ConnectionBroken):
            await hear(proposer)
        assert node.timelines.all == []


async def test_a_token_does_not_cross_the_network_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dialling.is_of_this_machine(("127.0.0.1", 5454))
    assert dialling.is_of_this_machine(("::1", 5454, 0, 0))
    assert dialling.is_of_this_machine("/run/acceptor")
    assert not dialling.is_of_this_machine(("192.0.2.7", 5454))
    assert not dialling.is_of_this_machine(("fe80::1%eth0", 5454, 0, 2))
    shown: list[bytes] = []

    def knows(token: bytes) -> bool:
        shown.append(token)
        return True

    async with served(tmp_path, knows) as node:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(dialling, "is_of_this_machine", lambda peer: False)
            with pytest.raises(WalRefused, match="in clear text"):
                await node.dial("opensesame")
        assert shown == []
        await node.dial("opensesame")
        assert shown == [b"opensesame"]


async def test_a_token_is_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path, lambda token: token == b"opensesame") as node:
        assert await asyncio.to_thread(node.rows, "TIMELINE_STATUS", password="opensesame") == []
        with pytest.raises(psycopg.OperationalError, match="not one of this acceptor's tokens"):
            await asyncio.to_thread(node.rows, "TIMELINE_STATUS", password="open")


async def test_with_tls_nobody_starts_in_the_clear(tmp_path: Path) -> None:
    """Mutual TLS with psycopg: with a certificate, without TLS, without a certificate."""
    authority = trustme.CA()
    files = {}
    for name, certificate in (
        ("server", authority.issue_cert("127.0.0.1")),
        ("client", authority.issue_cert("somebody")),
    ):
        files[name] = tmp_path / f"{name}.pem"
        certificate.private_key_and_cert_chain_pem.write_to_path(str(files[name]))
        files[name].chmod(0o600)
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    with_tls = TransportSecurity(str(files["server"]), str(files["server"]), str(ca)).context(
        server=True
    )
    ours = {"sslcert": str(files["client"]), "sslkey": str(files["client"])}
    async with served(tmp_path / "served", tls=with_tls) as node:
        rows = await asyncio.to_thread(
            lambda: node.rows("TIMELINE_STATUS", sslmode="verify-full", sslrootcert=str(ca), **ours)
        )
        assert rows == []
        with pytest.raises(psycopg.OperationalError, match="requires TLS"):
            await asyncio.to_thread(node.rows, "TIMELINE_STATUS", sslmode="disable")
        with pytest.raises(psycopg.OperationalError):
            await asyncio.to_thread(node.rows, "TIMELINE_STATUS", sslmode="require")
        assert node.timelines.all == []


class Certified:
    """Two sides with certificates of one authority, and a third with none of it."""

    def __init__(self, folder: Path) -> None:
        authority, stranger = trustme.CA(), trustme.CA()
        self.files = {}
        for name, certificate in (
            ("server", authority.issue_cert("127.0.0.1")),
            ("elsewhere", authority.issue_cert("192.0.2.7")),
            ("client", authority.issue_cert("somebody")),
            ("stranger", stranger.issue_cert("somebody")),
        ):
            self.files[name] = str(folder / f"{name}.pem")
            certificate.private_key_and_cert_chain_pem.write_to_path(self.files[name])
            Path(self.files[name]).chmod(0o600)
        self.authority = str(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.authority)

    def context(self, name: str, *, server: bool) -> ssl.SSLContext:
        path = self.files[name]
        return TransportSecurity(path, path, self.authority).context(server=server)


@pytest.mark.parametrize(
    ("config", "token", "said"),
    [
        (
            ProposerConfig(TENANT, TIMELINE, START_LSN),
            "another",
            "not one of this acceptor's tokens",
        ),
        (ProposerConfig("c" * 32, TIMELINE, START_LSN), "opensesame", "the token is for tenant"),
        (
            ProposerConfig(TENANT, TIMELINE, START_LSN, pg_version=150_000),
            "opensesame",
            "major versions",
        ),
    ],
)
async def test_a_writer_whom_to_wait_does_not_help_is_told(
    tmp_path: Path, config: ProposerConfig, token: str, said: str
) -> None:
    def check(shown: bytes) -> TenantGrant:
        if shown != b"opensesame":
            raise AuthenticationFailed("invalid password: it is not one of this acceptor's tokens")
        return TenantGrant(TENANT)

    async with served(tmp_path, check=check) as node:
        first = ProposerConfig(TENANT, TIMELINE, START_LSN, pg_version=160_000)
        with anyio.fail_after(60):
            async with propose(first, [node.address], token="opensesame") as log:
                await log.elected()
            async with propose(config, [node.address], token=token) as log:
                with pytest.raises(PeerRejected, match=said):
                    await log.elected()


async def test_a_token_goes_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dialled from elsewhere, as it were: a proposer and a reader over TLS, and their token."""
    monkeypatch.setattr(dialling, "is_of_this_machine", lambda peer: False)
    both = Certified(tmp_path)
    ours = both.context("client", server=False)
    theirs = both.context("server", server=True)
    async with served(tmp_path / "served", lambda token: token == b"opensesame", theirs) as node:
        with pytest.raises(WalRefused, match="requires TLS"):
            await node.dial("opensesame")
        with pytest.raises(ConnectionBroken):
            await node.dial("opensesame", both.context("stranger", server=False))
        with pytest.raises(WalRefused, match="not one of this acceptor's tokens"):
            await node.dial("another", ours)
        config = ProposerConfig(TENANT, TIMELINE, START_LSN, pg_version=PG_VERSION)
        with anyio.fail_after(60):
            async with propose(config, [node.address], token="opensesame", tls=ours) as log:
                await log.elected()
                record = b"said in secret" * 1_000
                end = await log.append_at(
                    lambda lsn: encode(record, lsn), framed_bytes_max(len(record))
                )
                reader = LogReader(await node.dial("opensesame", ours), START_LSN)
                await reader.start()
                decoder, found = RecordDecoder(START_LSN), list[bytes]()
                while decoder.next_lsn < end:
                    found += [each.payload for each in decoder.feed(await reader.next())]
                assert found == [record]


async def test_tls_is_with_the_host_that_was_dialled(tmp_path: Path) -> None:
    both = Certified(tmp_path)
    async with served(tmp_path / "served", tls=both.context("elsewhere", server=True)) as node:
        with pytest.raises(ConnectionBroken, match="cannot connect"):
            await node.dial(tls=both.context("client", server=False))


@pytest.mark.parametrize("answer", [b"N", b"", b"S\0\0\0\x08and more in the clear"])
async def test_who_asks_for_tls_speaks_nothing_else(tmp_path: Path, answer: bytes) -> None:
    """Also when somebody in between puts something behind the answer."""
    heard = bytearray()
    over = anyio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heard.extend(await reader.readexactly(8))
            writer.write(answer)
            writer.write_eof()
            heard.extend(await reader.read())
        except OSError:
            pass  # it is hung up on
        finally:
            writer.transport.abort()
            over.set()

    ours = Certified(tmp_path).context("client", server=False)
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((WalRefused, ConnectionBroken)):
            await dial(
                AcceptorAddress("127.0.0.1", port),
                TENANT,
                TIMELINE,
                timeout_ms=60_000,
                token="opensesame",
                tls=ours,
            )
        await over.wait()
        await anyio.lowlevel.checkpoint()
    assert bytes(heard[:8]) == struct.pack("!II", 8, 80877103)
    assert b"opensesame" not in heard
    assert b"timeline_id" not in heard


async def test_a_timeline_that_cannot_be_read_is_not_made_anew(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        (await node.lead()).abort()
    control = tmp_path / TENANT / TIMELINE / "safekeeper.control"
    control.write_bytes(b"nonsense" + control.read_bytes()[8:])
    before = control.read_bytes()
    async with served(tmp_path) as node:
        assert node.timelines.all == []
        with pytest.raises(WalRefused, match="is not served"):
            await node.lead()
    assert control.read_bytes() == before


async def test_a_folder_is_served_once(tmp_path: Path) -> None:
    async with served(tmp_path):
        again = TimelineRegistry(tmp_path, 6, FileTimelineStore(), SystemClock(), SETTINGS)
        with pytest.raises(StateDirectoryError, match="in use"):
            await again.open()


async def test_bytes_that_are_no_startup(tmp_path: Path) -> None:
    async with served(tmp_path) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.address.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        assert b"startup packet too large" in answer
        writer.close()
        assert await asyncio.to_thread(node.rows, "TIMELINE_STATUS") == []


async def test_pg_receivewal_writes_the_same_segment(tmp_path: Path) -> None:
    """PostgreSQL's own receiver, up to the end of what is committed."""
    receiver_program = binary("pg_receivewal")
    out = tmp_path / "received"
    out.mkdir()
    async with served(tmp_path / "served") as node:
        proposer = await node.lead()
        await push(proposer, START)
        await say(proposer, AppendRequest(0, 1, LOG.end_lsn, LOG.end_lsn, LOG.end_lsn, 0))
        await hear(proposer)
        receiver = await asyncio.create_subprocess_exec(
            receiver_program,
            "--no-loop",
            f"--directory={out}",
            f"--endpos={lsn_text(LOG.end_lsn - 1)}",
            f"--dbname=host=127.0.0.1 port={node.address.port} user=x",
            env={"PGOPTIONS": f"-c timeline_id={TIMELINE} tenant_id={TENANT}", "PATH": "/usr/bin"},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await receiver.communicate()
        finally:
            if receiver.returncode is None:
                receiver.send_signal(signal.SIGKILL)
        assert receiver.returncode == 0, said
        name = "000000010000000000000001.partial"
        ours = (tmp_path / "served" / TENANT / TIMELINE / name).read_bytes()
        theirs = (out / name).read_bytes()
        size = LOG.end_lsn - 0x100_0000
        assert theirs[:size] == ours[:size]


async def test_who_says_nothing_for_too_long_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    stream = PgStream(Settings(wal_idle_timeout_ms=20))  # expires: nothing is sent
    await asyncio.get_running_loop().connect_accepted_socket(lambda: stream, ours)
    with theirs:
        with pytest.raises(ConnectionBroken, match="sent nothing for"):
            await stream.next_copy()
        stream.abort()
