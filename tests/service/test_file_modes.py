"""What the service keeps is its user's alone, whatever the umask; what it writes for others is as
their umask has it."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pyarrow as pa
import pytest

from actors.doors.commands import cli
from actors.durable.object_store.file_modes import make_shared_folder, private_umask, warn_if_open
from actors.durable.persist.blob_file import FileBlob
from actors.durable.persist.consensus_sqlite import SqliteConsensus
from actors.durable.persist.directory import StateDirectory
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.kernel.clock import SystemClock
from actors.runtime.settings import Settings
from service_house import running_service  # type: ignore[import-not-found]


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(root: Path) -> dict[str, str]:
    """Return the files and folders, `root` among them, that others may use, with their modes."""
    modes = {path: path.lstat().st_mode for path in (root, *root.rglob("*"))}
    assert len(modes) > 1
    return {
        str(path): oct(stat.S_IMODE(mode))
        for path, mode in modes.items()
        if mode & 0o077 and not stat.S_ISLNK(mode)
    }


async def test_durable_files_are_private_by_themselves(tmp_path: Path) -> None:
    state = tmp_path / "state"
    directory = StateDirectory.open(state)
    clock = SystemClock()
    consensus = SqliteConsensus(directory.consensus, clock)
    await consensus.open()
    blob = FileBlob(directory.blobs, clock)
    await blob.prepare()
    await blob.set("s1/p1", b"rows")
    made = tmp_path / "by_spark"
    made.write_bytes(b"rows")
    await blob.adopt("s1/p2", made)
    assert (state / "consensus.db-wal").exists()
    assert open_to_others(state) == {}
    await consensus.close()
    directory.close()


def test_a_service_and_its_backups_are_private_and_its_copies_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, backups = tmp_path / "state", tmp_path / "backups"
    with private_umask():
        anyio.run(serve_and_copy, tmp_path, state)
    copies = tmp_path / "copies"
    # The lock is looked at by who writes there, and by nobody else.
    written = [path for path in copies.rglob("*") if path.name != "_lock"]
    assert {path.suffix for path in written} >= {".csv"}
    for path in written:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666), path
    for words in (["backup", str(backups)], ["restore", str(backups)]):
        place = state if words[0] == "backup" else tmp_path / "restored"
        monkeypatch.setattr(sys, "argv", ["penstock", *words, "--state-dir", str(place)])
        with suppress(SystemExit):
            cli.main()
        assert open_to_others(backups if place == state else place) == {}


async def serve_and_copy(tmp_path: Path, state: Path) -> None:
    settings = Settings(
        state_dir=str(state),
        listen=f"unix:{tmp_path / 'socket'}",
        copy_dir=str(tmp_path / "copies"),
        inline_part_bytes_max=1,
    )
    async with running_service(settings) as (_, client):
        columns = (TableColumn("id", "bigint"), TableColumn("text", "string"))
        await client.create_table("t", TableSchema(columns))
        await client.insert("t", pa.table({"id": range(100), "text": ["x" * 100] * 100}))
        await client.copy_to("t", str(tmp_path / "copies" / "below" / "here"), format="csv")
        assert (tmp_path / "socket").stat().st_mode & 0o077 == 0
        assert open_to_others(state) == {}
    assert any((state / "blob").rglob("*/*"))


def test_a_start_over_wider_modes_warns_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    state = tmp_path / "state"
    state.mkdir()
    StateDirectory.open(state).close()
    [record] = caplog.records
    assert f"other users may access {state} (mode 777): chmod -R go= {state}" == (
        record.getMessage()
    )
    caplog.clear()
    state.chmod(0o700)
    StateDirectory.open(state).close()
    warn_if_open(state)
    assert not caplog.records


def test_folders_for_others_have_the_outer_umask(tmp_path: Path) -> None:
    os.umask(0o027)
    with private_umask(), private_umask():
        make_shared_folder(tmp_path / "a" / "b")
        (tmp_path / "ours").mkdir()
    (tmp_path / "plain").mkdir()
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "plain")}
    assert modes == {"a": 0o750, "a/b": 0o750, "plain": 0o750}
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o700
    with pytest.raises(FileExistsError):
        (tmp_path / "file").touch()
        make_shared_folder(tmp_path / "file")
