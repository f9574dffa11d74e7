from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.model.pgwire.decoder import packet_bytes, parse_packet
from actors.model.pgwire.messages import CancelRequest, EncryptionRequest, StartupPacket
from actors.runtime.errors import (
    AuthenticationFailed,
    FrameTooLarge,
    MalformedFrame,
    PenstockError,
    WalRefused,
)
from actors.wal import startup
from actors.wal.startup import (
    AskReceivers,
    ConnectionTarget,
    IdentifySystem,
    ShowParameter,
    StartReplication,
    StartupHandshake,
    StartWalPush,
    TimelineStatus,
    body_bytes,
    parse_command,
    parse_target,
)

TENANT = "0123456789abcdef0123456789abcdef"
TIMELINE = "fedcba9876543210fedcba9876543210"
SSL = struct.pack("!I", 80877103)
GSS = struct.pack("!I", 80877104)


def packet(**parameters: str) -> bytes:
    """A startup packet without its length."""
    texts = "".join(f"{name}\0{value}\0" for name, value in parameters.items())
    return struct.pack("!I", 196608) + texts.encode() + b"\0"


# -- sizes, judged before anything is kept ---------------------------------------------------------


@pytest.mark.parametrize(("length", "rest"), [(8, 4), (10_000, 9_996)])
def test_a_startup_packet_has_a_size(length: int, rest: int) -> None:
    assert packet_bytes(struct.pack("!I", length)) == rest


@pytest.mark.parametrize(
    ("length", "error"), [(0, MalformedFrame), (7, MalformedFrame), (10_001, FrameTooLarge)]
)
def test_a_startup_packet_of_a_wrong_size(length: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        packet_bytes(struct.pack("!I", length))


@pytest.mark.parametrize("kind", [b"Q", b"p", b"d", b"c", b"f", b"X"])
def test_a_message_is_bounded_by_its_kind(kind: bytes) -> None:
    limit = startup._LIMITS[kind]
    assert body_bytes(kind + struct.pack("!I", limit + 4)) == (kind, limit)
    with pytest.raises(FrameTooLarge, match=f"limit {limit}"):
        body_bytes(kind + struct.pack("!I", limit + 5))
    with pytest.raises(MalformedFrame):
        body_bytes(kind + struct.pack("!I", 3))


def test_the_extended_protocol_is_not_spoken() -> None:
    with pytest.raises(MalformedFrame, match="b'P'"):
        body_bytes(b"P" + struct.pack("!I", 10))


def test_a_copy_holds_a_whole_append() -> None:
    """72 bytes of head in version 2, 45 in version 3, and the log."""
    assert body_bytes(b"d" + struct.pack("!I", 4 + 72 + 131_072)) == (b"d", 72 + 131_072)


# -- startup packets -------------------------------------------------------------------------------


def test_packets() -> None:
    assert parse_packet(SSL) == EncryptionRequest(gss=False)
    assert parse_packet(GSS) == EncryptionRequest(gss=True)
    cancel = parse_packet(struct.pack("!III", 80877102, 1, 2))
    assert cancel == CancelRequest(1, struct.pack("!I", 2))
    assert parse_packet(packet(user="a", dbname="")) == StartupPacket({"user": "a", "dbname": ""})
    assert parse_packet(struct.pack("!I", 196608) + b"\0") == StartupPacket({})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0",
        SSL + b"x",
        struct.pack("!I", 2 << 16) + b"\0",
        struct.pack("!I", 196608),
        struct.pack("!I", 196608) + b"user\0a",
        struct.pack("!I", 196608) + b"user\0\0",
        struct.pack("!I", 196608) + b"us\xff\0a\0\0",
    ],
)
def test_what_is_no_packet(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        parse_packet(body)


def test_options_name_the_timeline() -> None:
    """As a proposer's connection string has them, with what libpq makes of it."""
    found = parse_target(f"-c timeline_id={TIMELINE} tenant_id={TENANT}")
    assert found == ConnectionTarget(tenant=TENANT, timeline=TIMELINE)
    assert parse_target(f"-c ztimelineid={TIMELINE} -c ztenantid={TENANT.upper()}") == found
    assert parse_target("-c work_mem=4MB nonsense") == ConnectionTarget()
    with pytest.raises(WalRefused, match="timeline id 'xyz'"):
        parse_target("-c timeline_id=xyz")
    with pytest.raises(WalRefused, match="tenant"):
        parse_target("tenant_id=../../../../../../../etc/passwd")


# -- the handshake ---------------------------------------------------------------------------------


def test_trust() -> None:
    """Byte by byte: AuthenticationOk, three parameters, ReadyForQuery; no key to cancel with."""
    handshake = StartupHandshake(has_tls=False, knows=None)
    answer = handshake.packet(packet(user="x", options=f"tenant_id={TENANT}"))
    assert answer.data == (
        b"R\0\0\0\x08\0\0\0\0"
        b"S\0\0\0\x19client_encoding\0UTF8\0"
        b"S\0\0\0\x19integer_datetimes\0on\0"
        b"S\0\0\0\x18server_version\x0014.1\0"
        b"Z\0\0\0\x05I"
    )
    assert handshake.target == ConnectionTarget(tenant=TENANT)


def test_encryption_is_refused_once_each_where_there_is_none() -> None:
    handshake = StartupHandshake(has_tls=False, knows=None)
    assert handshake.packet(GSS).data == b"N"
    assert handshake.packet(SSL).data == b"N"
    with pytest.raises(MalformedFrame, match="twice"):
        handshake.packet(SSL)
    assert handshake.packet(packet(user="x")).data.startswith(b"R")


def test_with_tls_nobody_starts_in_the_clear() -> None:
    handshake = StartupHandshake(has_tls=True, knows=None)
    with pytest.raises(AuthenticationFailed, match="requires TLS"):
        handshake.packet(packet(user="x"))
    assert handshake.target is None
    handshake = StartupHandshake(has_tls=True, knows=None)
    answer = handshake.packet(SSL)
    assert (answer.data, answer.begin_tls) == (b"S", True)
    with pytest.raises(MalformedFrame, match="twice"):
        handshake.packet(SSL)
    handshake.packet(packet(user="x"))
    assert handshake.target == ConnectionTarget()


def test_a_token_by_cleartext_password() -> None:
    handshake = StartupHandshake(has_tls=False, knows=lambda token: token == b"opensesame")
    assert handshake.packet(packet(user="x")).data == b"R\0\0\0\x08\0\0\0\x03"
    assert handshake.asks_password
    assert handshake.target is None
    with pytest.raises(AuthenticationFailed):
        handshake.password(b"open\0")
    assert handshake.target is None
    assert handshake.password(b"opensesame\0").data.startswith(b"R\0\0\0\x08\0\0\0\0")
    assert handshake.target == ConnectionTarget()
    assert not handshake.asks_password
    with pytest.raises(MalformedFrame):
        handshake.password(b"opensesame\0")


def test_a_cancel_request_ends_the_connection_without_a_word() -> None:
    answer = StartupHandshake(has_tls=False, knows=None).packet(struct.pack("!III", 80877102, 1, 2))
    assert answer.ends
    assert not answer.data


# -- commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("IDENTIFY_SYSTEM", IdentifySystem()),
        ("RECEIVER_STATUS", AskReceivers()),
        (" identify_system ; ", IdentifySystem()),
        ("TIMELINE_STATUS", TimelineStatus()),
        ("START_WAL_PUSH", StartWalPush(2, True)),
        ("START_WAL_PUSH ()", StartWalPush(2, True)),
        (
            "START_WAL_PUSH (proto_version '3', allow_timeline_creation 'false')",
            StartWalPush(3, False),
        ),
        ("START_REPLICATION PHYSICAL 16/B374D848", StartReplication(0x16B374D848)),
        ("START_REPLICATION 0/0 (term='7')", StartReplication(0, 7)),
        ('START_REPLICATION SLOT "s" PHYSICAL 0/1000000 TIMELINE 1', StartReplication(1 << 24)),
        ("SHOW wal_segment_size", ShowParameter("wal_segment_size")),
    ],
)
def test_commands(text: str, command: startup.Command) -> None:
    assert parse_command(text) == command


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SELECT 1",
        "START_WAL_PUSH (proto_version '4')",
        "START_WAL_PUSH (proto_version 3)",
        "START_WAL_PUSH (allow_timeline_creation 'perhaps')",
        "START_REPLICATION PHYSICAL 123456789/0",
        "START_REPLICATION PHYSICAL",
        f"START_REPLICATION PHYSICAL 0/0 (term='{1 << 64}')",
        "IDENTIFY_SYSTEM; DROP TABLE x",
    ],
)
def test_what_is_no_command(text: str) -> None:
    with pytest.raises(WalRefused):
        parse_command(text)


# -- what is sent ----------------------------------------------------------------------------------


def test_messages_of_ours() -> None:
    assert startup.COPY_BOTH == b"W\0\0\0\x07\0\0\0"
    assert startup.error_response("no\0pe", "42601") == (
        b"E\0\0\0\x21SERROR\0VERROR\0C42601\0Mno pe\0\0"
    )


def test_rows() -> None:
    assert startup.rows({"a": str, "b": int}, [("x", 7), (None, 1)]) == (
        b"T\0\0\0\x2e\0\x02"
        b"a\0\0\0\0\0\0\0\0\0\0\x19\xff\xff\xff\xff\xff\xff\0\0"
        b"b\0\0\0\0\0\0\0\0\0\0\x17\0\x04\xff\xff\xff\xff\0\0"
        b"D\0\0\0\x10\0\x02\0\0\0\x01x\0\0\0\x017"
        b"D\0\0\0\x0f\0\x02\xff\xff\xff\xff\0\0\0\x011"
        b"C\0\0\0\x0dSELECT 2\0"
        b"Z\0\0\0\x05I"
    )


# -- whatever comes --------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_any_packet_is_accepted_or_one_named_error(body: bytes) -> None:
    handshake = StartupHandshake(has_tls=False, knows=None)
    try:
        handshake.packet(body)
    except PenstockError:
        assert handshake.target is None


@pytest.mark.sampled
def test_any_query_is_a_command_or_refused() -> None:
    seen: set[type[object]] = set()

    @given(st.one_of(st.text(), st.from_regex(r"START_(WAL_PUSH|REPLICATION)[ ('a-z=0-9/),]*")))
    @example("START_WAL_PUSH (proto_version '3')")
    @example("START_REPLICATION PHYSICAL 0/1000000")
    def parse(query: str) -> None:
        try:
            seen.add(type(parse_command(query)))
        except WalRefused:
            seen.add(WalRefused)

    parse()
    assert seen == {StartWalPush, StartReplication, WalRefused}
