"""The log on a real disk: killed in the middle, and WAL that a real PostgreSQL wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random
from struct import unpack_from

import psycopg

from actors.testing.postgres_server import binary, postgres_server
from actors.wal.acceptor_stores import ControlState
from actors.wal.control import FileControl
from actors.wal.inspection import inspect
from actors.wal.lsn import SEGMENT_BYTES, lsn_text, parse_lsn, parse_segment_name
from actors.wal.storage import FileWal

HERE = Path(__file__).parent


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    for lines in (1, 20):
        folder = tmp_path / str(lines)
        command = [sys.executable, str(HERE / "wal_appender.py"), str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            told = [process.stdout.readline() for _ in range(lines)]
            process.kill()
            told += process.stdout.readlines()
        acked = int([line for line in told if line.endswith("\n")][-1])
        state = FileControl.open(folder).state
        wal = FileWal.open(folder, state)
        assert wal.flush_record_lsn >= acked
        assert len(wal.read(state.commit_lsn, acked - state.commit_lsn)) > 0
        if lines == 20:
            assert acked > 2 * SEGMENT_BYTES, "a segment became full"
        wal.truncate(wal.flush_record_lsn)


def test_the_wal_of_a_real_server_is_kept_byte_for_byte(tmp_path: Path) -> None:
    """Its segments come in random pieces; ours equal them, and `pg_waldump` reads ours."""
    with postgres_server(wal_keep_size="1GB", fsync="off") as server:
        server.run("pgbench", ["-i", "-s", "1", "-q", "postgres"])
        server.run("pgbench", ["-c", "2", "-t", "200", "-n", "postgres"])
        with psycopg.connect(server.conninfo(), autocommit=True) as sql:
            sql.execute("SELECT pg_switch_wal()")
            server.run("pgbench", ["-t", "50", "-n", "postgres"])
            row = sql.execute("SELECT pg_switch_wal()").fetchone()
        assert row is not None
        server.stop()
        theirs = {
            parse_segment_name(path.name)[0]: path.read_bytes()
            for path in (server.folder / "data" / "pg_wal").iterdir()
            if len(path.name) == 24
        }
    last = (parse_lsn(row[0]) - 1) // SEGMENT_BYTES
    first = min(theirs)
    assert last - first >= 2
    stream = b"".join(theirs[number] for number in range(first, last + 1))
    system_id, _, _ = unpack_from("<QII", stream, 24)
    # The first segment of a server begins with its first record.
    start = first * SEGMENT_BYTES + 40
    state = ControlState("0" * 32, "1" * 32, pg_version=150000, system_id=system_id)
    wal = FileWal.open(tmp_path, state)
    wal.initialize(start)
    wal.truncate(start)
    rng, at = Random(5), 40
    while at < len(stream):
        size = rng.choice((24, 1000, 8192, 131072, rng.randrange(1, 131073)))
        wal.write(first * SEGMENT_BYTES + at, stream[at : at + size])
        at += size
    end = (last + 1) * SEGMENT_BYTES
    assert (wal.write_lsn, wal.flush_record_lsn) == (end, end)
    for segment in wal.segments():
        assert segment.whole
        assert segment.path.read_bytes() == theirs[segment.number]
    names = [segment.path.name for segment in wal.segments()]
    dumped = subprocess.run(
        [binary("pg_waldump"), "-p", tmp_path, "-s", lsn_text(start), "-e", lsn_text(end)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (dumped.returncode, dumped.stderr) == (0, "")
    counted = sum(len(inspect(tmp_path / name).records) for name in names)
    # A record that goes on in the next segment is in neither's list of whole ones.
    shown = dumped.stdout.count("rmgr: ")
    assert shown - len(names) < counted <= shown
    again = FileWal.open(tmp_path, ControlState("0" * 32, "1" * 32, commit_lsn=start))
    assert again.flush_record_lsn == end
