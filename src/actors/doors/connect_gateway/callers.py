"""The identity of a Spark Connect caller: the role that its token authenticates, and its
address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple, TypeAlias

from actors.control.access.access_rules import UNPROVEN, TokenLogin

FindRoleOfToken: TypeAlias = Callable[[bytes], Awaitable[TokenLogin]]
"""Returns the role to which the token with this digest belongs."""


class CallerIdentity(NamedTuple):
    """The identity of the client that makes a call."""

    role: str
    """The role's name, or `access_rules.UNPROVEN`."""
    peer: str = ""
    """The client's address, for logs."""
    runs_code: bool = False
    """True if the client may run its own code in Spark."""
    token: bytes = b""
    """Digest of the client's token if it belongs to a role, else empty."""


NOBODY: Final = CallerIdentity(UNPROVEN)
_CALLER: Final[ContextVar[CallerIdentity]] = ContextVar("caller", default=NOBODY)


def caller() -> CallerIdentity:
    """Return the caller of the call that this task serves."""
    return _CALLER.get()


@contextmanager
def use_caller(identity: CallerIdentity) -> Iterator[None]:
    """Set the caller of the call that is served within the block."""
    # A context variable, because many functions between here and its users do not need it.
    token = _CALLER.set(identity)
    try:
        yield
    finally:
        _CALLER.reset(token)
