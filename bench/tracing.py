"""The cost of tracing on the message path while no message is sampled.

Nanoseconds per message with one sender, from the send until a typed handler has received the last
one, with an exporter installed. The peer is the same kernel with the check of the trace context
removed from the mailbox (the receiver still tests each message's type). ``unsampled_message``: the
kernel as it is. ``unsampled_hop``: the handler also asks for a span per message. ``sampled_hop``:
and gets one. ``span``: a span that is not opened, against an empty block.
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
    """The message."""

    number: int


class Counter(Actor[Note]):
    """Counts the messages that it receives."""

    def __init__(self, wanted: int) -> None:
        self.left = wanted
        self.done = asyncio.Event()

    def receive(self, message: Note) -> None:
        """Handle one message."""
        self.left -= 1
        if self.left == 0:
            self.done.set()


class TracedCounter(Counter):
    """A counter that opens a span for each message."""

    def receive(self, message: Note) -> None:
        """Handle one message within a span."""
        with span(ADAPTER_COMMAND, "nonce", 0):
            super().receive(message)


async def send_bare(self: BoundedMailbox[Any], message: Any) -> None:
    """Send like `BoundedMailbox.send`, without checking the trace context."""
    if len(self._queue) >= self._bound:
        await self._room()
    self._queue.append(message)
    if self._wake is not None:
        self._notify()


class Dropping:
    """A tracing engine whose spans are not exported."""

    can_start_traces = True

    def __init__(self) -> None:
        self.tracer: Tracer = TracerProvider(shutdown_on_exit=False).get_tracer("bench")

    def engine(self, pid: int) -> Tracer:
        """Return the same tracer for all processes."""
        return self.tracer


async def tell(count: int, kind: type[Counter]) -> float:
    """Time `count` messages from a sender to an actor."""
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
    """Time messages with the check of the trace context removed from the mailbox."""
    send: Any = BoundedMailbox.send
    mailbox: Any = BoundedMailbox
    mailbox.send = send_bare
    try:
        return await tell(count, Counter)
    finally:
        mailbox.send = send


async def sampled_tell(count: int) -> float:
    """Time messages that all carry a context and open a span."""
    token = activate_context(SAMPLED)
    try:
        return await tell(count, TracedCounter)
    finally:
        deactivate_context(token)


def blocks(count: int, *, traced: bool) -> float:
    """Time `count` `with` blocks."""
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
    """Measure both sides in alternation, with an exporter installed and nothing sampled."""
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
    made = Report("The cost of tracing on the message path while no message is sampled.")
    anyio.run(run, made, backend_options={"use_uvloop": True})
    made.close()
