"""The command `penstock sql`: a shell for Spark SQL against a running service."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import typer

from actors.doors.commands.console import ServiceTarget, run_loop, service_command
from actors.runtime.errors import BadSettings, InvalidUsage, PenstockError, SqlSyntaxError

if TYPE_CHECKING:
    from actors.doors.sql_session import ParsedStatement, SqlSession, StatementResult

HISTORY: Final = Path("~/.penstock_history").expanduser()
HISTORY_LINES: Final = 2_000
ROWS_SHOWN_MAX: Final = 1_000
"""Maximum rows of one printed table; a longer result is printed as several tables."""
WATCH_SECONDS: Final = 2.0
HELP: Final = """\
Statements end with a semicolon and may span several lines. Commands:
  \\d [NAME]       list objects, or the columns of one object
  \\dt \\dv \\di     list tables, views, indexes
  \\du             list roles
  \\watch [S]      repeat the last statement every S seconds, until Ctrl-C
  \\timing         show how long each statement takes, on or off
  \\x              print one line per column, on or off
  \\i FILE         run the statements of a file
  \\q              quit"""
_SHORTHANDS: Final = {
    "\\dt": "SHOW TABLES",
    "\\dv": "SHOW MATERIALIZED VIEWS",
    "\\di": "SHOW INDEXES",
    "\\du": "SHOW ROLES",
}
_WORDS: Final = (
    "SELECT FROM WHERE GROUP BY ORDER LIMIT JOIN ON AS INSERT INTO VALUES UPDATE SET DELETE MERGE "
    "CREATE TABLE MATERIALIZED VIEW INDEX SOURCE SINK DROP SHOW TABLES VIEWS SOURCES SINKS INDEXES "
    "DESCRIBE EXPLAIN INCREMENTAL SUBSCRIBE BEGIN COMMIT ROLLBACK PRIMARY KEY REFRESH POLICY"
)


@service_command
def sql(
    target: ServiceTarget,
    command: Annotated[
        list[str] | None,
        typer.Option("-c", "--command", help="Statements to run. May be repeated."),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", help="File of statements to run; -: standard input."),
    ] = None,
) -> None:
    """Run SQL statements, or start an interactive shell.

    The shell has history and completion; \\? lists its commands.
    """
    texts = [*(command or ()), *(_read(path) for path in file or ())]
    failed = run_loop(lambda: _run(target, texts))
    if failed:
        raise typer.Exit(1)


def _read(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"cannot read {path}: {error}") from None


async def _run(target: ServiceTarget, texts: Sequence[str]) -> bool:
    """Run the texts, or the shell if there are none. Return whether a statement failed."""
    from actors.doors.client.client import Client
    from actors.doors.sql_session import SqlSession

    async with await Client.connect(target.address, settings=target.settings) as client:
        session = SqlSession(client, target.settings)
        shell = SqlShell(session, target.address)
        try:
            if not texts and not sys.stdin.isatty():
                texts = [sys.stdin.read()]
            if not texts:
                await shell.converse()
                return False
            for text in texts:
                if not await shell.run(text):
                    return True
            return False
        finally:
            await session.close()


class SqlShell:
    """Reads statements, executes them, and prints their results."""

    def __init__(self, session: SqlSession, address: str) -> None:
        self._session = session
        self._address = address
        # The statement that \\watch repeats.
        self._last: ParsedStatement | None = None
        # Toggled by \\timing and \\x.
        self._timing = False
        self._expanded = False

    # -- statements ----------------------------------------------------------------------------

    async def run(self, text: str) -> bool:
        """Execute the statements of a text up to the first failure. Return whether all
        succeeded."""
        try:
            found = self._session.split(text)
        except SqlSyntaxError as error:
            print(f"ERROR: {error}", file=sys.stderr)
            return False
        for each in found:
            if not await self._statement(each):
                return False
        return True

    async def _statement(self, statement: ParsedStatement) -> bool:
        self._last = statement
        began = time.perf_counter()
        try:
            result = await self._session.execute(statement.statement())
            count = await self._show(result)
        except PenstockError as error:
            print(f"ERROR: {type(error).__name__}: {error}", file=sys.stderr)
            return False
        if self._timing:
            print(f"Time: {(time.perf_counter() - began) * 1000:.1f} ms")
        if result.batches is None:
            print(result.tag)
        elif sys.stdout.isatty():
            print(f"({count} row{'' if count == 1 else 's'})")
        return True

    async def _show(self, result: StatementResult) -> int:
        """Print a result's rows as they arrive. Return their number."""
        for notice in result.notices:
            print(f"NOTICE: {notice}", file=sys.stderr)
        if result.schema is None or result.batches is None:
            return 0
        count, headed = 0, True
        async with contextlib.aclosing(result.batches) as batches:
            async for batch in batches:
                for start in range(0, max(1, batch.num_rows), ROWS_SHOWN_MAX):
                    part = batch.slice(start, ROWS_SHOWN_MAX)
                    if part.num_rows or headed:
                        self._print(part, headed=headed)
                    headed = False
                count += batch.num_rows
        return count

    def _print(self, rows: Any, *, headed: bool) -> None:
        names = rows.schema.names
        try:
            records = [[_shown(value) for value in row.values()] for row in rows.to_pylist()]
        except (OverflowError, ValueError) as error:
            raise InvalidUsage(f"a value cannot be printed ({error})") from None
        if self._expanded:
            width = max(map(len, names), default=0)
            for number, record in enumerate(records, 1):
                print(f"-[ {number} ]{'-' * width}")
                for name, value in zip(names, record, strict=True):
                    print(f"{name:<{width}} | {value}")
            return
        # Programs get one line per row, with tabs between the columns.
        if not sys.stdout.isatty():
            if headed:
                print(*names, sep="\t")
            for record in records:
                print(*record, sep="\t")
            return
        for line in _table_lines(names, records, headed=headed):
            print(line)

    # -- the shell -----------------------------------------------------------------------------

    async def converse(self) -> None:
        """Read and execute lines from the terminal until the user quits."""
        print(f"Connected to Penstock at {self._address}. Type \\? for help, \\q to quit.")
        with _history(await self._names()):
            pending = ""
            while True:
                prompt = "penstock> " if not pending else "       -> "
                try:
                    # In a thread, so that the event loop keeps the connection alive.
                    line = await anyio.to_thread.run_sync(input, prompt, abandon_on_cancel=True)
                except EOFError:
                    print()
                    return
                except KeyboardInterrupt:
                    print()
                    pending = ""
                    continue
                if not pending and line.lstrip().startswith("\\"):
                    if not await self._meta(line.strip()):
                        return
                    continue
                pending += line + "\n"
                if line.rstrip().endswith(";"):
                    await self._interruptible(pending)
                    pending = ""

    async def _interruptible(self, text: str) -> None:
        try:
            await self.run(text)
        except KeyboardInterrupt:
            print("canceled")

    async def _names(self) -> list[str]:
        """Return the names of objects and their columns, for completion."""
        found: set[str] = set()
        for each in await self._session.context.catalog.all():
            found.add(each.name)
            if each.schema is not None:
                found.update(each.schema.names)
        return sorted(found)

    async def _meta(self, line: str) -> bool:
        """Execute a backslash command. Return False if the shell should end."""
        word, _, rest = line.partition(" ")
        rest = rest.strip().rstrip(";")
        match word:
            case "\\q":
                return False
            case "\\?":
                print(HELP)
            case "\\timing":
                self._timing = not self._timing
                print(f"timing is {'on' if self._timing else 'off'}")
            case "\\x":
                self._expanded = not self._expanded
            case "\\d":
                await self.run(f"DESCRIBE EXTENDED {rest}" if rest else "SHOW TABLES")
            case "\\i":
                await self.run(_read(Path(rest)))
            case "\\watch":
                await self._watch(float(rest or WATCH_SECONDS))
            case _ if word in _SHORTHANDS:
                await self.run(_SHORTHANDS[word])
            case _:
                print(f"unknown command {word}: type \\? for help")
        return True

    async def _watch(self, seconds: float) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            while self._last is not None and await self._statement(self._last):
                await anyio.sleep(seconds)


def _shown(value: Any) -> str:
    return "NULL" if value is None else str(value)


def _table_lines(
    names: Sequence[str], records: Sequence[Sequence[str]], *, headed: bool
) -> Iterator[str]:
    """Yield the lines of a table with aligned columns.

    >>> list(_table_lines(["id", "name"], [["1", "ann"], ["20", "bo"]], headed=True))
    [' id | name', '----+------', ' 1  | ann', ' 20 | bo']
    """
    widths = [
        max([len(name), *(len(record[place]) for record in records)])
        for place, name in enumerate(names)
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        return f" {' | '.join(padded)}".rstrip()

    if headed:
        yield line(names)
        yield "+".join("-" * (width + 2) for width in widths)[: sum(widths) + 3 * len(widths) - 1]
    yield from map(line, records)


@contextlib.contextmanager
def _history(names: Sequence[str]) -> Iterator[None]:
    """Keep a history of lines and complete words with Tab, if readline is available."""
    try:
        import readline
    except ImportError:
        yield
        return
    words = [*_WORDS.split(), *names]

    def complete(text: str, state: int) -> str | None:
        fitting = [word for word in words if word.lower().startswith(text.lower())]
        return fitting[state] if state < len(fitting) else None

    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    with contextlib.suppress(OSError):
        readline.read_history_file(HISTORY)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(HISTORY)
