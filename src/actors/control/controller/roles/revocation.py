"""The rights that running requests need, and which of them a change of the rules ends. Pure.

A request is checked when it comes (`request_rights`). What goes on for longer, such as a subscribe,
keeps the rights that it needs with it: when roles or rights have changed, whatever has lost one of
them is ended with the refusal that it would get if it were asked for now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from actors.control.access.access_rules import AccessRules
from actors.control.access.open_sessions import ReadObjects
from actors.control.access.role_registry import READ
from actors.control.controller.catalog.catalog import CatalogObject
from actors.control.controller.roles.request_rights import NeededRight
from actors.runtime.errors import AccessDenied
from actors.runtime.progress import ObjectId


class HeldRights(msgspec.Struct, frozen=True, gc=False):
    """The role of a request, and the rights that it needs for as long as it runs."""

    role: str | None = None
    """See `access.access_rules`."""
    needs: tuple[tuple[str, ObjectId | None, str], ...] = ()
    """Rights, each with the id and name of its object; None: on the whole service."""

    @property
    def reads(self) -> ReadObjects:
        """Return the objects that are read; none for a session that is trusted."""
        if self.role is None:
            return ()
        return tuple((id_, name) for right, id_, name in self.needs if right == READ and id_)


TRUSTED: Final = HeldRights()
"""Those of a session that may do everything."""


class RunningRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that runs, with what it needs."""

    session: str
    """Path of its session."""
    request: int
    held: HeldRights


def held_rights(role: str | None, needed: Iterable[NeededRight]) -> HeldRights:
    """Return the rights that a request of a role keeps needing."""
    if role is None:
        return TRUSTED
    return HeldRights(
        role,
        tuple(
            (right, None if entry is None else entry.id, "" if entry is None else entry.name)
            for right, entry in needed
        ),
    )


def held_reads(role: str | None, inputs: Iterable[CatalogObject]) -> HeldRights:
    """Return the rights of a request that reads these objects."""
    return held_rights(role, ((READ, entry) for entry in inputs))


def lost_right(rules: AccessRules, held: HeldRights) -> AccessDenied | None:
    """Return the refusal of what a request needs; None if its role may still do all of it."""
    role = held.role
    if role is None or rules.is_free(role):
        return None
    # A role that was dropped may not go on, whatever it asked for.
    if role and rules.registry.get(role) is None:
        return AccessDenied(rules.refusal(role, READ))
    # The first that is missing: a role that was given another right meanwhile may go on.
    for right, id_, name in held.needs:
        if not rules.may(role, right, id_):
            return AccessDenied(rules.refusal(role, right, name))
    return None


def revoked(
    running: Iterable[RunningRequest],
    rules: AccessRules,
    role_of: Callable[[str, str | None], str | None],
) -> Iterator[tuple[RunningRequest, AccessDenied]]:
    """Yield the requests that may not go on under these rules, each with its refusal. `role_of`
    returns the role of a session by its path and the role that it came with."""
    # By the role that the session has now: one without a role may have made the first one.
    for each in running:
        held = msgspec.structs.replace(each.held, role=role_of(each.session, each.held.role))
        denied = lost_right(rules, held)
        if denied is not None:
            yield each, denied
