"""Reads the contents of a shard at one time, as a job's input or as a table.

Each read has its own leased reader, which is kept until the job that uses the files has ended.
Large parts are passed by path, or by their place in a bucket, and never enter this process. Inline
parts, parts with another schema and parts with error updates are read here and passed as Arrow.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa

from actors.durable.persist import PersistClient
from actors.durable.persist.schemas import schema_of
from actors.durable.persist.shard import BatchPart, ShardState
from actors.model.plan.jobs import NO_UPPER, BucketObject, JobRows
from actors.model.plan.schema import DIFF, ERROR, TableSchema, arrow_type
from actors.model.plan.updates import advance, between, consolidate
from actors.model.plan.updates import split_errors as split_errors
from actors.replica.dataflow.engine import EngineClient
from actors.runtime.progress import ShardId, Time


class ShardContents(msgspec.Struct, frozen=True):
    """Contents of a shard at one time: its rows and its errors."""

    rows: JobRows
    errors: tuple[str, ...]


def error_sums(errors: Iterable[pa.Table]) -> dict[str, int]:
    """Return the sum of the diffs of each error text, without zeros."""
    sums: dict[str, int] = {}
    for table in errors:
        rows = zip(table[ERROR].to_pylist(), table[DIFF].to_pylist(), strict=True)
        for text, diff in rows:
            sums[text] = sums.get(text, 0) + diff
    return {text: diff for text, diff in sums.items() if diff}


def errors_held(sums: Mapping[str, int]) -> tuple[str, ...]:
    """Return the errors that a collection with these sums holds."""
    return tuple(sorted(text for text, diff in sums.items() if diff > 0))


def truncated(text: str, bytes_max: int) -> str:
    """Return the text, cut to at most `bytes_max` bytes of UTF-8."""
    return text.encode()[:bytes_max].decode(errors="ignore")


@asynccontextmanager
async def contents(
    persist: PersistClient,
    engine: EngineClient,
    shard: ShardId,
    schema: TableSchema,
    as_of: Time,
    reader_id: str,
) -> AsyncIterator[ShardContents]:
    """Yield the contents at `as_of`, with times advanced to it. They are leased while the block
    runs.

    Wait until the shard's upper is beyond `as_of`. Raise `ReadBelowSince` and the stores' errors.
    """
    reader = await persist.open_reader(shard, reader_id)
    rows: JobRows | None = None
    copies: list[Path] = []
    try:
        parts, _ = await reader.snapshot(as_of)
        state = await persist.state(shard)
        files: list[str] = []
        objects: list[BucketObject] = []
        tables: list[pa.Table] = []
        errors: list[pa.Table] = []
        upper = NO_UPPER
        plain_parts = {part.key for part in parts if _is_plain(part, state, schema)}
        far = [part for part in parts if part.key in plain_parts and persist.path(part) is None]
        # Fetch all of them or none: Spark reads many parts anyway, and reading a few more costs
        # less than passing them through this process.
        fetched = sum(part.bytes for part in far) <= engine.settings.engine_inline_bytes_max
        for part in parts:
            plain = part.key in plain_parts
            path = persist.path(part) if plain else None
            place = None
            if plain and path is None and not fetched:
                place = None if engine.settings.engine_part_copies else persist.place(part)
                # Neither a local file nor in a bucket that Spark may read: copies on disk limit the
                # memory used.
                if place is None:
                    copies.append(engine.new_path("parquet"))
                    await persist.save(part, copies[-1])
                    path = str(copies[-1])
                else:
                    objects.append(BucketObject(*place, part.bytes))
            if path is not None:
                files.append(path)
            if path is not None or place is not None:
                if part.time_max > as_of:
                    # The file also holds later updates, which the job cuts off.
                    upper = as_of + 1
                continue
            kept, held = split_errors(between(await persist.fetch(part, schema), 0, as_of + 1))
            tables.append(kept)
            if held is not None:
                errors.append(held)
        table = await engine.clock.run_blocking(lambda: _together(tables, schema, as_of))
        if table.num_rows or not (files or objects):
            rows = await engine.pack(schema, table, as_of)
        else:
            rows = JobRows(schema, advance_to=as_of)
        yield ShardContents(
            msgspec.structs.replace(rows, files=tuple(files), objects=tuple(objects), upper=upper),
            errors_held(error_sums(errors)),
        )
    finally:
        # Release the lease only now, because the job reads the leased files until the block ends.
        reader.give_up()
        with anyio.CancelScope(shield=True):
            if rows is not None:
                await engine.discard(rows)
            if copies:
                await engine.clock.run_blocking(lambda: _remove(copies))


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _is_plain(part: BatchPart, state: ShardState, schema: TableSchema) -> bool:
    """Return whether the part's file holds exactly these rows.

    Its columns and types must be the same, except that the file may lack the last columns, which
    are then NULL, or may have additional ones.
    """
    if part.has_errors or part.inline is not None:
        return False
    written, wanted = schema_of(state, part.schema_id).columns, schema.columns
    count = min(len(written), len(wanted))
    return [(each.name, arrow_type(each.type)) for each in written[:count]] == [
        (each.name, arrow_type(each.type)) for each in wanted[:count]
    ]


async def scanned(
    persist: PersistClient,
    shard: ShardId,
    schema: TableSchema,
    as_of: Time,
    reader_id: str,
    *,
    errors_only: bool = False,
) -> AsyncGenerator[pa.Table, None]:
    """Yield the updates up to `as_of`, part by part, with the error column if there is one.

    Raise what `contents` raises.
    """
    reader = await persist.open_reader(shard, reader_id)
    try:
        parts, _ = await reader.snapshot(as_of)
        for part in parts:
            if part.has_errors or not errors_only:
                yield between(await persist.fetch(part, schema), 0, as_of + 1)
    finally:
        await reader.close()


def _together(tables: list[pa.Table], schema: TableSchema, as_of: Time) -> pa.Table:
    shape = schema.arrow_updates()
    whole = [advance(table.select(shape.names).cast(shape), as_of) for table in tables]
    return consolidate(pa.concat_tables(whole)) if whole else shape.empty_table()
