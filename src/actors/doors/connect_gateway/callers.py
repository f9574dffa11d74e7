"""The caller of a call of Spark Connect: the role that its token proves, and its address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple, TypeAlias

from actors.control.access.access_rules import UNPROVEN, TokenLogin

FindRoleOfToken: TypeAlias = Callable[[bytes], Awaitable[TokenLogin]]
"""Returns the role whose token has a digest."""


class CallerIdentity(NamedTuple):
    """The one that makes a call."""

    role: str
    """See `access.access_rules`."""
    peer: str = ""
    """Address, for people."""
    runs_code: bool = False
    """True if it may run code of its own in Spark."""
    token: bytes = b""
    """Digest of the token that it has shown, if that is a role's."""


NOBODY: Final = CallerIdentity(UNPROVEN)
_CALLER: Final[ContextVar[CallerIdentity]] = ContextVar("caller", default=NOBODY)


def caller() -> CallerIdentity:
    """Return who makes the call that this task serves."""
    return _CALLER.get()


@contextmanager
def use_caller(identity: CallerIdentity) -> Iterator[None]:
    """Serve a call of this caller in the block."""
    # A variable of the task, as a call passes through many functions that do not care.
    token = _CALLER.set(identity)
    try:
        yield
    finally:
        _CALLER.reset(token)
