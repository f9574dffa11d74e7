"""`penstock backup` and `penstock restore`: all that is durable, to a folder or a bucket and back.

Both work on the stores themselves. A backup is taken beside a running service, as an outside reader
(`actors.durable.persist.backup_run`), or where none runs; a restore goes into stores that hold
nothing.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from actors.doors.commands.console import run_loop
from actors.doors.commands.shard_reports import size_text
from actors.doors.commands.stores import CommandStores, show_progress, stands_on_stores, with_stores

if TYPE_CHECKING:
    from actors.durable.persist.attach import AttachedClient
    from actors.durable.persist.backup_format import BackupManifest
    from actors.durable.persist.backup_run import BackupReport
    from actors.durable.persist.restore import RestoreReport
    from actors.runtime.kernel import ActorClock

Target = Annotated[
    str,
    typer.Argument(
        help="A folder, or a URL: file:/path, s3://bucket/path, gs://bucket/path, "
        "az://container/path; credentials come from the environment."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


@stands_on_stores
def backup(
    stores: CommandStores,
    target: Target,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            min=1,
            help="Afterwards removes all but so many backups, and what only those needed. No other "
            "backup to the target may run meanwhile.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Only lists the backups that the target holds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Takes a backup of all that is durable: catalog, rows, views' states, roles, positions.

    The service goes on meanwhile. The backup is of one instant, and copies only what the target
    lacks. One that was cut off is none: take it again, and it goes on with what is missing.
    """
    from actors.durable.persist.backup_format import BackupTarget
    from actors.durable.persist.backup_run import take_backup

    if listed:
        _list(stores, target, as_json=as_json)
        return

    async def call(attached: AttachedClient, clock: ActorClock) -> BackupReport:
        opened = await BackupTarget.open(target, stores.settings, clock)
        with show_progress("copying", as_bytes=True) as progress:
            return await take_backup(attached, opened, stores.settings, clock, progress, keep=keep)

    report = with_stores(stores, call)
    if as_json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
        return
    removed = f"; {report.removed_blobs} old blobs removed" if report.removed_blobs else ""
    print(
        f"backup {report.manifest.name} is whole: {_shown(report.manifest)};"
        f" copied {report.copied_blobs} blobs, {size_text(report.copied_bytes)}{removed}"
    )


@stands_on_stores
def restore(
    stores: CommandStores,
    target: Target,
    name: Annotated[
        str | None, typer.Option("--backup", help="Which one, by name; else the latest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Restores a backup into stores that hold nothing, such as a state directory to be made.

    Every blob is compared with its size and checksum. A restore that was cut off goes on when it
    is run again; until it has ended no service starts on its state directory. Start the service
    as before then: it goes on as after a crash at the instant of the backup.
    """
    from actors.durable.persist.backup_format import BackupTarget
    from actors.durable.persist.restore import open_empty, restore_backup

    async def run() -> RestoreReport:
        from actors.runtime.kernel import SystemClock

        clock, settings = SystemClock(), stores.settings
        opened = await BackupTarget.open(target, settings, clock, existing=True)
        # Before the stores are made: a wrong name must leave nothing.
        manifest = await opened.find(name)
        async with open_empty(stores.place, settings, clock) as empty:
            with show_progress("restoring", as_bytes=True) as progress:
                return await restore_backup(opened, manifest.name, empty, settings, clock, progress)

    report = run_loop(run)
    if as_json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
        return
    print(
        f"backup {report.manifest.name} is in {stores.place.shown()}: {_shown(report.manifest)};"
        f" copied {report.copied_blobs} blobs, {size_text(report.copied_bytes)}"
    )


def _list(stores: CommandStores, target: str, *, as_json: bool) -> None:
    from actors.durable.persist.backup_format import BackupTarget

    async def run() -> list[BackupManifest]:
        from actors.runtime.kernel import SystemClock

        clock = SystemClock()
        opened = await BackupTarget.open(target, stores.settings, clock, existing=True)
        return await opened.manifests()

    found = run_loop(run)
    if as_json:
        print(json.dumps([_row(manifest) for manifest in found], indent=2))
        return
    for manifest in found:
        print(f"{manifest.name}  {_shown(manifest)}")


def _row(manifest: BackupManifest) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(manifest)
    return row


def _shown(manifest: BackupManifest) -> str:
    when = datetime.fromtimestamp(manifest.taken_ms / 1000, UTC)
    return (
        f"{when:%Y-%m-%d %H:%M:%S} UTC, {manifest.document_count} documents,"
        f" {manifest.blob_count} blobs, {size_text(manifest.blob_bytes)}"
    )
