"""Decides which running requests a change of roles or rights ends. Pure.

A request is checked when it arrives (`request_rights`). A request that runs for longer, such as a
subscribe, keeps the list of rights that it needs. When roles or rights have changed, every request
that has lost one of them ends with the refusal that it would get if it were made now.
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
    """Role of the session; None if trusted, see `access.access_rules`."""
    needs: tuple[tuple[str, ObjectId | None, str], ...] = ()
    """Rights, each with the id and name of its object; None for the whole service."""

    @property
    def reads(self) -> ReadObjects:
        """Return the objects that are read; none for a trusted session."""
        if self.role is None:
            return ()
        return tuple((id_, name) for right, id_, name in self.needs if right == READ and id_)


TRUSTED: Final = HeldRights()
"""Rights of a session that may do everything."""


class RunningRequest(msgspec.Struct, frozen=True, gc=False):
    """A running request and the rights that it needs."""

    session: str
    """Path of its session."""
    request: int
    held: HeldRights


def held_rights(role: str | None, needed: Iterable[NeededRight]) -> HeldRights:
    """Return the rights that a request of a role needs while it runs."""
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
    """Return the rights that a request needs to read these objects."""
    return held_rights(role, ((READ, entry) for entry in inputs))


def lost_right(rules: AccessRules, held: HeldRights) -> AccessDenied | None:
    """Return the refusal for a request that has lost a right, or None if its role still has all of
    them."""
    role = held.role
    if role is None or rules.is_free(role):
        return None
    # A dropped role may do nothing, whatever the request is.
    if role and rules.registry.get(role) is None:
        return AccessDenied(rules.refusal(role, READ))
    # Report the first missing right. A role that has it by another grant may continue.
    for right, id_, name in held.needs:
        if not rules.may(role, right, id_):
            return AccessDenied(rules.refusal(role, right, name))
    return None


def revoked(
    running: Iterable[RunningRequest],
    rules: AccessRules,
    role_of: Callable[[str, str | None], str | None],
) -> Iterator[tuple[RunningRequest, AccessDenied]]:
    """Yield the requests that these rules no longer allow, each with its refusal. `role_of` returns
    a session's current role, from its path and the role that it connected with."""
    # Use the session's current role: a session without one may have created the first role.
    for each in running:
        held = msgspec.structs.replace(each.held, role=role_of(each.session, each.held.role))
        denied = lost_right(rules, held)
        if denied is not None:
            yield each, denied
