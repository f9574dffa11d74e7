"""Makes N workers look like one replica: splits commands and merges responses. Pure.

The rule for each kind of response is stated where it is merged.

Invariants: emitted frontiers strictly advance; the batches of a subscribe are contiguous; a peek, a
drop and an answer are emitted at most once; with nothing in flight, no state is kept (`idle`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec
import pyarrow as pa

from actors.model.plan.schema import TIME
from actors.model.plan.updates import between, consolidate, from_ipc, to_ipc
from actors.model.protocol import storage
from actors.model.protocol.client_commands import merge_configuration
from actors.model.protocol.compute import (
    Command,
    ConnectionRefused,
    CopyDone,
    CopyDropped,
    CopyFailed,
    CopyResult,
    CopyToResponse,
    Frontiers,
    Hello,
    InitializationComplete,
    PeekCanceled,
    PeekError,
    PeekResponse,
    PeekResult,
    PeekRows,
    PeekStashed,
    Response,
    StashPart,
    StatusResponse,
    SubscribeBatch,
    SubscribeDropped,
    SubscribeResponse,
    UpdateConfiguration,
)
from actors.model.protocol.storage import (
    DroppedId,
    FilesStaged,
    FrontierUpper,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    StagedBatches,
    StagingFailed,
    StagingResult,
    StatisticsUpdates,
    StatusUpdate,
)
from actors.replica.storage.history import StorageDefinitions
from actors.runtime.errors import InvalidUsage, OperationCanceled, RemoteProtocolError
from actors.runtime.progress import EMPTY, Frontier, ObjectId, is_empty

C = TypeVar("C")
R = TypeVar("R")

KINDS = ("write", "input", "output")


class PartitionedHalf(ABC, Generic[C, R]):
    """Splits one client's commands over the parts (workers) and merges the parts' responses.

    `ended` collects the ids whose end was reported by all parts. Its reader clears it.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._complete = False
        """True once InitializationComplete has been sent."""
        self.ended: list[ObjectId] = []
        """Ids whose end was reported by all parts, until the reader clears it."""

    @property
    @abstractmethod
    def addressed(self) -> range:
        """Return the parts that get commands of the client."""

    @abstractmethod
    def split(self, command: C) -> list[tuple[int, C]]:
        """Return (part, command) for every part that should get the command."""

    @abstractmethod
    def absorb(self, part: int, response: R) -> R | None:
        """Return the merged response that this one completes, or None.

        Raise `RemoteProtocolError` if the part broke a rule.
        """


class _MergedFrontiers:
    """Frontiers of one object: for each kind the emitted frontier, followed by one for each part.

    There is one of these for each object, so it is kept small.
    """

    __slots__ = ("_frontiers",)

    def __init__(self, parts: int) -> None:
        self._frontiers: list[Frontier] = [0] * (len(KINDS) * (parts + 1))

    def absorb(self, part: int, response: Frontiers) -> Frontiers | None:
        frontiers = self._frontiers
        width = len(frontiers) // len(KINDS)
        news: dict[str, Frontier] = {}
        for emitted, kind in zip(range(0, len(frontiers), width), KINDS, strict=True):
            frontier = getattr(response, kind)
            if frontier is None:
                continue
            place = emitted + 1 + part
            # Take the maximum: a part's frontier never goes back.
            if frontier > frontiers[place]:
                frontiers[place] = frontier
            meet = min(frontiers[emitted + 1 : emitted + width])
            if meet > frontiers[emitted]:
                frontiers[emitted] = news[kind] = meet
        return Frontiers(response.id, **news) if news else None

    def ended(self) -> bool:
        frontiers = self._frontiers
        width = len(frontiers) // len(KINDS)
        return all(is_empty(meet) for meet in frontiers[::width])


class _PendingUpdates(msgspec.Struct, frozen=True):
    """Updates with ``lower <= time < upper`` that have not been emitted yet: rows, or blobs, which
    are never split."""

    lower: Frontier
    upper: Frontier
    arrow: bytes | None = None
    parts: tuple[StashPart, ...] = ()


class _Subscribe:
    """One subscribe being merged: the upper of each part, and the updates that were not emitted
    yet."""

    def __init__(self, parts: int) -> None:
        self.uppers: list[Frontier | None] = [None] * parts
        """Upper of each part's last batch; None before its first batch."""
        self.lowers: list[Frontier] = [0] * parts
        """Lower of each part's first batch."""
        self.emitted: Frontier | None = None
        """Upper of the last emitted batch; None before the first."""
        self.stash: list[_PendingUpdates] = []
        """Updates that have not been emitted yet."""
        self.muted = False
        """True after an error or a drop: nothing more is emitted."""
        self.traceparent: str | None = None
        """Trace context of the updates that have not been emitted yet."""

    def absorb(self, part: int, batch: SubscribeBatch) -> SubscribeBatch | None:
        if self.uppers[part] is None:
            self.lowers[part] = batch.lower
        self.uppers[part] = batch.upper
        if self.muted:
            return None
        if batch.error is not None:
            self.muted = True
            self.stash.clear()
            # The error replaces all updates that were not emitted, and covers their times.
            lower = self.lowers[part] if self.emitted is None else self.emitted
            return SubscribeBatch(lower, max(batch.upper, lower + 1), None, batch.error)
        if batch.arrow is not None:
            self.stash.append(_PendingUpdates(batch.lower, batch.upper, batch.arrow))
        if batch.parts:
            self.stash.append(_PendingUpdates(batch.lower, batch.upper, None, batch.parts))
        if batch.arrow is not None or batch.parts:
            self.traceparent = self.traceparent or batch.traceparent
        return self._emit()

    def _emit(self) -> SubscribeBatch | None:
        uppers = [upper for upper in self.uppers if upper is not None]
        if len(uppers) < len(self.uppers):
            return None
        # A part without data starts at 0; the part with data has the true lower bound.
        lower = max(self.lowers) if self.emitted is None else self.emitted
        meet = self._without_splitting(min(uppers))
        if meet <= lower:
            return None
        self.emitted = meet
        arrow, parts = self._take(meet)
        if arrow is None and not parts:
            return SubscribeBatch(lower, meet)
        traceparent, self.traceparent = self.traceparent, None
        return SubscribeBatch(lower, meet, arrow, None, traceparent, parts)

    def _without_splitting(self, meet: Frontier) -> Frontier:
        """Lower the frontier to the start of any blob that extends beyond it, because blobs are not
        split."""
        while True:
            cut = [
                kept.lower for kept in self.stash if kept.parts and kept.lower < meet < kept.upper
            ]
            if not cut:
                return meet
            meet = min(cut)

    def _take(self, meet: Frontier) -> tuple[bytes | None, tuple[StashPart, ...]]:
        """Remove and return the updates below `meet`; keep the others."""
        blobs = [kept for kept in self.stash if kept.parts]
        rows = [kept for kept in self.stash if kept.arrow is not None]
        parts = tuple(part for kept in blobs if kept.upper <= meet for part in kept.parts)
        self.stash = [kept for kept in blobs if kept.upper > meet]
        if not rows:
            return None, parts
        if len(rows) == 1 and rows[0].upper <= meet:
            return rows[0].arrow, parts
        table: pa.Table = pa.concat_tables([from_ipc(kept.arrow or b"") for kept in rows])
        later = between(table, meet, EMPTY)
        if later.num_rows:
            self.stash.append(_PendingUpdates(meet, EMPTY, to_ipc(later)))
        due = consolidate(between(table, 0, meet)).sort_by(TIME)
        return to_ipc(due) if due.num_rows else None, parts

    def end(self, part: int, dropped: SubscribeDropped) -> SubscribeDropped | None:
        """Record that a part was dropped.

        Return the end of the subscribe once, unless it has already ended or failed.
        """
        self.uppers[part] = EMPTY
        over = self.muted or (self.emitted is not None and is_empty(self.emitted))
        self.muted = True
        self.stash.clear()
        if over:
            return None
        return SubscribeDropped(dropped.frontier if self.emitted is None else self.emitted)

    def ended(self) -> bool:
        return all(upper is not None and is_empty(upper) for upper in self.uppers)


class ConnectionLimits:
    """The instance's current limits, as far as connections need them. They outlive a connection."""

    def __init__(self, result_bytes_max: int, inline_bytes_max: int | None = None) -> None:
        self.result_bytes_max = result_bytes_max
        self._inline_bytes_max = inline_bytes_max

    def configure(self, command: UpdateConfiguration) -> None:
        """Adopt the limits of a configuration."""
        if command.result_bytes_max is not None:
            self.result_bytes_max = command.result_bytes_max
        if command.inline_bytes_max is not None:
            self._inline_bytes_max = command.inline_bytes_max

    def inline_bytes(self, workers: int) -> int:
        """Return how many bytes of a result each worker may put inline into its response."""
        share = self.result_bytes_max // workers
        return share if self._inline_bytes_max is None else min(self._inline_bytes_max, share)


class PartitionedState(PartitionedHalf[Command, Response]):
    """Splits and merges the messages of one client of the compute half."""

    def __init__(self, parts: int, limits: ConnectionLimits) -> None:
        super().__init__(parts)
        self._limits = limits
        self._waiting: UpdateConfiguration | None = None
        """Configuration received before InitializationComplete."""
        self._clear()

    def _clear(self) -> None:
        self._meets: dict[ObjectId, _MergedFrontiers] = {}
        self._peeks: dict[str, dict[int, PeekResult]] = {}
        self._subscribes: dict[ObjectId, _Subscribe] = {}
        self._copies: dict[ObjectId, dict[int, CopyResult]] = {}

    def idle(self) -> bool:
        """Return whether nothing is being merged."""
        return not (self._peeks or self._meets or self._subscribes or self._copies)

    @property
    def addressed(self) -> range:
        """See `PartitionedHalf`."""
        return range(1)

    def split(self, command: Command) -> list[tuple[int, Command]]:
        """Return (part, command) for every part that should get the command; see
        `PartitionedHalf.split`."""
        match command:
            case Hello():
                self._clear()
                self._waiting, self._complete = None, False
            case UpdateConfiguration():
                # A configuration takes effect at InitializationComplete, as it does for the
                # workers.
                if self._complete:
                    self._limits.configure(command)
                else:
                    self._waiting = merge_configuration(self._waiting, command)
            case InitializationComplete():
                self._complete = True
                if self._waiting is not None:
                    self._limits.configure(self._waiting)
        # Part 0's worker passes the command to the sequencer, which orders it for all workers.
        return [(0, command)]

    def absorb(self, part: int, response: Response) -> Response | None:
        """Return the merged response that this one completes, or None; see
        `PartitionedHalf.absorb`."""
        match response:
            case Frontiers():
                return self._frontiers(part, response)
            case PeekResponse():
                return self._peek(part, response)
            case SubscribeResponse():
                return self._subscribe(part, response)
            case CopyToResponse():
                return self._copy(part, response)
            case StatusResponse() | ConnectionRefused():
                return response

    def _frontiers(self, part: int, response: Frontiers) -> Frontiers | None:
        # For each object and kind, the minimum over the parts is emitted when it advances. An
        # object is forgotten once all frontiers of all parts are empty.
        meets = self._meets.get(response.id)
        if meets is None:
            meets = self._meets[response.id] = _MergedFrontiers(self._parts)
        news = meets.absorb(part, response)
        if meets.ended():
            del self._meets[response.id]
            self.ended.append(response.id)
        return news

    def _peek(self, part: int, response: PeekResponse) -> PeekResponse | None:
        # Emit it once every part has answered, because each has its own rows.
        answers = self._peeks.setdefault(response.uuid, {})
        if part in answers:
            raise RemoteProtocolError(f"worker {part} answered peek {response.uuid} twice")
        answers[part] = response.result
        if len(answers) < self._parts:
            return None
        del self._peeks[response.uuid]
        results = [answers[number] for number in sorted(answers)]
        merged = merge_results(results, self._limits.result_bytes_max)
        return PeekResponse(response.uuid, merged)

    def _copy(self, part: int, response: CopyToResponse) -> CopyToResponse | None:
        # Emit it once every part has answered, because each may have written files.
        answers = self._copies.setdefault(response.id, {})
        if part in answers:
            raise RemoteProtocolError(f"worker {part} answered copy {response.id} twice")
        answers[part] = response.result
        if len(answers) < self._parts:
            return None
        del self._copies[response.id]
        self.ended.append(response.id)
        results = [answers[number] for number in sorted(answers)]
        return CopyToResponse(response.id, merge_copies(results))

    def _subscribe(self, part: int, response: SubscribeResponse) -> SubscribeResponse | None:
        # When the minimum of the parts' uppers advances, emit a batch with the updates below it.
        # The first error ends the subscribe, and so does a drop; the end is emitted once.
        merging = self._subscribes.get(response.id)
        if merging is None:
            merging = self._subscribes[response.id] = _Subscribe(self._parts)
        news: SubscribeBatch | SubscribeDropped | None
        if isinstance(response.batch, SubscribeBatch):
            news = merging.absorb(part, response.batch)
        else:
            news = merging.end(part, response.batch)
        if merging.ended():
            del self._subscribes[response.id]
            self.ended.append(response.id)
        return None if news is None else SubscribeResponse(response.id, news)


def merge_results(results: list[PeekResult], bytes_max: int) -> PeekResult:
    """Merge the parts' results of a peek into one."""
    # Precedence: Canceled comes before any error. An error of the data comes before one of a limit,
    # a limit of bytes before one of rows, and the smallest limit first. Stashed parts and rows form
    # one stashed result; rows alone are concatenated.
    if len(results) == 1:
        return results[0]
    for result in results:
        if isinstance(result, PeekCanceled):
            return result
    errors = [result for result in results if isinstance(result, PeekError)]
    if errors:
        return min(errors, key=_precedence)
    pieces = [piece for result in results if (piece := _inline(result)) is not None]
    stashed = [result for result in results if isinstance(result, PeekStashed)]
    arrow, rows = _concatenated(pieces)
    # Check the size again, because each part saw only its own rows.
    if len(arrow) > bytes_max:
        return PeekError(
            InvalidUsage.__name__,
            f"result too large: {len(arrow)} bytes (limit result_bytes_max: {bytes_max}); "
            "read by key, or subscribe",
            "bytes",
        )
    if not stashed:
        return PeekRows(arrow, rows)
    if rows < 0:
        rows = from_ipc(arrow).num_rows
    parts = tuple(part for result in stashed for part in result.parts)
    return PeekStashed(
        parts,
        rows + sum(part.rows for part in parts),
        (len(arrow) if rows else 0) + sum(part.size_bytes for part in parts),
        arrow if rows else None,
    )


def merge_copies(results: list[CopyResult]) -> CopyResult:
    """Merge the parts' results of a copy into one."""
    # Precedence: Dropped, then Failed, then the sum, with the manifest of the part that wrote one.
    for kind in (CopyDropped, CopyFailed):
        for result in results:
            if isinstance(result, kind):
                return result
    done = [result for result in results if isinstance(result, CopyDone)]
    manifest = next((result.manifest for result in done if result.manifest), "")
    return CopyDone(sum(r.rows for r in done), sum(r.files for r in done), manifest)


def _precedence(error: PeekError) -> tuple[int, float]:
    """Return the rank of an error: errors of the data first, then of bytes, then of rows by their
    limit."""
    limit = float("inf") if error.limit_rows is None else error.limit_rows
    return ("", "bytes", "rows").index(error.limit), limit


def _inline(result: PeekResult) -> tuple[bytes, int] | None:
    """Return the inline rows of a result and their number (-1: not counted)."""
    match result:
        case PeekRows(arrow=arrow, rows=rows):
            return arrow, rows
        case PeekStashed(inline=bytes() as arrow):
            return arrow, -1
    return None


def _concatenated(pieces: list[tuple[bytes, int]]) -> tuple[bytes, int]:
    """Return all rows as one stream, and their number. Pieces known to be empty are not decoded."""
    filled = [piece for piece in pieces if piece[1] != 0]
    if not filled:
        return next((arrow for arrow, _ in pieces if arrow), b""), 0
    if len(filled) == 1:
        return filled[0]
    decoded = [(from_ipc(arrow), arrow) for arrow, _ in filled]
    # If all pieces are empty, one of them provides the schema.
    tables = [(table, arrow) for table, arrow in decoded if table.num_rows] or decoded[:1]
    if len(tables) == 1:
        return tables[0][1], tables[0][0].num_rows
    # The parts hold disjoint rows, so there is nothing to consolidate.
    whole: pa.Table = pa.concat_tables([table for table, _ in tables])
    return to_ipc(whole), whole.num_rows


# -- the storage half ------------------------------------------------------------------------------


class _StorageObject(msgspec.Struct):
    """One object: the upper of each worker, the reported minimum, and the workers that have dropped
    it."""

    uppers: list[Frontier]
    reported: Frontier = 0
    dropped: set[int] = msgspec.field(default_factory=set)


class StoragePartitioned(PartitionedHalf[storage.Command, storage.Response]):
    """Splits and merges the messages of one client of the storage half.

    `ended` also contains uuids of one-shot ingestions.
    """

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self._clear()

    def _clear(self) -> None:
        self._wanted = StorageDefinitions()
        self._objects: dict[ObjectId, _StorageObject] = {}
        self._oneshots: dict[str, dict[int, StagingResult]] = {}

    def idle(self) -> bool:
        """Return whether nothing is being merged."""
        return not (self._objects or self._oneshots)

    @property
    def addressed(self) -> range:
        """See `PartitionedHalf`."""
        return range(self._parts)

    def split(self, command: storage.Command) -> list[tuple[int, storage.Command]]:
        """Return (part, command) for every part that should get the command; see
        `PartitionedHalf.split`."""
        if isinstance(command, Hello):
            self._clear()
            self._complete = False
        elif self._complete:
            self._track(command)
        else:
            self._wanted.add(command)
            if isinstance(command, InitializationComplete):
                self._complete = True
                # Nothing ran before this point, so only what is still wanted now will answer.
                for said in self._wanted.commands():
                    self._track(said)
                self._wanted = StorageDefinitions()
        # Every worker gets all commands, so they determine what its responses may be about.
        return [(part, command) for part in range(self._parts)]

    def _track(self, command: storage.Command) -> None:
        match command:
            case RunIngestion(description=description):
                self._begin(*description.ids)
            case RunSink(description=description):
                self._begin(description.id)
            case RunOneshotIngestion(uuid=uuid):
                self._oneshots.setdefault(uuid, {})

    def _begin(self, *ids: ObjectId) -> None:
        for id in ids:
            if id not in self._objects:
                self._objects[id] = _StorageObject([0] * self._parts)

    def absorb(self, part: int, response: storage.Response) -> storage.Response | None:
        """Return the merged response that this one completes, or None; see
        `PartitionedHalf.absorb`."""
        match response:
            case FrontierUpper():
                return self._upper(part, response)
            case DroppedId():
                return self._dropped(part, response)
            case StagedBatches():
                return self._staged(part, response)
            case StatusUpdate() | StatisticsUpdates() | ConnectionRefused():
                return response

    def _object(self, part: int, id: ObjectId, what: str) -> _StorageObject:
        found = self._objects.get(id)
        if found is None:
            raise RemoteProtocolError(
                f"worker {part} reported {what} of {id}, which is not running"
            )
        if part in found.dropped:
            raise RemoteProtocolError(f"worker {part} reported {what} of {id} after its drop")
        return found

    def _upper(self, part: int, response: FrontierUpper) -> FrontierUpper | None:
        # Each worker's upper only advances; emit the minimum when it advances.
        found = self._object(part, response.id, "an upper")
        found.uppers[part] = max(found.uppers[part], response.upper)
        meet = min(found.uppers)
        if meet <= found.reported:
            return None
        found.reported = meet
        return FrontierUpper(response.id, meet)

    def _dropped(self, part: int, response: DroppedId) -> DroppedId | None:
        # Emit it once all workers have sent it: until then one of them may still write.
        found = self._object(part, response.id, "the drop")
        found.dropped.add(part)
        if len(found.dropped) < self._parts:
            return None
        del self._objects[response.id]
        self.ended.append(response.id)
        return response

    def _staged(self, part: int, response: StagedBatches) -> StagedBatches | None:
        # Emit it once all workers have answered, because each may have staged rows.
        uuid = response.uuid
        answers = self._oneshots.get(uuid)
        if answers is None:
            raise RemoteProtocolError(
                f"worker {part} answered one-shot ingestion {uuid}, which was not requested"
            )
        if part in answers:
            raise RemoteProtocolError(f"worker {part} answered one-shot ingestion {uuid} twice")
        answers[part] = response.result
        if len(answers) < self._parts:
            return None
        del self._oneshots[uuid]
        self.ended.append(uuid)
        return StagedBatches(uuid, merge_staged([answers[part] for part in sorted(answers)]))


def merge_staged(results: list[StagingResult]) -> StagingResult:
    """Merge the workers' results of a one-shot ingestion into one."""
    # Precedence: Canceled, then another error, then the batches of all workers.
    failed = [result for result in results if isinstance(result, StagingFailed)]
    if failed:
        return min(failed, key=lambda result: result.code != OperationCanceled.__name__)
    staged = [result for result in results if isinstance(result, FilesStaged)]
    return FilesStaged(
        tuple(batch for result in staged for batch in result.batches),
        sum(result.files for result in staged),
        sum(result.bytes for result in staged),
    )
