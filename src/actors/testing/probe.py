"""A probe: an actor that records its messages, so that another actor can be tested alone.

`MessageProbe.start` starts one in an `ActorSystem`; pass its `address` to the actor under test as a
consumer, worker or parent. `expect` waits for the next message and checks it; `expect_nothing` runs
all ready callbacks (`settle`) and checks that no message arrived. Neither sleeps: under a test's
clock whose `run_blocking` runs inline, an actor that has settled acts again only on a timer. To
test one actor with doubles of all its peers, use `actors.testing.isolation`: this module is for
tests of several actors on an ordinary loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.lowlevel

from actors.runtime.kernel import Actor, ActorAddress, ActorSystem
from actors.testing.patience import PATIENCE_S
from actors.testing.virtual_time import TURNS_MAX, VirtualLivelock, VirtualTimeLoop

T = TypeVar("T")

EXPECT_SECONDS: Final = PATIENCE_S
"""Longest wait of `expect` before the test fails; a passing test never waits for it."""


async def settle() -> None:
    """Run all ready callbacks, and those that they make ready, until none is ready.

    Does not wait for callbacks of threads and sockets. Raises `VirtualLivelock`.
    """
    loop: Any = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        await loop.idle()
        return
    for _ in range(TURNS_MAX):
        # Asyncio runs callbacks in order: if none is queued when this task resumes, all others are
        # waiting.
        await anyio.lowlevel.checkpoint()
        if not loop._ready:
            return
    raise VirtualLivelock(f"{TURNS_MAX} turns of the loop, and callbacks are still ready")


class MessageProbe(Actor[Any]):
    """Records messages in order; created by `MessageProbe.start`."""

    def __init__(self) -> None:
        self.received: deque[Any] = deque()
        """Messages that the test has not expected yet."""
        self._came = anyio.Event()
        """Set at each message, then replaced."""

    address: ActorAddress[Any]
    """Its address."""

    @classmethod
    def start(cls, system: ActorSystem, name: str = "probe") -> Self:
        """Return a probe running in `system`."""
        probe = cls()
        probe.address = system.spawn(lambda: probe, name)
        return probe

    async def receive(self, message: Any) -> None:
        """Keep the message."""
        self.received.append(message)
        self._came.set()

    async def expect(self, kind: type[T], **fields: Any) -> T:
        """Return the next message, which must be a `kind` with these field values.

        Raises `AssertionError` for another message, or if none comes.
        """
        message = await self._next(kind.__name__)
        if not isinstance(message, kind):
            raise AssertionError(f"expected {kind.__name__}, got {message!r}")
        for name, value in fields.items():
            found = getattr(message, name)
            if found != value:
                raise AssertionError(f"{name} is {found!r}, expected {value!r}, in {message!r}")
        return message

    async def expect_nothing(self) -> None:
        """Assert that no message arrives once all ready callbacks have run. Raises
        `AssertionError`."""
        await settle()
        if self.received:
            raise AssertionError(f"expected no message, got {list(self.received)!r}")

    async def _next(self, wanted: str) -> Any:
        try:
            with anyio.fail_after(EXPECT_SECONDS):
                while not self.received:
                    self._came = anyio.Event()
                    await self._came.wait()
        except TimeoutError:
            raise AssertionError(f"expected {wanted}, got nothing") from None
        return self.received.popleft()
