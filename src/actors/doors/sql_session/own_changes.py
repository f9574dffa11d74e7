"""Reads by key in a transaction: the row as the transaction sees it, without Spark.

A row that the transaction has not touched is that of its time. Others are those that it has
written. Queries of any other form are Spark's, with the changes laid over (`OpenTransaction`).
"""

from __future__ import annotations

import pyarrow as pa

from actors.control.access.open_sessions import ReadRights
from actors.doors.sql_session.context import SessionContext
from actors.doors.sql_session.transaction import keys_in
from actors.engine.views.compile import CHANGES_MEANING
from actors.engine.views.simple import SimpleRead, simple_read
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import from_ipc
from actors.model.protocol.row_filter import passing_rows, prepare_comparison


async def read_own_row(context: SessionContext, text: str, rights: ReadRights) -> pa.Table | None:
    """Return the rows of a query in Spark's dialect that names one key of a table which the open
    transaction has changed; None if it is none such. `rights` notes the table. Raises as
    `Client.peek` does."""
    transaction = context.transaction
    if transaction is None or not transaction.tables:
        return None
    if any(key.lower().startswith(CHANGES_MEANING) for key in context.settings.spark_conf):
        return None
    changes = transaction.tables
    read = simple_read(text, {name: each.schema for name, each in changes.items()})
    if read is None or read.finishing is not None:
        return None
    schema = changes[read.name].schema
    key = _named_key(read, schema)
    if key is None:
        return None
    rights.note(await context.catalog.reads_of(read.name))
    time = await context.transaction_time()
    rows = await context.client.peek(
        read.name, as_of=time, key=key, deadline_ms=context.deadline_ms
    )
    gone, come = changes[read.name].net()
    # A row that another session has written since is not seen, as everywhere in the transaction.
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


def _named_key(read: SimpleRead, schema: TableSchema) -> dict[str, object] | None:
    """Return the one key that a read names; None if it may be more rows."""
    given = {each.column: each for each in read.filter if each.op == "="}
    if not schema.key or not set(schema.key) <= given.keys():
        return None
    # NaN equals itself to Spark, and not among the keys that are compared here.
    if any(pa.types.is_floating(schema.arrow().field(name).type) for name in schema.key):
        return None
    values = {name: from_ipc(given[name].value).column(0)[0].as_py() for name in schema.key}
    return None if None in values.values() else values
