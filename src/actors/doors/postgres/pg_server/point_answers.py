"""Answers a query of one key together with all messages that drivers send for it.

A driver sends Bind, Describe, Execute and Sync at once. Where the rows are there already, one turn
answers all four; a turn for each would cost more than the read itself.
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
"""Messages behind the Bind of a query; some drivers leave Describe out."""


async def answer_point(
    wire: PgWire,
    memory_reads: MemoryReads,
    kept: PreparedStatement,
    bound: pg.BindPortal,
    role: str | None,
    time_zone: str,
) -> bool:
    """Answer a Bind of a query of one key, outside of a transaction, and the messages behind it.

    Args:
        wire: The connection.
        memory_reads: Reads the rows.
        kept: The prepared statement, whose `point` is set.
        bound: The Bind.
        role: The session's.
        time_zone: The session's, for texts.

    Returns:
        False if the usual way must be gone: other messages follow, the rows are not there, or there
        is an error to be told. Nothing was taken or sent then.
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
    # The usual way meets the same error, and tells it at the right message.
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
    """Return the description of a point's columns, which is made once."""
    header = kept.headers.get(codes)
    if header is None:
        assert kept.point is not None
        shape = found.rename_columns(list(kept.point.names)).schema
        header = kept.headers[codes] = pg.encode_row_description(describe_fields(shape, codes))
    return header
