"""Runs a view's upkeep beside its steps, one task of a kind at a time.

The tasks fill state before the first step, rehearse frequent plans, merge the runs of
arrangements and advance the holds on the inputs.
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
    """Upkeep of one view. Advances holds at most once per `holds_interval_ms`."""

    def __init__(self, ctx: ActorContext[Any], view: ViewStages, holds_interval_ms: int) -> None:
        self._ctx = ctx
        self._view = view
        self._holds_interval_ms = holds_interval_ms
        self._warming: list[RunningEffect] = []
        self._merging = self._rehearsing = False
        self._moving_holds = False
        self._holds_moved_ms = float("-inf")

    def rehearse_first(self, incarnation: int) -> None:
        """Have plans built while the first contents are computed.

        It may take longer than that: a step waits only for the plan that it needs.
        """
        self._warm(lambda: self._view.rehearse_first(incarnation))

    def warm(self, incarnation: int) -> None:
        """Prepare state for the first step, beside the machine."""
        self._warm(lambda: self._view.warm(incarnation))

    def _warm(self, make: Callable[[], Awaitable[None]]) -> None:
        self._warming.append(
            self._ctx.effect(
                make,
                done=lambda _: None,
                # Not fatal: a step that needs the state retries this, and raises the error.
                failed=lambda error: log.info("%s: not warmed: %s", self._ctx.path, error),
            )
        )

    def cancel(self) -> None:
        """Cancel the preparation of state."""
        for each in self._warming:
            each.cancel()
        self._warming = []

    def rehearse(self, incarnation: int) -> None:
        """Have the engine build a plan, if it recommended that."""
        if self._rehearsing or not self._view.rehearsal_due:
            return
        self._rehearsing = True

        def rehearsed(_: Any) -> None:
            self._rehearsing = False

        make = partial(self._view.rehearse, incarnation)
        self._ctx.effect(make, done=rehearsed, failed=rehearsed)

    def merge(self) -> None:
        """Merge arrangements, off the path of the steps."""
        if self._merging or not self._view.merge_due():
            return
        self._merging = True

        def merged(_: Any) -> None:
            self._merging = False

        self._ctx.effect(self._view.merge, done=merged, failed=merged)

    def move_holds(self, lo: Frontier) -> None:
        """Advance the holds, unless that was done recently."""
        # Rate-limited: each move is a compare-and-set on every import.
        now = self._ctx.monotonic_ms()
        if self._moving_holds or now - self._holds_moved_ms < self._holds_interval_ms:
            return
        self._moving_holds, self._holds_moved_ms = True, now

        def moved(_: Any) -> None:
            self._moving_holds = False

        self._ctx.effect(lambda: self._view.move_holds(lo), done=moved, failed=moved)
