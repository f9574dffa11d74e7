"""Answers of a read, checked and finished for the client's caller."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from actors.client.requests import RequestExchange, RequestSlot
from actors.client.rows import ReadSpec
from actors.errors import PenstockError, RemoteProtocolError, from_wire
from actors.plan.updates import from_ipc
from actors.protocol.api import ReadContents, RequestFailed
from actors.protocol.row_finishing import RowFinisher


def contents(answer: Any) -> ReadContents:
    """Return the answer of a read. Raises the error that the service sent instead."""
    if isinstance(answer, RequestFailed):
        raise from_wire(answer.code, answer.text, answer.determinate)
    if not isinstance(answer, ReadContents):
        raise RemoteProtocolError(f"the service answered Read with {type(answer).__name__}")
    return answer


class AnswerCollector:
    """Collects the answers of one read and finishes their rows."""

    def __init__(self, wish: ReadSpec) -> None:
        self._wish = wish
        self._finisher: RowFinisher | None = None
        self._told = False
        self.ended = False
        """True if the service sends no further answer."""
        self.over = False
        """True if no further answer can change the rows."""

    def take(self, answer: Any) -> pa.Table | None:
        """Return the rows with their weight that are final after one more answer, or None; at least
        one table by the last answer unless `rest` has it. Raises the error that the service sent
        instead."""
        try:
            said = contents(answer)
        except PenstockError:
            self.ended = self.over = True
            raise
        self.ended = not said.more
        piece = from_ipc(said.arrow)
        if self._finisher is None:
            self._finisher = self._wish.finisher(piece.column_names)
        rows = self._finisher.add(piece)
        # A LIMIT without an order may be reached before the last answer: the rest is not waited
        # for.
        self.over = self.ended or self._finisher.complete
        if rows is None or not (rows.num_rows or (self.over and not self._told)):
            return None
        self._told = True
        return rows

    def rest(self) -> pa.Table | None:
        """Return the rows that an ORDER BY withheld until the last answer."""
        return None if self._finisher is None else self._finisher.end()


async def collect_answers(
    exchange: RequestExchange, number: int, slot: RequestSlot, wish: ReadSpec
) -> list[pa.Table]:
    """Return all rows of a read with their weight, finished; at least one table."""
    gathering = AnswerCollector(wish)
    tables = []
    try:
        while not gathering.over:
            rows = gathering.take(await exchange.next_answer(slot))
            if rows is not None:
                tables.append(rows)
    finally:
        await close_read(exchange, number, gathering)
    rest = gathering.rest()
    return tables if rest is None else [*tables, rest]


async def close_read(exchange: RequestExchange, number: int, gathering: AnswerCollector) -> None:
    """Close a read; cancel it at the service if answers are still to come."""
    exchange.close(number)
    if not gathering.ended and exchange.lost is None:
        await exchange.cancel(number)
