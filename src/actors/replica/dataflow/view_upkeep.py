"""Runs a view's background work alongside its steps, one task of each kind at a time.

The tasks fill state before the first step, rehearse frequent plans, merge the runs of arrangements,
and advance the holds on the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from actors.replica.dataflow.view import ViewStages
from actors.runtime.kernel import ActorContext, RunningEffect
from actors.runtime.progress import Frontier

log = logging.getLogger("penstock.dataflow")


class ViewUpkeep:
    """Background work of one view. Advances holds at most once per `holds_interval_ms`."""

    def __init__(self, ctx: ActorContext[Any], view: ViewStages, holds_interval_ms: int) -> None:
        self._ctx = ctx
        self._view = view
        self._holds_interval_ms = holds_interval_ms
        self._warming: list[RunningEffect] = []
        """Preparations in progress or done, until they are cancelled."""
        self._merging = self._rehearsing = False
        """True while runs are merged, and while a plan is rehearsed."""
        self._moving_holds = False
        """True while holds are advanced."""
        self._holds_moved_ms = float("-inf")
        """Monotonic time at which holds were last advanced."""

    def rehearse_first(self, incarnation: int) -> None:
        """Have plans built while the first contents are computed.

        This may take longer than computing them: a step waits only for the plan that it needs.
        """
        self._warm(lambda: self._view.rehearse_first(incarnation))

    def warm(self, incarnation: int) -> None:
        """Prepare state for the first step, outside the machine."""
        self._warm(lambda: self._view.warm(incarnation))

    def _warm(self, make: Callable[[], Awaitable[None]]) -> None:
        self._warming.append(
            self._ctx.effect(
                make,
                done=lambda _: None,
                # Not fatal: a step that needs the state tries again and raises the error.
                failed=lambda error: log.info("%s: cannot warm up: %s", self._ctx.path, error),
            )
        )

    def cancel(self) -> None:
        """Cancel the preparation of state."""
        for each in self._warming:
            each.cancel()
        self._warming = []

    def rehearse(self, incarnation: int) -> None:
        """Have the engine build a plan, if it recommended one."""
        if self._rehearsing or not self._view.rehearsal_due:
            return
        self._rehearsing = True

        def rehearsed(_: Any) -> None:
            self._rehearsing = False

        make = partial(self._view.rehearse, incarnation)
        self._ctx.effect(make, done=rehearsed, failed=rehearsed)

    def merge(self) -> None:
        """Merge arrangements, off the critical path of the steps."""
        if self._merging or not self._view.merge_due():
            return
        self._merging = True

        def merged(_: Any) -> None:
            self._merging = False

        self._ctx.effect(self._view.merge, done=merged, failed=merged)

    def move_holds(self, lo: Frontier) -> None:
        """Advance the holds, unless that was done recently."""
        # Limit the rate, because each move is a compare-and-set on every import.
        now = self._ctx.monotonic_ms()
        if self._moving_holds or now - self._holds_moved_ms < self._holds_interval_ms:
            return
        self._moving_holds, self._holds_moved_ms = True, now

        def moved(_: Any) -> None:
            self._moving_holds = False

        self._ctx.effect(lambda: self._view.move_holds(lo), done=moved, failed=moved)
