from __future__ import annotations

import contextlib
import gc
import json
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from anyio.streams.text import TextReceiveStream
from typer.testing import CliRunner

from actors import Client
from actors.connectors.sources.kinds import KINDS
from actors.doors.commands import cli
from actors.doors.commands import console as terminal
from actors.doors.commands.console import parse_settings
from actors.doors.commands.status import status_text
from actors.runtime.errors import AddressInUse, BadSettings, UnknownObject
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine

runner = CliRunner()


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "demo",
        "check-views",
        "status",
        "peek",
        "copy-to",
        "copy-from",
        "subscribe",
        "actors",
        "explain",
        "java",
        "version",
        "backup",
        "restore",
        "shard list",
        "shard inspect",
        "shard compact",
        "shard gc",
        "shard verify",
        "shard release",
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    answer = runner.invoke(cli.app, [*command.split(), "--help"])
    assert answer.exit_code == 0
    assert len(answer.output.splitlines()) > 4


def test_the_pages_of_sources_name_every_kind(root: Path) -> None:
    pages = "".join(page.read_text() for page in (root / "docs" / "guides").glob("sources*.md"))
    for kind in KINDS:
        assert f"`{kind}`" in pages


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version(asked: str) -> None:
    answer = runner.invoke(cli.app, [asked])
    assert answer.output.startswith("penstock ")


def test_set_pairs_become_flags() -> None:
    assert parse_settings(["workers=3", "spark_master=local[2]", "spark_conf.spark.a=b=c"]) == {
        "workers": "3",
        "spark_master": "local[2]",
        "spark_conf": {"spark.a": "b=c"},
    }
    with pytest.raises(BadSettings, match="name=value"):
        parse_settings(["workers"])


def test_a_setting_is_taken_from_its_option_or_from_set_but_not_from_both() -> None:
    options = {"listen": None, "state_dir": "here", "workers": None}
    assert cli.combine(options, ["listen=unix:/x", "workers=3"]) == {
        "listen": "unix:/x",
        "state_dir": "here",
        "workers": "3",
    }
    with pytest.raises(BadSettings, match="--state-dir here conflicts with --set state_dir=there"):
        cli.combine(options, ["state_dir=there"])


def test_serve_takes_from_set_what_has_an_option_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[Settings] = []

    async def serve(settings: Settings, metrics: object) -> None:
        taken.append(settings)

    monkeypatch.setattr(cli, "_serve", serve)
    arguments = ["--set", "listen=unix:/x", "--set", "state_dir=there", "--workers", "3"]
    monkeypatch.setattr(sys, "argv", ["penstock", "serve", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    (settings,) = taken
    assert (settings.listen, settings.state_dir, settings.workers) == ("unix:/x", "there", 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--set", "no_such_setting=1"],
        ["serve", "--set", "workers=2", "--workers", "3"],
        ["serve", "--workers", "0"],
        ["serve", "--config", "no-such-file.toml"],
        ["serve", "--log-level", "loud"],
        ["demo", "--from", "yesterday"],
        ["demo", "--from", "2020-01-01"],
        ["demo", "--days", "0"],
        ["demo", "--days", "1", "--source", "nowhere"],
        ["status", "--connect", "127.0.0.1:1"],
    ],
)
def test_errors_are_one_line_and_status_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == cli.STATUS_FAILED
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("penstock: ")


RELAY = ["wal", "relay", "a:1", "host=b", f"--tenant={'1' * 32}", f"--timeline={'2' * 32}"]


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (RELAY, "psycopg", "postgres"),
        (["demo", "--source", "postgres"], "psycopg", "postgres"),
    ],
)
def test_a_command_without_its_packages_says_which(
    arguments: list[str], package: str, extra: str
) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        "from actors.doors.commands.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == cli.STATUS_FAILED
    assert f"pip install 'penstock-views[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_our_error_is_found_inside_groups() -> None:
    group = ExceptionGroup("a", [ValueError(), ExceptionGroup("b", [AddressInUse("taken")])])
    assert isinstance(cli.cause_of(group), AddressInUse)
    assert isinstance(cli.cause_of(UnknownObject("v")), UnknownObject)
    assert isinstance(cli.cause_of(ExceptionGroup("c", [ValueError()])), ValueError)


def test_interruption_has_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == cli.STATUS_INTERRUPTED
    assert capsys.readouterr().err == "penstock: interrupted\n"


def test_a_record_is_one_line() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        record = logging.LogRecord(
            "penstock.x", logging.ERROR, "", 0, "it %s", ("failed",), sys.exc_info()
        )
    record.created, record.msecs = 0.25, 250.0
    text = terminal.OneLine().format(record)
    assert "\n" not in text
    assert text.startswith("1970-01-01T00:00:00.250Z ERROR penstock.x it failed | Traceback")
    assert text.endswith("ValueError: first | second")


@contextlib.asynccontextmanager
async def serving(state: Path, *arguments: str) -> AsyncIterator[tuple[anyio.abc.Process, str]]:
    """`penstock serve` on a free port, once it is ready, and its address."""
    command = [
        sys.executable,
        "-m",
        "actors.doors.commands.cli",
        "serve",
        "--state-dir",
        str(state),
    ]
    command += ["--listen", "127.0.0.1:0", *arguments]
    with anyio.fail_after(200):
        process = await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None)
        assert process.stdout is not None
        lines = TextReceiveStream(process.stdout)
        text = ""
        while "ready\n" not in text:
            text += await lines.receive()
    try:
        yield process, text.split()[2]
    finally:
        if process.returncode is None:
            process.terminate()
        with anyio.fail_after(200):
            await process.wait()
            await process.aclose()


async def penstock(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    with anyio.fail_after(200):
        done = await anyio.run_process(
            [sys.executable, "-m", "actors.doors.commands.cli", *arguments], check=False
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def asked(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a command that runs within this process: its start is most of what
    a command does."""
    done = await anyio.to_thread.run_sync(lambda: runner.invoke(cli.app, arguments))
    return done.exit_code, done.output


def test_status_tells_how_far_an_object_has_read_its_first_contents() -> None:
    mib = 1024 * 1024
    found = {
        "text": "",
        "parts_read": 3,
        "parts_total": 8,
        "bytes_read": mib,
        "bytes_total": 5 * mib // 2,
        "state_since_ms": 0,
        "retries": 0,
    }
    assert status_text(found) == "3 of 8 parts read, 1.0 of 2.5 MiB"
    assert status_text(found | {"text": "slow"}) == "3 of 8 parts read, 1.0 of 2.5 MiB; slow"
    assert status_text(found | {"text": "slow", "parts_total": 0}) == "slow"
    stalled = found | {"text": "no answer", "state_since_ms": 3_723_004}
    assert status_text(stalled) == "since 01:02:03 UTC: no answer"
    assert status_text(stalled | {"retries": 3}) == "since 01:02:03 UTC, 3 retries: no answer"


async def test_serve_runs_until_it_is_stopped(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with serving(state) as (process, address):
        async with await Client.connect(address) as client:
            await client.create_table("flights", {"id": "bigint"}, ["id"])
            time = await client.insert("flights", [{"id": 7}])
        status, text, _ = await penstock("status", "--connect", address)
        assert status == 0
        assert "flights" in text
        status, text = await asked("status", "--connect", address, "--json")
        assert json.loads(text)["objects"][0]["name"] == "flights"
        sql = "SELECT id AS number FROM flights WHERE id > 5"
        status, text = await asked("query", sql, "--connect", address)
        assert (status, text.split()) == (0, ["number", "7"])
        status, text = await asked("query", f"{sql} LIMIT 0", "--connect", address, "--json")
        assert (status, text) == (0, "")
        for arguments in (["relations"], ["peek", "penstock"]):
            status, text = await asked(*arguments, "--connect", address)
            assert status == 0
            assert {"penstock.objects", "penstock.steps"} <= set(text.split())
        arguments = ["peek", "penstock.objects", "--filter", "name = flights", "--columns", "key"]
        status, text = await asked(*arguments, "--connect", address, "--json")
        assert (status, json.loads(text)) == (0, {"key": "id"})
        status, text = await asked("actors", "--connect", address, "--interval", "0.05")
        assert status == 0
        paths = [line.split()[0] for line in text.splitlines()]
        assert paths[0] == "path"
        assert {"/controller", "/maintenance", "/sessions", "/spark"} <= set(paths)
        status, text = await asked("actors", "--connect", address, "--interval", "0.05", "--json")
        (found,) = (row for row in json.loads(text) if row["path"] == "/controller")
        # It handles the very message that asks; the first look came with the one before.
        assert (found["state"], found["depth"]) == ("handles SubmitRequest", 0)
        assert found["received"] > found["messages_per_second"] * 0.05 > 0
        status, text = await asked("sessions", "--connect", address, "--json")
        (own,) = json.loads(text)
        assert (own["door"], own["state"], own["role"]) == ("client", "active", None)
        status, text = await asked("sessions", "--connect", address)
        assert text.split()[:4] == ["number", "role", "door", "state"]
        status, _, error = await penstock("sessions", "--end", "99", "--connect", address)
        assert (status, error) == (2, f"{error.splitlines()[0]}\n")
        assert "there is no session 99" in error
        status, _, error = await penstock("explain", "no_such_view", "--connect", address)
        assert (status, error.splitlines()[0].split(":")[:2]) == (2, ["penstock", " UnknownObject"])
        taken = ["serve", "--state-dir", str(tmp_path / "other"), "--listen", address]
        for arguments, name in (
            (taken, "AddressInUse"),
            (
                ["serve", "--state-dir", str(state), "--listen", "127.0.0.1:0"],
                "StateDirectoryError",
            ),
        ):
            status, _, error = await penstock(*arguments, "--log-level", "error")
            assert status == cli.STATUS_FAILED
            assert error.startswith(f"penstock: {name}: ")
            assert len(error.splitlines()) == 1
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(200):
            assert await process.wait() == 0
    async with serving(state) as (process, address):
        async with await Client.connect(address) as client:
            found = await client.peek("flights", as_of=time)
            assert found.to_pylist() == [{"id": 7}], "a restart goes on where it stopped"
        process.send_signal(signal.SIGINT)
        with anyio.fail_after(200):
            assert await process.wait() == 0


async def test_collections_leave_out_what_a_service_has_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(state_dir=str(tmp_path), listen="127.0.0.1:0")
    service = Service(settings, engine=in_memory_engine())
    monkeypatch.setattr("actors.service.service_of", lambda _: service)
    gc.unfreeze()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(cli._serve, settings)
            shown = ""
            while "ready\n" not in shown:
                await anyio.lowlevel.checkpoint()
                shown += capsys.readouterr().out
            assert gc.get_freeze_count() > 10_000
            group.cancel_scope.cancel()
    finally:
        gc.unfreeze()
