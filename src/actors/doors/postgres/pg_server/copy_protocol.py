"""Executes COPY: inserts rows from the client's stream atomically, or sends rows to it."""

from __future__ import annotations

import pyarrow as pa

from actors.doors.postgres.pg_server.disconnect_watch import end_on_disconnect
from actors.doors.postgres.pg_server.wire import SEND_BYTES, PgWire
from actors.doors.sql_session.query_statements import read_query
from actors.doors.sql_session.results import StatementResult
from actors.doors.sql_session.session import SqlSession
from actors.doors.sql_session.subscribe_statements import subscribe
from actors.doors.sql_session.write_statements import named_columns, put_rows
from actors.engine.sql import statements as sql
from actors.engine.sql.tokens import quote_name
from actors.model.pgwire import messages as pg
from actors.model.pgwire.copy_options import CopyFormat, RowFormat
from actors.model.pgwire.row_decoding import copy_decoder
from actors.model.pgwire.row_encoding import CopyEncoder, cut_batches
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import InvalidUsage, RemoteProtocolError

BATCH_BYTES = 1 << 20


def format_of(options: sql.CopyOptions) -> RowFormat:
    """Return the row format for a statement's options. Raises `InvalidUsage` for options that
    conflict."""
    form = RowFormat(
        CopyFormat(options.format),
        options.delimiter.encode(),
        options.null.encode(),
        options.header,
        options.header_match,
        options.quote.encode(),
        options.escape.encode(),
    )
    form.check()
    return form


async def copy_from_client(wire: PgWire, session: SqlSession, statement: sql.CopyStatement) -> int:
    """Read rows until the client ends its stream, insert them atomically, and return their number.

    Raises:
        InvalidClientData: A row does not fit the table; nothing is inserted.
        InvalidUsage: The client aborted the copy, or its rows exceed `sql_rows_bytes_max`.
    """
    session.begin_statement(statement)
    context = session.context
    assert statement.table is not None
    table, schema = await context.catalog.find_table(statement.table)
    columns = named_columns(table, schema, statement.columns)
    # Check the right before the client sends rows in vain.
    await context.client.check_right("write", table)
    form = format_of(statement.options)
    decoder = copy_decoder(
        TableSchema(columns),
        form,
        batch_bytes=BATCH_BYTES,
        row_bytes_max=context.settings.frame_bytes_max,
        time_zone=session.context.zone,
    )
    binary = form.kind is CopyFormat.BINARY
    await wire.send(pg.encode_copy_in(binary=binary, columns=len(columns)))
    limit = context.settings.sql_rows_bytes_max
    batches: list[pa.RecordBatch] = []
    size = 0
    while True:
        message = await wire.receive()
        match message:
            case pg.CopyInData(data):
                batches += decoder.feed(data)
                size += len(data)
                # The rows are one write, so all of them are kept in memory until then.
                if size > limit:
                    raise InvalidUsage(
                        f"COPY {table}: too many rows: more than {limit} bytes (sql_rows_bytes_max)"
                    )
            case pg.CopyInDone():
                batches += decoder.finish()
                break
            case pg.CopyInFailure(reason):
                raise InvalidUsage(f"COPY from stdin failed: {reason}")
            case pg.FlushOutput() | pg.SyncPipeline():
                pass  # PostgreSQL ignores both during a copy
            case None:
                raise RemoteProtocolError("the connection ended during a copy")
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__} during a copy")
    rows = pa.Table.from_batches(batches, TableSchema(columns).arrow())
    if rows.num_rows:
        await put_rows(context, table, schema, rows)
    return int(rows.num_rows)


async def copy_to_client(
    wire: PgWire, session: SqlSession, statement: sql.CopyStatement, time_zone: str
) -> int:
    """Send the rows of a table, a query or a subscribe to the client. Return their number."""
    session.begin_statement(statement)
    if statement.options.header_match:
        raise InvalidUsage("HEADER MATCH is only supported for COPY … FROM: use HEADER")
    result = end_on_disconnect(wire, await _source(session, statement))
    assert result.schema is not None
    assert result.batches is not None
    form = format_of(statement.options)
    encoder = CopyEncoder(result.schema.names, form, time_zone)
    binary = form.kind is CopyFormat.BINARY
    count = 0
    try:
        await wire.send(pg.encode_copy_out(binary=binary, columns=len(result.schema)))
        await wire.send(encoder.begin())
        async for batch in result.batches:
            count += batch.num_rows
            for part in cut_batches(batch, BATCH_BYTES):
                for piece in encoder.encode(part).pieces(SEND_BYTES):
                    result.check_rights()
                    await wire.send(piece)
            # Send changes immediately: they may be rare, and a full buffer would take long.
            if result.tag == "SUBSCRIBE":
                await wire.flush()
    finally:
        await result.batches.aclose()
    await wire.send(encoder.finish())
    await wire.send(pg.COPY_DONE)
    return count


async def _source(session: SqlSession, statement: sql.CopyStatement) -> StatementResult:
    context = session.context
    query = statement.source
    if query is None:
        assert statement.table is not None
        entry = await context.catalog.find_present(statement.table)
        listed = ", ".join(map(quote_name, statement.columns)) if statement.columns else "*"
        text = f"SELECT {listed} FROM {quote_name(entry.name)}"
        query = sql.QueryStatement(position=0, query=sql.generated_span(context.dialect, text))
    async with context.typed(statement):
        if isinstance(query, sql.SubscribeStatement):
            return await subscribe(context, query, ())
        return await read_query(context, query, ())
