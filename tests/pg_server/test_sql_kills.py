"""The campaign of killed services under SQL, in short: the long one is ``tests/proof``'s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.testing.patience import PROGRAM_S

CAMPAIGN = Path(__file__).parents[1] / "proof" / "sql_kills.py"


@pytest.mark.long
def test_statements_are_there_whole_or_not_at_all_after_a_kill() -> None:
    command = [sys.executable, str(CAMPAIGN), "--kills", "4", "--every", "1.5", "--memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
