"""Names of the release before are understood for one more, and warned of."""

from __future__ import annotations

import subprocess
import sys

import pytest

import actors
from actors.runtime.errors import FORMER_CODES, PenstockError, ResourceBusy, from_wire


def test_a_former_name_is_the_new_class() -> None:
    with pytest.warns(DeprecationWarning, match=r"actors\.Change is now actors\.ChangeBatch"):
        assert actors.Change is actors.ChangeBatch
    with pytest.warns(DeprecationWarning, match=r"actors\.Busy is now actors\.ResourceBusy"):
        assert actors.Busy is ResourceBusy
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = actors.Nothing


@pytest.mark.parametrize("code", [code for code in FORMER_CODES if code not in ("Refused",)])
def test_a_former_code_becomes_the_error_of_today(code: str) -> None:
    import actors.connectors.sources.source  # noqa: F401 - `SourceUnreachable` is its

    error = from_wire(code, "why", True)
    assert type(error) is not PenstockError
    assert type(error).__name__ == FORMER_CODES[code]


@pytest.mark.second
def test_the_former_command_runs_the_simulators() -> None:
    command = [
        sys.executable,
        "-m",
        "actors.doors.commands.cli",
        "simulate",
        "--wal",
        "--runs",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "python -m tests.simulators" in done.stderr
    assert (done.returncode, done.stdout.startswith("1 runs")) == (0, True), done.stdout


async def test_a_view_is_made_by_the_former_name_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    async def create(*given: object, **options: object) -> None:
        made.append((given[1:], options))

    monkeypatch.setattr(actors.Client, "create_materialized_view", create)
    client = object.__new__(actors.Client)
    with pytest.warns(DeprecationWarning, match="now create_materialized_view") as warned:
        await client.create_view("v", "SELECT 1", conf={"a": "b"}, target_lag_ms=5)
    assert [each.filename for each in warned] == [__file__]
    assert made == [(("v", "SELECT 1"), {"spark_conf": {"a": "b"}, "target_lag_ms": 5})]
