"""Answers a point query together with all messages that drivers send for it.

A driver sends Bind, Describe, Execute and Sync together. If the rows are in memory, all four are
answered in one go; handling them one by one would cost more than the read itself.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from actors.control.controller.reads.memory_reads import MemoryReads
from actors.doors.postgres.pg_server.statements import PreparedStatement, describe_fields
from actors.doors.postgres.pg_server.wire import PgWire
from actors.model.pgwire import messages as pg
from actors.model.pgwire.parameters import parse_parameters
from actors.model.pgwire.row_encoding import RowEncoder
from actors.runtime.errors import PenstockError

_BEHIND: Final[list[pg.FrontendMessage]] = [
    pg.DescribePortal(""),
    pg.ExecutePortal("", 0),
    pg.SyncPipeline(),
]
"""The messages that follow a query's Bind; some drivers omit Describe."""


async def answer_point(
    wire: PgWire,
    memory_reads: MemoryReads,
    kept: PreparedStatement,
    bound: pg.BindPortal,
    role: str | None,
    time_zone: str,
) -> bool:
    """Answer the Bind of a point query, outside a transaction, and the messages that follow it.

    Args:
        wire: The connection.
        memory_reads: Reads the rows from memory.
        kept: The prepared statement, whose `point` is set.
        bound: The Bind message.
        role: The session's role.
        time_zone: The session's time zone, for rows in text format.

    Returns:
        False if the query must be executed in the usual way: other messages follow, the rows are
        not in memory, or there is an error. No message was consumed or sent then.
    """
    point = kept.point
    assert point is not None, kept.text
    behind = wire.ahead(len(_BEHIND))
    described = behind == _BEHIND
    if not described and behind[:2] != _BEHIND[1:]:
        return False
    if bound.portal or len(bound.parameters) != len(kept.parameter_oids):
        return False
    try:
        values = parse_parameters(bound, kept.parameter_oids, time_zone)
        found = memory_reads.find(point.selection, point.key(values), role)
        if found is None:
            return False
        codes = pg.expand_formats(bound.result_formats, found.num_columns, "columns")
        rows = RowEncoder(codes, time_zone).encode(found).data
    # The usual way raises the same error, and reports it for the right message.
    except PenstockError:
        return False
    answer = [pg.BIND_COMPLETE]
    if described:
        answer.append(_header(kept, found, codes))
    tag = pg.encode_command_complete(f"SELECT {found.num_rows}")
    wire.skip(len(_BEHIND) if described else len(_BEHIND) - 1)
    await wire.send(b"".join([*answer, rows, tag, pg.encode_ready(b"I")]))
    await wire.flush()
    return True


def _header(kept: PreparedStatement, found: pa.RecordBatch, codes: tuple[int, ...]) -> bytes:
    """Return the RowDescription of a point query; it is cached in the prepared statement."""
    header = kept.headers.get(codes)
    if header is None:
        assert kept.point is not None
        shape = found.rename_columns(list(kept.point.names)).schema
        header = kept.headers[codes] = pg.encode_row_description(describe_fields(shape, codes))
    return header
