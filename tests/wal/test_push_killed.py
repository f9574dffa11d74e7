"""Three acceptors, each in a separate process, on real disks: one is killed, comes
back without what it missed, and then must do for the one that is killed next."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from typer.testing import CliRunner

from actors.doors.commands import wal_push
from actors.wal.framing import START_LSN, RecordDecoder
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.pushing import parse_pushed

TENANT, TIMELINE = "0a" * 16, "0b" * 16
COUNT = 600
PENSTOCK = (sys.executable, "-c", "from actors.doors.commands.cli import main; main()", "wal")


@contextmanager
def acceptor(
    folder: Path, node_id: int, port: int = 0
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """(its port, its process), once it is ready; dead in the end."""
    process = subprocess.Popen(
        [*PENSTOCK, "serve", "--listen", f"127.0.0.1:{port}", "--node-id", str(node_id),
         "--dir", str(folder / str(node_id)), "--log-level", "error"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert process.stdout.readline() == "ready\n", first
        yield int(first.rsplit(":", 1)[1]), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def push(ports: list[int], lines: bytes, *more: str) -> str:
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    app = typer.Typer()
    app.command()(wal_push.push)
    arguments = [addresses, "--tenant", TENANT, "--timeline", TIMELINE, "--quiet", *more]
    done = CliRunner().invoke(app, arguments, input=lines)
    assert done.exit_code == 0, (done.exception, done.output)
    return done.stdout.strip()


def lines(count: int) -> bytes:
    rows = ({"table": "t", "row": {"id": number, "text": "x" * 500}} for number in range(count))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def log_of(folder: Path, node_id: int) -> bytes:
    [segment] = (folder / str(node_id) / TENANT / TIMELINE).glob("0*.partial")
    return segment.read_bytes()


def test_no_acknowledged_line_is_lost(tmp_path: Path) -> None:
    with acceptor(tmp_path, 1) as (one, first), acceptor(tmp_path, 2) as (two, second):
        with acceptor(tmp_path, 3) as (three, third):
            ports = [one, two, three]
            half = push(ports, lines(COUNT // 2))
            third.send_signal(signal.SIGKILL)
            third.wait()
            whole = push(ports, lines(COUNT), "--after", half)
        with acceptor(tmp_path, 3, three):
            first.send_signal(signal.SIGKILL)
            first.wait()
            # 2 and 3 are the majority now, and 3 lacks the second half.
            end = push(ports, lines(COUNT + 1), "--after", whole)
        assert int(end.split("@")[0]) == COUNT + 1
        second.send_signal(signal.SIGKILL)
        second.wait()
    assert log_of(tmp_path, 2) == log_of(tmp_path, 3)
    written = parse_pushed(end).lsn - START_LSN
    wal = log_of(tmp_path, 3)[START_LSN % SEGMENT_BYTES :][:written]
    rows = [json.loads(framed.payload)["row"] for framed in RecordDecoder(START_LSN).feed(wal)]
    assert [row["id"] for row in rows] == list(range(COUNT + 1))
