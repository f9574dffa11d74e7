"""The durable record of all roles, as a controller reads it when it starts."""

from __future__ import annotations

import secrets
from typing import Final

from actors.control.access.role_registry import ROLES_KEY, RoleRegistry
from actors.durable.persist import PersistClient

SECRET_BYTES: Final = 32


async def load_roles(persist: PersistClient) -> tuple[RoleRegistry, int | None]:
    """Return the durable roles and their sequence number (None: there never were any). Raises
    `StateDirectoryError`, `StorageError`."""
    head = await persist.head(ROLES_KEY)
    if head is None:
        # Kept with the first role that is stored; until then no role exists, and all that it makes
        # are verifiers of none.
        return RoleRegistry(secret=secrets.token_bytes(SECRET_BYTES)), None
    return RoleRegistry.decode(head.data), head.seqno
