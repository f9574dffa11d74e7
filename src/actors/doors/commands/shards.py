"""Commands for the maintenance of shards, beside a running service or without one.

All but `gc` attach to the stores as guests (`actors.durable.persist.guest_leases`): they are safe
beside any service that runs there.
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
    help="Shards: where everything durable lies. Safe beside a running service.",
    no_args_is_help=True,
)


Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Name = Annotated[str, typer.Argument(help="A shard, or the name of a table or view.")]


async def _owners(attached: AttachedClient) -> dict[str, str]:
    """Return each shard's object; nothing if the catalog cannot be read."""
    from actors.durable.persist.catalog_objects import CATALOG, objects_of, owners

    try:
        return owners(objects_of(await attached.client.head(CATALOG)))
    except (CorruptData, InvalidUsage) as error:
        print(f"penstock: names are not known: {error}", file=sys.stderr)
        return {}


async def _found(attached: AttachedClient, name: str) -> str:
    """Return the shard of that id, or else of the table or view of that name. Raises
    `UnknownObject`."""
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
    """Shows every shard: what it is of, its frontiers, its parts and their size.

    Times are those of the service: milliseconds since 1970, and where the upper is empty nothing
    will ever come.
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
    """Shows all that the document of a shard says: batches and parts, holds, leases, writers."""
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
    """Merges all batches of a shard, and raises times as far as its since allows.

    What is replaced is deleted by the service when nobody reads it any more, or by
    `penstock shard gc` where no service runs. Exit status 2 when there is nothing to gain.
    """

    from actors.doors.commands.shard_reports import size_text

    async def call(attached: AttachedClient, clock: ActorClock) -> str:
        found = await _found(attached, name)
        with show_progress(f"compacting {found}, rows") as note:
            done = await attached.client.upkeep.compact(found, note)
        state = await attached.client.state(found)
        if done is None:
            raise InvalidUsage(
                f"shard {found} has nothing to compact: its rows lie in one batch, and no time"
                f" below its since {state.since} is left to be raised"
            )
        size = sum(batch.bytes for batch in state.batches)
        rows = sum(part.rows for batch in state.batches for part in batch.parts)
        return (
            f"shard {found}: {done[0]} parts became {done[1]}, {rows} rows, {size_text(size)};"
            f" times below {state.since} are merged, {len(state.retired)} replaced blobs wait to be"
            " deleted"
        )

    print(with_stores(stores, call))


@shard.command("gc")
@stands_on_stores
def collect(
    stores: CommandStores,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tells what would be deleted, and deletes nothing.")
    ] = False,
    grace_ms: Annotated[
        int | None,
        typer.Option(
            "--grace-ms",
            min=0,
            help="How old a blob must be that no shard names; else blob_orphan_grace_ms. Where "
            "others write, shorter than they need to link what they wrote loses it.",
        ),
    ] = None,
) -> None:
    """Deletes blobs that nothing needs: replaced by compaction, or written and never named.

    On a state directory only where no service runs: one that does deletes them itself, and knows
    who reads them. Documents by URL may be used by others meanwhile: there what is unnamed must be
    so twice, the grace apart. With --dry-run it only looks, beside whatever runs.
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
                f"looks again in {settings.blob_orphan_grace_ms / 1000:.0f} s, for what is unnamed"
                " still (--grace-ms)",
                file=sys.stderr,
            )
            await anyio.sleep(settings.blob_orphan_grace_ms / 1000)
            await attached.client.collect_orphans()
        there = {info.key for info in await attached.blob.list_keys()}
        stays = "it was not deleted: another process uses it, or the store failed"
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
    consumer: Annotated[str, typer.Argument(help="As a stream's option consumer named it.")],
) -> None:
    """Gives up the durable hold of a consumer, who will not go on reading.

    Until then the shard keeps every change from the consumer's offset on, however old.
    """

    async def call(attached: AttachedClient, clock: ActorClock) -> str:
        from actors.durable.persist.split_leases import CONSUMER, SplitLeases

        found = await _found(attached, name)
        leases = SplitLeases(attached.consensus, attached.blob, stores.settings, clock)
        if await leases.release(found, consumer):
            return f"shard {found}: the hold of {consumer} is given up"
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

    # Ordered before the documents are read: see `list_garbage`.
    infos = await attached.blob.list_keys()
    states = {}
    for name in await attached.client.list_shards():
        with suppress(UnknownObject):  # dropped since it was listed
            states[name] = await attached.client.upkeep.state_now(name)
    dead: frozenset[str] = frozenset()
    if attached.place.consensus_url is None:
        # The one service of a state directory deletes blobs itself and knows its own readers: only
        # the leases of guests count here.
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
        list[str] | None, typer.Argument(help="Shards, tables or views; none: all shards.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Reads every part and compares it with what its shard says; exit status 1 on a fault.

    Checksums, columns, numbers of rows, times and diffs, blobs that are named and missing. Each
    fault is told with its shard, batch and part. Blobs that nothing names are counted, too: they
    are no faults (`penstock shard gc --dry-run` lists them).
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
        # If a document cannot be read, the blobs that it names would count as unreferenced.
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
