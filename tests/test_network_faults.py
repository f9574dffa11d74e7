"""A little of the campaign on a broken network, so that it does not rot; see tests/proof."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.testing.patience import PROGRAM_S

PROOF = Path(__file__).parent / "proof"


@pytest.mark.second
def test_clients_get_right_answers_over_a_broken_network() -> None:
    seed = 3  # with TLS and tokens
    command = [sys.executable, str(PROOF / "network_campaign.py"), "--runs", "1"]
    done = subprocess.run(
        [*command, "--seed", str(seed), "--seconds", "2"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}: right" in done.stdout
    assert "fault" in done.stdout
