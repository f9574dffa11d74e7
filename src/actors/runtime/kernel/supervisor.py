"""Supervision: every actor is a task of one system, and its policy decides what a crash does.

An `ActorSystem` owns the actors' tasks, the clock and the random numbers. It stops actors in
reverse order of their start, children before parents, and counts the messages left over.

The `CrashPolicy` of a crashed actor says whether to stop it (its watchers are notified), to restart
it with backoff, or to escalate. Too many restarts escalate as well. An escalation crashes the
nearest ancestor with a restart policy; if there is none, the system halts with `ActorCrashed`. The
lifecycle of one actor is in `actors.runtime.kernel.cell`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from actors.runtime.kernel.actor import ESCALATE, Actor, ActorAddress, ActorCrashed, CrashPolicy
from actors.runtime.kernel.cell import ActorCell
from actors.runtime.kernel.clock import ActorClock, SystemClock
from actors.runtime.kernel.mailbox import BoundedMailbox
from actors.runtime.measurement import Measurement
from actors.runtime.telemetry import ActorStatistics

M = TypeVar("M")
N = TypeVar("N")


class ActorSystem:
    """The root of a service's actors; an async context manager.

    `mailbox` is the default bound of mailboxes. Leaving the context stops all actors and raises
    `ActorCrashed` if a crash has escalated to the system.
    """

    mailbox_type: type[BoundedMailbox[Any]] = BoundedMailbox
    """Class of all mailboxes. Tests set one that copies messages, or that records which actor waits
    for which."""

    def __init__(
        self, *, clock: ActorClock | None = None, seed: int | None = None, mailbox: int = 1024
    ) -> None:
        self.clock: ActorClock = clock or SystemClock()
        self.random = random.Random(seed)
        self.mailbox_messages_max = mailbox
        self.cells: dict[str, ActorCell[Any]] = {}
        """All live actors by path."""
        self.failure: ActorCrashed | None = None
        """The first crash that escalated to the system; None if none has."""
        self._failure_cause: BaseException | None = None
        """The original error of that crash."""
        self.unhandled = 0
        """Number of messages left in the mailboxes of actors that have ended."""
        self._entered = False
        """True once the context was entered."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of the actors that have not ended."""
        self.failed = anyio.Event()
        """Set when a crash has escalated to the system."""
        self._roots: list[ActorCell[Any]] = []
        """The root actors in the order of their start; emptied by `stop`."""

    async def __aenter__(self) -> Self:
        self._entered = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Shielded, so that a cancelled service still stops its actors in order.
        with anyio.CancelScope(shield=True):
            await self.stop()
            if self._tasks:
                await asyncio.wait(self._tasks)
        if self.failure is not None and error is None:
            raise self.failure from self._failure_cause

    def spawn(
        self,
        factory: Callable[[], Actor[M]],
        name: str,
        *,
        mailbox: int | None = None,
        policy: CrashPolicy | None = None,
    ) -> ActorAddress[M]:
        """Start a root actor."""
        return self.spawn_below(None, factory, name, mailbox, policy)

    def spawn_below(
        self,
        parent: ActorCell[Any] | None,
        factory: Callable[[], Actor[M]],
        name: str,
        mailbox: int | None,
        policy: CrashPolicy | None,
    ) -> ActorAddress[M]:
        """Start an actor as a child of `parent`; None starts a root.

        Raises `ValueError` if an actor with this path is alive.
        """
        assert self._entered, "the system has not been entered"
        path = f"{parent.path if parent else ''}/{name}"
        if path in self.cells:
            raise ValueError(f"an actor named {path} is alive")
        limit = mailbox or self.mailbox_messages_max
        cell = ActorCell(self, parent, factory, path, limit, policy or ESCALATE)
        self.cells[path] = cell
        if parent is None:
            self._roots.append(cell)
        else:
            parent.children[path] = cell
        # The task runs in a copy of the spawner's context; `ActorCell.run` resets its variables.
        cell.task = asyncio.get_running_loop().create_task(
            cell.run(), name=path, context=cell.context
        )
        self._tasks.add(cell.task)
        cell.task.add_done_callback(self._tasks.discard)
        return cell.address

    def ended(self, cell: ActorCell[Any]) -> None:
        """Remove an actor that has ended, and count its unhandled messages."""
        self.cells.pop(cell.path, None)
        self.unhandled += cell.mailbox.statistics().unhandled

    def watch(self, other: ActorAddress[Any], watcher: ActorAddress[N], message: N) -> None:
        """Deliver `message` to `watcher` when `other` stops, or now if it has stopped already."""
        cell = self.cells.get(other.path)
        # It has stopped already. Another actor may have its path now.
        if cell is None or cell.address is not other:
            watcher.reply(message)
        else:
            cell.watchers = (*cell.watchers, (watcher, message))

    def fail(self, error: ActorCrashed, cause: BaseException) -> None:
        """Record a crash that escalated to the system, if it is the first, and set `failed`."""
        if self.failure is None:
            self.failure = error
            self._failure_cause = cause
        self.failed.set()

    async def stop(self) -> None:
        """Stop all roots in reverse order of their start, and wait for each."""
        for cell in reversed(self._roots):
            cell.request_stop()
            await cell.stopped.wait()
        self._roots.clear()

    async def stop_root(self, address: ActorAddress[Any]) -> None:
        """Stop one root and wait until it has stopped."""
        for cell in list(self._roots):
            if cell.address is address:
                cell.request_stop()
                await cell.stopped.wait()
                self._roots.remove(cell)

    def abort(self) -> None:
        """Cancel all actors immediately, for when an orderly stop takes too long."""
        for cell in self.cells.values():
            # Effects first, because a cancelled task waits for its effects.
            cell.cancel_effects()
        for task in self._tasks:
            task.cancel()

    def statistics(self) -> list[ActorStatistics]:
        """Return the statistics of every live actor, by path."""
        return [cell.statistics() for _, cell in sorted(self.cells.items())]

    def measures(self) -> Iterator[Measurement]:
        """Yield the measurements of every live actor."""
        for cell in list(self.cells.values()):
            yield from cell.measures()

    def describe(self) -> list[tuple[str, str]]:
        """Return the path of every live actor with the actor's own description."""
        return [(found.path, found.doing) for found in self.statistics()]
