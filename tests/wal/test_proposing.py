"""A proposer over real sockets: three acceptors, killed and back; proposers after one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from proposer_house import (  # type: ignore[import-not-found]
    TENANT,
    TIMELINE,
    House,
    houses,
)

from actors.runtime.errors import (
    BadSettings,
    ConnectionBroken,
    InvalidUsage,
    PeerRejected,
    ResourceClosed,
)
from actors.runtime.settings import Settings, load
from actors.wal.dialling import AcceptorAddress, parse_addresses
from actors.wal.proposer import Effect, ProposerConfig, ProposerPhase
from actors.wal.proposing import ProposerTiming, propose

pytestmark = pytest.mark.anyio

START = 0x100_0028
FAST = ProposerTiming(tick_ms=10, retry_delay_ms_min=5, retry_delay_ms_max=20)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def config(**options: Any) -> ProposerConfig:
    return ProposerConfig(TENANT, TIMELINE, START, heartbeat_ms=20, **options)


def leading(those: list[House], **options: Any) -> Any:
    return propose(config(**options), [each.address for each in those], timing=FAST)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(200):
        while not holds():
            await anyio.sleep(0.005)


async def test_what_is_appended_is_on_a_quorum() -> None:
    async with houses() as those, leading(those) as log:
        assert await log.elected() == START
        assert await log.append(b"a" * 300_000) == START + 300_000
        having = [each for each in those if each.wal.flush_lsn == START + 300_000]
        assert len(having) >= 2
        await until(lambda: all(each.acceptor.commit_lsn == START + 300_000 for each in those))


async def test_what_many_append_at_once_goes_out_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with houses() as those, leading(those) as log:
        await log.elected()
        sent: list[bytes] = []
        append: Callable[[bytes], list[Effect]] = log.core.append

        def noted(wal: bytes) -> list[Effect]:
            sent.append(wal)
            return append(wal)

        monkeypatch.setattr(log.core, "append", noted)
        ends: list[int] = []

        async def client(number: int) -> None:
            ends.extend([await log.append(b"%08d" % number) for _ in range(3)])

        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(client, number)
        assert sorted(ends) == [START + 8 * n for n in range(1, 301)]
        await until(lambda: bytes(those[0].wal.wal) == b"".join(sent))
        assert len(sent) < 30


async def test_one_acceptor_is_killed_and_comes_back() -> None:
    async with houses() as those, leading(those, retained_bytes_max=0) as log:
        await log.append(b"before--")
        await those[2].down()
        for number in range(50):
            await log.append(b"%08d" % number * 512)
        assert those[2].wal.flush_lsn <= START + 8
        await those[2].up()
        await until(lambda: those[2].wal.wal == those[0].wal.wal == those[1].wal.wal)
        assert any(b"START_REPLICATION" in each.served for each in those), "read from another"
        await log.append(b"after---")
        await until(lambda: those[2].acceptor.commit_lsn == log.end_lsn)
        assert log.core.truncate_lsn <= log.commit_lsn


async def test_without_a_quorum_nothing_is_acknowledged() -> None:
    async with houses() as those, leading(those) as log:
        await log.append(b"x" * 8)
        await those[0].down()
        await those[1].down()
        with anyio.move_on_after(0.2) as waited:  # expires: there is no quorum
            await log.append(b"y" * 8)
        assert waited.cancelled_caught
        await those[0].up()
        await log.append(b"z" * 8)
        await those[1].up()
        assert bytes(those[0].wal.wal) == b"x" * 8 + b"y" * 8 + b"z" * 8


async def test_the_next_proposer_goes_on_where_the_log_ends() -> None:
    async with houses() as those:
        async with leading(those[:2]) as log:
            await log.append(b"first---")
        async with leading(those) as log:
            assert await log.elected() == START + 8
            assert await log.append(b"second--") == START + 16
            await until(lambda: all(each.wal.wal == b"first---second--" for each in those))
            assert [entry.term for entry in log.core.history] == [1, 2]


async def test_another_leader_ends_this_one() -> None:
    async with houses() as those, leading(those) as log:
        await log.append(b"mine----")
        async with leading(those) as other:
            await other.append(b"theirs--")
            with pytest.raises(ConnectionBroken, match="no longer leads") as failed:
                await log.append(b"too late")
        assert b"too late" not in those[0].wal.wal
        assert "in term 2" in str(failed.value)


async def test_who_waits_hears_of_the_end() -> None:
    async with houses() as those:
        failures: list[ResourceClosed] = []
        async with anyio.create_task_group() as group, leading(those) as log:
            await log.append(b"x" * 8)
            for house in those:
                await house.down()

            async def appends() -> None:
                try:
                    await log.append(b"y" * 8)
                except ResourceClosed as error:
                    failures.append(error)

            group.start_soon(appends)
            await until(lambda: log.end_lsn == START + 16)
        [error] = failures
        assert not error.determinate, "it may have happened"
        for house in those:
            await house.up()


async def test_appends_of_many_wait_for_room_in_order() -> None:
    async with houses(1) as those, leading(those, pending_bytes_max=131_072) as log:
        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(log.append, b"%04d" % number * 8192)
        numbers = [int(those[0].wal.wal[at : at + 4]) for at in range(0, 40 * 32768, 32768)]
        assert numbers == list(range(40))
        with pytest.raises(InvalidUsage, match="pending_bytes_max"):
            await log.append(bytes(131_073))


async def test_sync_brings_them_to_agree() -> None:
    async with houses() as those:
        async with leading(those[:2]) as log:
            await log.append(b"x" * 200_000)
        async with leading(those, is_sync=True) as log:
            assert await log.synced() == START + 200_000
            agreed = [each for each in those if each.acceptor.commit_lsn == START + 200_000]
            assert len(agreed) >= 2
            assert log.core.phase is ProposerPhase.SYNCED
            with pytest.raises(InvalidUsage, match="sync mode"):
                await log.append(b"x")


async def test_sync_of_nothing() -> None:
    async with houses() as those, leading(those, is_sync=True) as log:
        assert await log.synced() == 0


async def test_what_the_block_raises_comes_out_as_it_is() -> None:
    async with houses() as those:
        with pytest.raises(ZeroDivisionError):
            async with leading(those):
                raise ZeroDivisionError


async def test_an_address_where_nobody_answers_does_not_stop_the_others() -> None:
    async with houses(2) as those:
        nowhere = AcceptorAddress("127.0.0.1", 1)
        addresses = [nowhere, *(each.address for each in those)]
        async with propose(config(), addresses, timing=FAST) as log:
            assert await log.append(b"x" * 8) == START + 8


async def test_a_writer_that_no_acceptor_takes_hears_what_each_said() -> None:
    async with houses() as those:
        for house in those:
            house.rejects = f"{house.node_id} knows no such token"
        async with leading(those) as log:
            with anyio.fail_after(200), pytest.raises(PeerRejected) as failed:
                await log.elected()
        for house in those:
            assert f"acceptor {house.address}: {house.rejects}" in str(failed.value)


async def test_acceptors_that_may_come_back_are_waited_for_whatever_another_says() -> None:
    async with houses() as those:
        those[0].rejects = "no such token"
        for house in those[1:]:
            await house.down()
        async with leading(those) as log:
            await until(lambda: those[0].rejected > 3)
            for house in those[1:]:
                await house.up()
            with anyio.fail_after(200):
                assert await log.elected() == START


async def test_a_leader_goes_on_when_all_acceptors_take_it_no_more_for_a_while() -> None:
    async with houses() as those, leading(those) as log:
        await log.append(b"before--")
        for house in those:
            await house.down()
            house.rejects = "no such token"
            await house.up()
        await until(lambda: all(house.rejected > 1 for house in those))
        for house in those:
            house.rejects = ""
        with anyio.fail_after(200):
            assert await log.append(b"after---") == START + 16


def test_addresses() -> None:
    assert parse_addresses("a:1, b ,[::1]:7,[fe80::1]") == (
        AcceptorAddress("a", 1),
        AcceptorAddress("b"),
        AcceptorAddress("::1", 7),
        AcceptorAddress("fe80::1"),
    )
    for wrong in ("", "a:0", "a:b", ":5", "a,,b"):
        with pytest.raises(InvalidUsage, match="invalid address"):
            parse_addresses(wrong)


def test_times_are_settings() -> None:
    settings = Settings(
        wal_heartbeat_ms=7,
        wal_silence_ms=70,  # expires: nothing runs
        retry_delay_ms_min=7_000,
        retry_delay_ms_max=7_000,
        connect_timeout_ms=777,  # expires: nothing runs
    )
    config = ProposerConfig(TENANT, TIMELINE, 8).timed(settings)
    assert (config.tenant, config.start_lsn) == (TENANT, 8)
    assert (config.heartbeat_ms, config.silence_ms_max) == (7, 70)
    timing = ProposerTiming.of(settings)
    assert (timing.retry_delay_ms_min, timing.connect_timeout_ms) == (7_000, 777)
    assert timing.retry_delay_ms_max == 7_000, "no less than the least"
    with pytest.raises(BadSettings, match="wal_heartbeat_ms must be"):
        load(environment={}, flags={"wal_heartbeat_ms": 6_000})
