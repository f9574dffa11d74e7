"""What a view's actor does beside its steps, one of a kind at a time: readying state before the
first one, having plans made of those that come often, merging what steps have put into
arrangements, moving the holds on its inputs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from actors.dataflow.view import View
from actors.kernel import Context, Effect
from actors.progress import Frontier

log = logging.getLogger("penstock.dataflow")


class Upkeep:
    """Of one view. A hold is moved no more often than every `holds_interval_ms`."""

    def __init__(self, ctx: Context[Any], view: View, holds_interval_ms: int) -> None:
        self._ctx = ctx
        self._view = view
        self._holds_interval_ms = holds_interval_ms
        self._warming: list[Effect] = []
        self._merging = self._rehearsing = False
        self._moving_holds = False
        self._holds_moved_ms = float("-inf")

    def rehearse_first(self, incarnation: int) -> None:
        """Have plans built beside the first contents, and behind them where that takes longer: a
        step waits for the one that it needs, at most."""
        self._warm(lambda: self._view.rehearse_first(incarnation))

    def warm(self, incarnation: int) -> None:
        """Readies state beside the machine. A step that needs it looks for itself, and meets
        what made this fail."""
        self._warm(lambda: self._view.warm(incarnation))

    def _warm(self, make: Callable[[], Awaitable[None]]) -> None:
        self._warming.append(
            self._ctx.effect(
                make,
                done=lambda _: None,
                failed=lambda error: log.info("%s: not warmed: %s", self._ctx.path, error),
            )
        )

    def cancel(self) -> None:
        """No state is wanted ready any more."""
        for each in self._warming:
            each.cancel()
        self._warming = []

    def rehearse(self, incarnation: int) -> None:
        """Has the engine make a plan, where it said that this pays."""
        if self._rehearsing or not self._view.rehearsal_due:
            return
        self._rehearsing = True

        def rehearsed(_: Any) -> None:
            self._rehearsing = False

        make = partial(self._view.rehearse, incarnation)
        self._ctx.effect(make, done=rehearsed, failed=rehearsed)

    def merge(self) -> None:
        """Off the path of the steps."""
        if self._merging or not self._view.merge_due():
            return
        self._merging = True

        def merged(_: Any) -> None:
            self._merging = False

        self._ctx.effect(self._view.merge, done=merged, failed=merged)

    def move_holds(self, lo: Frontier) -> None:
        """Lazily: a move is a compare-and-set on every import."""
        now = self._ctx.monotonic_ms()
        if self._moving_holds or now - self._holds_moved_ms < self._holds_interval_ms:
            return
        self._moving_holds, self._holds_moved_ms = True, now

        def moved(_: Any) -> None:
            self._moving_holds = False

        self._ctx.effect(lambda: self._view.move_holds(lo), done=moved, failed=moved)
