"""The checks of a session's rights, and what doors ask when a client logs in. Pure.

A session is one of three:

- *trusted* (`role` None): it came by a listener that is the administrators' own, or is the
  service's own client;
- *unproven* (`UNPROVEN`): it came by a door of users, and proved nothing. It may do everything
  while no role may log in, and nothing afterwards;
- a role's: it may do what the role may.
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
"""Role of a session that proved none."""


class RoleLogin(msgspec.Struct, frozen=True):
    """The facts by which a door lets a user in.

    Of a role that does not exist, or may not log in, it has a verifier that no password fits. So
    the door's answers are the same as for a wrong password.
    """

    wanted: bool
    """True if a role must be proved at all."""
    verifier: ScramVerifier
    role: str = ""
    """The role's name as it was created; "" if no role of this name may log in."""


class TokenLogin(msgspec.Struct, frozen=True):
    """The role that a token proves."""

    wanted: bool
    """True if a role must be proved at all."""
    role: str | None = None
    """None: the token is no role's."""
    runs_code: bool = False
    """True if the role may run code of its own in Spark."""


class AccessRules(msgspec.Struct, frozen=True):
    """The roles at one moment, and whether they are wanted before there are any."""

    registry: RoleRegistry = RoleRegistry()
    required: bool = False
    """See the setting `roles_required`."""

    @property
    def wanted(self) -> bool:
        """Return whether clients must prove a role."""
        return self.required or self.registry.has_logins

    # -- rights ------------------------------------------------------------------------------------

    def is_free(self, role: str | None) -> bool:
        """Return whether a session may do everything."""
        return self.may(role, ADMIN)

    def may(self, role: str | None, right: str, id_: ObjectId | None = None) -> bool:
        """Return whether a session has a right on an object, or (None) on the whole service."""
        if role is None or (role == UNPROVEN and not self.wanted):
            return True
        return self.registry.allows(role, right, id_)

    def check(
        self, role: str | None, right: str, id_: ObjectId | None = None, name: str = ""
    ) -> None:
        """Raise `AccessDenied` unless a session has a right; `name` is the object's."""
        if not self.may(role, right, id_):
            raise AccessDenied(self.refusal(role, right, name if id_ is not None else ""))

    def refusal(self, role: str | None, right: str, name: str = "") -> str:
        """Return why a session may not do something, and what would give it the right; `name`
        empty: a right on the whole service is missing."""
        if not role:
            return (
                "roles are in use, and this session has proved none: connect again as a role (with "
                "its password, its certificate or its token)"
            )
        if self.registry.get(role) is None:
            return f"role {role} was dropped: connect again as another one"
        # The statement is written out: whoever may run it can copy it.
        on = f" ON {name}" if name else ""
        grant = f"GRANT {right.upper()}{on} TO {role}"
        if right == CREATE:
            return f"role {role} may not create objects: ask an administrator for {grant}"
        if right == CONNECT:
            return f"role {role} may not use Spark Connect: ask an administrator for {grant}"
        if right == EXECUTE_CODE:
            return code_refusal(role, "code of its own")
        if right == ADMIN and name:
            return (
                f"role {role} neither owns nor administers {name}: ask its owner or an "
                f"administrator for {grant}"
            )
        if right == ADMIN:
            return f"role {role} is no administrator, as this needs: ask one for {grant}"
        return f"role {role} may not {right} {name}: ask its owner or an administrator for {grant}"

    # -- logins ------------------------------------------------------------------------------------

    def login(self, name: str) -> RoleLogin:
        """Return how a user of this name is let in."""
        entry = self.registry.get(name)
        # Made for every name, so that the time taken does not tell which ones there are.
        mock = mock_verifier(fold(name), self.registry.secret)
        # That it may not log in is told only to who has proved to be it, and nobody can here.
        if entry is None or not entry.login:
            return RoleLogin(self.wanted, mock)
        return RoleLogin(self.wanted, entry.verifier or mock, entry.name)

    def token_login(self, digest: bytes) -> TokenLogin:
        """Return the role that a token of this digest proves."""
        # The door then asks for a token of `token_file`, if there is one.
        if not self.wanted:
            return TokenLogin(False, runs_code=self.may(UNPROVEN, EXECUTE_CODE))
        role = self.registry.role_of_token(digest)
        return TokenLogin(True, role, role is not None and self.may(role, EXECUTE_CODE))


def code_refusal(role: str, what: str) -> str:
    """Return why a role may not use something of Spark without the right to run code."""
    return (
        f"role {role} may not use {what}: it may run code, or reach files and addresses, as the "
        f"service itself; ask an administrator for GRANT {EXECUTE_CODE.upper()} TO {role}"
    )
