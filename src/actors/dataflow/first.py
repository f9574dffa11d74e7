"""The first contents of a view: computed whole, streamed into parts.

Theory of operation. The engine computes the view once. What it answers with in memory is cut
into output and hidden states and written as parts; what it wrote into files (a large answer) is
either taken over as it is, where a file has just the columns of the output's parts, or read,
cut and written again a piece at a time. Then one append names all of it, so a view is there
whole or not at all, and what a killed process had written is an orphan.

Invariant: of a large answer, no more than `PIECE_ROWS` rows are in this process's memory. Rows of
files are not consolidated: equal rows may stand in several parts, and sum up as updates do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from actors.dataflow.commit import shards_of
from actors.dataflow.engine import Engine, Made
from actors.dataflow.recompute import opened
from actors.dataflow.step import cut, whole_job
from actors.errors import MalformedFrame
from actors.persist import Part, PersistClient
from actors.plan.jobs import FileDone
from actors.progress import Time
from actors.protocol.compute import SourceImport, ViewExport

PIECE_ROWS: Final = 500_000


async def first_parts(
    engine: Engine,
    persist: PersistClient,
    export: ViewExport,
    imports: Sequence[SourceImport],
    as_of: Time,
    name: tuple[int, int],
) -> list[list[Part]]:
    """Parts of the output, then of each hidden state, all at `as_of`; to be appended or given
    to `discard_parts`. Raises as `recompute` does; then none is left behind."""
    async with AsyncExitStack() as stack:
        sources = await opened(stack, engine, persist, imports, as_of, name)
        made = await whole_job(engine, export.plan, sources, as_of, name, into_files=True)
    parts: list[list[Part]] = [[] for _ in shards_of(export)]
    try:
        for file in made.files:
            if await _fits(engine, export, file):
                part = await persist.adopt_file(
                    export.shard, Path(file.path), file.rows, as_of, as_of
                )
                parts[0].append(part)
        async with aclosing(_pieces(engine, made)) as pieces:
            async for piece in pieces:
                await _write(engine, persist, export, piece, parts)
    except BaseException:
        await persist.discard_parts([part for each in parts for part in each])
        raise
    finally:
        await engine.clock.run_blocking(lambda: _remove(made.files))
    return parts


async def _write(
    engine: Engine,
    persist: PersistClient,
    export: ViewExport,
    piece: pa.Table,
    parts: list[list[Part]],
) -> None:
    """Cuts a piece and writes it, one part list a shard."""
    output, hidden = await engine.clock.run_blocking(lambda: cut(export.plan, piece))
    shards = shards_of(export)
    for shard, delta, written in zip(shards, (output, *hidden), parts, strict=True):
        if delta.num_rows:
            written += await persist.write_parts(shard, delta)


async def _fits(engine: Engine, export: ViewExport, file: FileDone) -> bool:
    """Whether a file has the very columns of a part of the output."""
    if export.plan.hidden:
        return False
    wanted = export.plan.output.arrow_updates()

    def same() -> bool:
        found = pq.read_schema(file.path)
        return found.names == wanted.names and all(
            found.field(name).type == wanted.field(name).type for name in wanted.names
        )

    return await engine.clock.run_blocking(same)


async def _pieces(engine: Engine, made: Made) -> AsyncGenerator[pa.Table, None]:
    """The rows: those in memory in one piece, those of files that are still there in many."""
    if not made.files:
        yield made.rows
    for file in made.files:
        path = Path(file.path)
        if not await engine.clock.run_blocking(path.exists):
            continue  # it was taken over
        try:
            with pq.ParquetFile(path) as reader:
                batches = reader.iter_batches(PIECE_ROWS)
                while True:
                    batch = await engine.clock.run_blocking(lambda: next(batches, None))  # noqa: B023
                    if batch is None:
                        break
                    yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise MalformedFrame(f"the engine's answer {path} cannot be read: {error}") from None


def _remove(files: Sequence[FileDone]) -> None:
    for file in files:
        Path(file.path).unlink(missing_ok=True)
