"""A real PostgreSQL's log through `penstock wal relay` to three acceptors: in short what
``tests/proof/wal_relay.py`` does; and where a log begins, and what a relay refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from test_wal_served import served  # type: ignore[import-not-found]
from typer.testing import CliRunner
from wal_wires import GREETING, TENANT, TIMELINE  # type: ignore[import-not-found]

from actors.connectors.sources.relay_server import FirstRecord, ServerIdentity, replication_dsn
from actors.doors.commands.cli import cause_of
from actors.doors.commands.wal_relay import STALL_MS, StallDetector, check_system, relay
from actors.runtime.errors import CorruptData, InvalidUsage
from actors.testing.postgres_server import binary, postgres_server
from actors.wal.dialling import AcceptorAddress
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES
from actors.wal.records import RecordScanner
from tests.simulators.wal.made_up import MadeUpLog

CAMPAIGN = Path(__file__).parents[1] / "proof" / "wal_relay.py"
VERSION = 150_018


@pytest.mark.long
def test_a_real_log_reaches_all_acceptors_byte_for_byte() -> None:
    """An acceptor and the relay are killed on the way; PostgreSQL waits for the relay as for a
    synchronous standby; pg_waldump reads all of it."""
    binary("initdb")  # where there is no PostgreSQL, that is said
    command = [sys.executable, str(CAMPAIGN), "--strikes", "acceptor,relay"]
    command += ["--transactions", "300", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"acceptor \d: \d{4,} records", done.stdout)) == 3, done.stdout
    assert "2 strikes" in done.stdout


def refused(dsn: str, *more: str) -> str:
    """What it ends with by itself."""
    app = typer.Typer()
    app.command()(relay)
    arguments = ["127.0.0.1:1", dsn, "--tenant", TENANT, "--timeline", TIMELINE, *more]
    done = CliRunner().invoke(app, [*arguments, "--timeout", "0.1"])
    return str(cause_of(done.exception)) if done.exception else ""


def test_what_a_relay_is_refused_for_is_said() -> None:
    with postgres_server(max_wal_senders="1") as server:
        dsn = f"postgresql://bench@127.0.0.1:{server.port}"
        assert "the server has no slot absent: create it" in refused(dsn, "--slot", "absent")
        assert "no majority of 127.0.0.1:1 elected" in refused(dsn)
    assert "refused" in refused(dsn)
    assert "--create-slot needs --slot NAME" in refused(dsn, "--create-slot")
    assert "tenant" in refused(dsn, "--tenant", "one")


# -- where a log begins --


def begun(log: MadeUpLog, page_lsn: int, step: int) -> int | None:
    """By what is found in the log from a page on, in pieces."""
    first = FirstRecord(page_lsn, VERSION)
    wal = bytes(log.wal[page_lsn - log.start_lsn :])
    for at in range(0, len(wal), step):
        if (found := first.feed(wal[at : at + step])) is not None:
            return found
    return None


@given(
    st.lists(st.sampled_from([0, 40, 8000, 8104, 8120, 20_000, 60_000]), min_size=1, max_size=9),
    st.integers(0, 30),
    st.sampled_from([1, 19, 4096, 8192, 1 << 17]),
)
def test_the_first_record_is_where_a_log_can_begin(sizes: list[int], page: int, step: int) -> None:
    log = MadeUpLog(SEGMENT_BYTES - 5 * PAGE_BYTES)
    for size in sizes:
        log.record(b"r" * size)
    page_lsn = min(log.start_lsn + page * PAGE_BYTES, log.end_lsn - log.end_lsn % PAGE_BYTES)
    found = begun(log, page_lsn, step)
    within = [end for begin, end in log.records if begin < page_lsn < end]
    if page_lsn + 20 > log.end_lsn:
        assert found is None
    elif not within:
        assert found == page_lsn
    else:
        [end] = within
        assert found == end
    if found is not None:
        scanner = RecordScanner(found, pg_version=VERSION)
        scanner.feed(bytes(log.wal[found - log.start_lsn :]))
        assert scanner.record_lsn == log.end_lsn


def test_what_is_no_log_has_no_first_record() -> None:
    log = MadeUpLog(SEGMENT_BYTES)
    log.record(b"r" * 10_000)
    with pytest.raises(CorruptData, match="its magic is D110"):
        FirstRecord(SEGMENT_BYTES, 160_000).feed(bytes(log.wal))
    with pytest.raises(CorruptData, match="0/1000000"):
        FirstRecord(2 * SEGMENT_BYTES, VERSION).feed(bytes(log.wal))
    with pytest.raises(InvalidUsage, match="is not at the start of a page"):
        FirstRecord(SEGMENT_BYTES + 8, VERSION)


# -- whose log it is --


async def test_a_timeline_is_of_one_system(tmp_path: Path) -> None:
    absent = AcceptorAddress("127.0.0.1", 1)
    own = ServerIdentity(GREETING.system_id, 1, 0, VERSION)
    other = ServerIdentity(GREETING.system_id + 1, 1, 0, VERSION)
    async with served(tmp_path) as node:
        addresses = (absent, node.address)
        await check_system(other, addresses, TENANT, TIMELINE)  # there is none yet
        await node.lead()
        await check_system(own, addresses, TENANT, TIMELINE)
        with pytest.raises(InvalidUsage, match="use a separate timeline"):
            await check_system(other, addresses, TENANT, TIMELINE)


def test_a_stall_is_told_of_and_told_of_again() -> None:
    stall = StallDetector(0)
    assert not stall.is_warning_due(STALL_MS - 1, 100, 200)  # the first commit
    assert not stall.is_warning_due(2 * STALL_MS - 2, 100, 300)
    assert stall.is_warning_due(2 * STALL_MS - 1, 100, 300)
    assert not stall.is_warning_due(2 * STALL_MS, 100, 300)
    assert stall.is_warning_due(3 * STALL_MS, 100, 300)
    assert not stall.is_warning_due(4 * STALL_MS, 300, 300)
    assert not stall.is_warning_due(9 * STALL_MS, 300, 300)  # nothing waits
    assert not stall.is_warning_due(9 * STALL_MS + 1, 300, 400)


def test_a_dsn_becomes_a_standbys() -> None:
    more = "replication=true&fallback_application_name=penstock"
    assert replication_dsn("postgresql://u@h") == f"postgresql://u@h?{more}"
    assert replication_dsn("postgres://u@h/?a=b") == f"postgres://u@h/?a=b&{more}"
    assert replication_dsn("host=h").startswith("host=h replication=true ")
