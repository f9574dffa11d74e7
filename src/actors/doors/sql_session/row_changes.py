"""Applies changes to rows that a statement has read, immediately or in the open transaction.

A write names the old rows in full. If another session changed one in the meantime, that row no
longer exists, and the entire write fails. Outside a transaction the statement then reads and writes
again. So no update is lost, and no locks are needed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
import pyarrow as pa

from actors.doors.client.client import TableWrite
from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.default_values import TableScope
from actors.doors.sql_session.mapped_sql import MappedSql
from actors.doors.sql_session.own_changes import read_own_row
from actors.doors.sql_session.returning import ReturningList
from actors.doors.sql_session.transaction import PendingChange, as_stored, count_rows
from actors.runtime.errors import AbsentRow, WriteConflict

ATTEMPTS_MAX: Final = 20

NEW: Final = "penstock_new_"
"""Prefix of the columns for new values, which follow the old row in a query."""


class ComputedChange(msgspec.Struct, frozen=True):
    """The change that a statement makes; `count` is the number of rows reported to the client."""

    change: PendingChange
    count: int


async def read_rows(context: SessionContext, text: MappedSql) -> pa.Table:
    """Return the rows of a query in Spark's dialect: in a transaction at its timestamp and with its
    changes, otherwise the latest."""
    transaction = context.transaction
    if transaction is None:
        return await context.collect(text)
    own = await read_own_row(context, text.text, context.read_rights())
    if own is not None:
        return own
    overlaid = text.within(transaction.overlaid(text.text))
    return await context.collect(overlaid, await context.transaction_time())


async def change_rows(
    scope: TableScope,
    compute: Callable[[], Awaitable[ComputedChange]],
    returning: ReturningList | None,
) -> tuple[int, pa.Table | None]:
    """Compute and apply a change, and retry if another session changed the same rows first.

    Return the number of rows, and the rows of RETURNING (None without it). Raises `WriteConflict`
    after `ATTEMPTS_MAX` attempts, or after one within a transaction.
    """
    context = scope.context
    # A transaction reads at a fixed timestamp, so reading again would return the same rows.
    attempts = 1 if context.transaction is not None else ATTEMPTS_MAX
    for attempt in range(attempts):
        made = await compute()
        change, returned = made.change, None
        if returning is not None:
            # A DELETE returns the rows that it deletes, other statements those that they insert.
            is_delete = change.insert is None and change.delete is not None
            returned = await returning.rows(change.delete if is_delete else change.insert)
        if not count_rows(change.delete) and not count_rows(change.insert):
            return made.count, returned
        try:
            await carry_out(scope, change)
        except AbsentRow as error:
            if attempt + 1 == attempts:
                raise WriteConflict(f"other sessions change the same rows: {error}") from None
            continue
        return made.count, returned
    raise AssertionError("a change ends or raises")


async def carry_out(scope: TableScope, change: PendingChange) -> None:
    """Write a change, or add it to the open transaction."""
    context, table, schema = scope.context, scope.table, scope.schema
    if context.transaction is not None:
        # Clients expect a missing right to fail the statement. COMMIT checks it again.
        if table not in context.transaction.tables:
            await context.client.check_right("write", table)
        limit = context.settings.sql_rows_bytes_max
        if change.insert is not None:
            # The transaction reads the rows before they are stored, so fit them to their types now.
            stored = as_stored(table, change.insert, schema)
            change = PendingChange(change.delete, stored)
        context.transaction.add(table, schema, change, limit, scope.digest)
        return
    if count_rows(change.delete) or count_rows(change.insert):
        write = TableWrite(
            change.insert, change.delete, defaults=scope.digest, columns=schema.digest
        )
        await context.write({table: write})
