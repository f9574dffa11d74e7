"""The campaign of a client that stalls, or is absent, in short: the long one is
``tests/proof``'s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.testing.patience import PROGRAM_S

CAMPAIGN = Path(__file__).parents[1] / "proof" / "stalled_client.py"


@pytest.mark.long
@pytest.mark.parametrize("variant", ["stalled", "absent"])
def test_the_replica_goes_on_while_nobody_completes_its_initialization(variant: str) -> None:
    command = [sys.executable, str(CAMPAIGN), "--minutes", "0.05", "--variant", variant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 dataflows reused" in done.stdout
