"""`penstock wal serve` as a process: killed without warning, it has what it acknowledged."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import pytest
from test_wal_served import LOG, START, Served, push  # type: ignore[import-not-found]
from wal_wires import TENANT, TIMELINE  # type: ignore[import-not-found]

from actors.doors.commands import wal_commands as timelines
from actors.runtime.errors import BadSettings, ConnectionBroken
from actors.runtime.settings import Settings
from actors.wal.lsn import lsn_text

PENSTOCK = (sys.executable, "-m", "actors.doors.commands.cli")


async def started(folder: Path, *flags: str) -> tuple[asyncio.subprocess.Process, int]:
    process, port, _ = await started_with_page(folder, *flags)
    return process, port


async def started_with_page(
    folder: Path, *flags: str
) -> tuple[asyncio.subprocess.Process, int, str]:
    """An acceptor's process, its port, and the URL of its metrics; "" if it has none."""
    process = await asyncio.create_subprocess_exec(
        *PENSTOCK, "wal", "serve", "--listen", "127.0.0.1:0", "--dir", str(folder), *flags,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    page = ""
    while (said := await process.stdout.readline()) != b"ready\n":
        assert said.startswith(b"metrics on "), said
        page = said.decode().split()[-1]
    return process, int(line.rsplit(":", 1)[1]), page


async def test_a_killed_acceptor_has_what_it_acknowledged(tmp_path: Path) -> None:
    process, port = await started(tmp_path)
    try:
        node = Served(port, None, None)
        proposer = await node.lead()
        await push(proposer, START)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        proposer.abort()
        process, port = await started(tmp_path)
        [found] = await timelines._of_acceptor(f"127.0.0.1:{port}", TENANT, TIMELINE, "")
        assert found["flush"] == lsn_text(LOG.end_lsn)
        assert await timelines._of_acceptor(f"127.0.0.1:{port}", "9" * 32, TIMELINE, "") == []
        [found] = timelines._of_folder(tmp_path, TENANT, TIMELINE)
        assert (found["term"], found["commit"]) == (1, lsn_text(START))
        assert timelines._of_folder(tmp_path, "9" * 32, None) == []
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_status_tells_who_pushes(tmp_path: Path) -> None:
    process, port = await started(tmp_path)
    where = ("--connect", f"127.0.0.1:{port}", "--tenant", TENANT, "--timeline", TIMELINE)

    async def status(*flags: str) -> str:
        command = (*PENSTOCK, "wal", "status", *where, *flags)
        asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await asked.communicate()
        assert asked.returncode == 0
        return out.decode()

    try:
        proposer = await Served(port, None, None).lead()
        await push(proposer, START)
        [found] = json.loads(await status("--json"))
        assert (found["term"], found["last_log_term"]) == (1, 1)
        [receiver] = found["receivers"]
        assert (receiver["slot"], receiver["stage"]) == (0, "streaming")
        line = f"  receiver 0  {receiver['connection']}  streaming"
        assert (await status()).splitlines()[1:] == [line]
        proposer.abort()
        while found["receivers"]:
            [found] = await timelines._of_acceptor(f"127.0.0.1:{port}", TENANT, TIMELINE, "")
    finally:
        process.kill()
        await process.wait()


async def test_its_measures_are_on_a_page(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *PENSTOCK, "wal", "serve", "--listen", "127.0.0.1:0", "--dir", str(tmp_path),
        "--metrics-listen", "127.0.0.1:0", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int((await process.stdout.readline()).decode().rsplit(":", 1)[1])
        said, place = (await process.stdout.readline()).decode().rsplit(" ", 1)
        assert said == "metrics on"
        assert await process.stdout.readline() == b"ready\n"
        proposer = await Served(port, None, None).lead()
        await push(proposer, START)

        def page() -> str:
            with urllib.request.urlopen(place.strip()) as found:
                return str(found.read().decode())

        text = await asyncio.to_thread(page)
        for other in ("healthz", "readyz"):
            place = place.strip().rpartition("/")[0] + f"/{other}"
            assert await asyncio.to_thread(page) == "ok\n"
        measured = {re.split("[{ ]", line)[0]: line.rsplit(" ", 1)[1] for line in text.splitlines()}
        assert float(measured["penstock_wal_receivers"]) == 1
        assert float(measured["penstock_wal_written_bytes_total"]) == LOG.end_lsn - START
        for name in (
            "penstock_wal_queue_messages",
            "penstock_wal_queue_size_bytes",
            "penstock_wal_messages_total",
            "penstock_wal_write_duration_seconds_count",
            "penstock_wal_flush_duration_seconds_count",
            "penstock_mailbox_depth",
        ):
            assert name in measured, text
        proposer.abort()
    finally:
        process.kill()
        await process.wait()


def test_an_acceptor_loads_no_engine_and_no_tables() -> None:
    """Or starting took three times as long."""
    program = (
        "import sys; from actors.runtime.transport import sockets; from actors.wal.listener import"
        " WalListener; print([name for name in ('pyarrow', 'sqlglot') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_a_port_that_others_reach_needs_tls_and_tokens(tmp_path: Path) -> None:
    settings = Settings(wal_listen="0.0.0.0:0", wal_dir=str(tmp_path))
    with pytest.raises(ExceptionGroup) as failed:
        await timelines._serve(settings)
    assert isinstance(failed.value.exceptions[0], BadSettings)
    assert "needs TLS and tokens" in str(failed.value.exceptions[0])


async def test_a_silent_acceptor_does_not_hang_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentConnection:
        def __init__(self) -> None:
            self.aborted = False

        async def query(self, _: str) -> list[Any]:
            await anyio.sleep_forever()
            return []

        def abort(self) -> None:
            self.aborted = True

    silent = SilentConnection()

    async def dialled(*_: object, **__: object) -> SilentConnection:
        return silent

    monkeypatch.setattr("actors.wal.dialling.dial", dialled)
    monkeypatch.setenv("PENSTOCK_CONNECT_TIMEOUT_MS", "20")
    with pytest.raises(ConnectionBroken, match="did not answer in 20 ms"):
        await timelines._of_acceptor("127.0.0.1:1", "0" * 32, "1" * 32, "")
    assert silent.aborted
