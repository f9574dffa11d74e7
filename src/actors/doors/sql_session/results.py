"""Results of SQL statements, as sessions return them to the protocols."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import msgspec
import pyarrow as pa

from actors.control.access.open_sessions import ReadRights

BATCH_ROWS: Final = 16_384


class StatementResult(msgspec.Struct):
    """The result of one statement.

    `tag` is PostgreSQL's command tag. For a read (``SELECT``) it lacks the number of rows, which is
    known only when all are sent. `batches` yields the rows, with the columns of `schema`; None: the
    statement returns no rows. The consumer of the rows must close the generator.
    """

    tag: str
    schema: pa.Schema | None = None
    batches: AsyncGenerator[pa.RecordBatch, None] | None = None
    notices: tuple[str, ...] = ()
    oids: tuple[int, ...] | None = None
    """PostgreSQL types of the columns; None: those that follow from their Arrow types."""
    rights: ReadRights | None = None
    """Must be checked before rows are sent; None: the rows are not from any object."""

    def check_rights(self) -> None:
        """Raise `AccessDenied` if the right to read the rows has been revoked."""
        if self.rights is not None:
            self.rights.check()


async def rows_of(table: pa.Table) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield a table in batches of at most `BATCH_ROWS`."""
    # A batch is encoded in one piece, so it must not be as large as the table.
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        yield batch


def result_of(tag: str, schema: pa.Schema, rows: list[tuple[object, ...]]) -> StatementResult:
    """Return a result with these rows, each a tuple of values."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return StatementResult(tag, schema, rows_of(pa.Table.from_arrays(arrays, schema=schema)))
