"""SET ROLE and SET SESSION AUTHORIZATION: choose the role that a session acts as. Pure.

As in PostgreSQL, but without role membership: an administrator may become any role, every other
role only itself. All later checks of the session's rights use that role. SET ROLE is checked
against the session's role, SET SESSION AUTHORIZATION against the role that the client has proved.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from actors.control.access.access_rules import UNPROVEN
from actors.control.access.open_sessions import OpenSession
from actors.model.protocol.relations import fold
from actors.runtime.errors import AccessDenied, InvalidUsage

NONE: Final = "none"
"""Not a role: ``SET ROLE NONE`` returns to the session's own role."""


class RoleChoice(NamedTuple):
    """The roles of a session at one moment, so that they can be restored."""

    session_role: str | None
    role: str | None


def role_choice(session: OpenSession) -> RoleChoice:
    """Return the current roles of a session."""
    return RoleChoice(session.session_role, session.role)


def restore_role(session: OpenSession, choice: RoleChoice) -> None:
    """Restore earlier roles of a session."""
    # A session without a role may since have created the first one: it continues as that role.
    session.session_role, session.role = (
        session.login_role if role == UNPROVEN else role for role in choice
    )


def set_role(session: OpenSession, name: str) -> None:
    """Act as the named role from now on, or for "none" as the session's own role. Raises
    `InvalidUsage` if the role does not exist, `AccessDenied` if the session may not become it."""
    if fold(name) == NONE:
        session.role = session.session_role
    else:
        session.role = _become(session, session.session_role, name, "set role")


def set_session_authorization(session: OpenSession, name: str | None) -> None:
    """Make the named role the session's own and act as it; None restores the role that the client
    has proved. Raises as `set_role` does."""
    if name is None:
        session.session_role = session.login_role
    else:
        session.session_role = _become(
            session, session.login_role, name, "set session authorization to"
        )
    session.role = session.session_role


def _become(session: OpenSession, own: str | None, name: str, what: str) -> str | None:
    """Return the role's name as it was created, if a session of the role `own` may become it."""
    # Always allowed without a lookup: connection pools set the role that they logged in as.
    if own and fold(own) == fold(name):
        return own
    rules = session.rules
    entry = rules.registry.get(name)
    if entry is None:
        raise InvalidUsage(f'role "{name}" does not exist')
    if not rules.is_free(own):
        raise AccessDenied(
            f'permission denied to {what} "{entry.name}": only an administrator may become '
            "another role"
        )
    return entry.name
