"""Responses of one worker's storage half that its adapter has not taken yet: bounded, coalesced.

As `compute.outbox`: at most so many responses are on their way; what waits is at most one
frontier and one status an object, one answer a one-shot ingestion, one end an object, and one
report of statistics, in which a newer one of an object replaces the older.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from actors.progress import Nonce
from actors.protocol.storage import (
    DroppedId,
    FrontierUpper,
    Response,
    StagedBatches,
    Statistics,
    StatisticsUpdates,
    StatusUpdate,
)


class StorageOutbox:
    """What waits for the adapter."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self.nonce: Nonce | None = None
        self._waiting: OrderedDict[tuple[str, str], Response] = OrderedDict()
        self._flying: set[int] = set()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def switch(self, nonce: Nonce | None) -> None:
        """Forgets everything and goes over to another connection, or none."""
        self._waiting.clear()
        self._flying.clear()
        self.nonce = nonce

    def push(self, response: Response) -> None:
        """Appends a response, or puts it in place of an older one that waits."""
        key = _key(response)
        former = self._waiting.get(key)
        if isinstance(former, StatisticsUpdates) and isinstance(response, StatisticsUpdates):
            response = _joined(former, response)
        self._waiting[key] = response

    def take(self) -> list[tuple[int, Response]]:
        """What may go to the adapter now, oldest first, each with its number (from 1)."""
        out: list[tuple[int, Response]] = []
        while self._waiting and len(self._flying) < self._messages_max:
            _, response = self._waiting.popitem(last=False)
            self._serial += 1
            self._flying.add(self._serial)
            out.append((self._serial, response))
        return out

    def taken(self, nonce: Nonce, serials: Iterable[int]) -> None:
        """The adapter is done with these."""
        if nonce == self.nonce:
            self._flying.difference_update(serials)


def _key(response: Response) -> tuple[str, str]:
    match response:
        case FrontierUpper() | StatusUpdate() | DroppedId():
            return (type(response).__name__, response.id)
        case StagedBatches():
            return ("StagedBatches", response.uuid)
    return (type(response).__name__, "")


def _joined(old: StatisticsUpdates, new: StatisticsUpdates) -> StatisticsUpdates:
    def join(before: Iterable[Statistics], after: Iterable[Statistics]) -> tuple[Statistics, ...]:
        return tuple({each.id: each for each in (*before, *after)}.values())

    return StatisticsUpdates(
        join(old.sources, new.sources),
        join(old.sinks, new.sinks),
        join(old.oneshots, new.oneshots),
    )
