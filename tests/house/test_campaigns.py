"""A little of each campaign of ``tests/proof``, so that it does not rot. Others are run in short
where the rest of their subject is tested: test_wal_crash, test_wal_relay, test_state_directory,
test_two_on_one_shard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.testing.patience import PROGRAM_S

PROOF = Path(__file__).parents[1] / "proof"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param(
            "network_campaign --runs 1 --seed 3 --seconds 2",  # with TLS and tokens
            ("seed 3: right", "fault"),
            id="clients get right answers over a broken network",
            marks=pytest.mark.second,
        ),
        pytest.param(
            "decoding_bombs --bombs 10",
            ("parquet: 10 bombs, 0 wrong", "csv: 10 bombs, 0 wrong", "json: 10 bombs, 0 wrong"),
            id="files that decode to very much are refused within the bound",
            marks=pytest.mark.second,
        ),
        pytest.param(
            "fuzz_functions --without-strace --seconds 30",
            (": 0 wrong", "computed: "),
            id="functions reach nothing that their arguments name",
            marks=[pytest.mark.second, pytest.mark.spark],
        ),
        pytest.param(
            "fuzz_operands --functions 30 --rows 2",
            ("30 functions, ", ": 0 wrong"),
            id="functions of bad operands have contents or an error at once",
            marks=[pytest.mark.second, pytest.mark.spark],
        ),
        pytest.param(
            "sink_campaign --kills 10",
            ("10 kills",),
            id="killed sinks skip nothing and repeat nothing",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "sql_kills --kills 4 --every 1.5 --memory",
            ("0 wrong",),
            id="statements are there whole or not at all after a kill",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "lost_answers --writes 30 --every 10",
            (": 0 wrong",),
            id="writes whose answers are lost are there once",
            marks=[pytest.mark.long, pytest.mark.spark],
        ),
        pytest.param(
            "controller_campaign --kills 3 --life-s 0.5",
            ("3 kills",),
            id="killed controllers lose nothing and nothing is computed again",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "hostile_bytes --peers 800 --tls --latency-ms 60000",
            ("pg: 800 peers", "wal: 800 peers"),
            id="hostile peers cost no memory and keep no login out",
            marks=pytest.mark.long,
        ),
        *(
            pytest.param(
                f"stalled_client --minutes 0.05 --variant {variant}",
                ("3 dataflows reused",),
                id=f"the replica goes on while its client is {variant}",
                marks=pytest.mark.long,
            )
            for variant in ("stalled", "absent")
        ),
    ],
)
def test_a_campaign_in_short(command: str, said: tuple[str, ...]) -> None:
    name, *arguments = command.split()
    program = [sys.executable, str(PROOF / f"{name}.py"), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in said:
        assert words in done.stdout
