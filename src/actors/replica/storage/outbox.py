"""Responses of one worker's storage half that its adapter has not acknowledged: bounded, coalesced.

As in `compute.outbox` a limited number is in flight. Waiting are at most one frontier, one status
and one drop for each object, one answer for each one-shot ingestion, and one report of
statistics, in which an object's newer entry replaces the older.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import (
    DroppedId,
    FrontierUpper,
    Response,
    StagedBatches,
    StatisticsUpdates,
    StatusUpdate,
)
from actors.runtime.progress import Nonce


class StorageOutbox:
    """Queue of responses for the adapter."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self.nonce: Nonce | None = None
        self._waiting: OrderedDict[tuple[str, str], Response] = OrderedDict()
        self._flying: set[int] = set()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def switch(self, nonce: Nonce | None) -> None:
        """Drop all responses and switch to another connection, or none."""
        self._waiting.clear()
        self._flying.clear()
        self.nonce = nonce

    def push(self, response: Response) -> None:
        """Queue a response, in place of an older one of its kind."""
        key = _key(response)
        former = self._waiting.get(key)
        if isinstance(former, StatisticsUpdates) and isinstance(response, StatisticsUpdates):
            response = _joined(former, response)
        self._waiting[key] = response

    def take(self) -> list[tuple[int, Response]]:
        """Return the responses to send now, oldest first, each with its serial (from 1)."""
        out: list[tuple[int, Response]] = []
        while self._waiting and len(self._flying) < self._messages_max:
            _, response = self._waiting.popitem(last=False)
            self._serial += 1
            self._flying.add(self._serial)
            out.append((self._serial, response))
        return out

    def taken(self, nonce: Nonce, serials: Iterable[int]) -> None:
        """Remove responses that the adapter acknowledged."""
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
    def join(
        before: Iterable[ObjectStatistics], after: Iterable[ObjectStatistics]
    ) -> tuple[ObjectStatistics, ...]:
        return tuple({each.id: each for each in (*before, *after)}.values())

    return StatisticsUpdates(
        join(old.sources, new.sources),
        join(old.sinks, new.sinks),
        join(old.oneshots, new.oneshots),
    )
