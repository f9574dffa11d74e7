"""`penstock backup` and `penstock restore`: copy all durable state to a folder or bucket, and back.

Both work on the stores directly. A backup reads them as a guest
(`actors.durable.persist.backup_run`), whether or not a service is running. A restore needs empty
stores.
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
        help="A folder or a URL: file:/path, s3://bucket/path, gs://bucket/path, "
        "az://container/path. Credentials come from the environment."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@stands_on_stores
def backup(
    stores: CommandStores,
    target: Target,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            min=1,
            help="Keep only the newest N backups. Afterwards the older ones are removed, with the "
            "blobs that only they used. Do not run another backup to the target at the same time.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Only list the backups in the target.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Back up all durable state of a service.

    This includes the catalog, rows, the state of views, roles and source positions. The service
    keeps running. The backup is consistent as of a single instant. Only blobs that are
    not in the target yet are copied. An interrupted backup cannot be restored: run the command
    again to copy what is still missing.
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
        f"backup {report.manifest.name} is complete: {_shown(report.manifest)};"
        f" copied {report.copied_blobs} blobs, {size_text(report.copied_bytes)}{removed}"
    )


@stands_on_stores
def restore(
    stores: CommandStores,
    target: Target,
    name: Annotated[
        str | None, typer.Option("--backup", help="Name of the backup; default: the latest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Restore a backup into empty stores.

    The stores can be those of a new state directory. The size and checksum of every blob are
    verified. To continue an interrupted restore, run the command again; until it completes, no
    service starts on the state directory. Then start the service as usual: it recovers as if it had
    crashed at the instant of the backup.
    """
    from actors.durable.persist.backup_format import BackupTarget
    from actors.durable.persist.restore import open_empty, restore_backup

    async def run() -> RestoreReport:
        from actors.runtime.kernel import SystemClock

        clock, settings = SystemClock(), stores.settings
        opened = await BackupTarget.open(target, settings, clock, existing=True)
        # Find the backup before creating the stores: a wrong name must leave nothing behind.
        manifest = await opened.find(name)
        async with open_empty(stores.place, settings, clock) as empty:
            with show_progress("restoring", as_bytes=True) as progress:
                return await restore_backup(opened, manifest.name, empty, settings, clock, progress)

    report = run_loop(run)
    if as_json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
        return
    print(
        f"restored backup {report.manifest.name} into {stores.place.shown()}:"
        f" {_shown(report.manifest)};"
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
