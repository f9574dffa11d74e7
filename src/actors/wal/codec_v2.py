"""Version 2 of the acceptors' protocol as bytes: packed little-endian structures, tags of 8 bytes.

Only the acceptor's side is implemented: our own proposers speak version 3.

Version 2 has no generations and no membership. Every message is of generation 0; any other cannot
be encoded (`LocalProtocolError`), and an acceptor's greeting omits its membership. In a proposer's
greeting the timeline precedes the tenant, as raw bytes, and in an acceptor's greeting the term
precedes its number; version 3 has both in the reverse order.

Trailing bytes of a proposer's message are ignored; an acceptor's message must have its exact
length. Bytes that are not a valid message raise `MalformedFrame`.
"""

from __future__ import annotations

import struct
from typing import Final

from actors.runtime.errors import LocalProtocolError
from actors.wal.feedback_codec import encode_feedback
from actors.wal.fields import Bytes, MessageFields, pack, pack_history
from actors.wal.messages import (
    AcceptorGreeting,
    AcceptorMessage,
    AppendRequest,
    AppendResponse,
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
    """Decode a proposer's message. Trailing bytes are ignored. Raise `MalformedFrame`."""
    fields = MessageFields(data, "a proposer's message")
    (tag,) = fields.unpack(_TAG, "the tag")
    if tag == APPEND:
        fields.message = "AppendRequest"
        # Older releases sent the start of the term as the second field; it is ignored.
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
    raise fields.malformed(f"unknown tag 0x{tag:x}: expected g, v, e or a")


def encode_acceptor(message: AcceptorMessage) -> bytes:
    """Encode an acceptor's message, with its exact length. Raise `LocalProtocolError`."""
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
        raise fields.malformed(f"it has version {version}, in a stream of version {VERSION}")
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
        raise LocalProtocolError(f"version 2 cannot encode generation {generation}: use version 3")
