"""The help of each command ends with two examples, which the command line takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from actors.doors.commands.cli import app
from actors.doors.commands.examples import EXAMPLES

ROOT: Any = typer.main.get_command(app)


def commands(command: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*before, name))
    if not hasattr(command, "commands"):
        yield before


WORDS = [" ".join(each) for each in commands(ROOT)]


def test_no_example_is_of_a_command_that_is_gone() -> None:
    assert sorted(EXAMPLES) == sorted(WORDS)


def parsed(example: str) -> tuple[Any, Any]:
    """The command of a command line, and the context with its options: nothing is called."""
    given, _, _ = example.partition(" < ")
    program, *rest = shlex.split(given)
    context, command = ROOT.make_context(program, rest), ROOT
    while hasattr(command, "commands"):
        left = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, left)
        context = command.make_context(name, rest, parent=context)
    return command, context


@pytest.mark.parametrize("words", WORDS)
def test_the_help_has_two_examples_that_are_parsed(words: str) -> None:
    first, second = EXAMPLES[words]
    assert first != second
    for example in (first, second):
        if example == "penstock --version":
            continue
        command, context = parsed(example)
        assert context.command_path == f"penstock {words}"
        lines = [line.strip() for line in command.get_help(context).splitlines()]
        assert lines[-3:] == ["Examples:", first, second]


def test_an_option_that_is_gone_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed("penstock peek late --former 7")
