"""The way of one command through the embedded service: from a client to every worker and back.

Every delivery into an actor's mailbox is recorded with the one that caused it: the message that its
sender was handling. A sender beside the actors (an effect) was caused by the last delivery, since
nothing else is under way. The result of an actor's own effect is no delivery.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeVar

import anyio
import msgspec
import pytest

from actors.doors.client.client import Client
from actors.model.protocol.compute import Peek
from actors.model.protocol.internal import SequencedCommand
from actors.runtime.kernel import ActorSystem, BoundedMailbox
from actors.runtime.kernel.actor import HANDLING
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine

M = TypeVar("M")

MAILBOXES_MAX = 8
"""The most mailboxes between a client's request and its answer."""
HOUR_MS = 3_600_000


class Delivery(msgspec.Struct):
    """One message in a mailbox, and the delivery that caused it."""

    path: str
    message: Any
    cause: Delivery | None

    def way(self) -> list[str]:
        """The mailboxes up to this one."""
        before = [] if self.cause is None else self.cause.way()
        return [*before, self.path]


class RecordingMailbox(BoundedMailbox[M]):
    """Records each delivery with its cause."""

    __slots__ = ()

    seen: ClassVar[list[Delivery]] = []
    handled: ClassVar[dict[int, Delivery]] = {}
    """Delivery by the message's identity; the deliveries keep the messages alive."""

    def _record(self, message: M) -> None:
        handling = HANDLING.get()
        last = self.seen[-1] if self.seen else None
        cause = last if handling is None else self.handled.get(id(handling.current), last)
        delivery = Delivery(self.path, message, cause)
        self.seen.append(delivery)
        self.handled[id(message)] = delivery

    async def send(self, message: M) -> None:
        self._record(message)
        await super().send(message)

    def send_nowait(self, message: M) -> None:
        self._record(message)
        super().send_nowait(message)

    def deliver(self, message: M) -> bool:
        self._record(message)
        return super().deliver(message)

    def deliver_own(self, message: M) -> bool:
        if self.seen:
            mine = [each for each in self.seen if each.path == self.path]
            self.handled[id(message)] = (mine or self.seen)[-1]
            self.kept.append(message)
        return super().deliver(message)

    kept: ClassVar[list[Any]] = []
    """Results of effects: alive, so that no other message has their identity."""


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_command_passes_eight_mailboxes(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActorSystem, "mailbox_type", RecordingMailbox)
    settings = Settings(
        state_dir=str(tmp_path),
        workers=workers,
        maintenance_ms=HOUR_MS,
        hold_downgrade_ms=HOUR_MS,
    )
    with anyio.fail_after(60):
        async with (
            Service(settings, engine=in_memory_engine()) as service,
            await Client.in_process(service) as client,
        ):
            # A table alone: a dataflow would say something of its own meanwhile.
            await client.create_table("t", {"k": "bigint"}, ["k"])
            await client.insert("t", [{"k": 1}])
            await client.peek("t")
            await anyio.wait_all_tasks_blocked()
            RecordingMailbox.seen.clear()
            assert (await client.peek("t")).to_pylist() == [{"k": 1}]
            seen = list(RecordingMailbox.seen)
    peeks = {
        each.path: each.way()
        for each in seen
        if isinstance(each.message, SequencedCommand) and isinstance(each.message.command, Peek)
    }
    down = ["/sessions/session-1", "/controller", "/adapter-0", "/worker-0"]
    assert peeks == {f"/worker-{n}": [*down, f"/worker-{n}"] for n in range(workers)}
    answer = next(each for each in seen if each.path == "/sessions/session-1" and each.cause)
    way = answer.way()
    back = [f"/adapter-{way[5][-1]}", "/controller", "/sessions/session-1"]
    assert way == [*down, f"/worker-{way[4][-1]}", *back]
    assert len(way) <= MAILBOXES_MAX
