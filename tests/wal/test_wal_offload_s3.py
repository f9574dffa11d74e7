"""Segments kept in a bucket of a real S3 server: written, removed here, read back from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_wal_offload import (  # type: ignore[import-not-found]
    LOG,
    NAMES,
    SETTINGS,
    SHORT,
    START,
    Hands,
    Node,
    local_segments,
    pushed,
)
from wal_wires import TENANT, TIMELINE  # type: ignore[import-not-found]

from actors.wal.archive import WalArchive
from actors.wal.lsn import SEGMENT_BYTES
from s3_server import Fate, point_to, serving  # type: ignore[import-not-found]


async def test_a_bucket_keeps_segments_and_gives_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as served:
        point_to(monkeypatch, served)
        bucket = served.new_bucket()
        failed: list[str] = []

        def late_once(call: str) -> Fate:
            """The first segment arrives, and who sent it hears of an error."""
            if call.startswith("PUT") and NAMES[0] in call and not failed:
                failed.append(call)
                return "late"
            return None

        served.rule = late_once
        node = Node(tmp_path, await WalArchive.at(f"s3://{bucket}/logs", SETTINGS, Hands()))
        await node.open()
        timeline = await node.lead()
        await pushed(timeline, SHORT, SHORT)
        await node.rounds()
        assert failed, "the store failed as it was to"
        assert timeline.acceptor.state.backup_lsn == 2 * SEGMENT_BYTES
        kept = [f"logs/{TENANT}/{TIMELINE}/{NAMES[0]}{tail}" for tail in ("", ".json")]
        assert sorted(served.keys(bucket)) == kept
        wal = (tmp_path / TENANT / TIMELINE / NAMES[0]).read_bytes()
        assert served.get(bucket, kept[0]) == wal
        await timeline.run(timeline.acceptor.checkpoint)
        await timeline.remove_old(1)
        assert local_segments(tmp_path) == [NAMES[1] + ".partial"]
        assert await timeline.read(START, 200, 1) == LOG.wal[:200]
        node.close()
