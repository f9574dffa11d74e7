"""The queue of statements that change the catalog: one runs, the others wait in order.

Besides clients' statements it holds the service's own, which continue the replacement of a view.
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
    """Put the computed view `id` in the place of the view that it replaces, or abandon the
    replacement with `error`. An internal statement: its result answers the CREATE OR REPLACE."""

    id: ObjectId
    name: str
    request: int
    error: PenstockError | None = None


class DropTakenShard(msgspec.Struct, frozen=True, gc=False):
    """Drop the shard whose contents the view `id` has taken over, and answer as `SwapView` does."""

    id: ObjectId
    name: str
    request: int


class RestartView(msgspec.Struct, frozen=True, gc=False):
    """Restart the view `id`, whose dataflow was stopped for a replacement that failed."""

    id: ObjectId
    name: str
    request: int


OwnStatement = SwapView | DropTakenShard | RestartView


class QueuedStatement(msgspec.Struct, frozen=True, gc=False):
    """A queued statement with its session, role and trace context."""

    session: ActorAddress[Any]
    statement: CatalogStatement | OwnStatement
    traceparent: str | None = None
    role: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Return the session's path and the request number, which identify the statement."""
        return self.session.path, self.statement.request

    @property
    def replaces(self) -> bool:
        """Return whether the statement replaces a view, which may take long."""
        return isinstance(self.statement, CreateView) and self.statement.replace


class StatementBacklog:
    """The running statement and the waiting ones."""

    def __init__(self) -> None:
        self.waiting: deque[QueuedStatement] = deque()
        """Statements to run, in order."""
        self.running: QueuedStatement | None = None
        """The running statement; None between two statements."""

    @property
    def all(self) -> tuple[QueuedStatement, ...]:
        """Return the running statement, then the waiting ones."""
        return (() if self.running is None else (self.running,)) + tuple(self.waiting)
