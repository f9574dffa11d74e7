"""FollowTask: hears what other processes do to the same stores, for as long as the service lives.

It ends the service when that ends: another service has taken the stores over (`Fenced`), or
nothing is heard any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from actors.errors import Closed
from actors.kernel import Actor
from actors.persist import PersistClient

log = logging.getLogger("penstock.service")


class _Ended(msgspec.Struct, frozen=True, gc=False):
    error: Exception


class FollowTask(Actor[_Ended]):
    """`halt` is told why, once."""

    def __init__(self, persist: PersistClient, halt: Callable[[Exception], None]) -> None:
        self._persist = persist
        self._halt = halt

    async def on_start(self) -> None:
        self.ctx.effect(
            self._persist.follow,
            done=lambda _: _Ended(Closed("the stores tell of no changes any more")),
            failed=_Ended,
        )

    async def receive(self, message: _Ended) -> None:
        log.error("halting: %s", message.error)
        self._halt(message.error)
