"""ListenTask of a dataflow that ends: it looks no further than `until`."""

from __future__ import annotations

from test_listen_task import FakeShard, spawn  # type: ignore[import-not-found]

from actors.model.protocol.internal import GrantDescriptions, PartsDescribed, StartListen
from actors.testing.isolation import ActorIsolation


async def test_nothing_at_or_beyond_until_is_listed(stage: ActorIsolation) -> None:
    shard = FakeShard()
    shard.append(5, "p")
    task, probe = spawn(stage, shard)
    await task.send(StartListen(4, True, 9))
    await probe.expect(PartsDescribed, snapshot=True, upper=5)
    await task.send(GrantDescriptions(10))
    shard.append(7, "q")
    await probe.expect(PartsDescribed, lower=5, upper=7)
    await task.send(GrantDescriptions(10))
    shard.append(12, "r")  # from 7 on
    shard.append(20, "s")
    last = await probe.expect(PartsDescribed, lower=7, upper=9)
    assert [(part.part.key, part.lower, part.upper) for part in last.parts] == [("r", 7, 9)]
    await task.send(GrantDescriptions(10))
    asked = shard.asked_next
    shard.append(30, "t")
    await probe.expect_nothing()
    assert shard.asked_next == asked
    assert shard.waiting_in_next == 0
    assert not shard.held & {"s", "t"}
