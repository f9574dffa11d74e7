"""ListenTask: follows the shard of one input of a dataflow and describes its parts.

Theory of operation. The task opens a leased reader and waits for `StartListen`. It takes a snapshot
at `as_of` if one is wanted, then listens from ``as_of + 1`` on. It sends `PartsDescribed` messages:
descriptions of parts, never bytes, with the interval of times that they cover. Such a message is
also the progress of the input to the interval's upper. Every wait for the shard is an effect, so
the task reacts to `ReleaseLeases` and stop immediately.

Flow control. The consumer answers each `PartsDescribed` with one `GrantDescriptions`. The task may
send a description if none is unanswered. Otherwise it needs fewer than `described_in_flight_max`
unanswered ones and enough credit for its bytes. The credit starts at
`inflight_bytes_per_dataflow_max`; each description lowers it and each grant raises it. While parts
wait to be described, the task does not ask the shard for more, so it keeps at most one answer.
Progress without parts joins the waiting description, and so do small batches; each part keeps the
interval of its own batch.

Until. The task never lists or describes a time at or beyond the `until` of `StartListen`.

Leases. The reader leases a part from its listing until the consumer has released every description
of it. A compacted batch may be described twice, in disjoint intervals. Parts outside the interval
are never described, and their leases are released immediately. The reader's since follows the
frontier of what was listed, and the reader stays open until the task is stopped.

Filter. Parts whose statistics exclude all wanted rows are left out (`persist.part_filter`) and
released immediately, except for a sample, which is read first to audit the filter. The task
describes the interval in any case, after the audit.

Errors. A request to a failing store is tried at most `fetch_attempts_max` times, with exponential
backoff and jitter. If it still fails, the task sends `ListenFailed` and describes nothing more, so
the input's frontier stays where it is. `ReleaseLeases` and stop still work.
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
"""A joined description has at most the initial credit divided by this."""


class _Opened(msgspec.Struct, frozen=True, gc=False):
    """The effect has opened the reader."""

    reader: Any


class _Listed(msgspec.Struct, frozen=True, gc=False):
    """The shard's answer to one listing: what to describe, in order."""

    items: tuple[_PendingDescription, ...]


class _Failed(msgspec.Struct, frozen=True, gc=False):
    """Opening the reader or a listing failed for good."""

    error: PenstockError


class _PendingDescription(msgspec.Struct, frozen=True, gc=False):
    """A description that waits to be sent: leased parts and the interval that they cover."""

    parts: tuple[_PartInterval, ...]
    lower: Time
    upper: Frontier
    snapshot: bool = False

    @property
    def bytes(self) -> int:
        return sum(meant.part.bytes for meant in self.parts)


class _PartInterval(msgspec.Struct, frozen=True, gc=False):
    """A part and the interval of its own batch.

    Joined batches keep their intervals, so that a missing part does not delay earlier times.
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

        `trail` finds the traces of the appends behind a description. `wanted` selects the rows
        that the consumer needs; None means all rows.
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
        """The open reader; None until the effect of `on_start` has opened it."""
        self._abandoned = False
        """True once the task has crashed: a reader that opens later is closed immediately."""
        self._start: StartListen | None = None
        """The start signal; None until it arrives."""
        self._snapshot_due = False
        """True from a start signal that wants a snapshot until the snapshot is requested."""
        self._frontier: Frontier = 0
        """All updates below it have been listed."""
        self._until: Frontier = EMPTY
        """The frontier at which listing ends; `EMPTY` means never."""
        self._listing = False
        """True while a listing effect runs."""
        self._error: PenstockError | None = None
        """The error that froze the input; None while it works."""
        self._failures: tuple[int, str] = (0, "")
        """Number of failures of the current request to the store, and the last error."""
        self._waiting: deque[_PendingDescription] = deque()
        """Descriptions that wait for a grant, oldest first."""
        self._credit = settings.inflight_bytes_per_dataflow_max
        """Bytes of parts that may still be described; negative after a description larger than the
        credit."""
        self._unanswered = 0
        """Number of descriptions sent and not yet answered by a grant."""
        self._leases: dict[str, str] = {}
        """Key of a described part → key of the reader's part, until the consumer releases it."""
        self._unaudited: list[BatchPart] = []
        """Filtered parts to audit before their interval is described."""
        self._uses: Counter[str] = Counter()
        """Number of uses of each leased part: descriptions, sent or waiting, and a pending audit.
        The lease ends with the last use."""

    # -- lifecycle --------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Open the reader, so that its lease exists before the start signal arrives."""
        reader_id = (
            f"{self._dataflow}-{self._incarnation}-{self._index}"
            f"-{self.ctx.random.getrandbits(64):016x}"
        )

        async def open_reader() -> LeasedReader:
            # Shielded, because a stop in the middle would leak the lease.
            with anyio.CancelScope(shield=True):
                reader = await self._persist.open_reader(self._shard, reader_id)
                self._reader = reader
                if self._abandoned:
                    reader.give_up()
            return reader

        self.ctx.effect(lambda: self._answer(open_reader), done=_Opened, failed=_failed)

    async def on_stop(self) -> None:
        """Close the reader, which releases all its leases."""
        if self._reader is not None:
            try:
                await self._reader.close()
            except PenstockError as error:
                log.warning(
                    "%s: could not close the reader, its lease will expire: %s",
                    self.ctx.path,
                    error,
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
                f"{self.ctx.path}: StartListen sent twice (as of {self._start.as_of},"
                f" then {start.as_of}): send it once"
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
        """Send the waiting descriptions that may be sent; list the shard if no part waits."""
        if self._error is not None:
            return
        while self._waiting and self._may_send(self._waiting[0]):
            self._send(self._waiting.popleft())
        # Progress without parts may wait while the task lists on: more progress joins it.
        full = any(item.parts or item.snapshot for item in self._waiting)
        if not self._listing and not full and self._reader is not None and self._start is not None:
            self._list(self._reader, self._start)

    def _may_send(self, item: _PendingDescription) -> bool:
        # Even a description larger than the whole credit must be sent eventually.
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
        """Return the trace contexts of the appends described; a snapshot has none."""
        if self._trail is None or item.snapshot or not item.parts:
            return ()
        return self._trail.between(self._shard, item.lower, item.upper)

    def _describe(self, item: _PendingDescription, index: int) -> DescribedPart:
        meant = item.parts[index]
        part: BatchPart = meant.part
        # Unique also for inline and repeated parts, because the intervals are disjoint.
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
        """Queue a description, or join it to the last one if the result stays small."""
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
            return  # complete; the reader stays open for its leases
        self._listing = True
        if self._snapshot_due:
            self._snapshot_due = False

            async def snapshot() -> _Listed:
                # Downgrade first: the snapshot may wait for long, and until the downgrade the
                # lease blocks compaction.
                await reader.downgrade(start.as_of)
                return self._take_snapshot((await reader.snapshot(start.as_of))[0])

            self.ctx.effect(lambda: self._list_and_audit(snapshot), done=_same, failed=_failed)
            return

        async def listen() -> _Listed:
            await reader.downgrade(self._frontier)
            return self._take_batches(*await reader.next(self._frontier))

        self.ctx.effect(lambda: self._list_and_audit(listen), done=_same, failed=_failed)

    async def _answer(self, ask: Callable[[], Awaitable[R]]) -> R:
        """Return the result of a request to the shard, with retries. Raises the last error."""
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
        """Return the listing after auditing the filter on its sampled parts.

        Raises `UnsoundFilter`.
        """
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
        """Stop renewing the reader's lease before a crash, so that the lease can expire."""
        # `on_stop` does not run after a crash, and the lease would be renewed forever.
        self._abandoned = True
        if self._reader is not None:
            self._reader.give_up()

    async def _read(self, part: BatchPart) -> pa.Table:
        return await self._persist.fetch(part, self._schema)

    # The two methods below run in the effect, in the same turn of the loop as the reader's answer.
    # So no release can come between the lease of a part and the first count of its uses.

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
        """Return the parts that may have wanted rows in the interval, and count a use of each.

        Releases all others, except those chosen for an audit.
        """
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
        """Release one use of each part, and the lease with the last use.

        None stands for a part that was released before; an inline part (empty key) has no lease.
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
        """Describe what the task is doing or waiting for, for operators."""
        if self._error is not None:
            return f"frozen at {format_frontier(self._frontier)}: {self._error}"
        if self._failures[0]:
            count, why = self._failures
            return f"retrying {self._shard}, failed {count} times: {why}"
        if self._reader is None:
            return f"opening a reader of {self._shard}"
        if self._start is None:
            return "waiting for the start signal"
        if self._waiting:
            size = sum(item.bytes for item in self._waiting)
            return (
                f"waiting for a grant ({self._unanswered} descriptions unanswered):"
                f" {len(self._waiting)} descriptions of {size} bytes, credit {self._credit}"
            )
        if self._frontier >= self._until:
            return f"complete: listed {self._shard} up to {format_frontier(self._until)}"
        return f"listening to {self._shard} from {format_frontier(self._frontier)}"


def _same(listed: _Listed) -> _Listed:
    return listed


def _failed(error: Exception) -> _Failed:
    """Turn a `PenstockError` into the message that freezes the input; raise a bug again."""
    if isinstance(error, PenstockError):
        return _Failed(error)
    raise error
