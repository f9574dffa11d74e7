"""Lines into a committed log, and going on where a run was cut."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import typer
from proposer_house import (  # type: ignore[import-not-found]
    TENANT,
    TIMELINE,
    House,
    houses,
)
from typer.testing import CliRunner

from actors.doors.commands import wal_push
from actors.runtime.errors import InvalidUsage, WalRefused
from actors.wal.framing import START_LSN, RecordDecoder
from actors.wal.proposer import ProposerConfig
from actors.wal.proposing import ProposerTiming, propose
from actors.wal.pushing import (
    BATCH_BYTES,
    PAUSE,
    LinesPushed,
    parse_pushed,
    payload_of,
    push,
    pushed_text,
    read_lines,
)

pytestmark = pytest.mark.anyio

FAST = ProposerTiming(tick_ms=10, retry_delay_ms_min=5, retry_delay_ms_max=20)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def leading(those: list[House]) -> Any:
    config = ProposerConfig(TENANT, TIMELINE, START_LSN, heartbeat_ms=20)
    return propose(config, [each.address for each in those], timing=FAST)


def lines(count: int, width: int = 10) -> list[bytes]:
    return [
        json.dumps({"table": "t", "row": {"id": number, "text": "x" * width}}).encode() + b"\n"
        for number in range(count)
    ]


def ids(house: House) -> list[int]:
    found = RecordDecoder(START_LSN).feed(bytes(house.wal.wal))
    return [json.loads(framed.payload)["row"]["id"] for framed in found]


async def test_all_lines_are_in_the_log_in_order() -> None:
    given = lines(1000, width=1000)
    told: list[LinesPushed] = []
    async with houses() as those, leading(those) as log:
        done = await push(log, [*given, b"\n"], [], note=told.append)
        assert done == LinesPushed(1000, log.commit_lsn)
        assert len(told) >= 1000 * 1000 // BATCH_BYTES, "more than one batch"
        assert told == sorted(told, key=lambda each: each.lines)
        whole = [each for each in those if each.wal.flush_lsn == log.commit_lsn]
        assert len(whole) >= 2
        assert ids(whole[0]) == list(range(1000))


async def test_a_line_that_is_no_change_stops_it_behind_those_before() -> None:
    told: list[LinesPushed] = []
    async with houses(1) as those, leading(those) as log:
        with pytest.raises(InvalidUsage, match="invalid change in line 4"):
            await push(log, [*lines(3), b'{"table": 5}'], [], note=told.append)
        assert told == [LinesPushed(3, log.commit_lsn)]
        assert ids(those[0]) == [0, 1, 2]


async def test_going_on_passes_over_what_is_in_the_log() -> None:
    """The run before was told of 10 lines; 7 more were in the log when it died."""
    async with houses() as those:
        addresses = [each.address for each in those]
        async with leading(those) as log:
            known = await push(log, lines(10), addresses)
            await push(log, lines(17)[10:], addresses)
        async with leading(those) as log:
            done = await push(log, lines(30), addresses, resume=known)
            assert done.lines == 30
            whole = next(each for each in those if each.wal.flush_lsn == done.lsn)
            assert ids(whole) == list(range(30))


async def test_going_on_behind_somebody_else_is_refused() -> None:
    async with houses() as those:
        addresses = [each.address for each in those]
        async with leading(those) as log:
            known = await push(log, lines(10), addresses)
            await push(log, lines(12)[11:], addresses)
        async with leading(those) as log:
            with pytest.raises(WalRefused, match="not line 11"):
                await push(log, lines(30), addresses, resume=known)
            with pytest.raises(InvalidUsage, match="wrong log"):
                await push(log, [], addresses, resume=LinesPushed(1, log.end_lsn + 8))


@pytest.mark.parametrize(
    "line",
    [b"1", b"{", b'{"table": "t"}', b'{"table": "", "row": {}}', b'{"table":"t","row":{},"diff":0}',
     b'{"table":"t","row":{},"more":1}', b"\xff", b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_change(line: bytes) -> None:
    with pytest.raises(InvalidUsage, match="line 7"):
        payload_of(line, 7)


def test_lines_of_a_pipe() -> None:
    class Pipe(io.BytesIO):
        def __init__(self) -> None:
            super().__init__()
            self.pieces = [b'{"a', b'"}\n1\n', b"2", b""]

        def read1(self, size: int | None = -1, /) -> bytes:
            return self.pieces.pop(0)

    assert list(read_lines(Pipe())) == [PAUSE, b'{"a"}\n', b"1\n", PAUSE, PAUSE, b"2"]


def test_how_far_it_came_as_text() -> None:
    assert parse_pushed(pushed_text(LinesPushed(12, 0x16_B374D848))) == LinesPushed(
        12, 0x16_B374D848
    )
    for wrong in ("12", "a@0/1", "1@x", ""):
        with pytest.raises(InvalidUsage):
            parse_pushed(wrong)


async def test_the_command(tmp_path: Path) -> None:
    """From a file, all of it; then on after what it said; and lines that are none."""
    app = typer.Typer()
    app.command()(wal_push.push)
    path = tmp_path / "changes.jsonl"
    path.write_bytes(b"".join(lines(20)))
    async with houses() as those:
        addresses = ",".join(str(each.address) for each in those)
        ids_given = ["--tenant", TENANT, "--timeline", TIMELINE]

        async def run(*more: str) -> Any:
            arguments = [addresses, str(path), *ids_given, *more]
            return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(app, arguments))

        first = await run("--quiet")
        assert first.exit_code == 0, first
        assert first.stdout.startswith("20@0/1")
        path.write_bytes(b"".join(lines(33)))
        second = await run("--after", first.stdout.strip(), "--json")
        assert json.loads(second.stdout)["lines"] == 33
        path.write_bytes(b"{}")
        third = await run()
        assert isinstance(third.exception, InvalidUsage)
        whole = max(those, key=lambda each: each.wal.flush_lsn)
        assert ids(whole) == list(range(33))
