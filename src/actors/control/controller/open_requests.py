"""Requests that outlive the turn in which they arrive: reads, queries, subscribes and copies.

Each kind keeps its open requests by session and number. A request of any kind ends when its client
cancels it or disconnects, when the client loses a right, or when the object is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from actors.control.controller.catalog.catalog import CatalogObject
from actors.control.controller.roles.revocation import HeldRights, RunningRequest
from actors.control.controller.tables.groups import TableTarget
from actors.runtime.errors import OperationCanceled, PenstockError, UnknownObject
from actors.runtime.kernel import ActorAddress

R = TypeVar("R", bound="_Request")


class _Request(Protocol):
    @property
    def session(self) -> ActorAddress[Any]: ...
    @property
    def number(self) -> int: ...
    @property
    def rights(self) -> HeldRights: ...
    @property
    def entry(self) -> CatalogObject | TableTarget | None:
        # The object whose drop ends the request.
        ...


class OpenRequests(Generic[R]):
    """All open requests of one kind."""

    canceled_text: ClassVar[str] = "canceled on request"
    """Text of the error with which a client's own cancel ends a request."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], R] = {}
        """Open requests by session path and request number."""

    def __len__(self) -> int:
        return len(self._open)

    def _opened(self, made: R) -> None:
        self._open[made.session.path, made.number] = made

    def _closed(self, made: R) -> None:
        del self._open[made.session.path, made.number]

    def _end(self, made: R, error: PenstockError | None) -> None:
        """End a request, and send its client the error unless it is None."""
        raise NotImplementedError

    def running(self) -> Iterator[RunningRequest]:
        """Yield all requests with the rights that they need."""
        for (session, number), made in self._open.items():
            yield RunningRequest(session, number, made.rights)

    def by_session(self) -> Counter[str]:
        """Return the number of requests of each session."""
        return Counter(path for path, _ in self._open)

    def cancel(self, session: str, request: int, error: PenstockError | None = None) -> bool:
        """End a request with an error; None means that its client canceled it. Return False if
        there is no such request."""
        made = self._open.get((session, request))
        if made is not None:
            self._end(made, error or OperationCanceled(self.canceled_text))
        return made is not None

    def session_closed(self, session: str) -> None:
        """End the requests of a closed session."""
        # Iterate over a list, since ending a request removes it.
        for made in list(self._open.values()):
            if made.session.path == session:
                self._end(made, None)

    def dropped(self, entry: CatalogObject) -> None:
        """End the requests whose object was dropped."""
        for made in list(self._open.values()):
            if made.entry is not None and made.entry.id == entry.id:
                self._end(made, UnknownObject(f"{entry.kind} {entry.name} was dropped"))
