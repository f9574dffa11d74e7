"""Messages of the WAL for tests: the golden ones, and strategies that draw any other."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hypothesis import strategies as st

from actors.wal.messages import (
    AcceptorGreeting,
    AcceptorMessage,
    AppendRequest,
    AppendResponse,
    ConfigMember,
    HotStandbyFeedback,
    MembershipConfig,
    PageserverFeedback,
    ProposerElected,
    ProposerGreeting,
    ProposerMessage,
    TermEntry,
    VoteRequest,
    VoteResponse,
)

TENANT: Final = "00112233445566778899aabbccddeeff"
TIMELINE: Final = "fedcba9876543210fedcba9876543210"
PROPOSER_ID: Final = bytes(range(0xA0, 0xB0))
WAL: Final = bytes([0, 1, 2, 3, 4, 255, 0, 254])
LSN: Final = 0x1_6B37_4D48
STREAM: Final = 1 << 32
START: Final = 0x0100_0028
JOINT: Final = MembershipConfig(
    7, (ConfigMember(1, "sk1", 5438), ConfigMember(2, "::1", 65535)), (ConfigMember(3, "", 1),)
)

GOLDEN: Final[dict[str, ProposerMessage | AcceptorMessage]] = {
    "v3 proposer greeting": ProposerGreeting(
        TENANT, TIMELINE, MembershipConfig(), 170005, 0x1234567890ABCDEF, 16 << 20
    ),
    "v3 proposer greeting with a joint configuration": ProposerGreeting(
        TENANT, TIMELINE, JOINT, 140000, 2**64 - 1, 1 << 20
    ),
    "v3 acceptor greeting": AcceptorGreeting(42, MembershipConfig(), 5),
    "v3 acceptor greeting with a configuration": AcceptorGreeting(
        1, MembershipConfig(2, (ConfigMember(1, "localhost", 5432),)), 0
    ),
    "v3 vote request": VoteRequest(3, 8),
    "v3 vote response": VoteResponse(
        3, 8, True, LSN, START, (TermEntry(1, START), TermEntry(4, STREAM))
    ),
    "v3 vote response refused by an empty acceptor": VoteResponse(0, 9, False, 0, 0),
    "v3 elected": ProposerElected(
        3, 8, STREAM, (TermEntry(1, START), TermEntry(4, STREAM), TermEntry(8, LSN))
    ),
    "v3 append": AppendRequest(3, 8, LSN, LSN + 8, LSN - 8, START, WAL),
    "v3 heartbeat": AppendRequest(0, 1, 16, 16, 0, 0),
    "v3 append response": AppendResponse(3, 8, LSN + 8, LSN, HotStandbyFeedback(-2, 750, 749)),
    "v3 append response with feedback": AppendResponse(
        0, 1, 24, 16, HotStandbyFeedback(), PageserverFeedback(1024, 24, 16, 8, 795808613188564)
    ),
    "v2 proposer greeting": ProposerGreeting(
        TENANT, TIMELINE, MembershipConfig(), 170005, 0x1234567890ABCDEF, 16 << 20, PROPOSER_ID, 1
    ),
    "v2 acceptor greeting": AcceptorGreeting(42, MembershipConfig(), 5),
    "v2 vote request": VoteRequest(0, 8, PROPOSER_ID),
    "v2 vote response": VoteResponse(
        0, 8, True, LSN, START, (TermEntry(1, START), TermEntry(4, STREAM))
    ),
    "v2 elected": ProposerElected(0, 8, STREAM, (TermEntry(8, LSN),), START),
    "v2 append": AppendRequest(0, 8, LSN, LSN + 8, LSN - 8, START, WAL, PROPOSER_ID),
    "v2 heartbeat": AppendRequest(0, 1, 16, 16, 0, 0),
    "v2 append response": AppendResponse(0, 8, LSN + 8, LSN, HotStandbyFeedback(-2, 750, 749)),
    "v2 append response with feedback": AppendResponse(
        0, 1, 24, 16, HotStandbyFeedback(), PageserverFeedback(1024, 24, 16, 8, -1, 3, True)
    ),
}
PROPOSERS: Final = (ProposerGreeting, VoteRequest, ProposerElected, AppendRequest)


def golden_bytes() -> dict[str, bytes]:
    """What stands in golden_wal_messages.txt, by name."""
    found: dict[str, bytes] = {}
    name = ""
    for line in (Path(__file__).parent / "golden_wal_messages.txt").read_text().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            found[name] = b""
        elif line and not line.startswith("#"):
            found[name] += bytes.fromhex(line.partition("  ")[0])
    return found


U16: Final = st.integers(0, 2**16 - 1)
U32: Final = st.integers(0, 2**32 - 1)
U64: Final = st.integers(0, 2**64 - 1)
I64: Final = st.integers(-(2**63), 2**63 - 1)
IDS: Final = st.binary(min_size=16, max_size=16).map(bytes.hex)
PROPOSER_IDS: Final = st.binary(min_size=16, max_size=16)
HISTORIES: Final = st.lists(st.builds(TermEntry, U64, U64), max_size=5).map(tuple)
HOSTS: Final = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=63)
MEMBERS: Final = st.lists(
    st.builds(ConfigMember, U64, HOSTS, U16), max_size=4, unique_by=lambda member: member.node_id
).map(tuple)
MEMBERSHIPS: Final = st.just(MembershipConfig()) | st.builds(
    MembershipConfig, st.integers(1, 2**32 - 1), MEMBERS.filter(len), MEMBERS
)
FEEDBACKS: Final = st.builds(PageserverFeedback, U64, U64, U64, U64, I64, U32, st.booleans())


@st.composite
def appends(draw: st.DrawFn, version: int) -> AppendRequest:
    """Any AppendRequest of that version."""
    wal = draw(st.binary(max_size=64))
    begin = draw(st.integers(0, 2**64 - 1 - len(wal)))
    proposer_id = draw(PROPOSER_IDS) if version == 2 else bytes(16)
    generation = draw(U32) if version == 3 else 0
    term, commit, truncate = draw(U64), draw(U64), draw(U64)
    end = begin + len(wal)
    return AppendRequest(generation, term, begin, end, commit, truncate, wal, proposer_id)


def proposer_messages(version: int) -> st.SearchStrategy[ProposerMessage]:
    """Any message of a proposer of that version."""
    if version == 3:
        return st.one_of(
            st.builds(ProposerGreeting, IDS, IDS, MEMBERSHIPS, U32, U64, U32),
            st.builds(VoteRequest, U32, U64),
            st.builds(ProposerElected, U32, U64, U64, HISTORIES),
            appends(3),
        )
    zero = st.just(0)
    return st.one_of(
        st.builds(
            ProposerGreeting,
            IDS,
            IDS,
            st.just(MembershipConfig()),
            U32,
            U64,
            U32,
            PROPOSER_IDS,
            U32,
        ),
        st.builds(VoteRequest, zero, U64, PROPOSER_IDS),
        st.builds(ProposerElected, zero, U64, U64, HISTORIES, U64),
        appends(2),
    )


def acceptor_messages(version: int) -> st.SearchStrategy[AcceptorMessage]:
    """Any message of an acceptor of that version."""
    generations = U32 if version == 3 else st.just(0)
    memberships = MEMBERSHIPS if version == 3 else st.just(MembershipConfig())
    standby = st.builds(HotStandbyFeedback, I64, U64, U64)
    return st.one_of(
        st.builds(AcceptorGreeting, U64, memberships, U64),
        st.builds(VoteResponse, generations, U64, st.booleans(), U64, U64, HISTORIES),
        st.builds(AppendResponse, generations, U64, U64, U64, standby, st.none() | FEEDBACKS),
    )
