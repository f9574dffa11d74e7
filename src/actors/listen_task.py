"""ListenTask: one source of one dataflow, from its shard to part descriptions.

Theory of operation. It opens a leased reader, waits for `StartListen`, takes the snapshot at
`as_of` if wanted, then listens from ``as_of + 1`` on. What the shard shows becomes `Described`:
part descriptions, never bytes, with the interval of times that is meant of them and progress to
its upper. Every wait for the shard is an effect, so `Release` and stop are obeyed at once, also
when caught up and idle.

Room. The consumer answers each `Described` with exactly one `Grant`. A description is sent when
none is unanswered, or when fewer than `described_in_flight_max` are and its bytes fit the
credit (at first `inflight_bytes_per_dataflow_max`; a description takes its bytes, a grant gives
its own). What may not be sent waits, and while parts wait the shard is not asked: so at most one
answer of the shard is kept here. Progress without parts joins what waits, so that only the
newest is told when there is room again. Small batches that wait together are described together,
each part with its own batch's interval.

Until. Nothing at or beyond the `until` of the start signal is listed or described.

Leases. A part is held by the reader from the moment the shard names it (even while its
description waits) until the consumer has released every description of it: a compacted batch
may be described twice, in disjoint intervals. Parts whose times lie outside the interval are
never described, and released at once. The reader's since follows what was listened to. It stays
open until the task is stopped: who stops it gives up what it has not fetched.

Filter. Parts that hold no row for the consumer, by their statistics, may be left out
(`persist.sieve`): they are released at once, but for a share that is read first to prove it. The
interval is described all the same, after that.

Errors. A store that fails is asked again, `fetch_attempts_max` times in all, with exponential
backoff and jitter: to open the reader, too. A listing that fails all the same is told with
`ListenFailed`, the task's last message: it then sends nothing more, whatever it is granted, so the
source's frontier stays; it still obeys `Release` and stop. What it does not do: it reads no part
that it describes, and filters no rows (a described part may repeat older updates, which its
interval cuts off).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, assert_never

import anyio
import msgspec

from actors.errors import LocalProtocolError, PenstockError, StorageError, is_passing
from actors.kernel import Actor, Address
from actors.persist.sieve import sieve
from actors.progress import EMPTY, Frontier, ObjectId, Time, format_frontier
from actors.protocol.compute import SourceImport
from actors.protocol.internal import (
    Described,
    DescribedPart,
    Grant,
    ListenFailed,
    ListenMessage,
    Release,
    StartListen,
)
from actors.settings import Settings
from actors.spans import span_below
from actors.telemetry import LISTEN
from actors.threshold_probes import DESCRIBED, LISTEN_CREDIT, LISTEN_JOIN
from actors.tracing.trail import Trail

if TYPE_CHECKING:
    import pyarrow as pa

    from actors.persist import Batch, Part, PartFilter, PersistClient, Reader

log = logging.getLogger("penstock.listen")

R = TypeVar("R")

_JOINED_SHARE: Final = 16
"""Batches that wait are described together up to this part of the whole credit."""


class _Opened(msgspec.Struct, frozen=True, gc=False):
    reader: Any


class _Listed(msgspec.Struct, frozen=True, gc=False):
    items: tuple[_Item, ...]


class _Failed(msgspec.Struct, frozen=True, gc=False):
    error: PenstockError


class _Item(msgspec.Struct, frozen=True, gc=False):
    """One description to be: parts (leased) and the interval that is meant of them."""

    parts: tuple[_Meant, ...]
    lower: Time
    upper: Frontier
    snapshot: bool = False

    @property
    def bytes(self) -> int:
        return sum(meant.part.bytes for meant in self.parts)


class _Meant(msgspec.Struct, frozen=True, gc=False):
    """A part and the interval of its own batch: what is joined with others stays apart in it, so
    that one that is missing holds up no time before its own."""

    part: Any
    lower: Time
    upper: Frontier


_Message: TypeAlias = ListenMessage | _Opened | _Listed | _Failed


class ListenTask(Actor[_Message]):
    """Messages: `ListenMessage` in; `Described` and `ListenFailed` to `consumer`."""

    def __init__(
        self,
        persist: PersistClient,
        source: SourceImport,
        dataflow: ObjectId,
        incarnation: int,
        source_index: int,
        consumer: Address[Any],
        settings: Settings,
        trail: Trail | None = None,
        wanted: PartFilter | None = None,
    ) -> None:
        """`trail`: where to look for the traces that led to what is described; `wanted`: the
        rows that the consumer looks at, None: all."""
        self._sieve = None if wanted is None else sieve(wanted, settings)
        self._schema = source.schema
        self._trail = trail
        self._persist = persist
        self._shard = source.shard
        self._dataflow = dataflow
        self._incarnation = incarnation
        self._index = source_index
        self._consumer = consumer
        self._settings = settings
        self._reader: Reader | None = None
        self._abandoned = False
        self._start: StartListen | None = None
        self._snapshot_due = False
        self._frontier: Frontier = 0
        """Everything below was taken from the shard."""
        self._until: Frontier = EMPTY
        self._listing = False
        self._error: PenstockError | None = None
        self._failures: tuple[int, str] = (0, "")
        """How often in a row the store failed to answer what is asked, and how."""
        self._waiting: deque[_Item] = deque()
        self._credit = settings.inflight_bytes_per_dataflow_max
        self._unanswered = 0
        self._leases: dict[str, str] = {}
        """Key of a described part → the reader's key."""
        self._unproved: list[Part] = []
        """Left out, held, and to be read before their interval is described."""
        self._uses: Counter[str] = Counter()
        """Descriptions, sent or waiting, that need a part of the reader's."""

    # -- life -------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Opens the reader; its hold stands before the start signal comes."""
        reader_id = (
            f"{self._dataflow}-{self._incarnation}-{self._index}"
            f"-{self.ctx.random.getrandbits(64):016x}"
        )

        async def open_reader() -> Reader:
            # Shielded: a stop in the middle would leave a lease that nobody closes.
            with anyio.CancelScope(shield=True):
                reader = await self._persist.open_reader(self._shard, reader_id)
                self._reader = reader
                if self._abandoned:
                    reader.give_up()
            return reader

        self.ctx.effect(lambda: self._answer(open_reader), done=_Opened, failed=_failed)

    async def on_stop(self) -> None:
        """Closes the reader: all its leases return."""
        if self._reader is not None:
            try:
                await self._reader.close()
            except PenstockError as error:
                log.warning(
                    "%s: reader not closed, its lease will expire: %s", self.ctx.path, error
                )

    async def receive(self, message: _Message) -> None:
        """Handles one message."""
        try:
            self._receive(message)
        except BaseException:
            self._abandon()
            raise

    def _receive(self, message: _Message) -> None:
        match message:
            case StartListen():
                self._started(message)
            case Grant(bytes=granted):
                whole = self._settings.inflight_bytes_per_dataflow_max
                self._credit = min(whole, self._credit + granted)
                self._unanswered = max(0, self._unanswered - 1)
            case Release(keys=keys):
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
        self._go_on()

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

    def _go_on(self) -> None:
        """Sends what may be sent; asks the shard when nothing waits."""
        if self._error is not None:
            return
        while self._waiting and self._may_send(self._waiting[0]):
            self._send(self._waiting.popleft())
        full = any(item.parts or item.snapshot for item in self._waiting)
        if not self._listing and not full and self._reader is not None and self._start is not None:
            self._list(self._reader, self._start)

    def _may_send(self, item: _Item) -> bool:
        if self._unanswered == 0:
            return True
        limit = self._settings.described_in_flight_max
        return not DESCRIBED.crossed(self._unanswered >= limit) and not LISTEN_CREDIT.crossed(
            item.bytes > self._credit
        )

    def _send(self, item: _Item) -> None:
        parts = tuple(self._describe(item, index) for index in range(len(item.parts)))
        self._unanswered += 1
        self._credit -= item.bytes
        described = Described(
            dataflow=self._dataflow,
            incarnation=self._incarnation,
            source=self._index,
            parts=parts,
            lower=item.lower,
            upper=item.upper,
            snapshot=item.snapshot,
            filtered=None if self._sieve is None else self._sieve.told(),
        )
        traces = self._traces(item)
        with span_below(traces[0] if traces else None, LISTEN, links=traces[1:]) as opened:
            if opened is not None:
                rows = sum(meant.part.rows for meant in item.parts)
                opened.describe(self._shard, self._dataflow, item.lower, item.upper, rows)
            self._consumer.reply(described)

    def _traces(self, item: _Item) -> tuple[str, ...]:
        """Those that led to what is described; a snapshot is no change."""
        if self._trail is None or item.snapshot or not item.parts:
            return ()
        return self._trail.between(self._shard, item.lower, item.upper)

    def _describe(self, item: _Item, index: int) -> DescribedPart:
        meant = item.parts[index]
        part: Part = meant.part
        # Intervals are disjoint, so this is unique, inline parts and repeated ones included.
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

    def _append(self, item: _Item) -> None:
        """Queues a description, joined to the last one if that stays small."""
        last = self._waiting[-1] if self._waiting else None
        joined_max = self._settings.inflight_bytes_per_dataflow_max // _JOINED_SHARE
        if last is None or last.snapshot or item.snapshot:
            self._waiting.append(item)
        elif (
            not item.parts
            or not last.parts
            or not LISTEN_JOIN.crossed(last.bytes + item.bytes > joined_max)
        ):
            self._waiting[-1] = _Item(last.parts + item.parts, last.lower, item.upper)
        else:
            self._waiting.append(item)

    # -- the shard --------------------------------------------------------------------------------

    def _list(self, reader: Reader, start: StartListen) -> None:
        if self._frontier >= self._until:
            return  # nothing more is wanted, or will come: the reader stays for the leases
        self._listing = True
        if self._snapshot_due:
            self._snapshot_due = False

            async def snapshot() -> _Listed:
                await reader.downgrade(start.as_of)  # first: the snapshot may wait long
                return self._take_snapshot((await reader.snapshot(start.as_of))[0])

            self.ctx.effect(lambda: self._proved(snapshot), done=_same, failed=_failed)
            return

        async def listen() -> _Listed:
            await reader.downgrade(self._frontier)
            return self._take_batches(*await reader.next(self._frontier))

        self.ctx.effect(lambda: self._proved(listen), done=_same, failed=_failed)

    async def _answer(self, ask: Callable[[], Awaitable[R]]) -> R:
        """What is asked of the shard. Raises what it failed with last."""
        try:
            while True:
                try:
                    return await ask()
                except StorageError as error:
                    count = self._failures[0] + 1
                    if not is_passing(error) or count >= self._settings.fetch_attempts_max:
                        raise
                    self._failures = count, str(error)
                delay_ms = self._settings.retry_delay_ms(count)
                await anyio.sleep(delay_ms * (0.5 + self.ctx.random.random() / 2) / 1000)
        finally:
            self._failures = 0, ""

    async def _proved(self, listing: Callable[[], Awaitable[_Listed]]) -> _Listed:
        """What was listed, once the filter has been audited on it. Raises `UnsoundFilter`."""
        try:
            found = await self._answer(listing)
            if self._sieve is not None and self._unproved:
                unproved, self._unproved = self._unproved, []
                await self._sieve.prove(unproved, self._read, self.ctx.clock)
                self._release([part.key for part in unproved])
            return found
        except PenstockError:
            raise
        except Exception:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """The actor crashes, and nobody stops it then: its lease would be renewed for ever."""
        self._abandoned = True
        if self._reader is not None:
            self._reader.give_up()

    async def _read(self, part: Part) -> pa.Table:
        return await self._persist.fetch(part, self._schema)

    # The two below run in the effect, in the same turn of the loop as the reader's answer: no
    # release can come between the reader's taking hold of a part and our counting it.

    def _take_snapshot(self, parts: Iterable[Part]) -> _Listed:
        kept = self._keep(parts, 0, self._frontier)
        return _Listed((_Item(kept, 0, self._frontier, snapshot=True),))

    def _take_batches(self, batches: Iterable[Batch], upper: Frontier) -> _Listed:
        items = []
        lower = self._frontier
        upper = min(upper, self._until)
        for batch in batches:
            high = min(batch.upper, upper)
            kept = self._keep(batch.parts, lower, high)
            if lower < high:
                items.append(_Item(kept, lower, high))
                lower = high
        if lower < upper:
            items.append(_Item((), lower, upper))
        self._frontier = max(self._frontier, upper)
        return _Listed(tuple(items))

    def _keep(self, parts: Iterable[Part], lower: Time, upper: Frontier) -> tuple[_Meant, ...]:
        """Return the parts that may hold times in the interval, and rows that are wanted, counted;
        release the others."""
        kept: list[_Meant] = []
        others: list[str] = []
        for part in parts:
            self._uses[part.key] += 1
            here = lower < upper and part.time_max >= lower and part.time_min < upper
            if not (part.rows and here):
                others.append(part.key)
            elif self._sieve is None or not self._sieve.discards(part):
                kept.append(_Meant(part, lower, upper))
            elif self._sieve.chooses(part):
                self._unproved.append(part)
            else:
                others.append(part.key)
        self._release(others)
        return tuple(kept)

    def _release(self, keys: Iterable[str | None]) -> None:
        """Returns one use of each part; its lease when that was the last. None and inline parts
        have no lease."""
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
        """What it is doing or waiting for."""
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
    """Errors of the family freeze the source; any other is a bug here and crashes the actor."""
    if isinstance(error, PenstockError):
        return _Failed(error)
    raise error
