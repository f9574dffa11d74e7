"""The state directory: its lock, its format, and what a killed process leaves in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.durable.persist import NewShard, PersistClient
from actors.durable.persist.directory import FORMAT, StateDirectory
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import StateDirectoryError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.testing.postgres_server import binary

SCHEMA = TableSchema((TableColumn("a", "bigint"),))


async def opened(directory: Path) -> PersistClient:
    return await PersistClient.open(directory, Settings(), SystemClock())


def files(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


async def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = await opened(tmp_path / "new" / "state")
    with pytest.raises(StateDirectoryError, match=rf"state is in use by process {os.getpid()}"):
        await opened(tmp_path / "new" / "state")
    await first.create_shards([NewShard("s", SCHEMA)])
    await first.close()
    await first.close()
    second = await opened(tmp_path / "new" / "state")
    assert await second.list_shards() == ["s"]
    await second.close()


async def test_a_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    await (await opened(tmp_path)).close()
    (tmp_path / "FORMAT").write_text(f"{FORMAT + 1}\n")
    before = files(tmp_path)
    with pytest.raises(StateDirectoryError, match=f"has format {FORMAT + 1}, .* up to {FORMAT}"):
        await opened(tmp_path)
    after = files(tmp_path)
    assert {p for p in before if before[p] != after.get(p)} <= {tmp_path / "LOCK"}
    (tmp_path / "FORMAT").write_text("junk")
    with pytest.raises(StateDirectoryError, match="contains 'junk', not a number"):
        await opened(tmp_path)
    (tmp_path / "FORMAT").unlink()
    with pytest.raises(StateDirectoryError, match="has lost its FORMAT file"):
        await opened(tmp_path)


async def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirectoryError, match=r"file/state.*choose another"):
        await opened(tmp_path / "file" / "state")


def test_scratch_is_empty_at_the_start(tmp_path: Path) -> None:
    directory = StateDirectory.open(tmp_path)
    (directory.scratch / "left").mkdir()
    directory.close()
    directory = StateDirectory.open(tmp_path)
    assert list(directory.scratch.iterdir()) == []
    directory.close()


@pytest.mark.parametrize(("stores", "kills"), [("sqlite", 5), ("postgres", 3)])
def test_what_was_acknowledged_survives_kill_9(stores: str, kills: int) -> None:
    """The campaign, in short."""
    if stores == "postgres":
        binary("initdb")  # where there is none, that is said
    script = Path(__file__).parents[2] / "proof" / "persist_crash.py"
    command = [sys.executable, str(script), "--kills", str(kills), "--stores", stores]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{stores}: {kills} kills" in done.stdout
