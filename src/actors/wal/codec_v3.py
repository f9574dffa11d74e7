"""Version 3 of the acceptors' protocol as bytes: all integers big-endian, no padding, one tag byte.

A proposer's message may be longer than its fields: the rest is ignored, as in Neon's acceptors. An
acceptor's message must have its exact length; otherwise a proposer closes the connection. Bytes
that are not a valid message raise `MalformedFrame`; values that no message can carry raise
`LocalProtocolError`.
"""

from __future__ import annotations

import struct
from typing import Final

from actors.runtime.errors import LocalProtocolError
from actors.wal.feedback_codec import encode_feedback, read_feedback
from actors.wal.fields import (
    ID_DIGITS,
    Bytes,
    MessageFields,
    check_wal,
    is_id,
    pack,
    pack_history,
    pack_text,
)
from actors.wal.messages import (
    AcceptorGreeting,
    AcceptorMessage,
    AppendRequest,
    AppendResponse,
    ConfigMember,
    HotStandbyFeedback,
    MembershipConfig,
    ProposerElected,
    ProposerGreeting,
    ProposerMessage,
    VoteRequest,
    VoteResponse,
)

GREETING: Final = ord("g")
VOTE: Final = ord("v")
ELECTED: Final = ord("e")
APPEND: Final = ord("a")
HOST_BYTES_MAX: Final = 255
"""Maximum length of a host name in DNS."""
MEMBER_BYTES_MIN: Final = 11
"""Size of the shortest member: its number, the NUL of an empty host, and its port."""

_TAG: Final = struct.Struct(">B")
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
_ENTRY: Final = struct.Struct(">QQ")
_SERVER: Final = struct.Struct(">IQI")
_VOTE_REQUEST: Final = struct.Struct(">IQ")
_VOTE_RESPONSE: Final = struct.Struct(">IQBQQ")
_ELECTED: Final = struct.Struct(">IQQ")
_APPEND_REQUEST: Final = struct.Struct(">IQQQQQ")
_APPEND_RESPONSE: Final = struct.Struct(">IQQQqQQ")


def decode_proposer(data: Bytes) -> ProposerMessage:
    """Decode a proposer's message. Trailing bytes are ignored. Raise `MalformedFrame`."""
    fields = MessageFields(data, "a proposer's message")
    (tag,) = fields.unpack(_TAG, "the tag")
    if tag == APPEND:
        fields.message = "AppendRequest"
        generation, term, begin, end, commit, truncate = fields.unpack(_APPEND_REQUEST, "its head")
        wal = fields.wal(begin, end)
        return AppendRequest(generation, term, begin, end, commit, truncate, wal)
    if tag == GREETING:
        return _read_proposer_greeting(fields)
    if tag == VOTE:
        fields.message = "VoteRequest"
        return VoteRequest(*fields.unpack(_VOTE_REQUEST, "its body"))
    if tag == ELECTED:
        fields.message = "ProposerElected"
        generation, term, start = fields.unpack(_ELECTED, "its head")
        return ProposerElected(generation, term, start, fields.history(_U32, _ENTRY))
    raise fields.malformed(f"unknown tag 0x{tag:02x}: expected g, v, e or a")


def decode_acceptor(data: Bytes) -> AcceptorMessage:
    """Decode an acceptor's message, which must have exactly these bytes. Raise `MalformedFrame`."""
    fields = MessageFields(data, "an acceptor's message")
    (tag,) = fields.unpack(_TAG, "the tag")
    message: AcceptorMessage
    if tag == APPEND:
        fields.message = "AppendResponse"
        generation, term, flush_lsn, commit_lsn, *standby = fields.unpack(
            _APPEND_RESPONSE, "its body"
        )
        feedback = read_feedback(fields) if fields.remaining else None
        hot_standby = HotStandbyFeedback(*standby)
        message = AppendResponse(generation, term, flush_lsn, commit_lsn, hot_standby, feedback)
    elif tag == GREETING:
        fields.message = "AcceptorGreeting"
        (node_id,) = fields.unpack(_U64, "node_id")
        membership = _read_membership(fields)
        message = AcceptorGreeting(node_id, membership, *fields.unpack(_U64, "the term"))
    elif tag == VOTE:
        fields.message = "VoteResponse"
        generation, term, given, flush_lsn, truncate_lsn = fields.unpack(_VOTE_RESPONSE, "its head")
        vote_given = fields.flag(given, "vote_given")
        history = fields.history(_U32, _ENTRY)
        message = VoteResponse(generation, term, vote_given, flush_lsn, truncate_lsn, history)
    else:
        raise fields.malformed(f"unknown tag 0x{tag:02x}: expected g, v or a")
    fields.end()
    return message


def encode_proposer(message: ProposerMessage) -> bytes:
    """Encode a proposer's message, without the fields of version 2. Raise `LocalProtocolError`."""
    match message:
        case AppendRequest():
            check_wal(message.begin_lsn, message.end_lsn, message.wal)
            head = pack(
                _APPEND_REQUEST,
                message.generation,
                message.term,
                message.begin_lsn,
                message.end_lsn,
                message.commit_lsn,
                message.truncate_lsn,
            )
            return b"".join([b"a", head, message.wal])
        case VoteRequest():
            return b"v" + pack(_VOTE_REQUEST, message.generation, message.term)
        case ProposerElected(generation=generation, term=term, start_streaming_at=start):
            head = pack(_ELECTED, generation, term, start)
            return b"".join([b"e", head, *pack_history(_U32, _ENTRY, message.history)])
        case ProposerGreeting():
            parts = [b"g"]
            for what, name in (("tenant", message.tenant), ("timeline", message.timeline)):
                if not is_id(name):
                    raise LocalProtocolError(
                        f"invalid {what} {name!r}: expected {ID_DIGITS} digits, 0-9a-f"
                    )
                parts.append(name.encode() + b"\0")
            parts += _pack_membership(message.membership)
            parts.append(
                pack(_SERVER, message.pg_version, message.system_id, message.segment_bytes)
            )
            return b"".join(parts)


def encode_acceptor(message: AcceptorMessage) -> bytes:
    """Encode an acceptor's message, with its exact length. Raise `LocalProtocolError`."""
    match message:
        case AppendResponse(hot_standby=hot_standby, pageserver=pageserver):
            body = pack(
                _APPEND_RESPONSE,
                message.generation,
                message.term,
                message.flush_lsn,
                message.commit_lsn,
                hot_standby.ts,
                hot_standby.xmin,
                hot_standby.catalog_xmin,
            )
            return b"a" + body + (b"" if pageserver is None else encode_feedback(pageserver))
        case VoteResponse():
            head = pack(
                _VOTE_RESPONSE,
                message.generation,
                message.term,
                int(message.vote_given),
                message.flush_lsn,
                message.truncate_lsn,
            )
            return b"".join([b"v", head, *pack_history(_U32, _ENTRY, message.history)])
        case AcceptorGreeting(node_id=node_id, membership=membership, term=term):
            parts = _pack_membership(membership)
            return b"".join([b"g", pack(_U64, node_id), *parts, pack(_U64, term)])


def _read_proposer_greeting(fields: MessageFields) -> ProposerGreeting:
    fields.message = "ProposerGreeting"
    tenant = _read_id(fields, "tenant")
    timeline = _read_id(fields, "timeline")
    membership = _read_membership(fields)
    pg_version, system_id, segment_bytes = fields.unpack(_SERVER, "the server's fields")
    return ProposerGreeting(tenant, timeline, membership, pg_version, system_id, segment_bytes)


def _read_id(fields: MessageFields, what: str) -> str:
    # Either case is accepted, but lower case is stored, because ids name folders.
    name = fields.text(ID_DIGITS, what).lower()
    if not is_id(name):
        raise fields.malformed(f"invalid {what} {name!r}: expected {ID_DIGITS} hexadecimal digits")
    return name


def _read_membership(fields: MessageFields) -> MembershipConfig:
    (generation,) = fields.unpack(_U32, "the generation")
    members = _read_members(fields)
    membership = MembershipConfig(generation, members, _read_members(fields))
    if wrong := _find_error(membership):
        raise fields.malformed(wrong)
    return membership


def _read_members(fields: MessageFields) -> tuple[ConfigMember, ...]:
    members = []
    for _ in range(fields.count(_U32, MEMBER_BYTES_MIN, "members")):
        (node_id,) = fields.unpack(_U64, "a member's number")
        host = fields.text(HOST_BYTES_MAX, f"the host of member {node_id}")
        (port,) = fields.unpack(_U16, f"the port of member {node_id}")
        members.append(ConfigMember(node_id, host, port))
    return tuple(members)


def _pack_membership(membership: MembershipConfig) -> list[bytes]:
    if wrong := _find_error(membership):
        raise LocalProtocolError(wrong)
    parts = [pack(_U32, membership.generation)]
    for members in (membership.members, membership.new_members):
        parts.append(pack(_U32, len(members)))
        for member in members:
            parts.append(pack(_U64, member.node_id))
            parts.append(pack_text(member.host, HOST_BYTES_MAX, "the host"))
            parts.append(pack(_U16, member.port))
    return parts


def _find_error(membership: MembershipConfig) -> str | None:
    generation, members = membership.generation, membership.members
    # Generation 0 means "no configuration", and each set must contain a node only once.
    if generation and not members:
        return f"generation {generation} has no members"
    if not generation and (members or membership.new_members):
        count = len(members) + len(membership.new_members)
        return f"generation 0 means no configuration, but has {count} members"
    for one_set in (members, membership.new_members):
        ids = [member.node_id for member in one_set]
        if len(set(ids)) < len(ids):
            return f"duplicate member in one set of generation {generation}: {sorted(ids)}"
    return None
