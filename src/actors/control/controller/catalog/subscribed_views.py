"""Views that belong to one subscribe each: who made them, and which are left to be dropped.

A subscribe of a query is the subscribe of a view of that query, which the client creates under a
name of its own (`is_subscribed_view`) and drops when the subscribe ends. A client may be gone
before that: such a view ends with the connection that created it, or else at the service's next
start.
"""

from __future__ import annotations

from typing import Any

from actors.control.controller.catalog.boot import BootState, load
from actors.control.controller.catalog.catalog import VIEW
from actors.control.controller.catalog.ddl import CatalogStore
from actors.durable.persist import PersistClient
from actors.model.protocol.api import CreateView, DropObject
from actors.model.protocol.relations import is_subscribed_view
from actors.runtime.errors import ObjectExists, PenstockError, UnknownObject
from actors.runtime.kernel import ActorAddress


class SubscribedViews:
    """The views of subscribes of all sessions, by name."""

    def __init__(self) -> None:
        self._owners: dict[str, ActorAddress[Any]] = {}
        """Sessions that created the views, or are about to."""
        self._left: dict[str, ActorAddress[Any]] = {}
        """Views of closed sessions that are to be dropped."""
        self._dropping: dict[str, ActorAddress[Any]] = {}
        """Views of closed sessions whose drop is queued."""

    def submitted(self, session: ActorAddress[Any], statement: object) -> None:
        """Note who creates a view of a subscribe."""
        if isinstance(statement, CreateView) and statement.for_subscribe:
            # The first one: another session that gives the same name is refused.
            self._owners.setdefault(statement.name, session)

    def session_closed(self, path: str) -> None:
        """Note that all views of a session are to be dropped."""
        for name, owner in list(self._owners.items()):
            # Also of views that are still being created: their drop is queued behind that.
            if owner.path == path:
                self._left[name] = self._owners.pop(name)

    def left(self) -> list[tuple[ActorAddress[Any], str]]:
        """Return the views whose drop is to be queued now, with their closed sessions."""
        found = [(owner, name) for name, owner in self._left.items()]
        # Until the drop is answered a further round must not queue it again.
        self._dropping |= self._left
        self._left.clear()
        return found

    def failed(self, statement: object, error: PenstockError) -> None:
        """Take the failure of a statement."""
        match statement:
            case CreateView(name=name, for_subscribe=True) if not isinstance(error, ObjectExists):
                self._owners.pop(name, None)
            case DropObject(name=name) if name in self._dropping:
                owner = self._dropping.pop(name)
                # A view that was refused is not there. Everything else is tried again.
                if not isinstance(error, UnknownObject):
                    self._left[name] = owner

    def dropped(self, name: str) -> None:
        """Forget a view that was dropped."""
        for views in (self._owners, self._left, self._dropping):
            views.pop(name, None)


async def drop_left_views(
    found: BootState, persist: PersistClient, store: CatalogStore
) -> BootState:
    """Drop the views of subscribes of an earlier process, which was killed. Return the durable
    state after that. Raises `WriterFenced` and `StorageError`."""
    left = [
        entry
        for entry in found.catalog.of_kind(VIEW)
        if is_subscribed_view(entry.name) and not found.catalog.dependents(entry.id)
    ]
    if not left:
        return found
    # One set: a crash between leaves them all, for the start after it.
    first, *also = left
    await store.drop_all(found.catalog.remove(*left), found.seqno, first, tuple(also))
    # Loading drops the holds of the dataflows that are gone.
    return await load(persist)
