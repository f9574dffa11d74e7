"""The fixtures in a project of a stranger: loops, orders, and how tests fail through pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from actors.testing.patience import PROGRAM_S

TESTS = """
import asyncio
import anyio
import pytest
from actors.runtime.kernel import Actor
from actors.testing.virtual_time import VirtualTimeLoop


class Fragile(Actor):
    def receive(self, message):
        raise ValueError(message)

    def describe(self):
        return "made of glass"


async def test_waits_for_ever(stage):
    stage.start(Fragile)
    await anyio.sleep_forever()


async def test_crashes(stage):
    await stage.start(Fragile).send("KABOOM")


async def test_on_virtual_time(stage):
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
    await stage.advance(1e9)
    assert stage.now_ms() == pytest.approx(1e9)


async def test_on_its_own_loop():
    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)


def test_without_a_loop():
    pass
"""


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text('pytest_plugins = ["actors.testing.fixtures"]\n')
    (folder / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nfilterwarnings = error\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    (folder / "test_stranger.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    return done.stdout + done.stderr


def test_each_test_gets_its_loop_and_a_failure_harms_no_other(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert "Deadlock: every task waits and no timer is set. Actors (no timer is set):" in said
    assert "/subject: idle (made of glass)" in said
    assert "ActorCrashed: /subject failed after ['str']: ValueError: KABOOM" in said
    for name in ("on_virtual_time", "on_its_own_loop", "without_a_loop"):
        assert f"PASSED test_stranger.py::test_{name}" in said
    assert "FAILED test_stranger.py::test_waits_for_ever" in said
    assert "ERROR test_stranger.py::test_crashes" in said


def test_orders_are_tests_of_their_own(tmp_path: Path) -> None:
    said = run(tmp_path, "--stage-orders", "2", "--messages-encoded", "-k", "on_ or without")
    assert "messages between actors are encoded" in said
    for order in (0, 1):
        assert f"PASSED test_stranger.py::test_on_virtual_time[order-{order}]" in said
    assert "4 passed" in said
