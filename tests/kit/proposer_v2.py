"""The proposer's side of version 2 of the acceptor protocol, which our own proposers do not speak.

The acceptor's side is here as well, so that this module is a complete codec like `codec_v3`.
"""

from __future__ import annotations

from actors.runtime.errors import LocalProtocolError
from actors.wal import codec_v2 as v2
from actors.wal.codec_v2 import decode_proposer as decode_proposer
from actors.wal.codec_v2 import encode_acceptor as encode_acceptor
from actors.wal.feedback_codec import read_feedback
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


def decode_acceptor(data: Bytes) -> AcceptorMessage:
    """Decode an acceptor's message, which must have exactly these bytes. Raises
    `MalformedFrame`."""
    fields = MessageFields(data, "an acceptor's message")
    (tag,) = fields.unpack(v2._TAG, "the tag")
    message: AcceptorMessage
    if tag == v2.APPEND:
        fields.message = "AppendResponse"
        term, flush_lsn, commit_lsn, *standby = fields.unpack(v2._APPEND_RESPONSE, "its body")
        # The feedback is big-endian in version 2 as well.
        feedback = read_feedback(fields) if fields.remaining else None
        hot_standby = HotStandbyFeedback(*standby)
        message = AppendResponse(0, term, flush_lsn, commit_lsn, hot_standby, feedback)
    elif tag == v2.GREETING:
        fields.message = "AcceptorGreeting"
        term, node_id = fields.unpack(v2._ACCEPTOR_GREETING, "its body")
        message = AcceptorGreeting(node_id, MembershipConfig(), term)
    elif tag == v2.VOTE:
        fields.message = "VoteResponse"
        term, given, flush_lsn, truncate_lsn = fields.unpack(v2._VOTE_RESPONSE, "its head")
        vote_given = fields.flag(given, "vote_given")
        history = fields.history(v2._U32, v2._ENTRY)
        # Older releases sent the start of the timeline here; now it is always 0.
        fields.unpack(v2._U64, "the zero at its end")
        message = VoteResponse(0, term, vote_given, flush_lsn, truncate_lsn, history)
    else:
        raise fields.malformed(f"unknown tag 0x{tag:x}: expected g, v or a")
    fields.end()
    return message


def encode_proposer(message: ProposerMessage) -> bytes:
    """Encode a proposer's message. Raises `LocalProtocolError`."""
    match message:
        case AppendRequest():
            v2._check_generation(message.generation)
            check_wal(message.begin_lsn, message.end_lsn, message.wal)
            head = pack(
                v2._APPEND_REQUEST,
                message.term,
                0,
                message.begin_lsn,
                message.end_lsn,
                message.commit_lsn,
                message.truncate_lsn,
                _proposer_id(message.proposer_id),
            )
            return b"".join([pack(v2._TAG, v2.APPEND), head, message.wal])
        case VoteRequest():
            v2._check_generation(message.generation)
            proposer_id = _proposer_id(message.proposer_id)
            return pack(v2._TAG, v2.VOTE) + pack(v2._VOTE_REQUEST, message.term, proposer_id)
        case ProposerElected():
            v2._check_generation(message.generation)
            head = pack(v2._ELECTED, message.term, message.start_streaming_at)
            history = pack_history(v2._U32, v2._ENTRY, message.history)
            end = pack(v2._U64, message.timeline_start_lsn)
            return b"".join([pack(v2._TAG, v2.ELECTED), head, *history, end])
        case ProposerGreeting():
            v2._check_generation(message.membership.generation)
            body = pack(
                v2._PROPOSER_GREETING,
                v2.VERSION,
                message.pg_version,
                _proposer_id(message.proposer_id),
                message.system_id,
                _raw(message.timeline, "timeline"),
                _raw(message.tenant, "tenant"),
                message.pg_timeline,
                message.segment_bytes,
            )
            return pack(v2._TAG, v2.GREETING) + body


def _raw(name: str, what: str) -> bytes:
    if not is_id(name):
        raise LocalProtocolError(f"invalid {what} {name!r}: expected {ID_DIGITS} digits, 0-9a-f")
    return bytes.fromhex(name)


def _proposer_id(proposer_id: bytes) -> bytes:
    # `struct` would silently truncate or pad it.
    if len(proposer_id) != 16:
        raise LocalProtocolError(f"a proposer's id has 16 bytes, not {len(proposer_id)}")
    return proposer_id
