"""The campaign of killed controllers, in short: the long one is ``tests/proof``'s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.testing.patience import PROGRAM_S

CAMPAIGN = Path(__file__).parents[1] / "proof" / "controller_campaign.py"


@pytest.mark.long
def test_killed_controllers_lose_nothing_and_nothing_is_computed_again() -> None:
    command = [sys.executable, str(CAMPAIGN), "--kills", "3", "--life-s", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout
