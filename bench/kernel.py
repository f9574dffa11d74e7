"""The actor kernel against bare queues and other actor libraries, in one process and one loop.

``tell_*``: nanoseconds per message with one sender, from the send until a typed handler has
received the last one. ``ask_*``: nanoseconds per round trip, one after another; the cost of bare
futures between two tasks is what any actor pays. ``ring_*``: 1,000 actors in a ring pass on 1,000
tokens; ours is a hop, the peer a message between two of our actors. Thespian runs in its simple
system base (one process, no threads), its fastest. xoscar's actors live in the caller's process.
``idle_actor``: traced memory of an idle actor; its peer is the limit.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

import anyio
import msgspec
import pykka
import thespian.actors as thespian
import xoscar

from actors.runtime.kernel import Actor, ActorAddress, ActorSystem, ReplySlot
from measure import Measure, Report, median

LIMIT = 1024
IDLE = 2_000
IDLE_BYTES_MAX = 4096
RING = 1_000
TURNS = 7


class Note(msgspec.Struct, frozen=True, gc=False):
    """A message without an answer."""

    number: int


class Ask(msgspec.Struct, frozen=True):
    """A message that is answered with its number."""

    number: int
    reply: ReplySlot[int]


class Counter(Actor[Note | Ask]):
    """Counts `Note` messages and answers `Ask` messages."""

    def __init__(self, wanted: int) -> None:
        self.left = wanted
        self.done = asyncio.Event()

    async def receive(self, message: Note | Ask) -> None:
        """Handle one message."""
        match message:
            case Note():
                self.left -= 1
                if self.left == 0:
                    self.done.set()
            case Ask(number, reply):
                reply.set(number)


class Hop(Actor[Note]):
    """Passes a token on until it has made enough hops."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.next: ActorAddress[Note] | None = None
        self.ended = ended

    async def receive(self, message: Note) -> None:
        """Pass the token on."""
        if message.number == 0:
            self.ended()
        elif self.next is not None:
            await self.next.send(Note(message.number - 1))


async def ours_tell(count: int) -> float:
    """Time `count` messages from a sender to one of our actors."""
    async with ActorSystem(mailbox=LIMIT) as system:
        counter = Counter(count)
        to = system.spawn(lambda: counter, "counter")
        note = Note(1)
        started = perf_counter_ns()
        for _ in range(count):
            await to.send(note)
        await counter.done.wait()
        return (perf_counter_ns() - started) / count


async def queue_tell(count: int) -> float:
    """Time `count` messages over a bare queue between two tasks."""
    queue: asyncio.Queue[Note] = asyncio.Queue(LIMIT)

    async def take() -> None:
        for _ in range(count):
            await queue.get()

    taking = asyncio.create_task(take())
    note = Note(1)
    started = perf_counter_ns()
    for _ in range(count):
        await queue.put(note)
    await taking
    return (perf_counter_ns() - started) / count


async def stream_tell(count: int) -> float:
    """Time `count` messages over anyio's memory object stream."""
    sender, receiver = anyio.create_memory_object_stream[Note](LIMIT)

    async def take() -> None:
        for _ in range(count):
            await receiver.receive()

    started = perf_counter_ns()
    async with sender, receiver, anyio.create_task_group() as group:
        group.start_soon(take)
        note = Note(1)
        for _ in range(count):
            await sender.send(note)
    return (perf_counter_ns() - started) / count


async def ours_ask(count: int) -> float:
    """Time `count` asks of one of our actors, one after another."""
    async with ActorSystem() as system:
        to: ActorAddress[Any] = system.spawn(lambda: Counter(0), "counter")

        def make(reply: ReplySlot[int]) -> Ask:
            return Ask(1, reply)

        started = perf_counter_ns()
        for _ in range(count):
            await to.ask(make)
        return (perf_counter_ns() - started) / count


async def bare_ask(count: int) -> float:
    """Time `count` round trips of two tasks with two futures each, the minimum for any actor."""
    loop = asyncio.get_running_loop()
    asked: list[asyncio.Future[int]] = []
    wake = loop.create_future()

    async def answer() -> None:
        nonlocal wake
        while True:
            await wake
            wake = loop.create_future()
            asked.pop().set_result(1)

    answering = loop.create_task(answer())
    started = perf_counter_ns()
    for _ in range(count):
        reply = loop.create_future()
        asked.append(reply)
        wake.set_result(None)
        await reply
    elapsed = (perf_counter_ns() - started) / count
    answering.cancel()
    return elapsed


async def ours_ring(count: int) -> float:
    """Time a ring in which all tokens together make about `count` hops."""
    async with ActorSystem(mailbox=LIMIT) as system:
        ended = 0
        done = asyncio.Event()

        def end() -> None:
            nonlocal ended
            ended += 1
            if ended == RING:
                done.set()

        made = [Hop(end) for _ in range(RING)]
        places = [system.spawn(partial(_itself, hop), f"hop{i}") for i, hop in enumerate(made)]
        for hop, place in zip(made, [*places[1:], places[0]], strict=True):
            hop.next = place
        far = count // RING
        started = perf_counter_ns()
        for place in places:
            await place.send(Note(far))
        await done.wait()
        return (perf_counter_ns() - started) / (far * RING)


async def idle_bytes() -> float:
    """Return the traced memory of one idle actor, averaged over many."""
    async with ActorSystem() as system:
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(IDLE):
            system.spawn(lambda: Counter(1), f"idle{number}")
        await anyio.wait_all_tasks_blocked()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return (after - before) / IDLE


def _itself(made: Hop) -> Hop:
    return made


class PykkaCounter(pykka.ThreadingActor):  # type: ignore[misc]
    """A pykka actor, which has its own thread."""

    def on_receive(self, message: Any) -> int:
        """Return the message."""
        return int(message)


def pykka_tell(count: int) -> float:
    """Time `count` messages until the last one is answered."""
    to = PykkaCounter.start()
    started = perf_counter_ns()
    for number in range(count):
        to.tell(number)
    to.ask(0)
    elapsed = (perf_counter_ns() - started) / count
    to.stop()
    return elapsed


def pykka_ask(count: int) -> float:
    """Time `count` asks, one after another."""
    to = PykkaCounter.start()
    started = perf_counter_ns()
    for number in range(count):
        to.ask(number)
    elapsed = (perf_counter_ns() - started) / count
    to.stop()
    return elapsed


class ThespianCounter(thespian.Actor):  # type: ignore[misc]
    """A Thespian actor that answers text messages."""

    def receiveMessage(self, message: Any, sender: Any) -> None:  # noqa: N802
        """Handle one message."""
        if isinstance(message, str):
            self.send(sender, message)


def thespian_tell(count: int) -> float:
    """Time `count` messages until the last one is answered."""
    system = thespian.ActorSystem("simpleSystemBase", transientUnique=True)
    try:
        to = system.createActor(ThespianCounter)
        started = perf_counter_ns()
        for number in range(count):
            system.tell(to, number)
        system.ask(to, "last", 10)
        return (perf_counter_ns() - started) / count
    finally:
        system.shutdown()


class XoscarCounter(xoscar.Actor):  # type: ignore[misc]
    """A xoscar actor that counts."""

    def __init__(self) -> None:
        self.count = 0

    async def add(self, number: int) -> int:
        """Count one message and return the count."""
        self.count += number
        return self.count


async def with_xoscar(measure: Callable[[Any], Awaitable[float]]) -> float:
    """Run a measurement with a xoscar pool in this process and one actor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pool = await xoscar.create_actor_pool(address, n_process=0)
    async with pool:
        to = await xoscar.create_actor(XoscarCounter, address=pool.external_address)
        return await measure(to)


async def xoscar_tell(count: int) -> float:
    """Time `count` messages until the count is complete."""

    async def measure(to: Any) -> float:
        started = perf_counter_ns()
        for _ in range(count):
            await to.add.tell(1)
        while await to.add(0) < count:
            await asyncio.sleep(0)
        return (perf_counter_ns() - started) / count

    return await with_xoscar(measure)


async def xoscar_ask(count: int) -> float:
    """Time `count` asks, one after another."""

    async def measure(to: Any) -> float:
        started = perf_counter_ns()
        for _ in range(count):
            await to.add(1)
        return (perf_counter_ns() - started) / count

    return await with_xoscar(measure)


def waiting(run: Callable[[int], float]) -> Callable[[int], Awaitable[float]]:
    """Wrap a blocking measurement so that it runs in the event loop's thread, with nothing else
    running."""

    async def waited(count: int) -> float:
        return run(count)

    return waited


async def run(report: Report) -> None:
    """Measure both sides in alternation."""
    scale = 20 if report.quick else 1
    pairs: list[tuple[str, Any, int, Any, int, float | None]] = [
        ("tell_queue", ours_tell, 200_000, queue_tell, 200_000, 1.0),
        ("tell_memory_stream", ours_tell, 200_000, stream_tell, 100_000, 1 / 5),
        ("tell_pykka", ours_tell, 200_000, waiting(pykka_tell), 50_000, 1 / 4),
        ("tell_thespian", ours_tell, 200_000, waiting(thespian_tell), 20_000, 1 / 10),
        ("tell_xoscar", ours_tell, 200_000, xoscar_tell, 5_000, 1 / 10),
        ("ask_pykka", ours_ask, 50_000, waiting(pykka_ask), 5_000, 1 / 8),
        ("ask_xoscar", ours_ask, 50_000, xoscar_ask, 5_000, 1 / 5),
        ("ask_bare_futures", ours_ask, 50_000, bare_ask, 50_000, None),
        ("ring_1000", ours_ring, 500_000, ours_tell, 200_000, 2.0),
    ]
    for name, ours, many, peer, few, target in pairs:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(TURNS):
            for times_, body, count in (
                (times[0], ours, max(2 * RING, many // scale)),
                (times[1], peer, few // scale),
            ):
                gc.collect()  # collect garbage left by the previous measurement
                times_.append(await body(count))
        figures = median(times[0]), median(times[1])
        report.add(Measure(name, *figures, unit="ns", target=target))
    report.add(Measure("idle_actor", await idle_bytes(), IDLE_BYTES_MAX, unit="B", target=1.0))


if __name__ == "__main__":
    made = Report("The actor kernel against queues and other actor libraries.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
