"""Restores a view from its durable state, and hydrates it first if needed.

The output shard's upper U decides. At 0 the view is *fresh*: it is computed whole at the `as_of`,
and appended as [0, as_of + 1) at time `as_of`. A view whose plan has changed is computed whole at
U, and its hidden state begins there; or it takes the contents that a view of the new plan has
computed beside it. Otherwise the view *resumes* at lo = U: imports are read from
U - 1, which the view's own durable holds keep readable. If a since has passed U - 1 nevertheless,
the view is recomputed at the least readable time, the difference is appended there, and the times
that cannot be known any more hold an error: a read there is refused, never wrong. Finally the
hidden state, and the errors of the imports and the output, are read into memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from actors.durable.arrangement import SharedArrangements
from actors.durable.persist import BatchPart, CompareAndSet, PersistClient
from actors.durable.persist.documents import sealed, unsealed
from actors.model.plan.delta import (
    ConsolidateRows,
    DeltaPlan,
    ExpandRows,
    FilterRows,
    GenerateRows,
    NamedInput,
    Node,
    SelectColumns,
    UnionRows,
    WeighRows,
)
from actors.model.plan.jobs import BucketObject, FileDone, JobRows
from actors.model.plan.schema import TableSchema
from actors.model.protocol.compute import DataflowDescription, ShardImport, ViewExport
from actors.replica.dataflow.answer_folders import AnswerFolders
from actors.replica.dataflow.commit import ErrorChange, commit, commit_parts, move_holds, shards_of
from actors.replica.dataflow.contents import (
    error_sums,
    errors_held,
    scanned,
    split_errors,
    truncated,
)
from actors.replica.dataflow.engine import EngineClient, JobResult, MadeFiles
from actors.replica.dataflow.policy import StepChooser
from actors.replica.dataflow.recompute import held_text, open_contents, recompute, taken_difference
from actors.replica.dataflow.step import empty_deltas, split_deltas, whole_job
from actors.replica.dataflow.touched import ImportArrangements, StateLookups
from actors.runtime.errors import (
    ERROR_TEXT_BYTES_MAX,
    CorruptData,
    DefiniteError,
    InvalidUsage,
    JobTooLarge,
    MalformedFrame,
    StorageError,
)
from actors.runtime.progress import Frontier, ShardId, Time, is_empty
from actors.runtime.threshold_probes import HYDRATION_CHUNK

PIECE_ROWS = 500_000

# -- Checkpoints of the hydration of an additive view: contents computed chunk by chunk ------------
# Theory of operation. A plan is *additive* when its output over a union of inputs is the union of
# its outputs: projections, filters and UNION ALL. The files of its imports are cut into chunks.
# Each chunk is computed alone, and its parts are noted in a document before the next chunk begins.
# After a crash hydration resumes after the last chunk noted. The append of the contents deletes the
# note in the same compare-and-set.
#
# A note holds for one `as_of` and one list of chunks, each named by the files and rows it reads. If
# compaction has replaced any of them, a noted part is gone, or the note is damaged, hydration
# starts over. Views with a hidden state or a join are not additive, and always start over.


class HydrationNote(msgspec.Struct, frozen=True):
    """Checkpoint of a hydration: its chunks by name, and the output's parts of each finished
    chunk."""

    as_of: Time
    chunks: tuple[str, ...]
    done: tuple[tuple[BatchPart, ...], ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HydrationNote)


def note_key(shard: ShardId) -> str:
    """Return the key of the document with the note of an output's shard."""
    return f"hydration/{shard}"


def is_additive(plan: DeltaPlan) -> bool:
    """Return whether the plan may be computed in chunks of its inputs."""
    return not plan.hidden and all(_linear(stratum.node) for stratum in plan.strata)


def _linear(node: Node) -> bool:
    match node:
        case NamedInput():
            return True
        case (
            FilterRows()
            | SelectColumns()
            | WeighRows()
            | ExpandRows()
            | GenerateRows()
            | ConsolidateRows()
        ):
            return _linear(node.input)
        case UnionRows():
            return all(_linear(child) for child in node.inputs)
        case _:
            return False


def split_into_chunks(inputs: Sequence[JobRows], bytes_max: int) -> list[list[JobRows]]:
    """Return the contents cut into chunks, one `JobRows` for each input.

    A chunk holds files of one input, up to `bytes_max` bytes but at least one file; the last chunk
    holds the rows that are in no file. Blocks to read the files' sizes.
    """
    nothing = [
        msgspec.structs.replace(rows, files=(), objects=(), arrow=None, arrow_file=None)
        for rows in inputs
    ]
    made: list[list[JobRows]] = []
    for index, rows in enumerate(inputs):
        taken: list[str | BucketObject] = []
        size = 0
        for file in (*rows.files, *rows.objects, None):
            bytes_ = 0 if file is None else _bytes_of(file)
            if taken and (file is None or size + bytes_ > bytes_max):
                chunk = list(nothing)
                chunk[index] = msgspec.structs.replace(
                    nothing[index],
                    files=tuple(each for each in taken if isinstance(each, str)),
                    objects=tuple(each for each in taken if isinstance(each, BucketObject)),
                )
                made.append(chunk)
                taken, size = [], 0
            if file is not None:
                taken.append(file)
                size += bytes_
    rest = [msgspec.structs.replace(rows, files=(), objects=()) for rows in inputs]
    if not made or any(rows.arrow is not None or rows.arrow_file is not None for rows in rest):
        made.append(rest)
    return made


def _bytes_of(file: str | BucketObject) -> int:
    return file.bytes if isinstance(file, BucketObject) else Path(file).stat().st_size


def chunk_name(chunk: Sequence[JobRows]) -> str:
    """Return a digest of the files and rows that a chunk reads. Blocks."""
    digest = hashlib.sha256()
    for index, rows in enumerate(chunk):
        # Compaction writes new files, so a file's name identifies its contents.
        keys = (*rows.files, *(part.key for part in rows.objects))
        names = " ".join(Path(key).name for key in keys)
        digest.update(f"{index} {rows.upper} {names}\n".encode())
        digest.update(rows.arrow or b"")
        if rows.arrow_file is not None:
            digest.update(Path(rows.arrow_file).read_bytes())
    return digest.hexdigest()


class HydrationJournal:
    """Stores the note of one hydration."""

    def __init__(self, persist: PersistClient, shard: ShardId) -> None:
        self._persist = persist
        self._shard = shard
        self._seqno: int | None = None

    async def load(self, as_of: Time, chunks: tuple[str, ...]) -> HydrationNote:
        """Return the note to resume from, an empty one if none fits. Raise `StorageError`."""
        fresh = HydrationNote(as_of, chunks)
        head = await self._persist.head(note_key(self._shard))
        self._seqno = None if head is None else head.seqno
        if head is None:
            return fresh
        try:
            found = _DECODER.decode(unsealed(note_key(self._shard), head.data))
        except (msgspec.DecodeError, UnicodeDecodeError, CorruptData):
            return fresh
        parts = [part for done in found.done for part in done]
        # Claimed parts do not become orphans while this process hydrates. The claim fails if the
        # orphan grace passed and a part is gone.
        if not await self._persist.claim(self._shard, parts):
            return fresh
        if (found.as_of, found.chunks) != (as_of, chunks):
            await self._persist.discard_parts(parts)
            return fresh
        return found

    async def save(self, note: HydrationNote) -> bool:
        """Store the note; return False if another service hydrates the same shard."""
        cas = CompareAndSet(note_key(self._shard), self._seqno, sealed(_ENCODER.encode(note)))
        if not await self._persist.compare_and_set([cas]):
            return False
        self._seqno = 0 if self._seqno is None else self._seqno + 1
        return True

    def gone(self) -> list[CompareAndSet]:
        """Return the changes that delete the note."""
        if self._seqno is None:
            return []
        return [CompareAndSet(note_key(self._shard), self._seqno, None)]

    async def drop(self) -> None:
        """Delete the note now."""
        if self.gone() and await self._persist.compare_and_set(self.gone()):
            self._seqno = None


# -- Computes the first contents of a view and streams them into parts -----------------------------
# Theory of operation. The engine computes the view once. An answer in memory is cut into output and
# hidden states and written as parts. A large answer comes as files: a file with exactly the columns
# of the output's parts is adopted, others are read, cut and written again piece by piece. One
# append then names all parts, so a view exists whole or not at all. The parts of a killed process
# become orphans, except the noted chunks of an additive view (`chunks`).
#
# Of a large answer, at most `PIECE_ROWS` rows are in memory. Rows of files are not
# consolidated: equal rows may be in several parts, and sum up as updates do.


class FirstContents(msgspec.Struct, frozen=True):
    """Parts and document changes of the first append."""

    parts: list[list[BatchPart]]
    """Parts of the output, then of each hidden state."""
    extra: Sequence[CompareAndSet] = ()
    """Deletes the hydration's note."""


async def first_parts(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    imports: Sequence[ShardImport],
    as_of: Time,
    name: tuple[int, int],
) -> FirstContents:
    """Write the view at `as_of` as parts and return them for an append.

    Raise as `recompute` does; then no part is left but those of noted chunks.
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
            # Saved before the next chunk: a crash repeats at most one.
            if not await notes.save(note):
                await persist.discard_parts(parts)
                raise StorageError(
                    f"another service hydrates {export.shard}: the note of this one was replaced",
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
        return await _run_whole(engine, persist, export, inputs, as_of, name, folders)


async def _run_whole(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    inputs: Sequence[JobRows],
    as_of: Time,
    name: tuple[int, int],
    folders: AnswerFolders,
) -> list[list[BatchPart]]:
    """Run the engine, whose executors may write into the folders; return the parts."""
    places = folders.places
    job = whole_job(engine, export.plan, inputs, as_of, name, into_files=True, into_bucket=places)
    made = await engine.run_into_files(job)
    files, objects = (made.files, made.objects) if isinstance(made, MadeFiles) else ((), ())
    parts = await folders.adopt(objects)
    try:
        for file in files:
            if await _fits(engine, export, file):
                # Adopting saves reading and writing the rows again.
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
    """Cut a piece and write it, with one part list for each shard."""
    output, hidden = await engine.clock.run_blocking(lambda: split_deltas(export.plan, piece))
    shards = shards_of(export)
    for shard, delta, written in zip(shards, (output, *hidden), parts, strict=True):
        if delta.num_rows:
            written += await persist.write_parts(shard, delta)


async def _fits(engine: EngineClient, export: ViewExport, file: FileDone) -> bool:
    """Return whether a file can be a part of the output unchanged: same columns, and some rows."""
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
    """Yield the rows: those in memory as one piece, those of remaining files in many."""
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
            raise MalformedFrame(f"the engine's answer {path} cannot be read: {error}") from None


def _remove(files: Sequence[FileDone]) -> None:
    for file in files:
        Path(file.path).unlink(missing_ok=True)


log = logging.getLogger("penstock.dataflow")


class ResumedHydration(msgspec.Struct, frozen=True):
    """State that a new incarnation starts from."""

    lo: Frontier
    touched: StateLookups | None
    output_errors: tuple[str, ...]
    """Errors that the output holds at ``lo - 1``."""
    input_errors: tuple[dict[str, int], ...]
    """Sums of the error updates at ``lo - 1``, for each import."""
    state_rows: int = 0
    """Approximate number of rows of the imports."""


async def restore(
    engine: EngineClient,
    persist: PersistClient,
    description: DataflowDescription,
    export: ViewExport,
    incarnation: int,
    scratch: Path,
    arrangements: SharedArrangements,
    chooser: StepChooser,
    hydrating: Callable[[], None],
    *,
    writable: bool,
) -> ResumedHydration:
    """Hydrate if needed, then read the durable state. Raise what stores and engine raise.

    `hydrating` is called before contents are computed, to start work that may run beside that.
    Without `writable` (read-only) a view that needs hydration waits until another replica has
    written it.
    """
    name = (incarnation, 0)
    upper, as_of = await _start_of(persist, description, export)
    shards = [imported.shard for imported in description.imports]
    # Reserves the arrangements at the future `lo`, so that other views' compaction does not pass it
    # while this view is computed. They are filled later, as its own are: a view is readable before
    # it can be stepped.
    reserved = ImportArrangements(
        export.plan, shards, arrangements, upper if as_of is None else as_of + 1
    )
    try:
        engine.announce(export.plan, incarnation)
        while as_of is not None:
            if not writable:
                await persist.wait_upper(export.shard, upper)
            else:
                started = engine.clock.monotonic_ms()
                hydrating()
                await _hydrate(engine, persist, description, export, as_of, upper, name)
                rows = await _rows(persist, description, as_of + 1)
                # Contents that were taken say nothing of what computing them costs.
                if not (export.taken_shard and upper == export.rebuilt_at):
                    chooser.recomputed(rows, engine.clock.monotonic_ms() - started)
            upper, as_of = await _start_of(persist, description, export)
        with suppress(JobTooLarge, InvalidUsage):  # the steps raise it again
            await engine.prepared()
        if is_empty(upper):
            nothing: tuple[dict[str, int], ...] = tuple({} for _ in description.imports)
            return ResumedHydration(upper, None, (), nothing)
        await move_holds(persist, description, export, upper)
        # Not on a thread: a cancelled call's result would be lost, and its files stay open.
        touched = StateLookups(
            export.plan,
            shards,
            arrangements,
            upper,
            scratch / str(incarnation),
            export.hidden_shards,
        )
        try:
            return await _resume(engine, persist, description, export, upper, name, touched)
        except BaseException:
            touched.close()
            raise
    finally:
        reserved.close()


async def _start_of(
    persist: PersistClient, description: DataflowDescription, export: ViewExport
) -> tuple[Frontier, Time | None]:
    """Return the output's upper, and the time to compute the view at.

    The time is None if the view resumes from the upper, or has ended.
    """
    # Read before the upper: another replica moves the upper before its holds, so a since beyond the
    # upper is a true gap.
    sinces = [(await persist.state(imported.shard)).since for imported in description.imports]
    upper = await persist.upper(export.shard)
    since = max(sinces, default=0)
    if is_empty(upper):
        return upper, None
    if upper == export.rebuilt_at:
        if export.taken_shard:
            # Nobody appends to it any more: it was handed over with the hidden states.
            return upper, await persist.upper(export.taken_shard) - 1
        return upper, max(since, upper or description.as_of)
    return upper, since if since > upper - 1 else None


async def _hydrate(
    engine: EngineClient,
    persist: PersistClient,
    description: DataflowDescription,
    export: ViewExport,
    as_of: Time,
    upper: Time,
    name: tuple[int, int],
) -> None:
    """Compute the view at `as_of` and append it."""
    held: tuple[str, ...] = ()
    if upper > 0:
        reader_id = engine.job_id(*name, "errors")
        held = await errors_of(persist, export.shard, export.plan.output, upper - 1, reader_id)
    if export.taken_shard and upper == export.rebuilt_at:
        first = upper or description.as_of
        await _take(engine, persist, export, as_of, (upper, first), held, name)
        return
    changes = [ErrorChange(text, as_of, -1) for text in held]
    first = upper if upper > 0 else description.as_of
    if as_of > first:
        gap = f"contents from {first} to {as_of} cannot be known: the inputs were compacted"
        changes += _gap(first, as_of, gap)
    interval, imports = (upper, as_of + 1), description.imports
    rebuilt = 0 < upper == export.rebuilt_at
    try:
        if upper == 0 and export.plan.strata:
            with engine.failures.judged():
                whole = await first_parts(engine, persist, export, imports, as_of, name)
            # An upper mismatch is no error: another replica has hydrated the view.
            await commit_parts(persist, export, interval, whole.parts, changes, whole.extra)
            return
        with AnswerFolders(persist, export) as folders, engine.failures.judged():
            deltas = await recompute(
                engine,
                persist,
                export,
                imports,
                as_of,
                upper,
                name,
                rebuilt=rebuilt,
                folders=folders,
            )
    except (DefiniteError, JobTooLarge) as error:
        text = truncated(held_text(error), ERROR_TEXT_BYTES_MAX)
        deltas = empty_deltas(export.plan)
        changes.append(ErrorChange(text, as_of, 1))
    await commit(
        persist,
        export,
        interval,
        deltas.output,
        deltas.hidden,
        changes,
        deltas.written,
        rebuilt=rebuilt,
    )


def _gap(lower: Time, upper: Time, text: str) -> list[ErrorChange]:
    """Return an error at the times in `[lower, upper)`."""
    return [ErrorChange(text, lower, 1), ErrorChange(text, upper, -1)]


async def _take(
    engine: EngineClient,
    persist: PersistClient,
    export: ViewExport,
    as_of: Time,
    begun: tuple[Frontier, Time],
    held: Sequence[str],
    name: tuple[int, int],
) -> None:
    """Append what the taken shard has up to `as_of`, in place of the former contents, from the
    output's upper on. The hidden states are there already. `begun`: that upper, and the first time
    that is read."""
    upper, first = begun
    changes = [ErrorChange(text, first, -1) for text in held]
    assert export.taken_shard is not None, "asked by the caller"
    since = (await persist.state(export.taken_shard)).since
    if since > first:
        # The view stood still before the one that takes its place began.
        changes += _gap(first, since, f"the view stood still from {first} until it was replaced")
    output = await taken_difference(
        engine, persist, export, as_of, begun, engine.job_id(*name, "taken")
    )
    alone = msgspec.structs.replace(export, hidden_shards=())
    # An upper mismatch is no error: another replica has taken them.
    await commit(persist, alone, (upper, as_of + 1), output, (), changes)


async def _resume(
    engine: EngineClient,
    persist: PersistClient,
    description: DataflowDescription,
    export: ViewExport,
    upper: Time,
    name: tuple[int, int],
    touched: StateLookups,
) -> ResumedHydration:
    plan = export.plan
    reader_id = engine.job_id(*name, "resume")
    output_errors = await errors_of(persist, export.shard, plan.output, upper - 1, reader_id)
    input_errors = [
        await _error_sums(persist, imported.shard, imported.schema, upper - 1, reader_id)
        for imported in description.imports
    ]
    rows = await _rows(persist, description, upper)
    return ResumedHydration(upper, touched, output_errors, tuple(input_errors), rows)


async def _rows(persist: PersistClient, description: DataflowDescription, before: Time) -> int:
    """Return about how many rows the imports have before a time: the number of stored updates."""
    states = [await persist.state(imported.shard) for imported in description.imports]
    return sum(b.rows for state in states for b in state.batches if b.lower < before)


async def errors_of(
    persist: PersistClient, shard: ShardId, schema: TableSchema, as_of: Time, reader_id: str
) -> tuple[str, ...]:
    """Return the errors that a shard holds at `as_of`. Raise `ReadBelowSince` and
    `StorageError`."""
    return errors_held(await _error_sums(persist, shard, schema, as_of, reader_id))


async def _error_sums(
    persist: PersistClient, shard: ShardId, schema: TableSchema, as_of: Time, reader_id: str
) -> dict[str, int]:
    """Return the sums of a shard's error updates at `as_of`."""
    state = await persist.state(shard)
    if not any(part.has_errors for batch in state.batches for part in batch.parts):
        return {}
    tables = []
    # Reads only the parts that hold errors.
    async with aclosing(
        scanned(persist, shard, schema, as_of, reader_id, errors_only=True)
    ) as parts:
        async for updates in parts:
            _, errors = split_errors(updates)
            if errors is not None:
                tables.append(errors)
    return error_sums(tables)
