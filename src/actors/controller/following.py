"""FollowTask: watches the changes that other processes make to the same stores.

It halts the service when the watch ends: another service has taken over the stores
(`WriterFenced`), or the stores report no changes any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from actors.errors import ResourceClosed
from actors.kernel import Actor
from actors.persist import PersistClient

log = logging.getLogger("penstock.service")


class _Ended(msgspec.Struct, frozen=True, gc=False):
    error: Exception


class FollowTask(Actor[_Ended]):
    """Calls `halt` once, with the error."""

    def __init__(self, persist: PersistClient, halt: Callable[[Exception], None]) -> None:
        self._persist = persist
        self._halt = halt

    async def on_start(self) -> None:
        self.ctx.effect(
            self._persist.follow,
            done=lambda _: _Ended(ResourceClosed("the stores tell of no changes any more")),
            failed=_Ended,
        )

    async def receive(self, message: _Ended) -> None:
        log.error("halting: %s", message.error)
        self._halt(message.error)
