"""Version 2 of the acceptors' protocol as bytes: packed little-endian structures, tags of 8 bytes.

Version 2 has no generations and no membership: every message is of generation 0, another cannot be
encoded (`LocalProtocolError`), and an acceptor's greeting leaves its membership out. A proposer's
greeting has the timeline before the tenant, as raw bytes, and an acceptor's has the term before its
number: both are the other way round in version 3.

Trailing bytes of a proposer are ignored, an acceptor's message must have its exact length. Bytes
that are no message raise `MalformedFrame`.
"""

from __future__ import annotations

import struct
from typing import Final

from actors.runtime.errors import LocalProtocolError
from actors.wal.feedback_codec import encode_feedback, read_feedback
from actors.wal.fields import ID_DIGITS, Bytes, MessageFields, check_wal, is_id, pack, pack_history
from actors.wal.messages import (
    AcceptorGreeting,
    AcceptorMessage,
    AppendRequest,
    AppendResponse,
    HotStandbyFeedback,
    MembershipConfig,
    ProposerElected,
    ProposerGreeting,
    ProposerMessage,
    VoteRequest,
    VoteResponse,
)

VERSION: Final = 2
GREETING: Final = ord("g")
VOTE: Final = ord("v")
ELECTED: Final = ord("e")
APPEND: Final = ord("a")

_TAG: Final = struct.Struct("<Q")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<QQ")
_PROPOSER_GREETING: Final = struct.Struct("<II16sQ16s16sII")
_ACCEPTOR_GREETING: Final = struct.Struct("<QQ")
_VOTE_REQUEST: Final = struct.Struct("<Q16s")
_VOTE_RESPONSE: Final = struct.Struct("<QQQQ")
_ELECTED: Final = struct.Struct("<QQ")
_APPEND_REQUEST: Final = struct.Struct("<QQQQQQ16s")
_APPEND_RESPONSE: Final = struct.Struct("<QQQqQQ")


def decode_proposer(data: Bytes) -> ProposerMessage:
    """Decode a proposer's message; trailing bytes are ignored. Raises `MalformedFrame`."""
    fields = MessageFields(data, "a proposer's message")
    (tag,) = fields.unpack(_TAG, "the tag")
    if tag == APPEND:
        fields.message = "AppendRequest"
        # Older releases sent the term's begin as second field; it is ignored.
        term, _, begin, end, commit, truncate, proposer_id = fields.unpack(
            _APPEND_REQUEST, "its head"
        )
        wal = fields.wal(begin, end)
        return AppendRequest(0, term, begin, end, commit, truncate, wal, proposer_id)
    if tag == GREETING:
        return _read_proposer_greeting(fields)
    if tag == VOTE:
        fields.message = "VoteRequest"
        return VoteRequest(0, *fields.unpack(_VOTE_REQUEST, "its body"))
    if tag == ELECTED:
        fields.message = "ProposerElected"
        term, start = fields.unpack(_ELECTED, "its head")
        history = fields.history(_U32, _ENTRY)
        (timeline_start_lsn,) = fields.unpack(_U64, "timeline_start_lsn")
        return ProposerElected(0, term, start, history, timeline_start_lsn)
    raise fields.malformed(f"unknown tag 0x{tag:x}: g, v, e or a is known")


def decode_acceptor(data: Bytes) -> AcceptorMessage:
    """Decode an acceptor's message, which must have exactly these bytes. Raises
    `MalformedFrame`."""
    fields = MessageFields(data, "an acceptor's message")
    (tag,) = fields.unpack(_TAG, "the tag")
    message: AcceptorMessage
    if tag == APPEND:
        fields.message = "AppendResponse"
        term, flush_lsn, commit_lsn, *standby = fields.unpack(_APPEND_RESPONSE, "its body")
        # The feedback is big-endian in version 2, too.
        feedback = read_feedback(fields) if fields.remaining else None
        hot_standby = HotStandbyFeedback(*standby)
        message = AppendResponse(0, term, flush_lsn, commit_lsn, hot_standby, feedback)
    elif tag == GREETING:
        fields.message = "AcceptorGreeting"
        term, node_id = fields.unpack(_ACCEPTOR_GREETING, "its body")
        message = AcceptorGreeting(node_id, MembershipConfig(), term)
    elif tag == VOTE:
        fields.message = "VoteResponse"
        term, given, flush_lsn, truncate_lsn = fields.unpack(_VOTE_RESPONSE, "its head")
        vote_given = fields.flag(given, "vote_given")
        history = fields.history(_U32, _ENTRY)
        # Older releases sent the timeline's begin here; now it is always 0.
        fields.unpack(_U64, "the zero at its end")
        message = VoteResponse(0, term, vote_given, flush_lsn, truncate_lsn, history)
    else:
        raise fields.malformed(f"unknown tag 0x{tag:x}: g, v or a is known")
    fields.end()
    return message


def encode_proposer(message: ProposerMessage) -> bytes:
    """Encode a proposer's message. Raises `LocalProtocolError`."""
    match message:
        case AppendRequest():
            _check_generation(message.generation)
            check_wal(message.begin_lsn, message.end_lsn, message.wal)
            head = pack(
                _APPEND_REQUEST,
                message.term,
                0,
                message.begin_lsn,
                message.end_lsn,
                message.commit_lsn,
                message.truncate_lsn,
                _proposer_id(message.proposer_id),
            )
            return b"".join([pack(_TAG, APPEND), head, message.wal])
        case VoteRequest():
            _check_generation(message.generation)
            proposer_id = _proposer_id(message.proposer_id)
            return pack(_TAG, VOTE) + pack(_VOTE_REQUEST, message.term, proposer_id)
        case ProposerElected():
            _check_generation(message.generation)
            head = pack(_ELECTED, message.term, message.start_streaming_at)
            history = pack_history(_U32, _ENTRY, message.history)
            end = pack(_U64, message.timeline_start_lsn)
            return b"".join([pack(_TAG, ELECTED), head, *history, end])
        case ProposerGreeting():
            _check_generation(message.membership.generation)
            body = pack(
                _PROPOSER_GREETING,
                VERSION,
                message.pg_version,
                _proposer_id(message.proposer_id),
                message.system_id,
                _raw(message.timeline, "timeline"),
                _raw(message.tenant, "tenant"),
                message.pg_timeline,
                message.segment_bytes,
            )
            return pack(_TAG, GREETING) + body


def encode_acceptor(message: AcceptorMessage) -> bytes:
    """Encode an acceptor's message, of exact length. Raises `LocalProtocolError`."""
    match message:
        case AppendResponse(hot_standby=hot_standby, pageserver=pageserver):
            _check_generation(message.generation)
            body = pack(
                _APPEND_RESPONSE,
                message.term,
                message.flush_lsn,
                message.commit_lsn,
                hot_standby.ts,
                hot_standby.xmin,
                hot_standby.catalog_xmin,
            )
            tail = b"" if pageserver is None else encode_feedback(pageserver)
            return b"".join([pack(_TAG, APPEND), body, tail])
        case VoteResponse():
            _check_generation(message.generation)
            head = pack(
                _VOTE_RESPONSE,
                message.term,
                int(message.vote_given),
                message.flush_lsn,
                message.truncate_lsn,
            )
            history = pack_history(_U32, _ENTRY, message.history)
            return b"".join([pack(_TAG, VOTE), head, *history, bytes(8)])
        case AcceptorGreeting(node_id=node_id, term=term):
            return pack(_TAG, GREETING) + pack(_ACCEPTOR_GREETING, term, node_id)


def _read_proposer_greeting(fields: MessageFields) -> ProposerGreeting:
    fields.message = "ProposerGreeting"
    version, pg_version, proposer_id, system_id, timeline, tenant, pg_timeline, segment_bytes = (
        fields.unpack(_PROPOSER_GREETING, "its body")
    )
    if version != VERSION:
        raise fields.malformed(f"it says version {version}, in a stream of version {VERSION}")
    return ProposerGreeting(
        tenant=tenant.hex(),
        timeline=timeline.hex(),
        membership=MembershipConfig(),
        pg_version=pg_version,
        system_id=system_id,
        segment_bytes=segment_bytes,
        proposer_id=proposer_id,
        pg_timeline=pg_timeline,
    )


def _check_generation(generation: int) -> None:
    if generation:
        raise LocalProtocolError(
            f"generation {generation} cannot be said in version 2; speak version 3"
        )


def _raw(name: str, what: str) -> bytes:
    if not is_id(name):
        raise LocalProtocolError(f"{what} {name!r} is not {ID_DIGITS} digits, 0-9a-f")
    return bytes.fromhex(name)


def _proposer_id(proposer_id: bytes) -> bytes:
    # `struct` would silently cut or pad it.
    if len(proposer_id) != 16:
        raise LocalProtocolError(f"a proposer's id has 16 bytes, not {len(proposer_id)}")
    return proposer_id
