"""Keeps track of the views that belong to one subscribe each: who created them, and which are to be
dropped.

A subscribe to a query is a subscribe to a view of that query, which the client creates under a name
of its own (`is_subscribed_view`) and drops when the subscribe ends. If the client disconnects
first, the service drops the view: when the connection closes, or else at the next start.
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
        """Sessions that created the views, or are creating them."""
        self._left: dict[str, ActorAddress[Any]] = {}
        """Views of closed sessions whose drop is still to be queued."""
        self._dropping: dict[str, ActorAddress[Any]] = {}
        """Views of closed sessions whose drop is queued."""

    def submitted(self, session: ActorAddress[Any], statement: object) -> None:
        """Record which session creates the view of a subscribe."""
        if isinstance(statement, CreateView) and statement.for_subscribe:
            # Keep the first: another session that gives the same name will be refused.
            self._owners.setdefault(statement.name, session)

    def session_closed(self, path: str) -> None:
        """Mark all views of a closed session to be dropped."""
        for name, owner in list(self._owners.items()):
            # Includes views still being created: their drop is queued after that.
            if owner.path == path:
                self._left[name] = self._owners.pop(name)

    def left(self) -> list[tuple[ActorAddress[Any], str]]:
        """Return the views whose drop must be queued now, each with its closed session."""
        found = [(owner, name) for name, owner in self._left.items()]
        # Remember them, so that they are not queued again before the drop is answered.
        self._dropping |= self._left
        self._left.clear()
        return found

    def failed(self, statement: object, error: PenstockError) -> None:
        """Handle the failure of a statement: a drop that failed is tried again."""
        match statement:
            case CreateView(name=name, for_subscribe=True) if not isinstance(error, ObjectExists):
                self._owners.pop(name, None)
            case DropObject(name=name) if name in self._dropping:
                owner = self._dropping.pop(name)
                # An unknown view was never created. Any other error is retried.
                if not isinstance(error, UnknownObject):
                    self._left[name] = owner

    def dropped(self, name: str) -> None:
        """Forget a view that was dropped."""
        for views in (self._owners, self._left, self._dropping):
            views.pop(name, None)


async def drop_left_views(
    found: BootState, persist: PersistClient, store: CatalogStore
) -> BootState:
    """Drop the views of subscribes that a killed process left. Return the durable state afterwards.
    Raises `WriterFenced` and `StorageError`."""
    left = [
        entry
        for entry in found.catalog.of_kind(VIEW)
        if is_subscribed_view(entry.name) and not found.catalog.dependents(entry.id)
    ]
    if not left:
        return found
    # One set: after a crash either all are dropped, or the next start drops all.
    first, *also = left
    await store.drop_all(found.catalog.remove(*left), found.seqno, first, tuple(also))
    # Loading again drops the holds of their dataflows.
    return await load(persist)
