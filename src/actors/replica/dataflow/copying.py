"""Copies the contents of a shard at one time into files. Each copy has its own actor.

Theory of operation. The actor waits until the copy is scheduled and writes are allowed, then runs
it once. It reads the shard at the `as_of` under a lease, part by part, writes the rows into files,
and publishes the manifest last (`sinks.copy_output`). It sends the result once, to worker 0
(`CopyFinished`), and then idles until it is dropped. A failure is also a result: nothing is
retried.

A row with multiplicity n is written n times. Memory holds one part, one piece or row group, and
whatever `GatheredUpdates` uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import msgspec
import pyarrow as pa

from actors.connectors.sinks.copy_output import CopyOutput, OpenOutput, check_copy, output_opener
from actors.connectors.sinks.formats import OutputFiles
from actors.durable.arrangement.gathered_updates import GatheredUpdates, check_positive, raise_error
from actors.durable.persist import BatchPart, PersistClient
from actors.model.plan.copy_manifest import VERSION, CopyManifest
from actors.model.plan.updates import between, iter_slices
from actors.model.protocol.compute import (
    CopyDone,
    CopyFailed,
    CopyToExport,
    DataflowDescription,
    StatusResponse,
)
from actors.model.protocol.internal import (
    CopyFinished,
    DataflowMessage,
    DataflowReport,
    DataflowScheduled,
    WritesAllowed,
)
from actors.replica.dataflow.contents import error_sums, errors_held, split_errors
from actors.runtime.errors import InvalidUsage, PenstockError, StorageError, ViewInError, to_wire
from actors.runtime.kernel import Actor, ActorAddress, ActorClock, RunningEffect
from actors.runtime.progress import Time
from actors.runtime.settings import Settings

R = TypeVar("R")

log = logging.getLogger("penstock.dataflow")


class CopyPosition(msgspec.Struct, frozen=True, gc=False):
    """Progress of a copy."""

    parts_read: int
    parts_total: int
    bytes_read: int
    bytes_total: int
    rows: int


class _Ended(msgspec.Struct, frozen=True, gc=False):
    result: CopyDone | CopyFailed


_Message: TypeAlias = DataflowMessage | CopyPosition | _Ended


class CopyTask(Actor[_Message]):
    """Runs one copy. `open_output` opens its destination; tests replace it."""

    def __init__(
        self,
        description: DataflowDescription,
        workers: tuple[ActorAddress[DataflowReport], ...],
        persist: PersistClient,
        settings: Settings,
        scratch: Path,
        *,
        open_output: OpenOutput | None = None,
    ) -> None:
        self._description = description
        self._worker = workers[0]
        self._persist = persist
        self._settings = settings
        self._scratch = scratch
        self._open_output = open_output
        self._scheduled = self._writable = False
        """True once the copy was scheduled, and once writes were allowed."""
        self._state = "suspended"
        """Last state that was reported."""
        self._running: RunningEffect | None = None
        """The copy in progress; set once."""

    async def receive(self, message: _Message) -> None:
        """Handle one message."""
        match message:
            case DataflowScheduled():
                self._scheduled = True
                self._start()
            case WritesAllowed():
                self._writable = True
                self._start()
            case CopyPosition():
                self._show("copying", message)
            case _Ended(result):
                text = "" if isinstance(result, CopyDone) else f"{result.code}: {result.text}"
                self._show("copied" if isinstance(result, CopyDone) else "failed", text=text)
                self._worker.reply(CopyFinished(self._description.id, result))
            case _:
                pass  # a copy has neither inputs nor readers

    def _start(self) -> None:
        if self._running is not None or not (self._scheduled and self._writable):
            return
        self._show("waiting")
        description, clock = self._description, self.ctx.clock
        attempt = f"{self.ctx.random.getrandbits(32):08x}"
        spool = self._scratch / "upload"
        make = self._open_output or output_opener(self._settings, clock, spool, attempt)
        far: Callable[[CopyPosition], Any] = self.ctx.self.reply
        persist, scratch = self._persist, self._scratch

        def failed(error: Exception) -> _Ended:
            if not isinstance(error, PenstockError):
                log.error("%s: the copy failed", self.ctx.path, exc_info=error)
            code, text, _ = to_wire(error)
            return _Ended(CopyFailed(code, text))

        self._running = self.ctx.effect(
            lambda: copy(persist, clock, description, make, scratch, far),
            done=_Ended,
            failed=failed,
        )

    def _show(self, state: str, far: CopyPosition | None = None, *, text: str = "") -> None:
        self._state = state
        status = StatusResponse(self._description.id, state, text)
        if far is not None:
            status = msgspec.structs.replace(
                status,
                rows_out=far.rows,
                parts_read=far.parts_read,
                parts_total=far.parts_total,
                bytes_read=far.bytes_read,
                bytes_total=far.bytes_total,
            )
        self._worker.reply(status)

    def describe(self) -> str:
        """Return the copy's state as readable text."""
        return self._state


class BlockingRunner(Protocol):
    """Runs a blocking call and waits until it has ended."""

    async def __call__(self, function: Callable[[], R], /) -> R:
        """Run the function and return its result."""
        ...


def run_to_completion(clock: ActorClock) -> BlockingRunner:
    """Return a function that runs blocking calls on a thread, and to their end even if canceled."""

    async def work(function: Callable[[], R], /) -> R:
        # A canceled copy removes its files next, so no call may still be using one.
        with anyio.CancelScope(shield=True):
            result = await clock.run_blocking(function)
        await anyio.lowlevel.checkpoint_if_cancelled()
        return result

    return work


async def copy(
    persist: PersistClient,
    clock: ActorClock,
    description: DataflowDescription,
    open_output: OpenOutput,
    scratch: Path,
    far: Callable[[CopyPosition], Any],
) -> CopyDone:
    """Copy the contents once `as_of` is sealed. `far` receives the progress.

    Raise `ViewInError`, `CorruptData`, `InvalidUsage`, `ReadBelowSince`, `ResourceBusy`,
    `StoreFull` or `StorageError`; no file of the copy is left then.
    """

    export = description.export
    if len(description.imports) != 1 or not isinstance(export, CopyToExport):
        raise InvalidUsage(f"{description.id} is not a copy with exactly one import")
    check_copy(export)
    # On a thread, because it follows links in the file system.
    output = await clock.run_blocking(partial(open_output, export, description.id))
    try:
        found = await output.begin()
        # An earlier attempt has finished this copy.
        if found is not None:
            return CopyDone(found.manifest.rows, len(found.manifest.files), found.path)
        files = output.open(export.schema.arrow(), export)
        await _fill(persist, clock, description, output, files, scratch, far)
        written = await output.run(files.finish)
        manifest = CopyManifest(
            VERSION,
            description.id,
            description.name,
            description.as_of,
            export.format,
            export.schema.columns,
            sum(file.rows for file in written),
            sum(file.bytes for file in written),
            tuple(written),
        )
        # Shield this: once the manifest is published the copy is valid, even if it is dropped.
        with anyio.CancelScope(shield=True):
            there = await output.publish(manifest)
        return CopyDone(there.manifest.rows, len(there.manifest.files), there.path)
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await output.close()
            except (StorageError, pa.ArrowException) as error:
                text = "copy %s: cannot remove its remaining files: %s"
                log.warning(text, description.id, error)


async def _fill(
    persist: PersistClient,
    clock: ActorClock,
    description: DataflowDescription,
    output: CopyOutput,
    files: OutputFiles,
    scratch: Path,
    far: Callable[[CopyPosition], Any],
) -> None:
    """Read all parts and write their rows."""
    imported, as_of = description.imports[0], description.as_of
    reader = await persist.open_reader(imported.shard, f"copy-{description.id}")
    gathered: GatheredUpdates | None = None
    wait = run_to_completion(clock)
    try:
        parts, _ = await reader.snapshot(as_of)
        # Check this before the first row is written: a view in error fails the copy.
        await _check_errors(persist, description, parts)
        # Without retractions, rows are written as they are read. Otherwise they must be summed
        # first.
        if any(part.retracts for part in parts):
            gathered = GatheredUpdates(imported.schema, scratch / "gathered")
        work, take = (output.run, files.add) if gathered is None else (wait, gathered.add)
        bytes_total = sum(part.bytes for part in parts)
        bytes_read = 0
        for number, part in enumerate(parts):
            updates = await persist.fetch(part, imported.schema)
            for rows in iter_slices(updates):
                await work(partial(_take, rows, as_of, take))
            reader.release([part.key])
            bytes_read += part.bytes
            far(CopyPosition(number + 1, len(parts), bytes_read, bytes_total, files.rows))
        if gathered is not None:
            batches = await wait(partial(_summed, gathered))
            while await output.run(partial(_write_some, batches, files)):
                far(CopyPosition(len(parts), len(parts), bytes_read, bytes_total, files.rows))
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()
            if gathered is not None:
                await wait(gathered.close)


async def _check_errors(
    persist: PersistClient, description: DataflowDescription, parts: Sequence[BatchPart]
) -> None:
    """Raise `ViewInError` if the contents hold an error."""
    errors = []
    for part in parts:
        if part.has_errors:
            updates = await persist.fetch(part, description.imports[0].schema)
            _, held = split_errors(between(updates, 0, description.as_of + 1))
            if held is not None:
                errors.append(held)
    texts = errors_held(error_sums(errors))
    if texts:
        raise ViewInError(texts[0])


def _take(updates: pa.Table, as_of: Time, take: Callable[[pa.Table], None]) -> None:
    """Pass on the plain updates up to `as_of`."""
    plain, _ = split_errors(between(updates, 0, as_of + 1))
    if plain.num_rows:
        take(plain)


def _summed(gathered: GatheredUpdates) -> Iterator[pa.RecordBatch]:
    contents = gathered.contents()
    raise_error(contents.errors())
    return contents.rows()


def _write_some(batches: Iterator[pa.RecordBatch], files: OutputFiles) -> bool:
    """Write one batch. Return False if there is none left."""
    batch = next(batches, None)
    if batch is None:
        return False
    check_positive(batch)
    files.add(pa.Table.from_batches([batch]))
    return True
