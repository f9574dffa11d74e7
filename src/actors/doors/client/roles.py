"""Calls of the Python client about roles and their rights; a base of `Client`.

    await client.create_role("reader", login=True, verifier=make_verifier(password, salt).text())
    await client.change_rights(["reader"], ["read"], names=["orders"])
    print(await client.roles())

Passwords and tokens are made by the caller: the service is sent what checks them, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from actors.doors.client.requests import RequestExchange
from actors.model.protocol.api import RequestDone, SignalSession
from actors.model.protocol.role_messages import (
    AlterRole,
    ChangeRights,
    CheckRight,
    CreateRole,
    DropRoles,
    ListRoles,
    RolesReport,
)


class ClientRoles:
    """Calls about roles."""

    _exchange: RequestExchange

    async def create_role(self, name: str, *, login: bool = False, verifier: str = "") -> str:
        """Create a role; return a notice, if there is one. `verifier`: see
        `pgwire.scram.ScramVerifier.text`. Raises `ObjectExists`, `InvalidUsage`, `AccessDenied`,
        `StorageError`."""
        request = CreateRole(self._exchange.number(), name, login, verifier)
        return (await self._exchange.ask(request, RequestDone)).text

    async def alter_role(
        self,
        name: str,
        *,
        login: bool | None = None,
        verifier: str | None = None,
        add_token: bytes = b"",
        drop_tokens: bool = False,
    ) -> str:
        """Change a role; see `AlterRole`. Return a notice, if there is one. Raises `UnknownObject`
        and as `create_role` does."""
        number = self._exchange.number()
        request = AlterRole(number, name, login, verifier, add_token, drop_tokens)
        return (await self._exchange.ask(request, RequestDone)).text

    async def drop_roles(self, names: Sequence[str], *, if_exists: bool = False) -> str:
        """Drop roles, all or none; return a line for each that was not there. Raises as
        `alter_role` does."""
        request = DropRoles(self._exchange.number(), tuple(names), if_exists)
        return (await self._exchange.ask(request, RequestDone)).text

    async def change_rights(
        self,
        roles: Sequence[str],
        rights: Sequence[str],
        *,
        scope: Literal["service", "objects", "tables"] = "objects",
        names: Sequence[str] = (),
        revoke: bool = False,
    ) -> None:
        """Grant rights to roles, or revoke them; see `ChangeRights`. Raises `UnknownObject` and as
        `create_role` does."""
        number = self._exchange.number()
        request = ChangeRights(number, tuple(roles), tuple(rights), scope, tuple(names), revoke)
        await self._exchange.ask(request, RequestDone)

    async def roles(self) -> RolesReport:
        """Return all roles, with their rights."""
        return await self._exchange.ask(ListRoles(self._exchange.number()), RolesReport)

    async def end_session(self, number: int, *, cancel: bool = False) -> None:
        """End a session of any door, by its number in ``penstock.sessions``; with `cancel` only
        what it runs. Raises `UnknownObject`, `AccessDenied`."""
        request = SignalSession(self._exchange.number(), number, not cancel)
        await self._exchange.ask(request, RequestDone)

    async def check_right(self, right: str, name: str) -> None:
        """Raise `AccessDenied` unless this connection has a right on an object now."""
        await self._exchange.ask(CheckRight(self._exchange.number(), right, name), RequestDone)
