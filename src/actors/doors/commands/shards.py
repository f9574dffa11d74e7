"""Commands that inspect and maintain shards, with or without a running service.

All but `gc` attach to the stores as guests (`actors.durable.persist.guest_leases`), so they are
safe alongside any service that uses these stores.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import anyio
import msgspec
import typer

from actors.doors.commands.stores import CommandStores, show_progress, stands_on_stores, with_stores
from actors.runtime.errors import (
    CorruptData,
    InvalidUsage,
    PenstockError,
    StorageError,
    UnknownObject,
)
from actors.runtime.settings import Settings

if TYPE_CHECKING:
    from actors.durable.persist.attach import AttachedClient
    from actors.runtime.kernel import ActorClock

R = TypeVar("R")

shard = typer.Typer(
    help="Inspect and maintain shards, which hold all durable data. Safe alongside a service.",
    no_args_is_help=True,
)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(help="A shard's id, or the name of a table or view.")]


async def _owners(attached: AttachedClient) -> dict[str, str]:
    """Map each shard to the name of its object; empty if the catalog cannot be read."""
    from actors.durable.persist.catalog_objects import CATALOG, objects_of, owners

    try:
        return owners(objects_of(await attached.client.head(CATALOG)))
    except (CorruptData, InvalidUsage) as error:
        print(f"penstock: cannot read the names of objects: {error}", file=sys.stderr)
        return {}


async def _found(attached: AttachedClient, name: str) -> str:
    """Return the id of the shard that `name` means: an id, or the name of a table or view.

    Raises `UnknownObject`.
    """
    from actors.durable.persist.attach import find_shard
    from actors.durable.persist.catalog_objects import CATALOG, objects_of, shard_of

    if name in await attached.client.list_shards():
        return name
    try:
        return shard_of(objects_of(await attached.client.head(CATALOG)), name)
    except PenstockError:
        return await find_shard(attached.client, name)


@shard.command("list")
@stands_on_stores
def list_shards(stores: CommandStores, as_json: Json = False) -> None:
    """Show every shard with its object, frontiers, parts and size.

    Times are milliseconds since 1970. An empty upper means that the shard is complete: nothing will
    be appended to it any more.
    """
    from actors.doors.commands.shard_reports import shard_summary, summary_lines

    async def call(attached: AttachedClient, clock: ActorClock) -> list[dict[str, Any]]:
        of = await _owners(attached)
        rows = []
        for name in await attached.client.list_shards():
            try:
                state = await attached.client.upkeep.state_now(name)
                upper = await attached.client.upper(name)
            except UnknownObject:
                continue  # dropped since it was listed
            except StorageError as error:
                rows.append({"shard": name, "object": of.get(name), "error": str(error)})
            else:
                rows.append(shard_summary(state, upper, of.get(name)))
        return rows

    rows = with_stores(stores, call)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for line in summary_lines(rows):
        print(line)


@shard.command("inspect")
@stands_on_stores
def inspect_shard(stores: CommandStores, name: Name, as_json: Json = False) -> None:
    """Show a shard's document in full.

    It contains the shard's batches and parts, holds, leases and writers.
    """
    from actors.doors.commands.shard_reports import detail_lines, shard_details
    from actors.durable.persist.documents import size_of
    from actors.durable.persist.shard import shard_key

    async def call(attached: AttachedClient, clock: ActorClock) -> dict[str, Any]:
        found = await _found(attached, name)
        state = await attached.client.upkeep.state_now(found)
        upper = await attached.client.upper(found)
        head = await attached.client.head(shard_key(found))
        of = (await _owners(attached)).get(found)
        data = head.data if head else b""
        return shard_details(state, upper, of, (len(data), size_of(data)), clock.now_ms())

    report = with_stores(stores, call)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for line in detail_lines(report):
        print(line)


@shard.command("compact")
@stands_on_stores
def compact_shard(stores: CommandStores, name: Name) -> None:
    """Merge all batches of a shard.

    Times are advanced as far as the shard's since allows. The service deletes the replaced blobs
    once nothing reads them; without a service, `penstock shard gc` does. The exit status is 2 if
    there is nothing to compact.
    """

    from actors.doors.commands.shard_reports import size_text

    async def call(attached: AttachedClient, clock: ActorClock) -> str:
        found = await _found(attached, name)
        with show_progress(f"compacting {found}, rows") as note:
            done = await attached.client.upkeep.compact(found, note)
        state = await attached.client.state(found)
        if done is None:
            raise InvalidUsage(
                f"shard {found} has nothing to compact: it has a single batch, and no times to"
                f" advance below its since {state.since}"
            )
        size = sum(batch.bytes for batch in state.batches)
        rows = sum(part.rows for batch in state.batches for part in batch.parts)
        return (
            f"shard {found}: {done[0]} parts became {done[1]}, {rows} rows, {size_text(size)};"
            f" times below {state.since} merged, {len(state.retired)} replaced blobs to delete"
        )

    print(with_stores(stores, call))


@shard.command("gc")
@stands_on_stores
def collect(
    stores: CommandStores,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be deleted, but delete nothing.")
    ] = False,
    grace_ms: Annotated[
        int | None,
        typer.Option(
            "--grace-ms",
            min=0,
            help="Minimum age of an orphaned blob; default: blob_orphan_grace_ms. Must exceed the "
            "time between a write and its append: a shorter one loses data of running writers.",
        ),
    ] = None,
) -> None:
    """Delete blobs that are no longer needed.

    These are blobs that compaction replaced, and orphans that no shard names. On a state directory,
    run it only while no service runs there: the service deletes such blobs itself and knows which
    are still read. Stores given by URL may have other users: there a blob is deleted only if it is
    an orphan in two checks, the grace period apart. With --dry-run it changes nothing and is always
    safe.
    """
    from msgspec.structs import replace

    from actors.doors.commands.shard_reports import waste_lines
    from actors.durable.persist.attach import open_as_owner
    from actors.durable.persist.orphans import RETIRED

    if grace_ms is not None:
        stores = replace(stores, settings=replace(stores.settings, blob_orphan_grace_ms=grace_ms))
    settings = stores.settings

    async def call(attached: AttachedClient, clock: ActorClock) -> list[str]:
        found = await _waste(attached, settings, clock)
        if dry_run:
            return list(waste_lines(found, "would be deleted"))
        for name in await attached.client.list_shards():
            await attached.client.upkeep.collect(name)
        if attached.client.exclusive:
            # No other process appends: a blob that is old by this machine's clock is an orphan.
            for one in found:
                if one.kind != RETIRED and not one.kept:
                    await attached.blob.delete(one.key)
        else:
            await attached.client.collect_orphans()
            print(
                f"checking again in {settings.blob_orphan_grace_ms / 1000:.0f} s for blobs that are"
                " still orphans (--grace-ms)",
                file=sys.stderr,
            )
            await anyio.sleep(settings.blob_orphan_grace_ms / 1000)
            await attached.client.collect_orphans()
        there = {info.key for info in await attached.blob.list_keys()}
        stays = "not deleted: another process uses it, or the store failed"
        done = [
            replace(one, kept=one.kept or stays) if one.key in there else replace(one, kept="")
            for one in found
        ]
        return list(waste_lines(done, "deleted"))

    for line in with_stores(stores, call, None if dry_run else open_as_owner):
        print(line)


@shard.command("release")
@stands_on_stores
def release(
    stores: CommandStores,
    name: Name,
    consumer: Annotated[
        str, typer.Argument(help="The consumer's name, from the stream's option `consumer`.")
    ],
) -> None:
    """Release the durable hold of a consumer that will not resume.

    Until then the shard keeps every change since the consumer's offset, however old.
    """

    async def call(attached: AttachedClient, clock: ActorClock) -> str:
        from actors.durable.persist.split_leases import CONSUMER, SplitLeases

        found = await _found(attached, name)
        leases = SplitLeases(attached.consensus, attached.blob, stores.settings, clock)
        if await leases.release(found, consumer):
            return f"shard {found}: released the hold of {consumer}"
        holds = (await attached.client.state(found)).holds
        names = [hold.removeprefix(CONSUMER) for hold in holds if hold.startswith(CONSUMER)]
        raise InvalidUsage(
            f"shard {found} has no consumer {consumer!r}; "
            f"{suggest_names(consumer, names, 'consumers')}"
        )

    from actors.durable.persist.attach import suggest_names

    print(with_stores(stores, call))


async def _waste(attached: AttachedClient, settings: Settings, clock: ActorClock) -> list[Any]:
    from actors.durable.persist.guest_leases import is_guest
    from actors.durable.persist.orphans import list_garbage

    # List the blobs before reading the documents: `list_garbage` requires this order.
    infos = await attached.blob.list_keys()
    states = {}
    for name in await attached.client.list_shards():
        with suppress(UnknownObject):  # dropped since it was listed
            states[name] = await attached.client.upkeep.state_now(name)
    dead: frozenset[str] = frozenset()
    if attached.place.consensus_url is None:
        # Only leases of guests count here: the one service of a state directory deletes blobs
        # itself and knows its own readers.
        leases = (lease for state in states.values() for lease in state.leases)
        dead = frozenset(lease for lease in leases if not is_guest(lease))
    return list_garbage(
        states,
        infos,
        clock.now_ms(),
        grace_ms=settings.blob_orphan_grace_ms,
        stash_ms=settings.stash_orphan_ms,
        ignored=dead,
    )


@shard.command("verify")
@stands_on_stores
def verify_shards(
    stores: CommandStores,
    names: Annotated[
        list[str] | None, typer.Argument(help="Shards, tables or views; default: all shards.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every part and compare it with its shard's document.

    The exit status is 1 if there is a fault. Verifies checksums, columns, row counts, times and
    diffs, and that every named blob exists. Each fault is reported with its shard, batch and part.
    Unreferenced blobs are counted as well, but are not faults (`penstock shard gc --dry-run` lists
    them).
    """
    from actors.doors.commands.shard_reports import verified_lines
    from actors.durable.persist.verify import verify

    async def call(attached: AttachedClient, clock: ActorClock) -> tuple[list[Any], list[Any]]:
        client = attached.client
        chosen = [await _found(attached, name) for name in names or []]
        chosen = chosen or await client.list_shards()
        reports = []
        read = 0

        def note(part: Any) -> None:
            nonlocal read
            read += 1
            show(read, read)

        with show_progress("parts read") as show:
            for one in chosen:
                try:
                    report = await verify(client, one, note)
                except UnknownObject:
                    continue  # dropped since it was listed
                reports.append(report)
        broken = any(not fault.batch for report in reports for fault in report.faults)
        # With an unreadable document, the blobs that it names would count as unreferenced.
        unnamed = [] if broken else await _waste(attached, stores.settings, clock)
        return reports, unnamed

    reports, unnamed = with_stores(stores, call)
    faults = sum(len(report.faults) for report in reports)
    if as_json:
        print(json.dumps(msgspec.to_builtins({"shards": reports, "unnamed": unnamed}), indent=2))
    else:
        for line in verified_lines(reports, unnamed):
            print(line)
    if faults:
        raise typer.Exit(1)
