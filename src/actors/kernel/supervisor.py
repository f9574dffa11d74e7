"""Supervision: every actor runs in one task group, and every crash has a named consequence.

A `System` owns the task group, the clock and the randomness. A `Cell` is the running form of
one actor: mailbox, children, effects. Stopping goes children first, in reverse order of their
start; messages left over are counted. A crash does what the actor's `Policy` says: escalate
(the system halts with `ActorCrashed`), stop (watchers are told), or restart with backoff and
an intensity limit, beyond which it escalates.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.abc
import msgspec

from actors.errors import PenstockError
from actors.kernel.actor import Actor, Address, Context
from actors.kernel.clock import Clock, SystemClock
from actors.kernel.mailbox import Mailbox
from actors.telemetry import TRACEPARENT

M = TypeVar("M")
N = TypeVar("N")

log = logging.getLogger("penstock.kernel")

STORY_MESSAGES_MAX = 16


class ActorCrashed(PenstockError):
    """An actor failed by its own fault; carries the story of its last messages."""


class Policy(msgspec.Struct, frozen=True):
    """What a crash of the actor means."""

    kind: str
    restarts_max: int = 0
    within_ms: int = 0
    delay_ms: int = 0


ESCALATE = Policy("escalate")
STOP = Policy("stop")


def restart(restarts_max: int = 5, within_ms: int = 60_000, delay_ms: int = 50) -> Policy:
    """Start afresh after `delay_ms` (doubling), at most `restarts_max` times per `within_ms`."""
    return Policy("restart", restarts_max, within_ms, delay_ms)


class _Stop:
    pass


class Cell(Generic[M]):
    """A running actor."""

    def __init__(
        self,
        system: System,
        parent: Cell[Any] | None,
        factory: Callable[[], Actor[M]],
        path: str,
        limit: int,
        policy: Policy,
    ) -> None:
        self.system = system
        self.parent = parent
        self.factory = factory
        self.path = path
        self.policy = policy
        self.mailbox: Mailbox[M] = Mailbox(path, limit)
        self.address: Address[M] = Address(self.mailbox)
        self.children: dict[str, Cell[Any]] = {}
        self.stopped = anyio.Event()
        self.watchers: list[tuple[Address[Any], Any]] = []
        self.story: deque[str] = deque(maxlen=STORY_MESSAGES_MAX)
        self.actor: Actor[M] | None = None
        self._stopping = False
        self._group: anyio.abc.TaskGroup | None = None
        self._crashes: deque[float] = deque()

    def request_stop(self) -> None:
        """Stops after the current message."""
        self._stopping = True
        self.mailbox.control(_Stop)

    async def stop_child(self, child: Address[Any]) -> None:
        """Stops one child and waits."""
        for cell in list(self.children.values()):
            if cell.address is child or cell.path == child.path:
                cell.request_stop()
                await cell.stopped.wait()

    def start_soon(self, body: Callable[[], Any]) -> None:
        """Runs an effect in this actor's own group."""
        if self._group is not None and not self._stopping:
            self._group.start_soon(body)

    async def run(self) -> None:
        """The whole life, restarts included."""
        broken: str | None = None
        try:
            while True:
                try:
                    await self._live()
                    return
                except Exception as error:  # noqa: BLE001 (a crash of any kind has its policy)
                    cause = _innermost(error)
                    broken = f"{type(cause).__name__}: {cause}"
                    if self._stopping or not await self._survives(cause):
                        return
                    broken = None
        finally:
            with anyio.CancelScope(shield=True):
                await self._end(broken)

    async def _live(self) -> None:
        actor = self.factory()
        actor.ctx = Context(self)
        self.actor = actor
        async with anyio.create_task_group() as group:
            self._group = group
            await actor.on_start()
            await self._serve(actor)
            group.cancel_scope.cancel()
        self._group = None
        await self._stop_children()
        await actor.on_stop()

    async def _serve(self, actor: Actor[M]) -> None:
        while True:
            control, batch = await self.mailbox.receive()
            if control or self._stopping:
                self.mailbox.close(unhandled=len(batch))
                return
            for index, envelope in enumerate(batch):
                self.story.append(type(envelope.message).__name__)
                token = TRACEPARENT.set(envelope.traceparent)
                try:
                    await actor.receive(envelope.message)
                except BaseException:
                    self.mailbox.put_back(batch[index + 1 :])
                    raise
                finally:
                    TRACEPARENT.reset(token)
                if self._stopping:
                    self.mailbox.close(unhandled=len(batch) - index - 1)
                    return

    async def _survives(self, error: BaseException) -> bool:
        """Whether the actor is started afresh; escalates or stops it otherwise."""
        self._group = None
        await self._stop_children()
        story = f"{self.path} failed after {list(self.story)}: {type(error).__name__}: {error}"
        log.error(story, exc_info=error)
        self.mailbox.fail_asks(f"{type(error).__name__}: {error}")
        if self.policy.kind == "restart":
            now = self.system.clock.monotonic_ms()
            self._crashes.append(now)
            while self._crashes and self._crashes[0] < now - self.policy.within_ms:
                self._crashes.popleft()
            if len(self._crashes) <= self.policy.restarts_max:
                delay = self.policy.delay_ms * 2 ** (len(self._crashes) - 1)
                await anyio.sleep(delay / 1000)
                return True
        if self.policy.kind != "stop":
            self.system.fail(ActorCrashed(story), error)
        return False

    async def _stop_children(self) -> None:
        for child in reversed(list(self.children.values())):
            child.request_stop()
            await child.stopped.wait()

    async def _end(self, broken: str | None) -> None:
        await self._stop_children()
        self.mailbox.close(broken=broken)
        if self.parent is not None:
            self.parent.children.pop(self.path, None)
        self.system.cells.pop(self.path, None)
        self.stopped.set()
        for watcher, message in self.watchers:
            watcher.reply(message)


class System:
    """The one task group in which all actors of a service run; an async context manager."""

    def __init__(
        self, *, clock: Clock | None = None, seed: int | None = None, mailbox: int = 1024
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.random = random.Random(seed)
        self.mailbox_messages_max = mailbox
        self.cells: dict[str, Cell[Any]] = {}
        self.failure: ActorCrashed | None = None
        self._failure_cause: BaseException | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self.failed = anyio.Event()
        self._roots: list[Cell[Any]] = []

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._group is not None
        with anyio.CancelScope(shield=True):
            await self.stop()
        self._group.cancel_scope.cancel()
        if isinstance(error, Exception):
            # All actors have stopped: the body's error leaves as it is, not inside a group.
            await self._group.__aexit__(None, None, None)
            return None
        result = await self._group.__aexit__(kind, error, trace)
        if self.failure is not None and error is None:
            raise self.failure from self._failure_cause
        return result

    def spawn(
        self,
        factory: Callable[[], Actor[M]],
        name: str,
        *,
        mailbox: int | None = None,
        policy: Policy | None = None,
    ) -> Address[M]:
        """Starts a root actor."""
        return self.spawn_below(None, factory, name, mailbox, policy)

    def spawn_below(
        self,
        parent: Cell[Any] | None,
        factory: Callable[[], Actor[M]],
        name: str,
        mailbox: int | None,
        policy: Policy | None,
    ) -> Address[M]:
        """Starts an actor below `parent` (None: a root)."""
        assert self._group is not None, "the system has not been entered"
        path = f"{parent.path if parent else ''}/{name}"
        if path in self.cells:
            raise ValueError(f"an actor named {path} is alive")
        limit = mailbox or self.mailbox_messages_max
        cell = Cell(self, parent, factory, path, limit, policy or ESCALATE)
        self.cells[path] = cell
        if parent is None:
            self._roots.append(cell)
        else:
            parent.children[path] = cell
        self._group.start_soon(cell.run, name=path)
        return cell.address

    def watch(self, other: Address[Any], watcher: Address[N], message: N) -> None:
        """Delivers `message` to `watcher` when `other` stops."""
        cell = self.cells.get(other.path)
        if cell is None or cell.address is not other:
            watcher.reply(message)
        else:
            cell.watchers.append((watcher, message))

    def fail(self, error: ActorCrashed, cause: BaseException) -> None:
        """Records the first escalated crash; the owner of the system sees `failed`."""
        if self.failure is None:
            self.failure = error
            self._failure_cause = cause
        self.failed.set()

    async def stop(self) -> None:
        """Stops all roots, last started first, and waits."""
        for cell in reversed(self._roots):
            cell.request_stop()
            await cell.stopped.wait()
        self._roots.clear()

    def abort(self) -> None:
        """Cancels every actor where it stands: for a stop that would take too long."""
        assert self._group is not None, "the system has not been entered"
        self._group.cancel_scope.cancel()

    def describe(self) -> list[tuple[str, str, Any]]:
        """(path, what it does, mailbox statistics) of every live actor."""
        return [
            (path, cell.actor.describe() if cell.actor else "", cell.mailbox.statistics())
            for path, cell in sorted(self.cells.items())
        ]


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
