"""SET ROLE and SET SESSION AUTHORIZATION: the role that a session acts as. Pure.

As in PostgreSQL, without members of roles: an administrator may become any role, and every role
itself. From then on all checks of the session's rights are those of that role. SET ROLE is checked
against the session's role, SET SESSION AUTHORIZATION against the one that the client has proved.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from actors.control.access.access_rules import UNPROVEN
from actors.control.access.open_sessions import OpenSession
from actors.model.protocol.relations import fold
from actors.runtime.errors import AccessDenied, InvalidUsage

NONE: Final = "none"
"""Name that is no role's: ``SET ROLE NONE`` goes back to the session's own role."""


class RoleChoice(NamedTuple):
    """The roles of a session at one moment, to go back to."""

    session_role: str | None
    role: str | None


def role_choice(session: OpenSession) -> RoleChoice:
    """Return the present roles of a session."""
    return RoleChoice(session.session_role, session.role)


def restore_role(session: OpenSession, choice: RoleChoice) -> None:
    """Go back to the roles that a session had."""
    # One that had proved no role may have made the first one since, and goes on as that.
    session.session_role, session.role = (
        session.login_role if role == UNPROVEN else role for role in choice
    )


def set_role(session: OpenSession, name: str) -> None:
    """Act as a role from now on; "none": as the session's own. Raises `InvalidUsage` for one that
    does not exist, `AccessDenied` for one that the session may not become."""
    if fold(name) == NONE:
        session.role = session.session_role
    else:
        session.role = _become(session, session.session_role, name, "set role")


def set_session_authorization(session: OpenSession, name: str | None) -> None:
    """Make a role the session's own, and act as it; None: the one that the client has proved.
    Raises as `set_role` does."""
    if name is None:
        session.session_role = session.login_role
    else:
        session.session_role = _become(
            session, session.login_role, name, "set session authorization to"
        )
    session.role = session.session_role


def _become(session: OpenSession, own: str | None, name: str, what: str) -> str | None:
    """Return the role of a name, if a session of the role `own` may become it."""
    # Needs no right, as pools set the role that they have logged in as.
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
