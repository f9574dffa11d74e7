"""A running actor: its task, its effects, its children and its end.

An actor has one task. It takes all waiting messages out of the mailbox in one batch and handles
them one by one. Effects have their own tasks; an effect that fails without a `failed` handler
crashes its actor immediately. When an actor ends:

1. its effects are cancelled;
2. its children stop, in reverse order of their start;
3. `on_stop` runs;
4. messages left in the mailbox are counted, and unanswered asks fail;
5. watchers are notified.

Invariants:

- A message is either handled once, or put back (the crash came before its turn), or counted.
- No effect outlives its actor's `on_stop`.
- A crash cancels the task only while it handles messages. So this cancel can be told from one by
  another task, and never hits later code.

Cost. Handling a message allocates nothing. An idle actor has no objects for effects, children or
traces; they are created on demand.
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
"""Number of message types that the log of a crash names."""


class _Stop:
    """The only control message: stop after the current message."""


class MessageTimer(Generic[M]):
    """Delivers a message after a delay. It needs no task, only a handle of the event loop."""

    __slots__ = ("_cell", "_message", "handle")

    def __init__(self, cell: ActorCell[M], message: M) -> None:
        self._cell = cell
        self._message = message
        self.handle: asyncio.TimerHandle | None = None
        """Handle of the pending timer. None after it has fired or was cancelled, and if it was set
        by an actor that is stopping."""

    def fire(self) -> None:
        """Deliver the message, now that the delay is over."""
        self.handle = None
        self._cell.fired(self, self._message)

    def cancel(self) -> None:
        """Cancel the timer. Does nothing after it has fired."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.cancel()
            self._cell.forget(self)


class ActorCell(Generic[M]):
    """A running actor, restarts included: what its `Actor` objects have in common."""

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
        """The live children by path, in the order of their start."""
        self.stopped = LatchedFlag()
        """Set when the actor has ended for good."""
        self.watchers: tuple[tuple[ActorAddress[Any], Any], ...] = ()
        """Addresses to notify when the actor ends, each with its message."""
        self.actor: Actor[M] | None = None
        """The current `Actor` object; a restart replaces it."""
        self.task: asyncio.Task[None] | None = None
        """The task that runs `run`; set by `ActorSystem.spawn_below`."""
        self.context = contextvars.copy_context()
        """Context of the task and its timers."""
        self.busy_ms = 0.0
        """Total time in `receive`, its waits included."""
        self.crashes = 0
        """Number of crashes so far."""
        self._begun = False
        """True from the end of `on_start`: the actor has all of its parts."""
        self._serving = False
        """True while `on_start` runs or messages are handled."""
        self._stopping = False
        """True once a stop was requested."""
        self._crash: Exception | None = None
        """Failure of an effect or a child that crashes the actor; None once it was raised."""
        self._effects: (
            dict[anyio.CancelScope | MessageTimer[M], asyncio.Task[None] | None] | None
        ) = None
        """The running effects with their tasks, and the pending timers; None before the first."""
        self._idle: LatchedFlag | None = None
        """Set when the last effect has ended; None unless the actor's end waits for it."""
        self._crashes: tuple[float, ...] = ()
        """Monotonic times (ms) of the crashes that count against the restart limit."""
        self._story: deque[type[Any]] | None = None
        """Types of the last messages handled, without those of the current batch."""

    def request_stop(self) -> None:
        """Make the actor stop after the current message."""
        self._stopping = True
        self.mailbox.control(_Stop)

    async def stop_child(self, child: ActorAddress[Any]) -> None:
        """Stop one child and wait until it has stopped."""
        for cell in list(self.children.values()):
            if cell.address is child or cell.path == child.path:
                cell.request_stop()
                await cell.stopped.wait()

    def statistics(self) -> ActorStatistics:
        """Return the actor's current statistics, for operators."""
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
        """Run an effect concurrently with the actor; see `ActorContext.effect`.

        Returns the scope that cancels it. The end of the actor cancels it as well.
        """
        scope = anyio.CancelScope()
        if self._serving and not self._stopping:
            if self._effects is None:
                self._effects = {}
            body = self._effect(scope, run, done, failed)
            self._effects[scope] = asyncio.get_running_loop().create_task(body)
        return scope

    def after(self, delay_ms: float, message: M) -> MessageTimer[M]:
        """Deliver `message` to the actor itself after the delay, unless the timer is cancelled or
        the actor ends before."""
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
        """Deliver the message of a timer that has fired."""
        self.forget(timer)
        # The message being handled at this moment is not the timer's cause.
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
        TRACEPARENT.set(None)  # most effects outlive their cause; the others set their own context
        message: M | None = None
        try:
            with scope:
                try:
                    message = done(await run())
                except Exception as error:
                    if failed is None:
                        raise
                    message = failed(error)
                # The effect may have been cancelled right after its await completed.
                if message is not None and not scope.cancel_called:
                    self.mailbox.deliver_own(message)
        except Exception as error:  # noqa: BLE001 (the actor crashes by it)
            self.crash(error)
        finally:
            # The error's traceback refers to this frame, and the message may refer to the error in
            # a struct without gc: a cycle that the garbage collector cannot see. Break it.
            message = None
            self.forget(scope)

    def crash(self, error: Exception) -> None:
        """Crash the actor immediately because an effect or a child failed, unless it is ending."""
        # Only while it serves: then `_live` knows that this cancel is ours and undoes it.
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

    # -- lifecycle -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the actor to its end, restarts included."""
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
                # Undo our own cancel, so that the task counts only those of other tasks.
                self.task.uncancel()
                self._crash = None
            # The end begins here: no effect may run concurrently with `on_stop`.
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
                # A stop overtakes the batch, so count its messages as unhandled.
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
                del message  # do not keep a handled message alive while idle
            except BaseException:
                # Without the message that failed: no message is handled twice.
                mailbox.put_back(batch[taken:])
                raise
            finally:
                self.busy_ms += (perf_counter() - began) * 1000
                # Once for each batch, because recording every message would cost more.
                self._story.extend(map(type, batch[max(0, taken - STORY_MESSAGES_MAX) : taken]))
                mailbox.batch, mailbox.current = [], None

    async def _traced(self, actor: Actor[M], batch: list[M | TracedMessage[M]], place: int) -> None:
        traced = batch[place]
        assert isinstance(traced, TracedMessage), "the caller checks this"
        self.mailbox.current = batch[place] = message = traced.message
        token = activate_context(traced.traceparent)
        try:
            if (waits := actor.receive(message)) is not None:
                await waits
        finally:
            deactivate_context(token)

    async def _survives(self, error: BaseException) -> bool:
        """Apply the crash policy. Return True if the actor restarts, after waiting the delay."""
        self.crashes += 1
        await self._stop_children()
        kinds = [kind.__name__ for kind in self._story or ()]
        story = f"{self.path} failed after {kinds}: {type(error).__name__}: {error}"
        log.error(story, exc_info=error)
        # Also before a restart: the new actor does not know which answers the old one owed.
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
            # In a `finally`, so that watchers are notified even if a child's stop was interrupted.
            if self.parent is not None:
                self.parent.children.pop(self.path, None)
            self.system.ended(self)
            # After the close, so that a task that awaited the stop finds the mailbox closed.
            self.stopped.set()
            for watcher, message in self.watchers:
                watcher.reply(message)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
