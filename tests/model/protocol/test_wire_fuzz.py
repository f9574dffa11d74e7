"""Mutated messages and handshakes: accepted, or exactly one named error, never anything else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.runtime.errors import (
    AuthenticationFailed,
    ConnectionBroken,
    FrameTooLarge,
    IncompatibleVersion,
    MalformedFrame,
    RemoteProtocolError,
    ResourceBusy,
    UnknownCommand,
    WrongService,
)
from actors.runtime.frames import HEADER
from suite_lanes import examples  # type: ignore[import-not-found]
from tests.kit.wire_fuzz import FRAME_BYTES_MAX, HANDSHAKES, TARGETS, framed, mutated

FRAMES = [name for name in TARGETS if "handshake" not in name]


def golden() -> dict[str, list[bytes]]:
    """Bodies of every message, by direction."""
    found: dict[str, list[bytes]] = {}
    for line in Path(__file__).with_name("golden_frames.txt").read_text().splitlines():
        label, _, text = line.rpartition(": ")
        found.setdefault(label.rpartition(": ")[0], []).append(bytes.fromhex(text))
    found["commands by the rules"] = found["controller to cluster"]
    return found


GOLDEN = golden()
ALL = [body for bodies in GOLDEN.values() for body in bodies]


@pytest.mark.parametrize("name", [name for name in FRAMES if name != "commands by the rules"])
def test_every_message_is_accepted_as_it_is(name: str) -> None:
    outcome = TARGETS[name].read(framed(GOLDEN[name]), 1 << 20)
    assert outcome.error is None
    assert outcome.accepted == len(GOLDEN[name])


def test_commands_are_held_to_the_rules_too() -> None:
    """The golden ones are not in order; some of them must pass, else nothing is looked at."""
    target = TARGETS["commands by the rules"]
    outcomes = [target.read(framed([body]), 1 << 20) for body in GOLDEN[target.name]]
    assert sum(outcome.accepted for outcome in outcomes) > 5
    assert any(isinstance(outcome.error, RemoteProtocolError) for outcome in outcomes)


@pytest.mark.parametrize("name", FRAMES)
@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_mutated_frames(name: str, seed: int) -> None:
    rng = Random(seed)
    bodies = [rng.choice(GOLDEN[name]) for _ in range(rng.randint(1, 4))]
    changed = rng.randrange(len(bodies))
    for _ in range(rng.randint(1, 4)):
        bodies[changed] = mutated(bodies[changed], ALL, rng)
    data = framed(bodies)
    if rng.random() < 0.3:
        data = mutated(data, ALL, rng)  # lengths, too
    whole = TARGETS[name].read(data, 1 << 20)
    torn = TARGETS[name].read(data, rng.randint(1, 20))
    assert (whole.accepted, str(whole.error)) == (torn.accepted, str(torn.error))


@pytest.mark.parametrize("name", ["handshake of a listener", "handshake of a dialler"])
@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_mutated_handshakes(name: str, seed: int) -> None:
    rng = Random(seed)
    data = rng.choice(HANDSHAKES)
    for _ in range(rng.randint(1, 3)):
        data = mutated(data, list(HANDSHAKES), rng)
    outcome = TARGETS[name].read(data, 1)
    assert (outcome.error is None) == (outcome.accepted == 1)


def test_the_mutations_reach_all_the_errors() -> None:
    """Else the tests above prove little."""
    rng, seen = Random(1), Counter[str]()
    for _ in range(4000):
        name = rng.choice(FRAMES)
        body = mutated(rng.choice(GOLDEN[name]), ALL, rng)
        seen[type(TARGETS[name].read(framed([body]), 1 << 20).error).__name__] += 1
        data = mutated(mutated(rng.choice(HANDSHAKES), list(HANDSHAKES), rng), [], rng)
        for side in ("listener", "dialler"):
            seen[type(TARGETS[f"handshake of a {side}"].read(data, 1).error).__name__] += 1
    large = HEADER.pack(FRAME_BYTES_MAX + 1)
    seen[type(TARGETS[FRAMES[0]].read(large, 4).error).__name__] += 1
    expected = (
        MalformedFrame,
        UnknownCommand,
        IncompatibleVersion,
        WrongService,
        ResourceBusy,
        ConnectionBroken,
    )
    for kind in (*expected, AuthenticationFailed, FrameTooLarge):
        assert seen[kind.__name__], kind
    assert seen["NoneType"]
