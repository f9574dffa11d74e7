"""The two sessions shown in the README: their input is sent, and the output is compared."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest

from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.check_views import for_short_lives
from penstock_flights.door import DoorConnection
from penstock_flights.script import table_lines

pytestmark = [pytest.mark.spark, pytest.mark.second]

README = Path(__file__).resolve().parents[3] / "README.md"
LINES_MAX = 30


def blocks(begin: str) -> Iterator[list[str]]:
    """Yield the text blocks in which a line starts with `begin`."""
    for block in re.findall(r"^```text\n(.*?)^```", README.read_text(), re.M | re.S):
        if re.search(f"^{re.escape(begin)}", block, re.M):
            yield block.splitlines()


def typed(lines: list[str], prompts: tuple[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each input after a prompt, with its continuation lines, and the output that follows."""
    text, shown = "", list[str]()
    for line in lines:
        if line.startswith(prompts[0]):
            if text:
                yield text, shown
            text, shown = line.removeprefix(prompts[0]), []
        elif line.startswith(prompts[1]):
            text += "\n" + line.removeprefix(prompts[1])
        elif text:
            shown.append(line)
    yield text, shown


def plain(lines: list[str]) -> list[list[str]]:
    """Return lines without the blanks and dashes that pad columns."""
    words = [re.sub("-+", "-", line).split() for line in lines]
    return [line for line in words if line]


async def test_both_sessions_show_what_comes(tmp_path: Path) -> None:
    settings = for_short_lives(
        Settings(
            state_dir=str(tmp_path / "state"),
            listen="127.0.0.1:0",
            pg_listen="127.0.0.1:0",
            connect_listen="127.0.0.1:0",
            spark_master="local[2]",
        )
    )
    async with Service(settings) as service:
        (psql,) = blocks("$ psql ")
        door = await DoorConnection.connect(service.pg_address)
        for statement, shown in typed(psql, ("penstock=> ", "penstock-> ")):
            (result,) = await door.query(statement)
            found = [result.tag]
            if result.columns:
                count = len(result.rows)
                found = [*table_lines(result.columns, result.rows), f"({count} rows)"]
            assert plain(found) == plain(shown), statement
        await door.aclose()
        (pyspark,) = blocks(">>> ")
        pairs = list(typed(pyspark, (">>> ", "... ")))
        program = "\n".join(["from pyspark.sql import SparkSession", *(text for text, _ in pairs)])
        program = program.replace("127.0.0.1:15002", service.connect_address)

        def run() -> str:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        printed = await anyio.to_thread.run_sync(run)
        assert plain(printed.splitlines()) == plain([line for _, shown in pairs for line in shown])
        assert len(psql) + len(pyspark) <= LINES_MAX
