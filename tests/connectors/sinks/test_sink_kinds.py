"""Configurations, where sinks may write, and calls that do not come back."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from random import Random

import anyio
import pytest
from sink_house import SCHEMA, settings_of  # type: ignore[import-not-found]

from actors.connectors.sinks.delta import DeltaConfig, DeltaSink
from actors.connectors.sinks.kinds import (
    KINDS,
    config_of,
    decode,
    encode,
    make_sink,
)
from actors.connectors.sinks.parquet import ParquetConfig, ParquetSink
from actors.connectors.sinks.sink import SinkConnector
from actors.connectors.sinks.sink_storage import FolderSinkStorage
from actors.connectors.sinks.sink_threads import SinkThreads
from actors.connectors.sources.source import SourceUnreachable
from actors.runtime.errors import InvalidUsage, StoreFull, WriterFenced
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings


def test_configurations_there_and_back() -> None:
    made = config_of("delta", {"folder": "x", "mode": "current", "retain_hours": "24"}, "c1")
    assert made == DeltaConfig("x", "current", 24, "c1")
    assert decode(encode(made)) == made
    once = config_of("parquet", {"folder": "x", "once": "true"}, "c2")
    assert once == ParquetConfig("x", True, "c2")
    assert decode(encode(once)) == once
    assert [type(each) for each in (made, once)] == list(KINDS.values())


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("kafka", {}, "available: delta, parquet"),
        ("delta", {}, "folder"),
        ("delta", {"folder": "x", "mode": "upsert"}, "upsert.*: mode is changes or current"),
        ("delta", {"folder": "x", "creation": "mine"}, "no option 'creation'"),
        ("delta", {"folder": "x", "retain_hours": 0}, "at least 1"),
        ("parquet", {"folder": "x", "mode": "changes"}, "no option 'mode'"),
        ("parquet", {"foldr": "x"}, "no option 'foldr'.*; did you mean 'folder'"),
    ],
)
def test_what_is_no_configuration(kind: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidUsage, match=text):
        config_of(kind, options, "c")


def test_what_cannot_be_decoded() -> None:
    for data in (b"", b"\xff", b"\x81\xa4kind\xa5kafka"):
        with pytest.raises(InvalidUsage, match="invalid configuration"):
            decode(data)


def made_in(folder: str, settings: Settings) -> SinkConnector:
    config = DeltaConfig(folder, creation="c")
    made: SinkConnector = make_sink(
        config, "u1", settings, SystemClock(), Random(1), Path("nowhere")
    )
    return made


def test_sinks_stay_below_the_folder_that_is_allowed(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "away").symlink_to(tmp_path)
    for folder in ("..", "../other", str(tmp_path), ".", "away/x", "s3://bucket/x", " "):
        with pytest.raises(InvalidUsage):
            made_in(folder, settings)
    with pytest.raises(InvalidUsage, match="sink_dir"):
        made_in("x", Settings())
    assert isinstance(made_in("x", settings), DeltaSink)
    assert isinstance(made_in(f"file://{tmp_path}/out/x/y", settings), DeltaSink)
    once = ParquetConfig("y", True, "c")
    assert isinstance(
        make_sink(once, "u1", settings, SystemClock(), Random(1), tmp_path), ParquetSink
    )


async def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(InvalidUsage, match=r"penstock-views\[delta\]"):
        await made_in("x", settings_of(tmp_path)).open(SCHEMA)


async def test_a_call_that_does_not_come_back_is_given_up() -> None:
    back = threading.Event()
    threads = SinkThreads(SystemClock(), 20, "folder x")
    with pytest.raises(SourceUnreachable, match="within 20 ms"):
        await threads.run(back.wait, "commit")
    assert threads.given_up
    with pytest.raises(SourceUnreachable, match="has not returned"):
        await threads.run(lambda: None, "write")
    back.set()


async def test_a_call_is_waited_for_when_cancelled() -> None:
    begun, back = threading.Event(), threading.Event()
    threads = SinkThreads(SystemClock(), 10_000, "folder x")
    ended = False

    def slow() -> None:
        begun.set()
        back.wait()

    async def call() -> None:
        nonlocal ended
        try:
            await threads.run(slow, "commit")
        finally:
            ended = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await asyncio.to_thread(begun.wait)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            assert not ended
            back.set()
    assert ended


async def test_errors_of_stores_go_away_by_waiting_others_do_not() -> None:
    threads = SinkThreads(SystemClock(), 1_000, "folder x")

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(SourceUnreachable, match="folder x: full"):
        await threads.run(lambda: fail(StoreFull("full", determinate=True)), "write")
    with pytest.raises(WriterFenced):
        await threads.run(lambda: fail(WriterFenced("gone", determinate=True)), "write")


class PanicException(BaseException):
    """As native code raises it."""


async def test_what_a_library_raises_is_the_end_of_one_sink_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = SinkThreads(SystemClock(), 1_000, "table x")

    def fail(error: BaseException) -> None:
        raise error

    for error in (PanicException("index out of bounds"), KeyError("who knows")):
        caplog.clear()
        with pytest.raises(
            SourceUnreachable, match=f"table x: could not commit: {type(error).__name__}"
        ):
            await threads.run(lambda error=error: fail(error), "commit")  # type: ignore[misc]
        assert "could not commit" in caplog.text
    with pytest.raises(InvalidUsage, match="as it is"):
        await threads.run(lambda: fail(InvalidUsage("as it is")), "commit")
    assert await threads.run(lambda: 7, "go on") == 7


def test_a_new_file_never_replaces_one(tmp_path: Path) -> None:
    path, folder = tmp_path / "1.json", FolderSinkStorage(tmp_path)
    assert folder.write_new("1.json", b"one", "a")
    assert not folder.write_new("1.json", b"two", "a")
    assert path.read_bytes() == b"one"
    assert [each.name for each in tmp_path.iterdir()] == ["1.json"]
