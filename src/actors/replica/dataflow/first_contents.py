"""Computes the first contents of a view and streams them into parts.

Theory of operation. The engine computes the view once. An answer in memory is split into output and
hidden states and written as parts. A large answer comes as files: a file with exactly the columns
of the output's parts is adopted; others are read, split and written again piece by piece. One
append then names all parts, so a view has either all of its contents or none. The parts of a killed
process become orphans, except the recorded chunks of an additive view (`hydration_journal`).

At most `PIECE_ROWS` rows of a large answer are in memory. Rows of files are not consolidated: equal
rows may be in several parts, and add up as updates do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from actors.durable.persist import BatchPart, CompareAndSet, PersistClient
from actors.model.plan.jobs import FileDone, JobRows
from actors.model.protocol.compute import ShardImport, ViewExport
from actors.replica.dataflow.answer_folders import AnswerFolders
from actors.replica.dataflow.commit import shards_of
from actors.replica.dataflow.engine import EngineClient, JobResult, MadeFiles
from actors.replica.dataflow.hydration_journal import (
    HydrationJournal,
    chunk_name,
    is_additive,
    split_into_chunks,
)
from actors.replica.dataflow.recompute import open_contents
from actors.replica.dataflow.step import full_job, split_deltas
from actors.runtime.errors import DefiniteError, JobTooLarge, MalformedFrame, StorageError
from actors.runtime.progress import Time
from actors.runtime.threshold_probes import HYDRATION_CHUNK

PIECE_ROWS = 500_000


class FirstContents(msgspec.Struct, frozen=True):
    """Parts and document changes of the first append."""

    parts: list[list[BatchPart]]
    """Parts of the output, then of each hidden state."""
    extra: Sequence[CompareAndSet] = ()
    """Changes that delete the hydration's note."""


async def first_parts(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    imports: Sequence[ShardImport],
    as_of: Time,
    name: tuple[int, int],
) -> FirstContents:
    """Write the view at `as_of` as parts, and return them for an append.

    Raise what `recompute` raises; then no parts are left but those of recorded chunks.
    """
    async with AsyncExitStack() as stack:
        inputs = await open_contents(stack, engine, persist, imports, as_of, name)
        if is_additive(export.plan):
            bytes_max = engine.settings.hydration_chunk_bytes
            chunks = await engine.clock.run_blocking(lambda: split_into_chunks(inputs, bytes_max))
            if HYDRATION_CHUNK.crossed(len(chunks) > 1):
                return await _chunk_by_chunk(engine, persist, export, chunks, as_of, name)
        return FirstContents(await _computed(engine, persist, export, inputs, as_of, name))


async def _chunk_by_chunk(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    chunks: list[list[JobRows]],
    as_of: Time,
    name: tuple[int, int],
) -> FirstContents:
    names = await engine.clock.run_blocking(lambda: tuple(chunk_name(chunk) for chunk in chunks))
    notes = HydrationJournal(persist, export.shard)
    note = await notes.load(as_of, names)
    try:
        for chunk in chunks[len(note.done) :]:
            (parts,) = await _computed(engine, persist, export, chunk, as_of, name)
            note = msgspec.structs.replace(note, done=(*note.done, tuple(parts)))
            # Save it before the next chunk, so that a crash repeats at most one chunk.
            if not await notes.save(note):
                await persist.discard_parts(parts)
                raise StorageError(
                    f"another service is hydrating {export.shard} and has replaced the note",
                    determinate=True,
                )
    except (DefiniteError, JobTooLarge):
        # The error becomes the view's first contents, so the finished chunks are not needed.
        await notes.drop()
        await persist.discard_parts([part for done in note.done for part in done])
        raise
    return FirstContents([[part for done in note.done for part in done]], notes.gone())


async def _computed(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    inputs: Sequence[JobRows],
    as_of: Time,
    name: tuple[int, int],
) -> list[list[BatchPart]]:
    """Run the engine once, and return parts of the output and of each hidden state."""
    with AnswerFolders(persist, export) as folders:
        return await _run_once(engine, persist, export, inputs, as_of, name, folders)


async def _run_once(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    inputs: Sequence[JobRows],
    as_of: Time,
    name: tuple[int, int],
    folders: AnswerFolders,
) -> list[list[BatchPart]]:
    """Run the engine, whose executors may write into the folders, and return the parts."""
    places = folders.places
    job = full_job(engine, export.plan, inputs, as_of, name, into_files=True, into_bucket=places)
    made = await engine.run_into_files(job)
    files, objects = (made.files, made.objects) if isinstance(made, MadeFiles) else ((), ())
    parts = await folders.adopt(objects)
    try:
        for file in files:
            if await _is_adoptable(engine, export, file):
                # Adopting the file avoids reading and rewriting the rows.
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
        await engine.clock.run_blocking(lambda: _remove(files))
    return parts


async def _write(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    piece: pa.Table,
    parts: list[list[BatchPart]],
) -> None:
    """Split a piece and write it; `parts` has one list for each shard."""
    output, hidden = await engine.clock.run_blocking(lambda: split_deltas(export.plan, piece))
    shards = shards_of(export)
    for shard, delta, written in zip(shards, (output, *hidden), parts, strict=True):
        if delta.num_rows:
            written += await persist.write_parts(shard, delta)


async def _is_adoptable(engine: EngineClient, export: ViewExport, file: FileDone) -> bool:
    """Return whether a file can be a part of the output as it is: same columns, and at least one
    row."""
    if export.plan.hidden or not file.rows:
        return False
    wanted = export.plan.output.arrow_updates()

    def same() -> bool:
        found = pq.read_schema(file.path)
        return found.names == wanted.names and all(
            found.field(name).type == wanted.field(name).type for name in wanted.names
        )

    return await engine.clock.run_blocking(same)


async def _pieces(
    engine: EngineClient, made: JobResult | MadeFiles
) -> AsyncGenerator[pa.Table, None]:
    """Yield the rows: those in memory as one piece, those in the remaining files in many."""
    if isinstance(made, JobResult):
        yield made.rows
        return
    for file in made.files:
        path = Path(file.path)
        if not await engine.clock.run_blocking(path.exists):
            continue  # it was adopted as a part
        try:
            with pq.ParquetFile(path) as reader:
                batches = reader.iter_batches(PIECE_ROWS)
                while True:
                    batch = await engine.clock.run_blocking(lambda: next(batches, None))  # noqa: B023
                    if batch is None:
                        break
                    yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise MalformedFrame(f"cannot read the engine's answer {path}: {error}") from None


def _remove(files: Sequence[FileDone]) -> None:
    for file in files:
        Path(file.path).unlink(missing_ok=True)
