"""Responses of a worker's compute half that its adapter has not acknowledged yet.

The queue is bounded. Frontiers and statuses of one object merge into one entry each, a peek has one
response, and a subscribe has one batch outstanding. So there are at most two entries for each
object and one for each pending peek.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from actors.model.protocol.compute import (
    ConnectionRefused,
    CopyToResponse,
    Frontiers,
    PeekResponse,
    PeekRows,
    PeekStashed,
    Response,
    StatusResponse,
    SubscribeBatch,
    SubscribeResponse,
)
from actors.runtime.kernel import CoalescingOutbox

T = TypeVar("T")


class ResponseOutbox(CoalescingOutbox[Response, T]):
    """Queue of responses for the adapter. `T` is the type of a receipt."""

    def key(self, message: Response) -> tuple[str, str] | None:
        """Return the key under which a newer response replaces a waiting one; None: it never
        does."""
        match message:
            case Frontiers():
                return ("frontiers", message.id)
            case StatusResponse():
                return ("status", message.id)
            case PeekResponse():
                return ("peek", message.uuid)
            case SubscribeResponse() | CopyToResponse():
                # A dataflow has one batch outstanding: the receipt asks for the next.
                return None
            case ConnectionRefused():
                return ("refused", "")

    def merged(self, old: Response, new: Response) -> Response:
        """Return the response that replaces two waiting ones of the same key."""
        if not (isinstance(old, Frontiers) and isinstance(new, Frontiers)):
            return new
        # Frontiers never go back, so those of the newer report win where it has them.
        return msgspec.structs.replace(
            new,
            write=old.write if new.write is None else new.write,
            input=old.input if new.input is None else new.input,
            output=old.output if new.output is None else new.output,
        )

    def size(self, message: Response) -> int:
        """Return about how many bytes of memory a response holds."""
        return response_bytes(message)


def response_bytes(response: object) -> int:
    """Return about how many bytes of memory a response of either half holds."""
    match response:
        case PeekResponse(result=PeekRows(arrow=arrow)):
            return len(arrow)
        case PeekResponse(result=PeekStashed(inline=bytes() as arrow)):
            return len(arrow)
        case SubscribeResponse(batch=SubscribeBatch(arrow=bytes() as arrow)):
            return len(arrow)
    return 0
