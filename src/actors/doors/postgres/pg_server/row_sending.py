"""Sends the rows of results and portals, checking the session's rights before each piece.

A client may read rows slowly, and its role may lose the right to them in the meantime. So the right
is checked before each piece instead of once for the result.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from actors.doors.postgres.pg_server.statements import OpenPortal, describe_fields
from actors.doors.postgres.pg_server.wire import SEND_BYTES, PgWire
from actors.doors.sql_session.results import StatementResult
from actors.model.pgwire import messages as pg
from actors.model.pgwire.row_encoding import RowEncoder, cut_batches

BATCH_BYTES: Final = 1 << 20
"""Approximate bytes of rows that are encoded at a time."""


async def send_result(wire: PgWire, result: StatementResult, time_zone: str) -> None:
    """Send a result's rows in text format, then its command tag. Raises `AccessDenied` once the
    right to read the rows is revoked."""
    count = 0
    if result.schema is not None and result.batches is not None:
        fields = describe_fields(result.schema, (), result.oids)
        await wire.send(pg.encode_row_description(fields))
        encoder = RowEncoder((pg.TEXT_FORMAT,) * len(fields), time_zone)
        try:
            async for batch in result.batches:
                count += batch.num_rows
                await _send_batch(wire, batch, encoder, result)
        finally:
            await result.batches.aclose()
    tag = f"{result.tag} {count}" if result.tag in ("SELECT", "FETCH") else result.tag
    await wire.send(pg.encode_command_complete(tag))


async def _send_batch(
    wire: PgWire, batch: pa.RecordBatch, encoder: RowEncoder, result: StatementResult
) -> None:
    for part in cut_batches(batch, BATCH_BYTES):
        for piece in encoder.encode(part).pieces(SEND_BYTES):
            result.check_rights()
            await wire.send(piece)
    # Send changes immediately: they may be rare, and a full buffer would take long.
    if result.tag == "SUBSCRIBE":
        await wire.flush()


async def send_portal(wire: PgWire, portal: OpenPortal, rows_max: int, time_zone: str) -> bool:
    """Send the next rows of a portal, at most `rows_max` (0: all). Return whether they were the
    last. Raises as `send_result` does."""
    assert portal.shape is not None
    codes = pg.expand_formats(portal.bound.result_formats, len(portal.shape), "columns")
    encoder = RowEncoder(codes, time_zone)
    room = rows_max or None
    while True:
        if portal.rows is None or portal.at >= len(portal.rows):
            batch, portal.found = portal.found, None
            if batch is None and portal.batches is not None:
                batch = await anext(portal.batches, None)
            if batch is None:
                await portal.close()
                return True
            portal.rows, portal.at = encoder.encode(batch), 0
            continue
        last = len(portal.rows)
        # If the client asks for few rows at a time, later calls send the rest of the batch.
        if room is not None:
            last = min(last, portal.at + room)
            room -= last - portal.at
        portal.count += last - portal.at
        await _send_rows(wire, portal, last)
        if room == 0:
            return False


async def _send_rows(wire: PgWire, portal: OpenPortal, last: int) -> None:
    """Send the encoded rows of a portal up to row `last` (exclusive), in pieces."""
    assert portal.rows is not None
    while portal.at < last:
        # Estimate the number of rows from the size of the first: rows of a batch are mostly alike.
        size = max(1, SEND_BYTES // max(1, len(portal.rows.rows(portal.at, portal.at + 1))))
        stop = min(last, portal.at + size)
        # Check again: a client may fetch the rest of a suspended portal much later.
        if portal.rights is not None:
            portal.rights.check()
        await wire.send(portal.rows.rows(portal.at, stop))
        portal.at = stop
