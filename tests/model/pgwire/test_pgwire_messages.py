"""The bytes of what a server sends: as the protocol's documentation has them."""

from __future__ import annotations

import struct

import pytest

from actors.model.pgwire import messages
from actors.model.pgwire.messages import (
    ErrorReport,
    FieldDescription,
    StartupPacket,
    encode_backend_key,
    encode_command_complete,
    encode_copy_data,
    encode_copy_in,
    encode_copy_out,
    encode_error,
    encode_notice,
    encode_parameter_description,
    encode_parameter_status,
    encode_ready,
    encode_row_description,
    encode_sasl_continue,
    encode_sasl_final,
    encode_sasl_request,
    expand_formats,
    negotiate_protocol,
)
from actors.model.pgwire.type_oids import INT8, TEXT, sized
from actors.runtime.errors import RemoteProtocolError


def test_messages_without_a_body() -> None:
    assert messages.AUTHENTICATION_OK == b"R\0\0\0\x08\0\0\0\0"
    assert messages.CLEARTEXT_PASSWORD_REQUEST == b"R\0\0\0\x08\0\0\0\x03"
    kinds = {
        messages.PARSE_COMPLETE: b"1",
        messages.BIND_COMPLETE: b"2",
        messages.CLOSE_COMPLETE: b"3",
        messages.NO_DATA: b"n",
        messages.EMPTY_QUERY_RESPONSE: b"I",
        messages.PORTAL_SUSPENDED: b"s",
        messages.COPY_DONE: b"c",
    }
    assert all(message == kind + b"\0\0\0\x04" for message, kind in kinds.items())


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (encode_sasl_request(["SCRAM-SHA-256"]), b"R\0\0\0\x17\0\0\0\x0aSCRAM-SHA-256\0\0"),
        (encode_sasl_continue(b"r=1"), b"R\0\0\0\x0b\0\0\0\x0br=1"),
        (encode_sasl_final(b"v=1"), b"R\0\0\0\x0b\0\0\0\x0cv=1"),
        (encode_parameter_status("a", "b"), b"S\0\0\0\x08a\0b\0"),
        (encode_backend_key(7, b"\1\2\3\4"), b"K\0\0\0\x0c\0\0\0\x07\1\2\3\4"),
        (encode_ready(b"I"), b"Z\0\0\0\x05I"),
        (encode_parameter_description([23, 25]), b"t\0\0\0\x0e\0\2\0\0\0\x17\0\0\0\x19"),
        (encode_command_complete("SELECT 1"), b"C\0\0\0\x0dSELECT 1\0"),
        (encode_copy_in(binary=False, columns=2), b"G\0\0\0\x0b\0\0\2\0\0\0\0"),
        (encode_copy_out(binary=True, columns=1), b"H\0\0\0\x09\1\0\1\0\1"),
        (encode_copy_data(b"x"), b"d\0\0\0\x05x"),
    ],
)
def test_golden_bytes(message: bytes, wanted: bytes) -> None:
    assert message == wanted


def test_a_row_description() -> None:
    found = encode_row_description(
        [FieldDescription("id", sized(INT8), 1), FieldDescription("\0", sized(TEXT))]
    )
    first = b"id\0" + struct.pack("!IhIhih", 0, 0, 20, 8, -1, 1)
    assert found == b"T" + struct.pack("!IH", 4 + 2 + 21 + 20, 2) + first + b" \0" + struct.pack(
        "!IhIhih", 0, 0, 25, -1, -1, 0
    )


def test_errors_and_notices() -> None:
    report = ErrorReport("42601", "no\0such", position=5, hint="try")
    fields = b"SERROR\0VERROR\0C42601\0Mno such\0Htry\0P5\0\0"
    length = struct.pack("!I", len(fields) + 4)
    assert encode_error(report) == b"E" + length + fields
    assert encode_notice(report) == b"N" + length + fields
    assert encode_error(ErrorReport("1", "", "FATAL"))[5:] == b"SFATAL\0VFATAL\0C1\0M\0\0"


def test_versions_are_negotiated() -> None:
    assert negotiate_protocol(StartupPacket({"user": "a"})) == (0, b"")
    assert negotiate_protocol(StartupPacket({}, 2)) == (2, b"")
    body = struct.pack("!II", 3 << 16 | 2, 0)
    assert negotiate_protocol(StartupPacket({}, 9999)) == (2, b"v\0\0\0\x0c" + body)
    assert negotiate_protocol(StartupPacket({}, 1))[0] == 0
    minor, reply = negotiate_protocol(StartupPacket({"_pq_.x": "1"}))
    assert (minor, reply[5:]) == (0, struct.pack("!II", 3 << 16, 1) + b"_pq_.x\0")


def test_formats_are_expanded() -> None:
    assert expand_formats((), 2, "columns") == (0, 0)
    assert expand_formats((1,), 2, "columns") == (1, 1)
    assert expand_formats((0, 1), 2, "columns") == (0, 1)
    assert expand_formats((1,), 0, "columns") == ()
    with pytest.raises(RemoteProtocolError, match="2 formats given for 3 columns"):
        expand_formats((0, 1), 3, "columns")
