"""Responses of one worker that its adapter has not acknowledged: bounded, ordered, coalesced.

Theory of operation. At most `messages_max` responses (and about `bytes_max` bytes) are in flight to
the adapter; the rest wait here. The queue is bounded: frontiers and statuses of one object merge
into one entry, a peek has one response, and a subscribe has one batch outstanding. So it holds at
most two entries for each object and one for each pending peek.

Each response in flight has a unique serial number, by which it is acknowledged, in any order.
Responses belong to one nonce; an acknowledgement of a former nonce is ignored. A batch's `receipt`
is returned exactly once: when the batch was acknowledged, or dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

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
from actors.runtime.progress import Nonce

T = TypeVar("T")


class ResponseOutbox(Generic[T]):
    """Queue of responses for the adapter; `T` is the type of a receipt."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self.nonce: Nonce | None = None
        self._waiting: OrderedDict[tuple[str, str], tuple[Response, T | None]] = OrderedDict()
        self._flying: dict[int, tuple[int, T | None]] = {}
        self._flying_bytes = 0
        self._serial = 0
        self._batches = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def switch(self, nonce: Nonce | None) -> list[T]:
        """Drop all responses and switch to another connection (or none); return the dropped
        receipts."""
        receipts = [receipt for _, receipt in self._flying.values() if receipt is not None]
        receipts += [receipt for _, receipt in self._waiting.values() if receipt is not None]
        self._waiting.clear()
        self._flying.clear()
        self._flying_bytes = 0
        # The window starts empty. Serials go on, so that old acknowledgements match none.
        self.nonce = nonce
        return receipts

    def push(self, response: Response, receipt: T | None = None) -> None:
        """Queue a response, or merge it into a waiting one."""
        key = self._key(response)
        old = self._waiting.get(key)
        if old is not None and isinstance(response, Frontiers) and isinstance(old[0], Frontiers):
            response = _later(old[0], response)
        self._waiting[key] = (response, receipt)

    def _key(self, response: Response) -> tuple[str, str]:
        match response:
            case Frontiers():
                return ("frontiers", response.id)
            case StatusResponse():
                return ("status", response.id)
            case PeekResponse():
                return ("peek", response.uuid)
            case SubscribeResponse() | CopyToResponse():
                # Unique, since batches never merge. A dataflow has one outstanding: its receipt
                # asks for the next.
                self._batches += 1
                return ("stream", f"{response.id}/{self._batches}")
            case ConnectionRefused():
                return ("refused", "")

    def take(self) -> list[tuple[int, Response]]:
        """Return the responses to send now, oldest first, each with its serial (from 1)."""
        out: list[tuple[int, Response]] = []
        while self._waiting and self._has_room():
            _, (response, receipt) = self._waiting.popitem(last=False)
            size = response_bytes(response)
            self._serial += 1
            self._flying[self._serial] = (size, receipt)
            self._flying_bytes += size
            out.append((self._serial, response))
        return out

    def _has_room(self) -> bool:
        if not self._flying:
            return True  # even a response larger than the window must go some time
        return len(self._flying) < self._messages_max and self._flying_bytes < self._bytes_max

    def taken(self, nonce: Nonce, serials: Iterable[int]) -> list[T]:
        """Remove responses that the adapter acknowledged; return their receipts."""
        receipts: list[T] = []
        if nonce != self.nonce:
            return receipts
        for serial in serials:
            if serial not in self._flying:
                continue
            size, receipt = self._flying.pop(serial)
            self._flying_bytes -= size
            if receipt is not None:
                receipts.append(receipt)
        return receipts


def response_bytes(response: Response) -> int:
    """Return about how much memory a response holds."""
    match response:
        case PeekResponse(result=PeekRows(arrow=arrow)):
            return len(arrow)
        case PeekResponse(result=PeekStashed(inline=bytes() as arrow)):
            return len(arrow)
        case SubscribeResponse(batch=SubscribeBatch(arrow=bytes() as arrow)):
            return len(arrow)
    return 0


def _later(old: Frontiers, new: Frontiers) -> Frontiers:
    """Return both reports merged; frontiers never go back, so each of the newer one wins."""
    return msgspec.structs.replace(
        new,
        write=old.write if new.write is None else new.write,
        input=old.input if new.input is None else new.input,
        output=old.output if new.output is None else new.output,
    )
