"""Parses pages of the documentation into the steps that a reader would execute, in order.

A block is fenced or indented by four columns. The first rule that applies decides:

- A block after an HTML comment ``<!-- not run: WHY -->`` is not run, for the reason given.
- ``mermaid`` is drawn elsewhere, ``psql`` is run by the page's own test, and a fence without a
  language, whose first line is neither a command nor Python, is a drawing.
- A fence of ``console`` has commands after ``$ ``, each followed by its output.
- A line that starts with a command of `PROGRAMS` is a command, with its continuation lines.
- A command with ``[--`` or ``…`` is a synopsis: the command must exist, with those options.
- SQL statements end with a semicolon.
- Everything else must be Python, possibly with top-level ``await``. ``print(…)  # X`` must print X.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["command", "synopsis", "python", "sql", "json", "skipped", "drawing"]
PROGRAMS: Final = (
    *("penstock", "make", "pip", "python3", "venv/bin/pip", "openssl", "printf", "docker"),
    *("./jaeger", "export", "echo", "cat"),
)
_SKIP: Final = re.compile(r"<!-- not run: (.+?) -->")
_COMMAND: Final = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:" + "|".join(map(re.escape, PROGRAMS)) + r")(?:\s|$)"
)
_SQL: Final = re.compile(r"(SELECT|ALTER|CREATE|GRANT|DROP)\b")


class Step(NamedTuple):
    """One step of a page; `line` is its line number."""

    line: int
    kind: Kind
    text: str
    """A command, Python or SQL; or the reason why a block is not run."""
    shown: str = ""
    """The output that the page shows."""
    block: int = 0
    """The line at which the step's block starts."""


class _Block(NamedTuple):
    line: int
    language: str
    """The language of a fence, or ``indented``."""
    lines: list[str]
    skipped: str


def steps_of(path: Path) -> Iterator[Step]:
    """Yield the steps of a page in order. Raises `ValueError` for a block of no known kind."""
    for block in _blocks(path.read_text().split("\n")):
        for step in _steps(block):
            yield step._replace(block=block.line)


def _steps(block: _Block) -> Iterator[Step]:
    if block.skipped:
        yield Step(block.line, "skipped", block.skipped)
    elif block.language in ("mermaid", "text", "diff", "psql"):
        yield Step(block.line, "drawing", "")
    elif block.language == "console":
        yield from _console(block)
    elif block.language in ("sql", "json"):
        yield Step(block.line, block.language, "\n".join(block.lines))  # type: ignore[arg-type]
    elif block.language == "python":
        yield _python(block.line, block.lines)
    else:
        yield from _mixed(block)


def _blocks(lines: list[str]) -> Iterator[_Block]:
    at, skipped = 0, ""
    while at < len(lines):
        line = lines[at]
        fence = re.match(r"( *)```(\w*)$", line)
        begin = at
        if fence:
            end = at + 1
            while lines[end].strip() != "```":
                end += 1
            inside = [each.removeprefix(fence[1]) for each in lines[at + 1 : end]]
            yield _Block(begin + 2, fence[2], inside, skipped)
            at, skipped = end + 1, ""
        elif line.startswith("    ") and not (at and lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            inside = textwrap.dedent("\n".join(lines[at:end])).rstrip().split("\n")
            yield _Block(begin + 1, "indented", inside, skipped)
            at, skipped = end, ""
        else:
            found = _SKIP.search(line)
            skipped = found[1] if found else skipped if not line.strip() else ""
            at += 1


def _console(block: _Block) -> Iterator[Step]:
    begin = [n for n, line in enumerate(block.lines) if line.startswith("$ ")]
    for at, end in zip(begin, [*begin[1:], len(block.lines)], strict=True):
        first = at
        while block.lines[first].endswith("\\"):
            first += 1
        command = "\n".join(block.lines[at : first + 1])[2:]
        shown = "\n".join(block.lines[first + 1 : end])
        yield Step(block.line + at, "command", command, shown)


def _mixed(block: _Block) -> Iterator[Step]:
    lines, at = block.lines, 0
    while at < len(lines):
        line, begin = lines[at], at
        at += 1
        if not line.strip():
            continue
        if _COMMAND.match(line):
            while lines[at - 1].endswith("\\"):
                at += 1
            text = "\n".join(lines[begin:at])
            kind: Kind = "synopsis" if "[--" in text or "…" in text else "command"
            yield Step(block.line + begin, kind, re.sub(r"\s{2,}[#(].*$", "", text))
            continue
        while at < len(lines) and not _COMMAND.match(lines[at]):
            at += 1
        rest = lines[begin:at]
        if _SQL.match(line):
            yield Step(block.line + begin, "sql", "\n".join(rest))
        elif not block.language and not _is_python("\n".join(rest)):
            yield Step(block.line, "drawing", "")
        else:
            yield _python(block.line + begin, rest)


def _is_python(text: str) -> bool:
    try:
        compiled(text, "a block")
    except SyntaxError:
        return False
    return True


def _python(line: int, lines: list[str]) -> Step:
    text = "\n".join(lines)
    if not _is_python(text):
        raise ValueError(f"line {line}: neither a command nor Python: {lines[0]!r}")
    promised = [found[1] for each in lines if (found := re.search(r"print\(.*\)  # (\[.*)$", each))]
    return Step(line, "python", text, "\n".join(promised))


def compiled(text: str, name: str) -> object:
    """Compile Python that may contain top-level ``await``. Raises `SyntaxError`."""
    return compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
