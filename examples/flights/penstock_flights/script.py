"""The demo's SQL session, which prints each statement and its result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console

from penstock_flights.door import DoorConnection, DoorResult
from penstock_flights.statements import shorten

PROMPT: Final = "penstock=> "
CELL_CHARACTERS: Final = 28


class DemoScript:
    """Executes statements over a connection, and prints them with their results."""

    def __init__(self, door: DoorConnection, console: Console) -> None:
        self.door = door
        self._console = console

    async def run(self, statement: str, *, rows_shown: int = 10) -> DoorResult:
        """Print a statement, execute it, and print its result. Raises the same as
        `DoorConnection.query`."""
        self.show(statement)
        (result,) = await self.door.query(statement)
        self.answer(result, rows_shown)
        return result

    async def copy_in(self, statement: str, data: bytes) -> None:
        """Print a COPY statement, execute it with these rows, and print its result."""
        self.show(statement)
        self.answer(await self.door.copy_in(statement, data), 0)

    def show(self, statement: str) -> None:
        """Print a statement."""
        self._say(f"{PROMPT}{shorten(statement)};")

    def answer(self, result: DoorResult, rows_shown: int) -> None:
        """Print the first rows of a result; without columns, its tag."""
        if not result.columns:
            self._say(result.tag)
            return
        # A result may have more rows than fit on a screen.
        for line in table_lines(result.columns, result.rows[:rows_shown]):
            self._say(line)
        more = len(result.rows) - rows_shown
        count = len(result.rows)
        self._say(f"({count} rows{f', {more} more' if more > 0 else ''})")

    def _say(self, text: str) -> None:
        # Statements are long; let the terminal wrap them.
        self._console.print(text, markup=False, soft_wrap=True)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str | None]]) -> Iterator[str]:
    """Format rows like psql.

    >>> list(table_lines(["a", "name"], [["1", "x"], ["20", None]]))
    [' a  | name', '----+------', ' 1  | x', ' 20 |']
    """
    cells = [[_shown(value) for value in row] for row in rows]
    # Each column is as wide as its widest value.
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        return f" {' | '.join(padded)}".rstrip()

    yield line(columns)
    yield "+".join("-" * (width + 2) for width in widths)
    yield from map(line, cells)


def _shown(value: str | None) -> str:
    text = value or ""
    return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"
