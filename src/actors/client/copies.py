"""The client's side of copies into and from files: progress messages, then one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from actors.client.requests import RequestExchange
from actors.errors import RemoteProtocolError, from_wire
from actors.progress import Time
from actors.protocol.api import CopiedInto, CopyProgressed, CopyTo, RequestFailed
from actors.protocol.api_storage import CopiedFrom, CopyFromFiles, CopyFromProgress

CopyFormat: TypeAlias = Literal["parquet", "csv", "json"]


class CopiedTo(msgspec.Struct, frozen=True):
    """A finished copy: `rows` in so many `files`, which `manifest` names; contents at `as_of`."""

    rows: int
    files: int
    manifest: str
    as_of: Time


class CopiedRows(msgspec.Struct, frozen=True):
    """A durable copy from files: so many `rows`, all at `time`. `repeated`: an earlier request with
    the same uuid made it."""

    rows: int
    time: Time
    repeated: bool


async def await_copy_to(
    exchange: RequestExchange, request: CopyTo, progress: Callable[[CopyProgressed], object] | None
) -> CopiedTo:
    """Send the request and wait for its answer. Cancellation drops the copy. Raises the service's
    error, and `ConnectionBroken`."""
    answer = await _answered(exchange, request, progress)
    if not isinstance(answer, CopiedInto):
        raise RemoteProtocolError(f"the service answered CopyTo with {type(answer).__name__}")
    return CopiedTo(answer.rows, answer.files, answer.manifest, answer.as_of)


async def await_copy_from(
    exchange: RequestExchange,
    request: CopyFromFiles,
    progress: Callable[[CopyFromProgress], object] | None,
) -> CopiedRows:
    """Send a request for a copy from files and wait for its answer, as `await_copy_to` does."""
    answer = await _answered(exchange, request, progress)
    if not isinstance(answer, CopiedFrom):
        raise RemoteProtocolError(f"the service answered CopyFrom with {type(answer).__name__}")
    return CopiedRows(answer.rows, answer.time, answer.repeated)


async def _answered(
    exchange: RequestExchange,
    request: CopyTo | CopyFromFiles,
    progress: Callable[[Any], object] | None,
) -> Any:
    number = request.request
    slot = await exchange.open(request)
    answered = False
    try:
        answer: Any = await exchange.next_answer(slot)
        while isinstance(answer, CopyProgressed | CopyFromProgress):
            if progress is not None:
                progress(answer)
            answer = await exchange.next_answer(slot)
        answered = True
    finally:
        exchange.close(number)
        # This task was cancelled: the service must drop the copy.
        if not answered and exchange.lost is None:
            await exchange.cancel(number)
    if isinstance(answer, RequestFailed):
        raise from_wire(answer.code, answer.text, answer.determinate)
    return answer
