"""Mutated messages of the WAL: accepted, or exactly one named error, never anything else."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wal_messages import GOLDEN, PROPOSERS, golden_bytes  # type: ignore[import-not-found]

from actors.wal.feedback_codec import encode_feedback
from tests.kit.wal_fuzz import OPENINGS, TARGETS, mutated_wal

SEEDS: dict[str, list[bytes]] = {name: [] for name in TARGETS}
for label, message_bytes in golden_bytes().items():
    side = "proposer" if isinstance(GOLDEN[label], PROPOSERS) else "acceptor"
    SEEDS[f"{label[:2]} {side}"].append(message_bytes)
SEEDS["feedback"] = [
    encode_feedback(message.pageserver)
    for message in GOLDEN.values()
    if getattr(message, "pageserver", None) is not None
]
SEEDS.update(OPENINGS)
ALL = [data for seeds in SEEDS.values() for data in seeds]
NAMES = pytest.mark.parametrize("name", list(TARGETS))


@NAMES
def test_every_golden_message_is_accepted(name: str) -> None:
    assert len(SEEDS[name]) > 1
    assert [TARGETS[name](data) for data in SEEDS[name]] == [None] * len(SEEDS[name])


REFUSALS = {"MalformedFrame", "WalRefused", "PeerRejected", "AuthenticationFailed"}


@pytest.mark.sampled
@NAMES
def test_any_bytes(name: str) -> None:
    outcomes: Counter[str] = Counter()

    @given(data=st.binary(max_size=200))
    def read(data: bytes) -> None:
        error = TARGETS[name](data)
        outcomes["accepted" if error is None else type(error).__name__] += 1

    read()
    # Bytes that mean nothing are seldom accepted: `test_mutated_messages` walks that way.
    assert outcomes.keys() & REFUSALS
    assert outcomes.keys() <= REFUSALS | {"accepted"}


@NAMES
def test_mutated_messages(name: str) -> None:
    outcomes: Counter[str] = Counter()
    rng = Random(name)
    for _ in range(2000):
        error = TARGETS[name](mutated_wal(rng.choice(SEEDS[name]), ALL, rng))
        outcomes["accepted" if error is None else type(error).__name__] += 1
    accepted = outcomes.pop("accepted")
    assert set(outcomes) <= REFUSALS
    # both ways are walked, or nothing was looked at
    assert min(accepted, outcomes.total()) > 50, (accepted, outcomes)
