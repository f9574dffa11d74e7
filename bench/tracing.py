"""What tracing costs on the message path while no message is sampled.

Nanoseconds a message, one sender, from the send until a typed handler has seen the last, with an
exporter in place. The peer is the same kernel with the look at the trace context taken out of
the mailbox (the receiver still tests each message's type).
``unsampled_message``: as the kernel is. ``unsampled_hop``: the handler asks for a span for each,
besides; ``sampled_hop``: and gets one. ``span``: a span that is not opened, beside an empty block.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from time import perf_counter_ns
from typing import Any

import anyio
import msgspec
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer

from actors.runtime import spans
from actors.runtime.kernel import Actor, ActorSystem, BoundedMailbox
from actors.runtime.spans import span
from actors.runtime.telemetry import ADAPTER_COMMAND, activate_context, deactivate_context
from measure import Measure, Report, median

LIMIT = 1024
MESSAGES = 200_000
TURNS = 15
TARGET = 1.05
SAMPLED = f"00-{7:032x}-{9:016x}-01"


class Note(msgspec.Struct, frozen=True, gc=False):
    """What is sent."""

    number: int


class Counter(Actor[Note]):
    """Counts what it is told."""

    def __init__(self, wanted: int) -> None:
        self.left = wanted
        self.done = asyncio.Event()

    def receive(self, message: Note) -> None:
        """Handles one message."""
        self.left -= 1
        if self.left == 0:
            self.done.set()


class TracedCounter(Counter):
    """The same, as a hop that opens a span for each message."""

    def receive(self, message: Note) -> None:
        """Handles one message."""
        with span(ADAPTER_COMMAND, "nonce", 0):
            super().receive(message)


async def send_bare(self: BoundedMailbox[Any], message: Any) -> None:
    """`BoundedMailbox.send` without its look at the trace context."""
    if len(self._queue) >= self._bound:
        await self._room()
    self._queue.append(message)
    if self._wake is not None:
        self._notify()


class Dropping:
    """Spans are made and not exported."""

    can_start_traces = True

    def __init__(self) -> None:
        self.tracer: Tracer = TracerProvider(shutdown_on_exit=False).get_tracer("bench")

    def engine(self, pid: int) -> Tracer:
        """The same for all."""
        return self.tracer


async def tell(count: int, kind: type[Counter]) -> float:
    """A sender and an actor."""
    async with ActorSystem(mailbox=LIMIT) as system:
        counter = kind(count)
        to = system.spawn(lambda: counter, "counter")
        note = Note(1)
        started = perf_counter_ns()
        for _ in range(count):
            await to.send(note)
        await counter.done.wait()
        return (perf_counter_ns() - started) / count


async def untraced_tell(count: int) -> float:
    """With the look at the trace context taken out of the mailbox."""
    send: Any = BoundedMailbox.send
    mailbox: Any = BoundedMailbox
    mailbox.send = send_bare
    try:
        return await tell(count, Counter)
    finally:
        mailbox.send = send


async def sampled_tell(count: int) -> float:
    """Every message carries a context, and opens a span."""
    token = activate_context(SAMPLED)
    try:
        return await tell(count, TracedCounter)
    finally:
        deactivate_context(token)


def blocks(count: int, *, traced: bool) -> float:
    """Of one `with` block."""
    empty = nullcontext()
    started = perf_counter_ns()
    if traced:
        for _ in range(count):
            with span(ADAPTER_COMMAND, "nonce", 0):
                pass
    else:
        for _ in range(count):
            with empty:
                pass
    return (perf_counter_ns() - started) / count


async def run(report: Report) -> None:
    """Both sides in turns; an exporter is in place, and nothing is sampled."""
    count = MESSAGES // (20 if report.quick else 1)
    spans.export_by(Dropping())
    times: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in ("unsampled_message", "unsampled_hop", "sampled_hop", "span")
    }
    for _ in range(TURNS):
        bare = await untraced_tell(count)
        times["unsampled_message"][0].append(await tell(count, Counter))
        times["unsampled_message"][1].append(bare)
        times["unsampled_hop"][0].append(await tell(count, TracedCounter))
        times["unsampled_hop"][1].append(bare)
        times["sampled_hop"][0].append(await sampled_tell(count // 20))
        times["sampled_hop"][1].append(bare)
        times["span"][0].append(blocks(count, traced=True))
        times["span"][1].append(blocks(count, traced=False))
    for name, (ours, peer) in times.items():
        target = TARGET if name == "unsampled_message" else None
        report.add(Measure(f"tracing_{name}", median(ours), median(peer), unit="ns", target=target))
    spans.export_by(None)


if __name__ == "__main__":
    made = Report("What tracing costs on the message path while no message is sampled.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
