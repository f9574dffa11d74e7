"""Version 2 of the protocol over a port: a whole life of a proposer that speaks the old words."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import anyio
import pytest
from test_wal_served import ELECTED, LOG, START, served  # type: ignore[import-not-found]
from wal_wires import GREETING, TENANT, TIMELINE, VOTE  # type: ignore[import-not-found]

from actors.wal.dialling import AcceptorConnection, start_replication
from actors.wal.feedback_codec import encode_feedback
from actors.wal.messages import (
    AcceptorGreeting,
    AppendRequest,
    AppendResponse,
    PageserverFeedback,
    ProposerMessage,
    VoteResponse,
)
from tests.kit import proposer_v2

ASKED = "START_WAL_PUSH (proto_version '2', allow_timeline_creation 'true')"
END = next(end for _, end in LOG.records if end - START > 100)


async def say(connection: AcceptorConnection, *messages: ProposerMessage) -> None:
    await connection.send([proposer_v2.encode_proposer(message) for message in messages])


async def hear(connection: AcceptorConnection, size: int) -> Any:
    """The next answer, which has so many bytes."""
    body = await connection.receive()
    assert len(body) == size
    return proposer_v2.decode_acceptor(body)


def append(begin: int, end: int, commit: int = 0) -> AppendRequest:
    return AppendRequest(0, 1, begin, end, commit, 0, bytes(LOG.wal[begin - START : end - START]))


@pytest.mark.parametrize("asked", [ASKED, "START_WAL_PUSH"])
async def test_a_proposer_of_version_2(tmp_path: Path, asked: str) -> None:
    with anyio.fail_after(60):
        async with served(tmp_path) as node:
            proposer = await node.dial()
            await proposer.command(asked)
            await say(proposer, GREETING)
            assert await hear(proposer, 24) == AcceptorGreeting(5, GREETING.membership, 0)
            await say(proposer, VOTE)
            assert await hear(proposer, 52) == VoteResponse(0, 1, True, 0, 0)
            await say(proposer, ELECTED, append(START, END))
            assert await hear(proposer, 56) == AppendResponse(0, 1, END, START)
            await say(proposer, append(END, END, END))  # a heartbeat, with a commit
            answer = await hear(proposer, 56)
            assert (answer.term, answer.flush_lsn) == (1, END)

            reader = await node.dial()
            await start_replication(reader, START)
            wal = b""
            while len(wal) < END - START:
                body = await reader.receive()
                wal += body[25:] if body[:1] == b"w" else b""
            assert wal == LOG.wal[: END - START]
            feedback = PageserverFeedback(
                current_timeline_bytes=7, last_received_lsn=END, remote_consistent_lsn=END
            )
            data = encode_feedback(feedback)
            await reader.send([b"z" + struct.pack("!Q", len(data)) + data])
            answer = await hear(proposer, 56 + len(data))
            assert answer.pageserver == feedback
            assert answer.flush_lsn == END

            again = await node.dial()  # the same leader, over a new connection
            await again.command(asked)
            await say(again, GREETING, VOTE)
            assert (await hear(again, 24)).term == 1
            vote = await hear(again, 52 + 16)
            assert (vote.vote_given, vote.flush_lsn, vote.history) == (False, END, ELECTED.history)
            found = node.timelines.find(TENANT, TIMELINE)
            assert found is not None
            assert found.acceptor.state.remote_consistent_lsn == END
