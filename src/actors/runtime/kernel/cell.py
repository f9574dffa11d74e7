"""The running form of an actor: its task, its effects, its children, its end.

An actor has one task, which takes all waiting messages of the mailbox in one batch and handles them
one by one. Effects have tasks of their own; an effect that fails without a `failed` handler crashes
its actor at once. An actor ends in this order: its effects are cancelled, its children stop (the
last first), `on_stop` runs, messages left in the mailbox are counted, owed replies fail, watchers
are notified.

Invariants: a message is handled once, put back (the crash came before its turn) or counted; no
effect outlives its actor's `on_stop`; we cancel the task only while it serves, so that our cancel
differs from one of another task, and never strikes later code.

Cost. Nothing is allocated for a message, nor for an idle actor: fields of effects, children and
traces are made on demand.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import anyio

from actors.runtime.kernel.actor import (
    HANDLING,
    Actor,
    ActorAddress,
    ActorContext,
    ActorCrashed,
    CrashPolicy,
)
from actors.runtime.kernel.mailbox import BoundedMailbox, LatchedFlag
from actors.runtime.measurement import Measurement
from actors.runtime.metric_table import (
    ACTOR_BUSY_SECONDS,
    MAILBOX_DEPTH,
    MAILBOX_DEPTH_MAX,
    MAILBOX_RECEIVED,
)
from actors.runtime.telemetry import (
    TRACEPARENT,
    ActorStatistics,
    TracedMessage,
    activate_context,
    deactivate_context,
)

if TYPE_CHECKING:
    from actors.runtime.kernel.supervisor import ActorSystem

M = TypeVar("M")
T = TypeVar("T")

log = logging.getLogger("penstock.kernel")

STORY_MESSAGES_MAX: Final = 16


class _Stop:
    """The only control message."""


class MessageTimer(Generic[M]):
    """A message that is delivered later. It has no task, only a handle of the event loop."""

    __slots__ = ("_cell", "_message", "handle")

    def __init__(self, cell: ActorCell[M], message: M) -> None:
        self._cell = cell
        self._message = message
        self.handle: asyncio.TimerHandle | None = None
        """None after it fired or was cancelled, and in an actor that stops."""

    def fire(self) -> None:
        """Deliver the message: the delay is over."""
        self.handle = None
        self._cell.fired(self, self._message)

    def cancel(self) -> None:
        """Cancel it; harmless after it has fired."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.cancel()
            self._cell.forget(self)


class ActorCell(Generic[M]):
    """A running actor."""

    __slots__ = (
        "_begun",
        "_crash",
        "_crashes",
        "_effects",
        "_idle",
        "_serving",
        "_stopping",
        "_story",
        "actor",
        "address",
        "busy_ms",
        "children",
        "context",
        "crashes",
        "factory",
        "mailbox",
        "parent",
        "path",
        "policy",
        "stopped",
        "system",
        "task",
        "watchers",
    )

    def __init__(
        self,
        system: ActorSystem,
        parent: ActorCell[Any] | None,
        factory: Callable[[], Actor[M]],
        path: str,
        limit: int,
        policy: CrashPolicy,
    ) -> None:
        self.system = system
        self.parent = parent
        self.factory = factory
        self.path = path
        self.policy = policy
        self.mailbox: BoundedMailbox[M] = system.mailbox_type(path, limit)
        self.address: ActorAddress[M] = ActorAddress(self.mailbox)
        self.children: dict[str, ActorCell[Any]] = {}
        self.stopped = LatchedFlag()
        self.watchers: tuple[tuple[ActorAddress[Any], Any], ...] = ()
        self.actor: Actor[M] | None = None
        self.task: asyncio.Task[None] | None = None
        self.context = contextvars.copy_context()
        """Context of the task and its timers."""
        self.busy_ms = 0.0
        """Time in `receive`, its waits included."""
        self.crashes = 0
        self._begun = False
        """True from the end of `on_start`: the actor has all of its parts."""
        self._serving = False
        self._stopping = False
        self._crash: Exception | None = None
        """Failure of an effect or a child."""
        self._effects: (
            dict[anyio.CancelScope | MessageTimer[M], asyncio.Task[None] | None] | None
        ) = None
        self._idle: LatchedFlag | None = None
        """Set when the last effect has ended."""
        self._crashes: tuple[float, ...] = ()
        self._story: deque[type[Any]] | None = None
        """Types of the messages handled last, up to the current batch."""

    def request_stop(self) -> None:
        """Stop after the current message."""
        self._stopping = True
        self.mailbox.control(_Stop)

    async def stop_child(self, child: ActorAddress[Any]) -> None:
        """Stop one child and wait."""
        for cell in list(self.children.values()):
            if cell.address is child or cell.path == child.path:
                cell.request_stop()
                await cell.stopped.wait()

    def statistics(self) -> ActorStatistics:
        """Return the statistics, for operators."""
        box = self.mailbox.statistics()
        return ActorStatistics(
            path=self.path,
            state=self._state(),
            doing=self.actor.describe() if self.actor else "",
            depth=box.depth,
            depth_max=box.depth_max,
            limit=box.limit,
            senders_waiting=box.senders_waiting,
            received=box.received,
            busy_ms=self.busy_ms,
            effects=len(self._effects or ()),
            crashes=self.crashes,
        )

    def measures(self) -> Iterator[Measurement]:
        """Yield the measurements of the mailbox, and the actor's own once it has started."""
        box, path = self.mailbox.statistics(), (self.path,)
        yield Measurement(MAILBOX_DEPTH, box.depth, path)
        yield Measurement(MAILBOX_DEPTH_MAX, box.depth_max, path)
        yield Measurement(MAILBOX_RECEIVED, box.received, path)
        yield Measurement(ACTOR_BUSY_SECONDS, self.busy_ms / 1000, path)
        if self._begun and self.actor is not None:
            yield from self.actor.measures()

    def _state(self) -> str:
        mailbox = self.mailbox
        if mailbox.asking:
            return f"asks {', '.join(box.path for box, _ in mailbox.asking)}"
        if mailbox.current is not None:
            return f"handles {type(mailbox.current).__name__}"
        if self._stopping:
            return "stops"
        if not self._serving:
            return "restarts" if self.crashes else "starting"
        return "idle"

    # -- effects ---------------------------------------------------------------------------------

    def start(
        self,
        run: Callable[[], Awaitable[T]],
        done: Callable[[T], M | None],
        failed: Callable[[Exception], M | None] | None,
    ) -> anyio.CancelScope:
        """Run an effect beside the actor; the scope cancels it, and so does the actor's end."""
        scope = anyio.CancelScope()
        if self._serving and not self._stopping:
            if self._effects is None:
                self._effects = {}
            body = self._effect(scope, run, done, failed)
            self._effects[scope] = asyncio.get_running_loop().create_task(body)
        return scope

    def after(self, delay_ms: float, message: M) -> MessageTimer[M]:
        """Deliver `message` to the actor itself after the delay, unless it is cancelled or has
        ended."""
        timer = MessageTimer(self, message)
        if self._serving and not self._stopping:
            if self._effects is None:
                self._effects = {}
            self._effects[timer] = None
            timer.handle = asyncio.get_running_loop().call_later(
                delay_ms / 1000, timer.fire, context=self.context
            )
        return timer

    def fired(self, timer: MessageTimer[M], message: M) -> None:
        """Deliver a timer's message."""
        self.forget(timer)
        # The message being handled meanwhile is not the timer's cause.
        token = TRACEPARENT.set(None)
        self.mailbox.deliver_own(message)
        TRACEPARENT.reset(token)

    def forget(self, effect: anyio.CancelScope | MessageTimer[M]) -> None:
        """Remove an effect or timer that is over."""
        assert self._effects is not None, "it was started"
        self._effects.pop(effect, None)
        if self._idle is not None and not self._effects:
            self._idle.set()

    async def _effect(
        self,
        scope: anyio.CancelScope,
        run: Callable[[], Awaitable[T]],
        done: Callable[[T], M | None],
        failed: Callable[[Exception], M | None] | None,
    ) -> None:
        HANDLING.set(None)
        TRACEPARENT.set(None)  # most effects outlive their cause; others set their own
        message: M | None = None
        try:
            with scope:
                try:
                    message = done(await run())
                except Exception as error:
                    if failed is None:
                        raise
                    message = failed(error)
                # It may have been cancelled right after its await completed.
                if message is not None and not scope.cancel_called:
                    self.mailbox.deliver_own(message)
        except Exception as error:  # noqa: BLE001 (the actor crashes by it)
            self.crash(error)
        finally:
            # An error holds this frame by its traceback, and the message may hold the error in a
            # struct without gc: a cycle that the garbage collector cannot see.
            message = None
            self.forget(scope)

    def crash(self, error: Exception) -> None:
        """Crash the actor at once, by a failure of an effect or a child; unless it ends anyhow."""
        # Only while it serves: `_live` then knows this cancel for ours, and takes it back.
        if self._crash is None and self._serving:
            self._crash = error
            assert self.task is not None, "it serves"
            self.task.cancel()

    def cancel_effects(self) -> None:
        """Cancel all effects and timers."""
        for effect in list(self._effects or ()):
            effect.cancel()

    async def _end_effects(self) -> None:
        self.cancel_effects()
        if self._effects:
            self._idle = LatchedFlag()
            await self._idle.wait()
            self._idle = None

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the whole life, restarts included."""
        HANDLING.set(self.mailbox)
        TRACEPARENT.set(None)  # the context was copied from the spawning task
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
            await self._end(broken)

    async def _live(self) -> None:
        actor = self.factory()
        actor.ctx = ActorContext(self)
        self.actor = actor
        self._serving = True
        try:
            try:
                await actor.on_start()
                self._begun = True
                await self._serve(actor)
            except asyncio.CancelledError:
                if self._crash is None:
                    raise
            finally:
                self._begun = self._serving = False
            if self._crash is not None:
                raise self._crash
        finally:
            if self._crash is not None:
                assert self.task is not None, "it has served"
                # Our own cancel: taken back, so that the task counts only those of other tasks.
                self.task.uncancel()
                self._crash = None
            # First of the end: no effect may run beside `on_stop`.
            await self._end_effects()
        await self._stop_children()
        await actor.on_stop()

    async def _serve(self, actor: Actor[M]) -> None:
        mailbox, receive = self.mailbox, actor.receive
        while True:
            while not (batch := mailbox.take()) and mailbox.urgent is None:
                await mailbox.arrival()
            if self._story is None:
                self._story = deque(maxlen=STORY_MESSAGES_MAX)
            if mailbox.urgent is not None:
                # A stop overtakes the batch: its messages are counted as unhandled.
                mailbox.close(unhandled=len(batch))
                return
            began = perf_counter()
            mailbox.batch = batch
            taken = 0
            try:
                for message in batch:
                    taken += 1
                    mailbox.current = message
                    if isinstance(message, TracedMessage):
                        await self._traced(actor, batch, taken - 1)
                    elif (waits := receive(message)) is not None:
                        await waits
                    if self._crash is not None:
                        raise self._crash  # the handler swallowed the cancel
                    if mailbox.urgent is not None:
                        mailbox.close(unhandled=len(batch) - taken)
                        return
                del message  # an idle actor must not keep handled messages alive
            except BaseException:
                # Without the failed one: a message is handled once.
                mailbox.put_back(batch[taken:])
                raise
            finally:
                self.busy_ms += (perf_counter() - began) * 1000
                # Once a batch: a record for each message would cost more.
                self._story.extend(map(type, batch[max(0, taken - STORY_MESSAGES_MAX) : taken]))
                mailbox.batch, mailbox.current = [], None

    async def _traced(self, actor: Actor[M], batch: list[M | TracedMessage[M]], place: int) -> None:
        traced = batch[place]
        assert isinstance(traced, TracedMessage), "the caller has looked"
        self.mailbox.current = batch[place] = message = traced.message
        token = activate_context(traced.traceparent)
        try:
            if (waits := actor.receive(message)) is not None:
                await waits
        finally:
            deactivate_context(token)

    async def _survives(self, error: BaseException) -> bool:
        """Apply the policy to a crash; return whether the actor is restarted."""
        self.crashes += 1
        await self._stop_children()
        kinds = [kind.__name__ for kind in self._story or ()]
        story = f"{self.path} failed after {kinds}: {type(error).__name__}: {error}"
        log.error(story, exc_info=error)
        # Also before a restart: the new actor knows nothing of the answers that the old one owed.
        self.mailbox.fail_asks(f"{type(error).__name__}: {error}")
        if self.policy.kind == "restart":
            now = self.system.clock.monotonic_ms()
            since = now - self.policy.within_ms
            self._crashes = (*(at for at in self._crashes if at >= since), now)
            if len(self._crashes) <= self.policy.restarts_max:
                delay = self.policy.delay_ms * 2 ** (len(self._crashes) - 1)
                await anyio.sleep(delay / 1000)
                return True
        if self.policy.kind != "stop":
            guardian = self._guardian()
            if guardian is None:
                self.system.fail(ActorCrashed(story), error)
            else:
                guardian.crash(ActorCrashed(story))
        return False

    def _guardian(self) -> ActorCell[Any] | None:
        """Return the nearest ancestor whose policy restarts it."""
        above = self.parent
        while above is not None and above.policy.kind != "restart":
            above = above.parent
        return above

    async def _stop_children(self) -> None:
        for child in reversed(list(self.children.values())):
            child.request_stop()
            await child.stopped.wait()

    async def _end(self, broken: str | None) -> None:
        try:
            await self._stop_children()
        finally:
            self.mailbox.close(broken=broken)
            # In a `finally`: also when a child's stop was interrupted, no watcher may wait for
            # ever.
            if self.parent is not None:
                self.parent.children.pop(self.path, None)
            self.system.ended(self)
            # After the close: a task that awaited the stop finds the mailbox closed.
            self.stopped.set()
            for watcher, message in self.watchers:
                watcher.reply(message)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
