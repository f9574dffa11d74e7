"""The client's side of a subscribe: changes out of answers, with a pause when too many wait."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pyarrow as pa

from actors.client.requests import RequestExchange
from actors.errors import OperationCanceled, RemoteProtocolError, from_wire
from actors.plan.updates import from_ipc
from actors.progress import Frontier, Time
from actors.protocol.api import RequestDone, RequestFailed, SubscribeChanges, SubscribeObject
from actors.spans import accept, make_request_context, root, span_below
from actors.telemetry import CLIENT_CHANGES, CLIENT_REQUEST


class ChangeBatch(msgspec.Struct, frozen=True):
    """Updates of a subscribe with ``lower <= time < upper``, complete: a subscriber resumes after
    them with ``from_=upper``. `table` has the object's columns, ``__time`` and ``__diff`` (+1
    insertion, -1 retraction); None for progress without updates.

    A large interval comes in pieces: `partial` ones, whose `upper` is `lower`, then one with the
    interval's upper. If the subscribe ends before that one, discard the partial ones and resume
    from the upper of the last change that was not partial.
    """

    lower: Frontier
    upper: Frontier
    table: pa.Table | None = None
    partial: bool = False


class SubscribeSpec(msgspec.Struct, frozen=True):
    """The arguments of a subscribe; see `Client.subscribe`."""

    name: str
    from_: Frontier | None = None
    as_of: Time | None = None
    up_to: Frontier | None = None
    snapshot: bool = True
    progress: bool = True


async def follow(
    exchange: RequestExchange, wanted: SubscribeSpec, waiting_bytes_max: int
) -> AsyncGenerator[ChangeBatch, None]:
    """Yield the changes. When more than `waiting_bytes_max` wait here, between two intervals, the
    subscribe is cancelled, the waiting changes are yielded, and another subscribe resumes after
    them. Raises the service's error, and `ConnectionBroken`."""
    name, frontier, start = wanted.name, wanted.from_, wanted.as_of
    while True:
        number = exchange.number()
        with root(CLIENT_REQUEST, number, name) as opened:
            request = SubscribeObject(
                number,
                name,
                frontier,
                start,
                make_request_context(opened),
                wanted.up_to,
                wanted.snapshot,
                wanted.progress,
            )
            slot = await exchange.open(request)
        paused = ended = False
        kept: list[ChangeBatch] = []
        try:
            while True:
                answer = await exchange.next_answer(slot)
                if isinstance(answer, RequestDone | RequestFailed):
                    ended = True
                    break
                change = _change(answer)
                if paused and change.partial:
                    # The cancel may cut this interval short. Then the next subscribe sends it
                    # again from its lower, so its pieces are withheld until one more arrives.
                    kept.append(change)
                    continue
                while kept:
                    yield kept.pop(0)
                yield change
                if change.partial:
                    continue
                # The next subscribe resumes here, and no longer at the as_of.
                frontier, start = change.upper, None
                if not paused and slot.bytes > waiting_bytes_max:
                    paused = True
                    await exchange.cancel(number)
        finally:
            exchange.close(number)
            # The caller has left the loop: the service need not go on.
            if not ended and not paused and exchange.lost is None:
                await exchange.cancel(number)
        if isinstance(answer, RequestDone):
            return
        # `OperationCanceled` is the answer to this client's own pause: subscribe again from
        # `frontier`.
        if not (paused and answer.code == OperationCanceled.__name__):
            raise from_wire(answer.code, answer.text, answer.determinate)


async def concatenate_pieces(
    changes: AsyncGenerator[ChangeBatch, None],
) -> AsyncGenerator[ChangeBatch, None]:
    """Yield the same changes with pieces concatenated, so that each is a complete interval. Holds
    one interval in memory, however large. The `changes` are closed with it."""
    tables: list[pa.Table] = []
    async with contextlib.aclosing(changes):
        async for change in changes:
            if change.table is not None:
                tables.append(change.table)
            if not change.partial:
                table = pa.concat_tables(tables) if tables else None
                yield ChangeBatch(change.lower, change.upper, table)
                tables = []


def _change(answer: Any) -> ChangeBatch:
    if not isinstance(answer, SubscribeChanges):
        raise RemoteProtocolError(f"the service answered Subscribe with {type(answer).__name__}")
    arrow = answer.arrow
    if arrow is None:
        return ChangeBatch(answer.lower, answer.upper, None, answer.partial)
    with span_below(accept(answer.traceparent), CLIENT_CHANGES) as opened:
        if opened is not None:
            opened.describe(answer.request, answer.lower, answer.upper, len(arrow))
        return ChangeBatch(answer.lower, answer.upper, from_ipc(arrow), answer.partial)
