"""The campaign of killed sinks, in short: the long one is ``tests/proof``'s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.testing.patience import PROGRAM_S

CAMPAIGN = Path(__file__).parents[1] / "proof" / "sink_campaign.py"


@pytest.mark.long
def test_killed_sinks_skip_nothing_and_repeat_nothing() -> None:
    command = [sys.executable, str(CAMPAIGN), "--kills", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 kills" in done.stdout
