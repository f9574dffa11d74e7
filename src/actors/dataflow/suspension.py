"""Suspends the computation of a view that is too large for the engine."""

from __future__ import annotations

from actors.errors import JobTooLarge
from actors.settings import Settings


class RecomputeSuspension:
    """Pause before a view that was too large for the engine is computed whole again.

    Meanwhile its steps keep the error that it holds. Each failure doubles the pause.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._failures = 0
        self._until_ms = 0.0
        self._text = ""

    @property
    def begun(self) -> bool:
        """Return whether the last attempt to compute the view failed."""
        return self._failures > 0

    def begin(self, text: str, now_ms: float) -> None:
        """Begin a pause, longer than the last one."""
        self._failures += 1
        self._until_ms = now_ms + self._settings.engine_killer_retry_ms(self._failures)
        self._text = text

    def check(self, now_ms: float) -> None:
        """Raise `JobTooLarge` while the pause lasts."""
        if self._failures and now_ms < self._until_ms:
            raise JobTooLarge(self._text)

    def end(self) -> None:
        """End the suspension: the view could be computed."""
        self._failures = 0


def held_text(error: Exception) -> str:
    """Return the text under which an output holds an error: its message, or `JobTooLarge` with its
    name."""
    return f"{type(error).__name__}: {error}" if isinstance(error, JobTooLarge) else str(error)


def find_held(texts: tuple[str, ...]) -> str:
    """Return the text of a held `JobTooLarge`, or the empty text."""
    prefix = f"{JobTooLarge.__name__}: "
    return next((t.removeprefix(prefix) for t in texts if t.startswith(prefix)), "")
