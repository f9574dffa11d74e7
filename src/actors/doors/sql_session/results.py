"""Results of SQL statements, as both doors send them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import msgspec
import pyarrow as pa

from actors.control.access.open_sessions import ReadRights

BATCH_ROWS: Final = 16_384


class StatementResult(msgspec.Struct):
    """The result of one statement.

    `tag` is PostgreSQL's command tag without the number of rows of a read (``SELECT``), which is
    known when they were sent. `batches` yields the rows, with the columns of `schema`; None: the
    statement has no rows. Whoever takes the rows closes the generator.
    """

    tag: str
    schema: pa.Schema | None = None
    batches: AsyncGenerator[pa.RecordBatch, None] | None = None
    notices: tuple[str, ...] = ()
    oids: tuple[int, ...] | None = None
    """PostgreSQL's types of the columns, where those of their Arrow types are not meant."""
    rights: ReadRights | None = None
    """Checked before each of the rows is handed on; None: the rows are of no object."""

    def check_rights(self) -> None:
        """Raise `AccessDenied` if the rows must not be handed on any more; see `ReadRights`."""
        if self.rights is not None:
            self.rights.check()


async def rows_of(table: pa.Table) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield the batches of a table that is there already."""
    # Each is encoded at once, so that none may be as large as the table.
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        yield batch


def result_of(tag: str, schema: pa.Schema, rows: list[tuple[object, ...]]) -> StatementResult:
    """Return a result whose rows are there already: a tuple of values for each."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return StatementResult(tag, schema, rows_of(pa.Table.from_arrays(arrays, schema=schema)))
