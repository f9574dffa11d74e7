"""Answers of the service as the client's callers get them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from actors.compute.finishing import Finisher
from actors.controller.client_link import Exchange, Slot
from actors.controller.client_rows import Wish
from actors.errors import PenstockError, RemoteProtocolError, from_wire
from actors.plan.updates import from_ipc
from actors.protocol.api import Contents, Failed


def contents(answer: Any) -> Contents:
    """One answer of a read. Raises what the service says instead."""
    if isinstance(answer, Failed):
        raise from_wire(answer.code, answer.text, answer.determinate)
    if not isinstance(answer, Contents):
        raise RemoteProtocolError(f"the service answered Read with {type(answer).__name__}")
    return answer


class Gathering:
    """One read's answers as they come, and what of them can be told."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._finisher: Finisher | None = None
        self._told = False
        self.ended = False
        """The service has said all."""
        self.over = False
        """Nothing that it could still say is wanted."""

    def take(self, answer: Any) -> pa.Table | None:
        """Rows with their weight that can be told now; at least one table until it is over.
        Raises what the service says instead."""
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
        self.over = self.ended or self._finisher.complete
        if rows is None or not (rows.num_rows or (self.over and not self._told)):
            return None
        self._told = True
        return rows

    def rest(self) -> pa.Table | None:
        """What is left to tell when it is over."""
        return None if self._finisher is None else self._finisher.end()


async def gathered(exchange: Exchange, number: int, slot: Slot, wish: Wish) -> list[pa.Table]:
    """Rows of a whole read with their weight, finished; at least one table."""
    gathering = Gathering(wish)
    tables = []
    try:
        while not gathering.over:
            rows = gathering.take(await exchange.next_answer(slot))
            if rows is not None:
                tables.append(rows)
    finally:
        await leave(exchange, number, gathering)
    rest = gathering.rest()
    return tables if rest is None else [*tables, rest]


async def leave(exchange: Exchange, number: int, gathering: Gathering) -> None:
    """No more answers of a read are wanted; the service is told when it has more."""
    exchange.close(number)
    if not gathering.ended and exchange.lost is None:
        await exchange.cancel(number)
