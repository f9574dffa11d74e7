"""TLS and tokens over real sockets: who is let in, and what the others are told."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import trustme
import uvloop

from actors.runtime.errors import (
    AuthenticationFailed,
    BadSettings,
    ConnectionBroken,
    MalformedFrame,
    PenstockError,
)
from actors.runtime.settings import Settings
from actors.runtime.transport.address import NetworkAddress
from actors.runtime.transport.connection import FramedConnection, TransportListener, dial
from actors.runtime.transport.security import TransportSecurity, for_dialler, for_listener

pytestmark = pytest.mark.usefixtures("patient_loop")

MAGIC = b"TESTPROT"
TOKEN, OLD_TOKEN, WRONG = "t" * 32, "o" * 32, "w" * 32
QUICK = Settings(connect_timeout_ms=1000)


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


class Files:
    """An authority of the test's own, and certificates that it signed."""

    def __init__(self, folder: Path, name: str = "ours") -> None:
        self.authority = trustme.CA()
        self.folder = folder
        self.name = name
        self.authority_file = str(folder / f"{name}-ca.pem")
        self.authority.cert_pem.write_to_path(self.authority_file)

    def settings(self, *names: str, **fields: Any) -> Settings:
        """Of a side that shows a certificate for those names."""
        certificate = self.authority.issue_cert(*(names or ("127.0.0.1",)))
        chain = self.folder / f"{self.name}-{names}.pem"
        key = self.folder / f"{self.name}-{names}.key"
        for number, blob in enumerate(certificate.cert_chain_pems):
            blob.write_to_path(str(chain), append=number > 0)
        certificate.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        return Settings(
            connect_timeout_ms=1000,
            tls_certificate=str(chain),
            tls_key=str(key),
            tls_authority=self.authority_file,
            **fields,
        )

    def tokens(self, *tokens: str) -> str:
        path = self.folder / f"tokens-{len(tokens)}-{tokens[0][:1]}"
        path.write_text("# of the test\n" + "\n".join(tokens) + "\n")
        path.chmod(0o600)
        return str(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


class Echo:
    """Echoes, and counts whom it has met."""

    def __init__(self) -> None:
        self.met = 0

    async def __call__(self, connection: FramedConnection[Ping, Ping]) -> None:
        self.met += 1
        while True:
            await connection.send(await connection.receive())


@asynccontextmanager
async def listening(
    settings: Settings, handler: Echo | None = None
) -> AsyncIterator[TransportListener]:
    address = NetworkAddress.parse("127.0.0.1:0")
    security = for_listener("listen", address, settings, "token_file")
    listener = await TransportListener.bind(address, Ping, Ping, settings, MAGIC, security=security)
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, handler or Echo())
        with anyio.fail_after(200):
            yield listener
        await listener.aclose()


async def connect(listener: TransportListener, settings: Settings, address: str = "") -> Any:
    place = NetworkAddress.parse(address) if address else listener.address
    security = for_dialler(place, settings, settings.token_file)
    return await dial(place, Ping, Ping, settings, MAGIC, security=security)


async def spoken(listener: TransportListener, settings: Settings) -> None:
    """A connection that works, with large frames both ways."""
    connection = await connect(listener, settings)
    try:
        sent = [Ping(n, bytes([n]) * size) for n, size in enumerate((0, 70_000, 5_000_000))]
        async with anyio.create_task_group() as group:

            async def send() -> None:
                for message in sent:
                    await connection.send(message)

            group.start_soon(send)
            assert [await connection.receive() for _ in sent] == sent
    finally:
        await connection.aclose()


async def test_both_sides_prove_themselves_and_speak(files: Files) -> None:
    tokens = files.tokens(TOKEN, OLD_TOKEN)
    ours = files.settings(token_file=tokens)
    echo = Echo()
    async with listening(ours, echo) as listener:
        for token in (TOKEN, OLD_TOKEN):
            await spoken(listener, files.settings("client", token_file=files.tokens(token)))
        assert echo.met == 2


def test_the_same_on_the_loop_of_production(files: Files) -> None:
    async def speak() -> None:
        ours = files.settings(token_file=files.tokens(TOKEN))
        async with listening(ours) as listener:
            await spoken(listener, ours)
            with pytest.raises(AuthenticationFailed, match="token is not valid"):
                await connect(listener, files.settings(token_file=files.tokens(WRONG)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(speak())


async def test_tls_is_1_3(files: Files) -> None:
    ours = files.settings()
    async with listening(ours) as listener:
        context = TransportSecurity.of(ours, "").context(server=False)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection(
                "127.0.0.1", listener.port, ssl=context, server_hostname="127.0.0.1"
            )
        context = TransportSecurity.of(ours, "").context(server=False)
        _, writer = await asyncio.open_connection(
            "127.0.0.1", listener.port, ssl=context, server_hostname="127.0.0.1"
        )
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.transport.abort()


async def test_certificates_of_others_are_refused_both_ways(files: Files, tmp_path: Path) -> None:
    theirs = Files(tmp_path, "theirs").settings()
    ours = files.settings()
    mixed = msgspec.structs.replace(theirs, tls_authority=ours.tls_authority)
    echo = Echo()
    async with listening(ours, echo) as listener:
        with pytest.raises(AuthenticationFailed, match=r"CERTIFICATE_VERIFY_FAILED.*tls_authority"):
            await connect(listener, theirs)  # which does not trust our service
        with pytest.raises((AuthenticationFailed, ConnectionBroken), match="check tls_certificate"):
            await connect(listener, mixed)  # which trusts it, and is not trusted
        with pytest.raises(ConnectionBroken, match="TLS"):
            await connect(listener, QUICK)  # which shows none at all
        assert echo.met == 0
        await spoken(listener, ours)
        assert echo.met == 1


async def test_a_client_without_a_certificate_is_refused(files: Files) -> None:
    ours = files.settings()
    echo = Echo()
    async with listening(ours, echo) as listener:
        context = ssl.create_default_context(cafile=ours.tls_authority)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", listener.port, ssl=context, server_hostname="127.0.0.1"
        )
        with suppress(OSError):
            assert await reader.read() == b""
        writer.transport.abort()
        assert echo.met == 0


async def test_the_certificate_must_be_for_the_host_that_is_dialled(files: Files) -> None:
    async with listening(files.settings("db.example")) as listener:
        with pytest.raises(AuthenticationFailed, match=r"CERTIFICATE_VERIFY_FAILED"):
            await connect(listener, files.settings())


async def test_a_dialler_with_tls_speaks_to_no_one_without(files: Files) -> None:
    async with listening(QUICK) as listener:
        with pytest.raises((AuthenticationFailed, ConnectionBroken)):
            await connect(listener, files.settings())


@pytest.mark.parametrize("tls", [True, False])
async def test_a_wrong_token_or_none_is_told_so(files: Files, tls: bool) -> None:
    def side(**fields: Any) -> Settings:
        return files.settings(**fields) if tls else Settings(**fields)

    echo = Echo()
    async with listening(side(token_file=files.tokens(TOKEN)), echo) as listener:
        with pytest.raises(AuthenticationFailed, match="the token is not valid here"):
            await connect(listener, side(token_file=files.tokens(WRONG)))
        with pytest.raises(AuthenticationFailed, match="requires a token"):
            await connect(listener, side())
        assert echo.met == 0
        await spoken(listener, side(token_file=files.tokens(TOKEN)))


async def test_a_stranger_s_token_is_never_seen_by_whom_it_is_not_for(files: Files) -> None:
    """A service that is not the one that is meant gets no token, only an opening."""
    heard = bytearray()

    async def thief(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GIVE ME YOUR TOKEN")
        heard.extend(await reader.read(1000))
        writer.transport.abort()

    server = await asyncio.start_server(thief, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = Settings(token_file=files.tokens(TOKEN))
    place = NetworkAddress.parse(address)
    security = for_dialler(place, settings, settings.token_file)
    with pytest.raises(MalformedFrame):
        await dial(place, Ping, Ping, settings, MAGIC, security=security)
    server.close()
    await server.wait_closed()
    assert TOKEN.encode() not in heard


async def test_who_never_finishes_tls_holds_no_place(files: Files) -> None:
    settings = msgspec.structs.replace(files.settings(), connections_max=2)
    async with listening(settings) as listener:
        strangers = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3)]
        for reader, writer in strangers:
            assert await reader.read() == b""
            writer.transport.abort()
        while listener.connections:
            await anyio.sleep(0.01)
        await spoken(listener, files.settings())


# -- settings --------------------------------------------------------------------------------------


def test_other_machines_are_let_in_with_tls_and_tokens_only(files: Files) -> None:
    tokens = files.tokens(TOKEN)
    for text in ("0.0.0.0:1", "[::]:1", "db.example:1"):
        address = NetworkAddress.parse(text)
        for settings in (
            Settings(),
            files.settings(),
            Settings(token_file=tokens),
            Settings(cluster_token_file=tokens),
            files.settings(cluster_token_file=tokens),
        ):
            with pytest.raises(BadSettings, match=r"listen = .*needs TLS and tokens.*token_file"):
                for_listener("listen", address, settings, "token_file")
        security = for_listener("listen", address, files.settings(token_file=tokens), "token_file")
        assert security is not None
        assert security.has_tls
        assert security.knows(TOKEN.encode())
        assert not security.knows(WRONG.encode())
        assert not security.knows(b"")


def test_this_machine_is_let_in_without(files: Files) -> None:
    for text in ("127.0.0.1:1", "[::1]:1", "localhost:1"):
        address = NetworkAddress.parse(text)
        assert for_listener("listen", address, Settings(), "token_file") is None
        assert for_dialler(address, Settings(), "") is None
    unix = NetworkAddress.parse("unix:/run/s")
    settings = files.settings(token_file=files.tokens(TOKEN))
    assert for_listener("listen", unix, settings, "token_file") is None
    assert for_dialler(unix, settings, settings.token_file) is None


def test_a_token_does_not_leave_this_machine_in_the_clear(files: Files) -> None:
    tokens = files.tokens(TOKEN)
    with pytest.raises(BadSettings, match="without TLS"):
        for_dialler(NetworkAddress.parse("db.example:1"), Settings(), tokens)
    assert for_dialler(NetworkAddress.parse("db.example:1"), files.settings(), tokens) is not None


def test_settings_that_do_not_fit_are_named(files: Files, tmp_path: Path) -> None:
    local = NetworkAddress.parse("127.0.0.1:1")
    whole = files.settings()
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.write_text("# nothing\n\n")
    short.write_text("secret\n")
    wrong: list[tuple[dict[str, str], str]] = [
        ({"tls_key": ""}, "also set tls_key,"),
        ({"tls_certificate": "", "tls_authority": ""}, "also set tls_certificate, tls_authority,"),
        ({"token_file": str(tmp_path / "gone")}, "cannot read tokens"),
        ({"token_file": str(empty)}, "contains no token"),
        ({"token_file": str(short)}, "fewer than 16 characters"),
    ]
    for fields, text in wrong:
        settings = msgspec.structs.replace(whole, **fields)
        with pytest.raises(BadSettings, match=text):
            for_listener("listen", local, settings, "token_file")
    for name in ("tls_certificate", "tls_key", "tls_authority"):
        settings = msgspec.structs.replace(whole, **{name: str(empty)})
        security = TransportSecurity.of(settings, "")
        with pytest.raises(BadSettings, match=name):
            security.context(server=True)


def test_a_secret_that_others_may_read_is_warned_of(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Path(files.tokens(TOKEN))
    tokens.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        TransportSecurity.of(Settings(), str(tokens))
    assert "chmod 600" in caplog.text
    assert TOKEN not in caplog.text


async def test_no_error_shows_a_token(files: Files) -> None:
    async with listening(Settings(token_file=files.tokens(TOKEN))) as listener:
        with pytest.raises(PenstockError) as caught:
            await connect(listener, Settings(token_file=files.tokens(WRONG)))
        assert WRONG not in str(caught.value)
