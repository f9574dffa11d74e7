"""Commands of the WAL: run an acceptor, show the status of timelines, inspect segments."""

from __future__ import annotations

import json
import logging
import os
import signal
from contextlib import AsyncExitStack, suppress
from itertools import chain
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from actors.doors.commands.console import (
    Authority,
    Certificate,
    Key,
    LogLevel,
    TokenFile,
    run_loop,
    set_up_logging,
)
from actors.runtime.errors import ConnectionBroken, InvalidUsage, PenstockError, WalRefused
from actors.runtime.settings import Settings, load

if TYPE_CHECKING:
    import ssl

    from actors.runtime.kernel import ActorClock, ActorSystem
    from actors.runtime.tracing.metrics import MetricCollector
    from actors.wal.dialling import AcceptorAddress, AcceptorConnection
    from actors.wal.inspection import InspectedFile
    from actors.wal.timelines import TimelineRegistry

log = logging.getLogger("penstock.wal")

wal = typer.Typer(
    help="Run and inspect the acceptors of the write-ahead log.",
    no_args_is_help=True,
)


@wal.command()
def serve(
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            help="Address to listen on: host:port (port 0: any free port) or unix:/path.",
        ),
    ] = None,
    folder: Annotated[
        str | None, typer.Option("--dir", help="Folder of the timelines; created if missing.")
    ] = None,
    node_id: Annotated[
        int | None,
        typer.Option("--node-id", help="Id of this acceptor, unique among those of its logs."),
    ] = None,
    peers: Annotated[
        str | None, typer.Option("--peers", help="The other acceptors: host:port,host:port,…")
    ] = None,
    blob_url: Annotated[
        str | None,
        typer.Option(
            "--blob-url", help="Store to which committed segments are copied: file:PATH, s3://…"
        ),
    ] = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    token_file: TokenFile = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option("--metrics-listen", help="Address for metrics in Prometheus format."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")] = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one acceptor until SIGINT or SIGTERM.

    Proposers push logs to it, and readers read them. The first line printed is the address, the
    last one `ready`. Acknowledged data is always on disk. A port that other machines can reach
    needs TLS and tokens (docs/guides/tls-and-tokens.md); clients send the token as their PostgreSQL
    password.
    """
    set_up_logging(log_level)
    flags = {
        "wal_listen": listen,
        "wal_dir": folder,
        "wal_node_id": node_id,
        "wal_peers": peers,
        "wal_blob_url": blob_url,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_authority": tls_authority,
        "token_file": token_file,
        "metrics_listen": metrics_listen,
    }
    chosen = load(config, flags=flags)
    if not chosen.metrics_listen:
        run_loop(lambda: _serve(chosen))
        return
    from actors.runtime.tracing.metrics import start

    with start() as metrics:
        run_loop(lambda: _serve(chosen, metrics))


async def _serve(settings: Settings, metrics: MetricCollector | None = None) -> None:
    # Imported here so that an acceptor does not load the packages of the engine and of tables:
    # with them it takes three times as long to start.
    from actors.runtime.kernel import ActorSystem, SystemClock
    from actors.runtime.kernel.clock import ThreadedClock
    from actors.runtime.transport.security import TransportSecurity, dialling_tls
    from actors.wal.archive import WalArchive
    from actors.wal.dialling import dial
    from actors.wal.offload import SegmentOffload
    from actors.wal.peers import PeerExchange
    from actors.wal.timelines import FileTimelineStore, TimelineRegistry

    tls = dialling_tls(settings)
    own = settings.token_file
    token = TransportSecurity.of(settings, own).token.decode() if own else ""

    async def dialled(address: AcceptorAddress, tenant: str, timeline: str) -> AcceptorConnection:
        limit_ms = settings.connect_timeout_ms
        return await dial(address, tenant, timeline, timeout_ms=limit_ms, token=token, tls=tls)

    # As many threads as an executor has. Uploads have their own, so that flushes never wait for
    # them.
    clock, node_id = ThreadedClock((os.cpu_count() or 1) + 4), settings.wal_node_id
    url = settings.wal_blob_url
    archive = await WalArchive.at(url, settings, SystemClock()) if url else None
    served = TimelineRegistry(
        Path(settings.wal_dir), node_id, FileTimelineStore(), clock, settings, archive
    )
    # Before listening: a proposer must find every timeline that is on disk.
    await served.open()
    try:
        async with ActorSystem(clock=clock) as system, anyio.create_task_group() as group:
            group.start_soon(served.run_maintenance)
            looks = [system.measures]
            if archive is not None:
                offload = SegmentOffload(
                    lambda: served.all, node_id, archive, clock, settings, Random()
                )
                group.start_soon(offload.run)
                looks.append(offload.measures)
            if metrics is not None:
                metrics.watch(lambda: chain.from_iterable(look() for look in looks))
            group.start_soon(
                PeerExchange(lambda: served.all, node_id, dialled, clock, settings).run
            )
            group.start_soon(_listen, served, system, clock, settings, metrics)
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for number in signals:
                    log.info("stopping: %s", signal.Signals(number).name)
                    break
            group.cancel_scope.cancel()
    finally:
        served.close()
        clock.close()
    log.info("stopped")


async def _listen(
    served: TimelineRegistry,
    system: ActorSystem,
    clock: ActorClock,
    settings: Settings,
    metrics: MetricCollector | None,
) -> None:
    from actors.runtime.transport import sockets
    from actors.runtime.transport.address import NetworkAddress
    from actors.runtime.transport.http_pages import HttpPages, liveness_page, metrics_page
    from actors.runtime.transport.security import for_listener
    from actors.wal.listener import WalListener
    from actors.wal.tokens import token_check

    address = NetworkAddress.parse(settings.wal_listen, "wal_listen")
    check = token_check(settings)
    security = for_listener("wal_listen", address, settings, "token_file", checks=check is not None)
    tls = security.context(server=True) if security and security.has_tls else None
    knows = security.knows if security and security.has_tokens else None
    bound = await sockets.bind(address)
    try:
        print(f"listening on {bound.address}", flush=True)
        async with AsyncExitStack() as stack:
            if metrics is not None:
                # An acceptor is ready as soon as it listens, and its port is open by now.
                pages = {
                    "/metrics": metrics_page(metrics.page),
                    "/healthz": liveness_page(),
                    "/readyz": liveness_page(),
                }
                monitor = HttpPages(pages, settings).serve(
                    settings.metrics_listen, "metrics_listen"
                )
                page = await stack.enter_async_context(monitor)
                print(f"metrics on {page}/metrics", flush=True)
            # Callers wait for this line.
            print("ready", flush=True)
            listener = WalListener(
                served, system, clock, settings, tls=tls, knows=knows, check=check
            )
            await listener.serve(bound.sockets)
    finally:
        bound.close()


@wal.command()
def status(
    tenant: Annotated[str | None, typer.Option("--tenant", help="32 hexadecimal digits.")] = None,
    timeline: Annotated[
        str | None, typer.Option("--timeline", help="32 hexadecimal digits.")
    ] = None,
    connect: Annotated[
        str | None, typer.Option("--connect", help="Address of a running acceptor: host:port.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Folder of an acceptor, running or not, to read instead of --connect."
        ),
    ] = None,
    token: Annotated[
        str,
        typer.Option(
            "--token", envvar="PENSTOCK_WAL_TOKEN", help="Token that the acceptor requires."
        ),
    ] = "",
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    tls_authority: Authority = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the progress of timelines.

    With --connect, show one timeline on a running acceptor; with --dir, all timelines in a folder.
    A running acceptor reports what is durable and committed right now, and which proposers are
    connected to it (receivers). The control files in a folder lag behind that. The exit status is 2
    if there is no such timeline.
    """
    from actors.runtime.transport.security import dialling_tls

    set_up_logging("warning")
    given = {
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_authority": tls_authority,
    }
    if (connect is None) == (folder is None):
        raise typer.BadParameter("give --connect ADDRESS or --dir FOLDER")
    if folder is not None:
        found = _of_folder(folder, tenant, timeline)
    elif tenant is None or timeline is None:
        raise typer.BadParameter("--connect needs --tenant and --timeline")
    else:
        tls = dialling_tls(load(flags=given))
        found = run_loop(lambda: _of_acceptor(str(connect), str(tenant), str(timeline), token, tls))
    if not found:
        raise InvalidUsage(f"timeline not found in {folder or connect}")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for one in found:
        receivers = one.pop("receivers", ())
        print("  ".join(f"{name} {value}" for name, value in one.items()))
        for each in receivers:
            print(f"  receiver {each['slot']}  {each['connection']}  {each['stage']}")


@wal.command()
def inspect(
    segment: Annotated[
        Path,
        typer.Argument(
            help="Path of a segment file: 24 digits, perhaps with .partial. With --blob-url: its "
            "name."
        ),
    ],
    blob_url: Annotated[
        str | None,
        typer.Option(
            "--blob-url", help="Read the segment from this store (the acceptor's wal_blob_url)."
        ),
    ] = None,
    tenant: Annotated[str, typer.Option("--tenant", help="Needed with --blob-url.")] = "",
    timeline: Annotated[str, typer.Option("--timeline", help="Needed with --blob-url.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the pages and records of a segment, and where they end.

    The command only reads the segment. A segment may end within a record or with zeros: that is
    where its log continues, and not a fault. The exit status is 1 for a file whose first page is
    zeros, and 2 for a segment that is not in the store.
    """
    import msgspec

    from actors.wal import inspection

    set_up_logging("warning")
    if blob_url is None:
        found = inspection.inspect(segment)
    else:
        url = blob_url
        found = run_loop(lambda: _of_archive(url, tenant, timeline, segment.name))
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    for line in inspection.lines(found):
        print(line)


async def _of_archive(url: str, tenant: str, timeline: str, name: str) -> InspectedFile:
    from actors.runtime.kernel import SystemClock
    from actors.wal.archive import WalArchive
    from actors.wal.inspection import inspect_bytes
    from actors.wal.lsn import SEGMENT_BYTES, parse_segment_name
    from actors.wal.startup import checked_id

    checked_id("tenant", tenant)
    checked_id("timeline", timeline)
    number, _ = parse_segment_name(name)
    archive = await WalArchive.at(url, load(), SystemClock())
    data = await archive.segment(tenant, timeline, number)
    if data is None:
        raise InvalidUsage(f"{url} does not contain segment {name} of timeline {timeline}")
    return inspect_bytes(data, number * SEGMENT_BYTES, whole=True)


async def _of_acceptor(
    address: str, tenant: str, timeline: str, token: str, tls: ssl.SSLContext | None = None
) -> list[dict[str, Any]]:
    from actors.wal.dialling import dial, parse_addresses
    from actors.wal.lsn import lsn_text
    from actors.wal.peer_status import parse_status
    from actors.wal.startup import checked_id

    checked_id("tenant", tenant)
    checked_id("timeline", timeline)
    more: dict[str, Any] = {}
    limit_ms = load().connect_timeout_ms
    connection = await dial(
        parse_addresses(address)[0], tenant, timeline, timeout_ms=limit_ms, token=token, tls=tls
    )
    try:
        # An acceptor that accepts the connection and then stays silent must not hang the command.
        with anyio.fail_after(limit_ms / 1000):
            lines = await connection.query("TIMELINE_STATUS")
            with suppress(WalRefused):  # Neon's safekeepers do not have these commands
                for row in await connection.query("PEER_STATUS"):
                    status = parse_status(row)
                    more["term"] = status.term
                    more["last_log_term"] = status.last_log_term
                    more["backup"] = lsn_text(status.backup_lsn)
                    more["consumed"] = lsn_text(status.consumed_lsn)
                more["receivers"] = [
                    {"slot": int(slot or 0), "connection": peer or "recovery", "stage": stage}
                    for slot, peer, stage in await connection.query("RECEIVER_STATUS")
                ]
    except TimeoutError:
        raise ConnectionBroken(f"acceptor {address} did not answer in {limit_ms} ms") from None
    finally:
        connection.abort()
    named = {"tenant": tenant, "timeline": timeline}
    return [
        {**named, "flush": str(flush), "commit": str(commit), **more} for flush, commit in lines
    ]


def _of_folder(folder: Path, tenant: str | None, timeline: str | None) -> list[dict[str, Any]]:
    from actors.wal.control import FileControl
    from actors.wal.lsn import lsn_text

    found: list[dict[str, Any]] = []
    for control in sorted(folder.glob("*/*/safekeeper.control")):
        named = (control.parent.parent.name, control.parent.name)
        if tenant not in (None, named[0]) or timeline not in (None, named[1]):
            continue
        one: dict[str, Any] = {"tenant": named[0], "timeline": named[1]}
        try:
            state = FileControl.open(control.parent).state
        except PenstockError as error:
            one["error"] = f"{type(error).__name__}: {error}"
        else:
            one |= {
                "term": state.term,
                "commit": lsn_text(state.commit_lsn),
                "begin": lsn_text(state.timeline_start_lsn),
                "backup": lsn_text(state.backup_lsn),
                "consumed": lsn_text(state.remote_consistent_lsn),
            }
        found.append(one)
    return found
