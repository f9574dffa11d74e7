"""Deadlines that pass when a test says so: how fast the machine is decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from actors.runtime.kernel import ActorContext, RunningEffect

NEVER_MS = 600_000


class Deadlines:
    """Of all timers with one kind of message. They are begun and cancelled as ever, and only their
    end is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        self._begun: list[tuple[float, Callable[[], Any]]] = []
        begin = ActorContext.after

        def after(ctx: ActorContext[Any], delay_ms: float, message: Any) -> RunningEffect:
            if not isinstance(message, kind):
                return begin(ctx, delay_ms, message)
            self._begun.append((delay_ms, partial(ctx.self.reply, message)))
            return begin(ctx, NEVER_MS, message)

        monkeypatch.setattr(ActorContext, "after", after)

    def end(self, delay_ms: float) -> None:
        """The one that was begun last for so long has passed."""
        passes = [message for begun_ms, message in self._begun if begun_ms == delay_ms]
        passes[-1]()
