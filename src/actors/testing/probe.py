"""A probe: an actor that keeps what it is sent, so that another actor can be tested alone.

`Probe.start` puts it into a `System`; its `address` is given to the actor under test as a
consumer, worker or parent. `expect` waits for the next message and checks it; `expect_nothing`
lets everything that is ready run (`settle`) and checks that no message came. Neither sleeps:
under a test's clock whose `run_blocking` runs inline, an actor that has settled has done all
that it will do by itself, timers aside. To test one actor with all its neighbours made up, take
`actors.testing.isolation`: this is for tests of several actors on an ordinary loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.lowlevel

from actors.kernel import Actor, Address, System
from actors.testing.virtual_time import TURNS_MAX, Livelock, VirtualTimeLoop

T = TypeVar("T")

EXPECT_SECONDS: Final = 100.0
"""How long `expect` waits before the test fails: never a delay of a test that passes."""


async def settle() -> None:
    """Lets all that is ready run, and what that makes ready, until nothing is.

    Asyncio's loop runs what is ready in order: when this task runs and nothing stands behind it,
    all others wait. Of threads and sockets nothing is known. Raises `Livelock`.
    """
    loop: Any = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        await loop.idle()
        return
    for _ in range(TURNS_MAX):
        await anyio.lowlevel.checkpoint()
        if not loop._ready:
            return
    raise Livelock(f"{TURNS_MAX} turns of the loop, and something is ready still")


class Probe(Actor[Any]):
    """Records messages in order; used through `Probe.start`."""

    def __init__(self) -> None:
        self.received: deque[Any] = deque()
        """Messages not yet expected."""
        self._came = anyio.Event()

    address: Address[Any]

    @classmethod
    def start(cls, system: System, name: str = "probe") -> Self:
        """A probe running in `system`."""
        probe = cls()
        probe.address = system.spawn(lambda: probe, name)
        return probe

    async def receive(self, message: Any) -> None:
        """Keeps the message."""
        self.received.append(message)
        self._came.set()

    async def expect(self, kind: type[T], **fields: Any) -> T:
        """The next message, which must be a `kind` with these field values.

        Raises `AssertionError` naming what came instead, and when nothing comes.
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
        """Nothing comes, once all that is ready has run. Raises `AssertionError`."""
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
            raise AssertionError(f"expected {wanted}, nothing came") from None
        return self.received.popleft()
