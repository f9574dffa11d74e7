"""The statements that change the catalog, as they wait: one runs, the others follow in order.

Beside those of clients there are the service's own, which go on with the replacement of a view.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from actors.model.protocol.api import CatalogStatement, CreateView
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import ActorAddress
from actors.runtime.progress import ObjectId


class SwapView(msgspec.Struct, frozen=True, gc=False):
    """Puts the view `id`, which is computed, in the place of the one that it replaces; or ends that
    with an error. The service's own statement: it answers the one that began the replacement."""

    id: ObjectId
    name: str
    request: int
    error: PenstockError | None = None


class DropTakenShard(msgspec.Struct, frozen=True, gc=False):
    """Drops the shard whose contents the view `id` has taken, and answers as `SwapView`."""

    id: ObjectId
    name: str
    request: int


class RestartView(msgspec.Struct, frozen=True, gc=False):
    """Lets the view `id` go on whose dataflow was ended for a replacement that failed."""

    id: ObjectId
    name: str
    request: int


OwnStatement = SwapView | DropTakenShard | RestartView


class QueuedStatement(msgspec.Struct, frozen=True, gc=False):
    """A statement, its session, and its trace context."""

    session: ActorAddress[Any]
    statement: CatalogStatement | OwnStatement
    traceparent: str | None = None
    role: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Return the session and the request."""
        return self.session.path, self.statement.request

    @property
    def replaces(self) -> bool:
        """Return whether the statement replaces a view, which may take long."""
        return isinstance(self.statement, CreateView) and self.statement.replace


class StatementBacklog:
    """The statement that runs, and those that wait."""

    def __init__(self) -> None:
        self.waiting: deque[QueuedStatement] = deque()
        self.running: QueuedStatement | None = None

    @property
    def all(self) -> tuple[QueuedStatement, ...]:
        """Return the statement that runs, then those that wait."""
        return (() if self.running is None else (self.running,)) + tuple(self.waiting)
