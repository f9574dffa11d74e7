"""ListenTask: listens to the shard of one input of a dataflow, and describes its parts.

Theory of operation. It opens a leased reader, waits for `StartListen`, takes the snapshot at
`as_of` if wanted, then listens from ``as_of + 1`` on. It sends `PartsDescribed`: part descriptions,
never bytes, with their interval of times and progress to the interval's upper. Every wait for the
shard is an effect, so `ReleaseLeases` and stop are obeyed at once.

Room. The consumer answers each `PartsDescribed` with one `GrantDescriptions`. A description is sent
if none is unanswered, or if fewer than `described_in_flight_max` are and its bytes fit the credit
(initially `inflight_bytes_per_dataflow_max`; a description takes its bytes, a grant gives its own).
While parts wait the shard is not asked, so at most one answer of the shard is kept here. Progress
without parts, and small batches, join the waiting description, each part with its own batch's
interval.

Until. No time at or beyond the `until` of the start signal is listed or described.

Leases. The reader holds a part from its listing until the consumer has released every description
of it: a compacted batch may be described twice, in disjoint intervals. Parts outside the interval
are never described, and released at once. The reader's since follows the listened frontier, and the
reader stays open until the task is stopped.

Filter. Parts whose statistics exclude all wanted rows may be left out (`persist.part_filter`): they
are released at once, except a share that is read first, to audit the filter. The interval is
described all the same, after that.

Errors. A failing store is retried, `fetch_attempts_max` times in all, with exponential backoff and
jitter. If a listing still fails the task sends `ListenFailed` and describes no more, so the
input's frontier stays; it still obeys `ReleaseLeases` and stop.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, assert_never

import anyio
import msgspec

from actors.durable.persist.part_filter import part_pruner
from actors.model.protocol.compute import ShardImport
from actors.model.protocol.internal import (
    DescribedPart,
    GrantDescriptions,
    ListenFailed,
    ListenMessage,
    PartsDescribed,
    ReleaseLeases,
    StartListen,
)
from actors.runtime.errors import LocalProtocolError, PenstockError, StorageError, is_retriable
from actors.runtime.kernel import Actor, ActorAddress, with_jitter
from actors.runtime.progress import EMPTY, Frontier, ObjectId, Time, format_frontier
from actors.runtime.settings import Settings
from actors.runtime.spans import span_below
from actors.runtime.telemetry import LISTEN
from actors.runtime.threshold_probes import DESCRIBED, LISTEN_CREDIT, LISTEN_JOIN
from actors.runtime.tracing.append_traces import AppendTraceIndex

if TYPE_CHECKING:
    import pyarrow as pa

    from actors.durable.persist import (
        BatchPart,
        LeasedReader,
        PartFilter,
        PersistClient,
        ShardBatch,
    )

log = logging.getLogger("penstock.listen")

R = TypeVar("R")

_JOINED_SHARE: Final = 16
"""Divisor of the whole credit that bounds the bytes of a joined description."""


class _Opened(msgspec.Struct, frozen=True, gc=False):
    reader: Any


class _Listed(msgspec.Struct, frozen=True, gc=False):
    items: tuple[_PendingDescription, ...]


class _Failed(msgspec.Struct, frozen=True, gc=False):
    error: PenstockError


class _PendingDescription(msgspec.Struct, frozen=True, gc=False):
    """A future description: leased parts and their interval."""

    parts: tuple[_PartInterval, ...]
    lower: Time
    upper: Frontier
    snapshot: bool = False

    @property
    def bytes(self) -> int:
        return sum(meant.part.bytes for meant in self.parts)


class _PartInterval(msgspec.Struct, frozen=True, gc=False):
    """A part and the interval of its own batch.

    Joined batches keep their intervals, so that a missing part delays no time before its own.
    """

    part: Any
    lower: Time
    upper: Frontier


_Message: TypeAlias = ListenMessage | _Opened | _Listed | _Failed


class ListenTask(Actor[_Message]):
    """Receives `ListenMessage`; sends `PartsDescribed` and `ListenFailed` to `consumer`."""

    def __init__(
        self,
        persist: PersistClient,
        imported: ShardImport,
        dataflow: ObjectId,
        incarnation: int,
        input_index: int,
        consumer: ActorAddress[Any],
        settings: Settings,
        trail: AppendTraceIndex | None = None,
        wanted: PartFilter | None = None,
    ) -> None:
        """Create the task.

        `trail` finds the traces that led to a description; `wanted` selects the consumer's rows
        (None: all).
        """
        self._pruner = None if wanted is None else part_pruner(wanted, settings)
        self._schema = imported.schema
        self._trail = trail
        self._persist = persist
        self._shard = imported.shard
        self._dataflow = dataflow
        self._incarnation = incarnation
        self._index = input_index
        self._consumer = consumer
        self._settings = settings
        self._reader: LeasedReader | None = None
        self._abandoned = False
        self._start: StartListen | None = None
        self._snapshot_due = False
        self._frontier: Frontier = 0
        """Frontier below which all updates were listed."""
        self._until: Frontier = EMPTY
        self._listing = False
        self._error: PenstockError | None = None
        self._failures: tuple[int, str] = (0, "")
        """Number of failures in a row of the current request to the store, and the last error."""
        self._waiting: deque[_PendingDescription] = deque()
        self._credit = settings.inflight_bytes_per_dataflow_max
        self._unanswered = 0
        self._leases: dict[str, str] = {}
        """Key of a described part → the reader's key."""
        self._unaudited: list[BatchPart] = []
        """Parts left out whose audit must precede the description of their interval."""
        self._uses: Counter[str] = Counter()
        """Number of descriptions, sent or waiting, that need each part of the reader."""

    # -- life -------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Open the reader, so that its hold exists before the start signal comes."""
        reader_id = (
            f"{self._dataflow}-{self._incarnation}-{self._index}"
            f"-{self.ctx.random.getrandbits(64):016x}"
        )

        async def open_reader() -> LeasedReader:
            # Shielded: a stop in the middle would leak the lease.
            with anyio.CancelScope(shield=True):
                reader = await self._persist.open_reader(self._shard, reader_id)
                self._reader = reader
                if self._abandoned:
                    reader.give_up()
            return reader

        self.ctx.effect(lambda: self._answer(open_reader), done=_Opened, failed=_failed)

    async def on_stop(self) -> None:
        """Close the reader and release all its leases."""
        if self._reader is not None:
            try:
                await self._reader.close()
            except PenstockError as error:
                log.warning(
                    "%s: reader not closed, its lease will expire: %s", self.ctx.path, error
                )

    async def receive(self, message: _Message) -> None:
        """Handle one message."""
        try:
            self._receive(message)
        except BaseException:
            self._abandon()
            raise

    def _receive(self, message: _Message) -> None:
        match message:
            case StartListen():
                self._started(message)
            case GrantDescriptions(bytes=granted):
                whole = self._settings.inflight_bytes_per_dataflow_max
                self._credit = min(whole, self._credit + granted)
                self._unanswered = max(0, self._unanswered - 1)
            case ReleaseLeases(keys=keys):
                self._release(self._leases.pop(key, None) for key in keys)
            case _Opened():
                pass
            case _Listed(items=items):
                self._listing = False
                for item in items:
                    self._append(item)
            case _Failed(error=error):
                self._fail(error)
            case _:
                assert_never(message)
        self._make_progress()

    def _started(self, start: StartListen) -> None:
        if self._start is not None:
            raise LocalProtocolError(
                f"{self.ctx.path}: StartListen as of {start.as_of} after one"
                f" as of {self._start.as_of}; send it once"
            )
        self._start = start
        self._snapshot_due = start.snapshot
        self._frontier = start.as_of + 1
        self._until = EMPTY if start.until is None else start.until

    def _fail(self, error: PenstockError) -> None:
        self._error = error
        failed = ListenFailed(self._dataflow, self._incarnation, self._index, error)
        self._consumer.reply(failed)

    # -- describing -------------------------------------------------------------------------------

    def _make_progress(self) -> None:
        """Send waiting descriptions that have room; ask the shard if none waits."""
        if self._error is not None:
            return
        while self._waiting and self._may_send(self._waiting[0]):
            self._send(self._waiting.popleft())
        # Waiting progress without parts does not stop the listing: more progress joins it.
        full = any(item.parts or item.snapshot for item in self._waiting)
        if not self._listing and not full and self._reader is not None and self._start is not None:
            self._list(self._reader, self._start)

    def _may_send(self, item: _PendingDescription) -> bool:
        # Even a description larger than the whole credit must be sent some time.
        if self._unanswered == 0:
            return True
        limit = self._settings.described_in_flight_max
        return not DESCRIBED.crossed(self._unanswered >= limit) and not LISTEN_CREDIT.crossed(
            item.bytes > self._credit
        )

    def _send(self, item: _PendingDescription) -> None:
        parts = tuple(self._describe(item, index) for index in range(len(item.parts)))
        self._unanswered += 1
        self._credit -= item.bytes
        described = PartsDescribed(
            dataflow=self._dataflow,
            incarnation=self._incarnation,
            input_index=self._index,
            parts=parts,
            lower=item.lower,
            upper=item.upper,
            snapshot=item.snapshot,
            filtered=None if self._pruner is None else self._pruner.counts(),
        )
        traces = self._traces(item)
        with span_below(traces[0] if traces else None, LISTEN, links=traces[1:]) as opened:
            if opened is not None:
                rows = sum(meant.part.rows for meant in item.parts)
                opened.describe(self._shard, self._dataflow, item.lower, item.upper, rows)
            self._consumer.reply(described)

    def _traces(self, item: _PendingDescription) -> tuple[str, ...]:
        """Return the traces that led to the described changes; a snapshot has none."""
        if self._trail is None or item.snapshot or not item.parts:
            return ()
        return self._trail.between(self._shard, item.lower, item.upper)

    def _describe(self, item: _PendingDescription, index: int) -> DescribedPart:
        meant = item.parts[index]
        part: BatchPart = meant.part
        # Unique even for inline and repeated parts, since the intervals are disjoint.
        key = f"{self._shard}[{item.lower},{item.upper})#{index}"
        self._leases[key] = part.key
        return DescribedPart(
            key=key,
            shard=self._shard,
            part=part,
            lower=meant.lower,
            upper=meant.upper,
            bytes=part.bytes,
            rows=part.rows,
            snapshot=item.snapshot,
        )

    def _append(self, item: _PendingDescription) -> None:
        """Queue a description, joined to the last one if that stays small."""
        last = self._waiting[-1] if self._waiting else None
        joined_max = self._settings.inflight_bytes_per_dataflow_max // _JOINED_SHARE
        if last is None or last.snapshot or item.snapshot:
            self._waiting.append(item)
        elif (
            not item.parts
            or not last.parts
            or not LISTEN_JOIN.crossed(last.bytes + item.bytes > joined_max)
        ):
            self._waiting[-1] = _PendingDescription(last.parts + item.parts, last.lower, item.upper)
        else:
            self._waiting.append(item)

    # -- the shard --------------------------------------------------------------------------------

    def _list(self, reader: LeasedReader, start: StartListen) -> None:
        if self._frontier >= self._until:
            return  # complete; the reader stays open for the leases
        self._listing = True
        if self._snapshot_due:
            self._snapshot_due = False

            async def snapshot() -> _Listed:
                # Before the snapshot, which may wait long: until then the lease blocks compaction.
                await reader.downgrade(start.as_of)
                return self._take_snapshot((await reader.snapshot(start.as_of))[0])

            self.ctx.effect(lambda: self._list_and_audit(snapshot), done=_same, failed=_failed)
            return

        async def listen() -> _Listed:
            await reader.downgrade(self._frontier)
            return self._take_batches(*await reader.next(self._frontier))

        self.ctx.effect(lambda: self._list_and_audit(listen), done=_same, failed=_failed)

    async def _answer(self, ask: Callable[[], Awaitable[R]]) -> R:
        """Return the result of a request to the shard, with retries. Raise its last error."""
        try:
            while True:
                try:
                    return await ask()
                except StorageError as error:
                    count = self._failures[0] + 1
                    if not is_retriable(error) or count >= self._settings.fetch_attempts_max:
                        raise
                    self._failures = count, str(error)
                delay_ms = self._settings.retry_delay_ms(count)
                await anyio.sleep(with_jitter(delay_ms, self.ctx.random) / 1000)
        finally:
            self._failures = 0, ""

    async def _list_and_audit(self, listing: Callable[[], Awaitable[_Listed]]) -> _Listed:
        """Return the listing, once the filter has been audited on it. Raise `UnsoundFilter`."""
        try:
            found = await self._answer(listing)
            if self._pruner is not None and self._unaudited:
                unproved, self._unaudited = self._unaudited, []
                await self._pruner.prove(unproved, self._read, self.ctx.clock)
                self._release([part.key for part in unproved])
            return found
        except PenstockError:
            raise
        except Exception:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Give up the reader before a crash."""
        # `on_stop` does not run after a crash, and the lease would be renewed for ever.
        self._abandoned = True
        if self._reader is not None:
            self._reader.give_up()

    async def _read(self, part: BatchPart) -> pa.Table:
        return await self._persist.fetch(part, self._schema)

    # The two methods below run in the effect, in the same turn of the loop as the reader's answer:
    # no release can come between the reader's lease of a part and the count of its uses.

    def _take_snapshot(self, parts: Iterable[BatchPart]) -> _Listed:
        kept = self._keep(parts, 0, self._frontier)
        return _Listed((_PendingDescription(kept, 0, self._frontier, snapshot=True),))

    def _take_batches(self, batches: Iterable[ShardBatch], upper: Frontier) -> _Listed:
        items = []
        lower = self._frontier
        upper = min(upper, self._until)
        for batch in batches:
            high = min(batch.upper, upper)
            kept = self._keep(batch.parts, lower, high)
            if lower < high:
                items.append(_PendingDescription(kept, lower, high))
                lower = high
        if lower < upper:
            items.append(_PendingDescription((), lower, upper))
        self._frontier = max(self._frontier, upper)
        return _Listed(tuple(items))

    def _keep(
        self, parts: Iterable[BatchPart], lower: Time, upper: Frontier
    ) -> tuple[_PartInterval, ...]:
        """Return the parts with wanted rows in the interval, counted as used; release the
        others."""
        kept: list[_PartInterval] = []
        others: list[str] = []
        for part in parts:
            self._uses[part.key] += 1
            here = lower < upper and part.time_max >= lower and part.time_min < upper
            if not (part.rows and here):
                others.append(part.key)
            elif self._pruner is None or not self._pruner.discards(part):
                kept.append(_PartInterval(part, lower, upper))
            elif self._pruner.chooses(part):
                self._unaudited.append(part)
            else:
                others.append(part.key)
        self._release(others)
        return tuple(kept)

    def _release(self, keys: Iterable[str | None]) -> None:
        """Release one use of each part, and its lease after the last use.

        None and inline parts (an empty key) have no lease.
        """
        free = []
        for key in keys:
            if key is None:
                continue
            self._uses[key] -= 1
            if self._uses[key] == 0:
                del self._uses[key]
                if key:
                    free.append(key)
        if free and self._reader is not None:
            self._reader.release(free)

    def describe(self) -> str:
        """Return the current work or wait, as text for people."""
        if self._error is not None:
            return f"frozen at {format_frontier(self._frontier)}: {self._error}"
        if self._failures[0]:
            count, why = self._failures
            return f"asks {self._shard} again, which failed {count} times: {why}"
        if self._reader is None:
            return f"opens a reader of {self._shard}"
        if self._start is None:
            return "waits for the start signal"
        if self._waiting:
            size = sum(item.bytes for item in self._waiting)
            return (
                f"waits for a grant ({self._unanswered} descriptions unanswered):"
                f" {len(self._waiting)} batches of {size} bytes, credit {self._credit}"
            )
        if self._frontier >= self._until:
            return "has seen all that it is to see of its shard"
        return f"listens to {self._shard} from {format_frontier(self._frontier)}"


def _same(listed: _Listed) -> _Listed:
    return listed


def _failed(error: Exception) -> _Failed:
    """Return an error of the family, which freezes the input; raise any other, a bug."""
    if isinstance(error, PenstockError):
        return _Failed(error)
    raise error
