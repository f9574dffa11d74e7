"""The tutorial as its reader does it: a PostgreSQL, the service as a program, and psql.

Each block of the page is one program's input and, for psql, what it prints. Ports are the test's
own. What needs root (a setting of the server, a restart) is done by the server's fixture.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from doc_house import process  # type: ignore[import-not-found]

from actors.testing.patience import PROGRAM_S
from actors.testing.postgres_server import (
    PostgresServer,
    binary,
    postgres_server,
    reserve_port,
)

pytestmark = [pytest.mark.spark, pytest.mark.second]

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "tutorial.md"
AS_POSTGRES: Final = "sudo -u postgres "
BY_THE_FIXTURE: Final = ("make setup", AS_POSTGRES + "psql", "sudo systemctl restart")
"""Commands that the fixture has already done: its server uses logical WAL from the start."""


def blocks() -> Iterator[tuple[str, list[str]]]:
    """Yield the language and the lines of each block, in order."""
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        yield language, text.splitlines()


def session(lines: list[str]) -> tuple[str, str, str]:
    """Return the database in psql's prompt, the input typed there, and the output."""
    database = lines[0].split("=")[0]
    typed, printed = [], []
    for line in lines:
        prompt = re.match(rf"{database}[=-][#>] ?", line)
        if prompt:
            typed.append(line[prompt.end() :])
        else:
            printed.append(line)
    return database, "\n".join(typed), "\n".join(printed)


def plain(text: str) -> list[str]:
    """Return the words, without the blanks and dashes that pad columns."""
    return re.sub("-+", "-", text).split()


class Reader:
    """A reader of the page, with PostgreSQL and psql."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "PENST"))}
        self.penstock = ("", "")
        """Host and port of the service, once it runs."""

    def placed(self, text: str) -> str:
        """Return a page's text with this test's port of PostgreSQL."""
        text = text.replace("127.0.0.1:5432", f"127.0.0.1:{self.server.port}")
        return text.replace(
            "    host = '127.0.0.1',", f"    host = '127.0.0.1', port = '{self.server.port}',"
        )

    def psql(self, database: str) -> list[str]:
        """Return the psql command for a database, of PostgreSQL or of the service."""
        if database == "penstock":
            host, port = self.penstock
            user = "reader"
        else:
            host, port, user = str(self.server.folder), str(self.server.port), self.server.user
        # Ignores the user's own psqlrc and pager.
        return [binary("psql"), "-X", "-P", "pager=off", "-h", host, "-p", port, "-U", user]

    def type(self, database: str, text: str) -> str:
        """Return psql's output, with errors and notices in order."""
        done = subprocess.run(
            [*self.psql(database), "-v", "ON_ERROR_STOP=1", database],
            input=self.placed(text),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environ,
            cwd=self.folder,
            text=True,
            check=False,
            timeout=PROGRAM_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


class Subscription:
    """The command that prints changes as they arrive, in its own terminal."""

    def __init__(self, reader: Reader, statement: str) -> None:
        # psql flushes its output immediately only to a terminal.
        self._terminal, inner = pty.openpty()
        self._running = subprocess.Popen(
            [*reader.psql("penstock"), "-c", statement, "penstock"],
            stdin=subprocess.DEVNULL,
            stdout=inner,
            env=reader.environ,
        )
        os.close(inner)
        self._text = ""

    def lines(self, count: int) -> list[list[str]]:
        """Wait for the next `count` lines and return them as fields."""
        while self._text.count("\n") < count:
            self._text += os.read(self._terminal, 4096).decode()
        found = self._text.split("\n")
        self._text = "\n".join(found[count:])
        return [line.strip("\r").split("\t") for line in found[:count]]

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._running.terminate()
        self._running.wait(PROGRAM_S)
        os.close(self._terminal)


def test_it_leads_from_nothing_to_a_live_view(tmp_path: Path) -> None:
    with postgres_server(wal_level="logical") as server:
        changes = follow_the_page(Reader(server, tmp_path))
    # Two rows vanish and three appear at one timestamp: the transaction is atomic.
    assert sorted(fields[1] for fields in changes) == ["-1", "-1", "1", "1", "1"]
    assert len({fields[0] for fields in changes}) == 1


def follow_the_page(reader: Reader) -> list[list[str]]:
    """Follow the whole page, and return the subscription's output after the snapshot."""
    steps = list(blocks())
    served = next(n for n, (_, lines) in enumerate(steps) if "penstock serve" in lines[-1])
    for language, lines in steps[: served + 1]:
        do(reader, language, lines)
    with reserve_port() as held:
        host, port = held.getsockname()
        reader.penstock = (host, str(port))
        settings = ["--listen", "127.0.0.1:0", "--set", f"pg_listen={host}:{port}"]
        with process(["serve", *settings], reader.environ, reader.folder):
            return read_on(reader, steps[served + 1 :])


def read_on(reader: Reader, steps: list[tuple[str, list[str]]]) -> list[list[str]]:
    """Follow the page from the point where the service runs, and return the printed changes."""
    subscription: Subscription | None = None
    changes: list[list[str]] = []
    for language, lines in steps:
        if "SUBSCRIBE" in lines[0]:
            statement = re.search(r'-c "(.*)"', lines[0])
            assert statement
            subscription = Subscription(reader, statement[1])
            contents = subscription.lines(2)
            assert sorted(fields[1:3] for fields in contents) == [["1", "Leeds"], ["1", "York"]]
            continue
        do(reader, language, lines)
        if lines[0] == "shop=# BEGIN;":
            assert subscription
            changes = subscription.lines(5)
    assert subscription
    subscription.interrupt()
    return changes


def do(reader: Reader, language: str, lines: list[str]) -> None:
    """Execute a block and compare its output."""
    if language == "psql":
        database, typed, printed = session(lines)
        assert plain(reader.type(database, typed)) == plain(printed), typed
        return
    for line in lines:
        command = line.removeprefix("$ ")
        if command.startswith("export "):
            name, _, value = reader.placed(command).removeprefix("export ").partition("=")
            reader.environ[name] = value
        elif command.startswith(AS_POSTGRES + "createdb"):
            reader.server.run("createdb", command.split()[-1:])
        else:
            opens = ("psql -h 127.0.0.1 -p 5433", ".venv/bin/penstock serve")
            assert command.startswith((*BY_THE_FIXTURE, *opens)), command
