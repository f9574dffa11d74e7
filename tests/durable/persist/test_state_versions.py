"""State directories of this version and of all that were released: they are opened, read, and
written on. `state_versions/make_state.py` makes them."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import anyio
import pytest

sys.path.append(str(Path(__file__).with_name("state_versions")))
import make_state  # type: ignore[import-not-found]

from actors.doors.client.client import Client
from actors.durable.persist.verify import verify
from actors.service import Service
from actors.testing.engine import in_memory_engine

HERE = Path(__file__).with_name("state_versions")
ARCHIVES = sorted(HERE.glob("*.tar.xz"))
BYTES_MAX = 300_000


def unpack(archive: Path, folder: Path) -> dict[str, Any]:
    # Debian's Python 3.11 knows no filters yet.
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **safely)
    expected: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return expected


def test_this_version_has_its_state_and_those_of_releases_stay() -> None:
    """A new version needs an archive of its own: run `make_state.py`, and add its line."""
    lines = [line.split() for line in (HERE / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in ARCHIVES}
    assert found == sums
    assert f"{make_state.version()}.tar.xz" in found
    assert all(path.stat().st_size < BYTES_MAX for path in ARCHIVES)


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
async def test_a_state_is_opened_read_and_written_on(archive: Path, tmp_path: Path) -> None:
    expected = unpack(archive, tmp_path)
    settings = make_state.settings_of(tmp_path / "state")
    with anyio.fail_after(200):
        for life in range(2):
            async with (
                Service(settings, engine=in_memory_engine()) as service,
                await Client.connect(service.address) as client,
            ):
                if life == 0:
                    assert await make_state.rows_of(client) == expected["rows"]
                assert await make_state.roles_of(client) == expected["roles"]
                found = (await client.peek("orders", key={"id": 9_999})).to_pylist()
                assert [row["note"] for row in found] == ["added"]
                assert (await client.peek("orders", key={"customer": "last"})).num_rows == 1
                await client.insert("many", [{"id": -1 - life, "text": "more"}])
                status = {each.name: each for each in (await client.status()).objects}
                assert status["by_customer"].kind == "index"
                row = {"id": 20_000 + life, "customer": "new", "amount": None, "note": None}
                time = await client.insert("orders", [row])
                await client.wait_for("spent", time)
                assert (await client.peek("many")).num_rows == 5_001 + life
                [spent] = (await client.peek("spent", where=[("customer", "=", "new")])).to_pylist()
                assert spent == {"customer": "new", "n": 1 + life, "total": None}


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
async def test_every_part_of_a_state_is_whole(archive: Path, tmp_path: Path) -> None:
    from actors.durable.persist.attach import StoreLocation, open_as_guest
    from actors.runtime.kernel import SystemClock

    unpack(archive, tmp_path)
    place = StoreLocation(str(tmp_path / "state"))
    settings = make_state.settings_of(tmp_path / "state")
    async with open_as_guest(place, settings, SystemClock()) as attached:
        shards = await attached.client.list_shards()
        states = [await attached.client.upkeep.state_now(shard) for shard in shards]
        # It has what it is there for: a list of parts, inline parts and files.
        batches = [batch for state in states for batch in state.batches]
        assert any(batch.listed is not None for batch in batches)
        assert {part.inline is None for batch in batches for part in batch.parts} == {True, False}
        for shard in shards:
            assert (await verify(attached.client, shard)).faults == ()
