"""A loop in which a process can die: its callbacks never run again, and clean nothing up.

All code of one life of the simulated process runs in contexts that carry the life's number. `kill`
takes the number: from then on no callback of such a context runs, no timer of it fires. That is the
effect of ``kill -9``; cancelling tasks is not: they would run their ``finally``.

Tasks hash by their serial number, and scopes by their task's, so that sets of them are iterated in
the same order in every process: anyio cancels a scope's tasks in the order of such sets.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import warnings
from collections.abc import Coroutine, Generator, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final

from anyio._backends._asyncio import CancelScope

from actors.testing.virtual_time import VirtualTimeLoop

LIFE: ContextVar[int] = ContextVar("life", default=0)
"""Number of the process's running life; 0 outside the process."""


TURNS_MAX: Final = 60_000
"""Most turns of the loop in one run; the longest need a tenth of it."""

CLOSES_MAX: Final = 20
"""Most awaits in a ``finally`` of one coroutine that is buried."""


class EndlessRun(Exception):
    """Raised when a run does not end."""


class _Task(asyncio.Task[Any]):
    serial = 0

    def __hash__(self) -> int:
        return self.serial


def _hash_of_scope(scope: CancelScope) -> int:
    """Return the hash of the scope's task; two scopes of one task are never children of the same
    scope at a time."""
    return hash(scope._host_task)


class CrashableLoop(VirtualTimeLoop):
    """A loop in which lives can be killed; see the module's docstring."""

    def __init__(self, seed: int | str | None = None) -> None:
        super().__init__(seed)
        self._virtual.polls = False  # a run has no threads
        self._serial = 0
        self.turns = 0
        self._dead: set[int] = set()
        self._tasks: dict[int, tuple[_Task, Context]] = {}
        self.set_task_factory(self._make)

    def _make(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        self._serial += 1
        serial = _Task.serial = self._serial  # the constructor hashes it already
        context = copy_context() if context is None else context
        task = _Task(coro, loop=loop, context=context)
        task.serial = serial
        self._tasks[serial] = (task, context)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(hash(task), None)

    def run_forever(self) -> None:
        """Run as asyncio does; meanwhile scopes are hashed by their tasks."""
        hashed: Any = CancelScope
        before, hashed.__hash__ = hashed.__hash__, _hash_of_scope
        try:
            super().run_forever()
        finally:
            hashed.__hash__ = before

    def kill(self, life: int) -> None:
        """Let no code of that life run from now on."""
        self._dead.add(life)
        self._drop()
        timers: Any = self._scheduled  # type: ignore[attr-defined] # asyncio's own heap
        for handle in list(timers):
            if handle._context.get(LIFE, 0) in self._dead:
                handle.cancel()

    def _drop(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined] # asyncio's own queue
        for handle in ready:
            if handle._context.get(LIFE, 0) in self._dead:
                handle.cancel()

    def _run_once(self) -> None:
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise EndlessRun(f"no end in {TURNS_MAX} turns of the loop, at {self.time():.1f} s")
        if self._dead:
            self._drop()
        super()._run_once()

    def close_killed_tasks(self) -> None:
        """Close the coroutines of killed lives; to be called when no code of the run runs any
        more."""
        for _, (task, context) in sorted(self._tasks.items(), reverse=True):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coro = task.get_coro()
            for _ in range(CLOSES_MAX):
                try:
                    if coro is not None:
                        context.run(coro.close)
                except BaseException:  # noqa: BLE001 (it awaits while it ends: once more)
                    continue
                break
        self._tasks.clear()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Silence the warnings that closing half-done coroutines causes."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
