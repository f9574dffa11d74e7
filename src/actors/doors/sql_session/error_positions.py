"""Adjusts the positions of errors in a text that is a part of the user's statement, or that came
with another statement."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Final

import pyarrow as pa

from actors.engine.sql.statements import TextSpan
from actors.engine.sql.tokens import line_and_column
from actors.runtime.errors import DefiniteError, QueryRejected, SqlSyntaxError

_PLACED: Final = (DefiniteError, QueryRejected, SqlSyntaxError)
_LINE: Final = re.compile(r"\Aline \d+, column \d+")


@contextmanager
def map_positions(span: TextSpan) -> Iterator[None]:
    """Map the positions of syntax errors within `span` to the full text.

    A message that starts with a line and a column gets those of the full text.

    >>> from actors.engine.sql.grammar import split_statements
    >>> (_, second) = split_statements("SELECT 1;\\n CREATE x")
    >>> with map_positions(second):
    ...     raise SqlSyntaxError("line 1, column 9: no", position=7)
    Traceback (most recent call last):
    actors.runtime.errors.SqlSyntaxError: line 2, column 9: no
    """
    try:
        yield
    except SqlSyntaxError as error:
        if error.position is not None:
            error.position = span.place_of(error.position)
        if error.position is not None:
            line, column = line_and_column(span.lexed.text, error.position)
            error.problem = _LINE.sub(f"line {line}, column {column}", error.problem)
            error.args = (_LINE.sub(f"line {line}, column {column}", str(error)),)
        raise


@contextmanager
def drop_positions() -> Iterator[None]:
    """Remove the positions of errors whose text the client sent in an earlier statement."""
    try:
        yield
    except _PLACED as error:
        error.position = None
        raise


async def rows_without_positions(
    batches: AsyncGenerator[pa.RecordBatch, None],
) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield the same batches; remove the positions of errors, as `drop_positions` does."""
    with drop_positions():
        async with aclosing(batches) as found:
            async for batch in found:
                yield batch
