"""Peeks that wait for their time or for their rows: bounded, each named by a ticket."""

from __future__ import annotations

import msgspec

from actors.errors import ResourceBusy
from actors.progress import Time
from actors.protocol.compute import Peek


class PendingPeek(msgspec.Struct):
    """An unanswered peek. `number` is the index's render number, 0 for a shard."""

    ticket: int
    number: int
    peek: Peek
    started: bool = False


class PendingPeeks:
    """All unanswered peeks of the current connection."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_uuid: dict[str, PendingPeek] = {}
        self._by_ticket: dict[int, PendingPeek] = {}
        self._by_number: dict[int, dict[int, PendingPeek]] = {}
        """Pending peeks by index, then ticket."""
        self._last_ticket = 0

    def __len__(self) -> int:
        return len(self._by_uuid)

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._by_uuid

    def check_room(self) -> None:
        """Raise `ResourceBusy` if no more can wait."""
        if len(self) >= self._limit:
            raise ResourceBusy(
                f"{len(self)} reads wait already (peeks_pending_max); try again later"
            )

    def add(self, peek: Peek, number: int) -> PendingPeek:
        """Add a peek, under a fresh ticket."""
        # Never reused: the late result of a cancelled peek must not answer another of the same
        # uuid.
        self._last_ticket += 1
        pending = PendingPeek(self._last_ticket, number, peek)
        self._by_uuid[peek.uuid] = self._by_ticket[pending.ticket] = pending
        self._by_number.setdefault(number, {})[pending.ticket] = pending
        return pending

    def get(self, uuid: str) -> PendingPeek | None:
        """Return the peek with this uuid."""
        return self._by_uuid.get(uuid)

    def by_ticket(self, ticket: int) -> PendingPeek | None:
        """Return the peek with this ticket."""
        return self._by_ticket.get(ticket)

    def remove(self, pending: PendingPeek) -> None:
        """Remove a peek that was answered or cancelled."""
        del self._by_uuid[pending.peek.uuid]
        del self._by_ticket[pending.ticket]
        same = self._by_number[pending.number]
        del same[pending.ticket]
        if not same:
            del self._by_number[pending.number]

    def all(self) -> list[PendingPeek]:
        """Return all peeks, oldest first."""
        return list(self._by_uuid.values())

    def of(self, number: int) -> list[PendingPeek]:
        """Return the peeks of one index."""
        return list(self._by_number.get(number, {}).values())

    def earliest(self, number: int) -> Time | None:
        """Return the earliest time at which an index is read."""
        return min((p.peek.time for p in self._by_number.get(number, {}).values()), default=None)

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._by_uuid) == len(self._by_ticket) <= self._limit
        assert all(self._by_ticket[p.ticket] is p for p in self._by_uuid.values())
        assert sum(map(len, self._by_number.values())) == len(self._by_uuid)
