"""Bytes that are no session harm their own connection alone: a slice of the campaign."""

from __future__ import annotations

from pathlib import Path
from random import Random

from pg_house import pg_service  # type: ignore[import-not-found]

from actors.runtime.errors import RemoteProtocolError
from tests.kit.pg_fuzz import (
    MESSAGE_BYTES_MAX,
    SESSIONS,
    FuzzedDoor,
    FuzzedSession,
    attack_together,
    fuzzed_session,
    read_session,
)

CASES = 600
ATTACKS = 120
AT_ONCE = 8
SMALL = {"frame_bytes_max": MESSAGE_BYTES_MAX, "result_bytes_max": MESSAGE_BYTES_MAX // 2}


def test_sessions_are_valid_as_they_are() -> None:
    for session in SESSIONS:
        for size in (1, 5, 1 << 20):
            count, error = read_session(FuzzedSession(b"".join(session), size))
            assert error is None
            assert count == len(session)


def test_the_decoder_refuses_by_name_whatever_comes() -> None:
    outcomes: dict[str, int] = {}
    for seed in range(CASES):
        _, error = read_session(fuzzed_session(Random(seed)))
        name = "accepted" if error is None else type(error).__name__
        outcomes[name] = outcomes.get(name, 0) + 1
    assert outcomes.keys() == {"accepted", "MalformedFrame", "FrameTooLarge"}
    assert min(outcomes.values()) > CASES // 50, outcomes


def test_how_bytes_are_cut_changes_nothing() -> None:
    for seed in range(CASES // 4):
        data = fuzzed_session(Random(seed)).data
        if len(data) > 4_000:
            continue
        found = [read_session(FuzzedSession(data, size)) for size in (1, 1 << 20)]
        assert found[0][0] == found[1][0]
        assert str(found[0][1]) == str(found[1][1])


async def test_a_service_goes_on_whatever_comes(tmp_path: Path) -> None:
    rng = Random(1)
    async with pg_service(tmp_path, **SMALL) as service:
        door = await FuzzedDoor.open(service)
        try:
            for _ in range(0, ATTACKS, AT_ONCE):
                sessions = [fuzzed_session(rng) for _ in range(AT_ONCE)]
                await attack_together(door, sessions, rng)
            await door.wait_alone()
            await door.check()
        finally:
            await door.aclose()
    assert door.answered > ATTACKS // 2
    # Few: most send a query before they are let in, and are refused for that.
    assert door.let_in > ATTACKS // 8


def test_a_refusal_is_of_the_protocol() -> None:
    error = read_session(FuzzedSession(b"\0\0\0\x03", 1))[1]
    assert isinstance(error, RemoteProtocolError)
