"""Reads by key within a transaction, including its own changes, without Spark.

A row that the transaction has not changed is read at the transaction's timestamp. A changed row is
taken from its changes. Spark runs all other queries, with the changes overlaid (`OpenTransaction`).
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from actors.control.access.open_sessions import ReadRights
from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.transaction import keys_in
from actors.engine.views.read_choice import QueryChoice, ReadChoice
from actors.model.plan.updates import from_ipc
from actors.model.protocol.row_filter import passing_rows, prepare_comparison

OWN_ROW: Final = ReadChoice("memory", own=True)
"""The read choice for a row that the transaction may have changed, as EXPLAIN shows it."""


def choose_own_read(context: SessionContext, text: str) -> QueryChoice:
    """Decide whether a query in Spark's dialect reads one key of a table that the open transaction
    has changed."""
    assert context.transaction is not None, "only a transaction has changes of its own"
    changes = context.transaction.tables
    schemas = {name: each.schema for name, each in changes.items()}
    return context.choose_query(text, schemas, changes)


async def read_own_row(context: SessionContext, text: str, rights: ReadRights) -> pa.Table | None:
    """Return the rows of a query that reads one key of a table that the open transaction changed.

    Return None for any other query. `text` is in Spark's dialect; `rights` notes the table. Raises
    as `Client.peek` does.
    """
    transaction = context.transaction
    if transaction is None or not transaction.tables:
        return None
    read, changes = choose_own_read(context, text).read, transaction.tables
    if read is None:
        return None
    schema = changes[read.name].schema
    given = {each.column: each.value for each in read.filter if each.op == "="}
    key = {name: from_ipc(given[name]).column(0)[0].as_py() for name in schema.key}
    rights.note(await context.catalog.reads_of(read.name))
    time = await context.transaction_time()
    rows = await context.client.peek(
        read.name, as_of=time, key=key, deadline_ms=context.deadline_ms
    )
    gone, come = changes[read.name].net()
    # `rows` is as of the transaction's timestamp, so later writes of other sessions are not seen.
    left = set(keys_in(gone, schema))
    kept = [number for number, each in enumerate(keys_in(rows, schema)) if each not in left]
    shape = schema.arrow()
    here = pa.concat_tables(
        [
            each.select(shape.names).cast(shape)
            for each in (rows.take(pa.array(kept, pa.int64())), come)
        ]
    )
    found = passing_rows([prepare_comparison(schema, each) for each in read.filter], here)
    return found.select(list(read.project)).rename_columns(list(read.names))
