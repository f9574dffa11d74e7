"""Checks the rights of a session and answers the login questions of the listeners. Pure.

A session is one of three kinds:

- *trusted* (`role` is None): it came through the administrators' own listener, or is the service's
  own client;
- *unproven* (`UNPROVEN`): it came through a listener for users without proving a role. It may do
  everything while no role may log in, and nothing once one may;
- a session of a role: it may do what the role may.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.control.access.role_registry import ADMIN, CONNECT, CREATE, EXECUTE_CODE, RoleRegistry
from actors.model.pgwire.scram import ScramVerifier, mock_verifier
from actors.model.protocol.relations import fold
from actors.runtime.errors import AccessDenied
from actors.runtime.progress import ObjectId

UNPROVEN: Final = ""
"""Role of a session that has not proved one."""


class RoleLogin(msgspec.Struct, frozen=True):
    """The facts that a listener needs to authenticate a user.

    For a role that does not exist or may not log in, `verifier` is one that no password matches, so
    the client sees the same answers as for a wrong password.
    """

    wanted: bool
    """True if clients must prove a role."""
    verifier: ScramVerifier
    """Checks the password (SCRAM)."""
    role: str = ""
    """The role's name as it was created; "" if no role of this name may log in."""


class TokenLogin(msgspec.Struct, frozen=True):
    """The role that a token proves."""

    wanted: bool
    """True if clients must prove a role."""
    role: str | None = None
    """None: the token belongs to no role."""
    runs_code: bool = False
    """True if the role may run its own code in Spark."""


class AccessRules(msgspec.Struct, frozen=True):
    """All roles at one moment, and whether clients must prove one before any role may log in."""

    registry: RoleRegistry = RoleRegistry()
    required: bool = False
    """Value of the setting `roles_required`."""

    @property
    def wanted(self) -> bool:
        """Return whether clients must prove a role."""
        return self.required or self.registry.has_logins

    # -- rights ------------------------------------------------------------------------------------

    def is_free(self, role: str | None) -> bool:
        """Return whether a session may do everything."""
        return self.may(role, ADMIN)

    def may(self, role: str | None, right: str, id_: ObjectId | None = None) -> bool:
        """Return whether a session has a right on an object, or on the whole service if `id_` is
        None."""
        if role is None or (role == UNPROVEN and not self.wanted):
            return True
        return self.registry.allows(role, right, id_)

    def check(
        self, role: str | None, right: str, id_: ObjectId | None = None, name: str = ""
    ) -> None:
        """Raise `AccessDenied` unless a session has a right. `name` is the object's name, for the
        error text."""
        if not self.may(role, right, id_):
            raise AccessDenied(self.refusal(role, right, name if id_ is not None else ""))

    def refusal(self, role: str | None, right: str, name: str = "") -> str:
        """Return the text of a refusal, which names the GRANT that would lift it. An empty `name`
        means that a right on the whole service is missing."""
        if not role:
            return (
                "this service requires a role: connect again as a role, with its password, "
                "certificate or token"
            )
        if self.registry.get(role) is None:
            return f"role {role} was dropped: connect again as another role"
        # Spell out the statement, so that an administrator can copy it.
        on = f" ON {name}" if name else ""
        grant = f"GRANT {right.upper()}{on} TO {role}"
        if right == CREATE:
            return f"role {role} may not create objects: ask an administrator for {grant}"
        if right == CONNECT:
            return f"role {role} may not use Spark Connect: ask an administrator for {grant}"
        if right == EXECUTE_CODE:
            return code_refusal(role, "its own code")
        if right == ADMIN and name:
            return (
                f"role {role} neither owns nor administers {name}: ask its owner or an "
                f"administrator for {grant}"
            )
        if right == ADMIN:
            return f"role {role} is not an administrator: ask one for {grant}"
        return f"role {role} may not {right} {name}: ask its owner or an administrator for {grant}"

    # -- logins ------------------------------------------------------------------------------------

    def login(self, name: str) -> RoleLogin:
        """Return what is needed to authenticate a user of this name."""
        entry = self.registry.get(name)
        # Computed for every name, so that the response time does not reveal which roles exist.
        mock = mock_verifier(fold(name), self.registry.secret)
        # Only a client that has proved to be the role may learn that it cannot log in, and no
        # client has proved that yet.
        if entry is None or not entry.login:
            return RoleLogin(self.wanted, mock)
        return RoleLogin(self.wanted, entry.verifier or mock, entry.name)

    def token_login(self, digest: bytes) -> TokenLogin:
        """Return the role that a token with this digest proves."""
        # The listener then checks the token of `token_file`, if one is configured.
        if not self.wanted:
            return TokenLogin(False, runs_code=self.may(UNPROVEN, EXECUTE_CODE))
        role = self.registry.role_of_token(digest)
        return TokenLogin(True, role, role is not None and self.may(role, EXECUTE_CODE))


def code_refusal(role: str, what: str) -> str:
    """Return the refusal for a role that needs EXECUTE CODE to use `what`."""
    return (
        f"role {role} may not use {what}, which can run code or reach files and hosts as the "
        f"service: ask an administrator for GRANT {EXECUTE_CODE.upper()} TO {role}"
    )
