"""The surroundings of the documentation tests: services, acceptors, buckets, and a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from actors.doors.commands import cli
from actors.testing.patience import PROGRAM_S

IN_MEMORY = Path(__file__).with_name("serve_in_memory.py")
BIN = """#!/bin/sh
exec {python} -m actors.doors.commands.cli "$@"
"""


@contextmanager
def process(
    arguments: list[str], environ: Mapping[str, str], folder: Path, *, in_memory: bool = False
) -> Iterator[str]:
    """Run `penstock serve` or `penstock wal serve` until the block ends, and yield the address that
    it printed."""
    program = [str(IN_MEMORY)] if in_memory else ["-m", "actors.doors.commands.cli"]
    with (
        (folder / "served.log").open("ab") as log,
        subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(environ),
            cwd=folder,
            text=True,
        ) as running,
    ):
        assert running.stdout is not None
        try:
            said = ""
            while not said.endswith("ready\n"):
                line = running.stdout.readline()
                assert line, (arguments, said, (folder / "served.log").read_text()[-2000:])
                said += line
            yield said.split()[2]
        finally:
            running.terminate()
            running.stdout.read()


class Shell:
    """A reader's shell in `folder`. Runs `penstock` in this process, which is fast, and everything
    else in sh."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch
        monkeypatch.chdir(folder)
        program = folder / "bin" / "penstock"
        program.parent.mkdir(exist_ok=True)
        program.write_text(BIN.format(python=sys.executable))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        # the width of a page, whatever the terminal of the test run
        monkeypatch.setenv("COLUMNS", "200")

    def speak_to(self, address: str) -> None:
        """Point later commands at this service."""
        self._patch.setenv("PENSTOCK_LISTEN", address)

    def run(self, command: str) -> str:
        """Return a command's output, including errors. Fails the test if the command fails
        silently."""
        words = words_of(command)
        if words is not None and words[0] == "penstock":
            done = CliRunner().invoke(cli.app, words[1:])
            if done.exception is None or isinstance(done.exception, SystemExit):
                assert done.exit_code == 0, (command, done.output)
                return done.output
            raise done.exception
        found = subprocess.run(
            ["bash", "-ec", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            check=False,
        )
        assert found.returncode in (0, cli.STATUS_FAILED), (command, found.stderr)
        return found.stdout + found.stderr


def words_of(command: str) -> list[str] | None:
    """Return the words of a plain command, or None if it needs a shell."""
    import shlex

    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words = list(lexer)
    if any(re.fullmatch(r"[|&;<>()]+", word) for word in words):
        return None
    return words


def check_synopsis(text: str) -> None:
    """Fail the test unless the command exists and has these options."""
    words = re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", text)
    command: Any = typer.main.get_command(cli.app)
    for word in text.split()[1:]:
        if not hasattr(command, "commands"):
            break
        assert word in command.commands, (text, word)
        command = command.commands[word]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert set(words) <= known, (text, set(words) - known)


def same_output(printed: str, shown: str) -> bool:
    """Return whether a command printed what the page shows. Ignores times in milliseconds and the
    number of blanks between columns."""

    def plain(text: str) -> list[list[str]]:
        lines = re.sub(r"\b1\d{12}\b", "TIME", text).splitlines()
        return [line.split() for line in lines if line.strip()]

    return plain(printed) == plain(shown)
