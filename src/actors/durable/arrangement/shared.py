"""Arrangements that the dataflows of a process share, by (shard, key columns, columns, filter).

`open` hands out a `ArrangementHandle`: one user's view of an arrangement. The user reads at times
before its `lo`, and releases what lies before ``lo - 1`` when it advances. An arrangement holds the
columns, and the rows that pass the filter, of the user that it was made for, so that changes of
other columns and rows cost nothing; users that need no more of both share it, each with its own
filter. It keeps real times; its since follows the least `lo` of its users, with some slack, so that
a new view still finds its first time.

Every user offers the deltas that it processed. They are of one shard, so they agree: of ``[lower,
hi)`` the updates beyond the upper are inserted, the rest was there before. The first user advances
the arrangement for all.

A new arrangement is unreadable until it is filled. Any user may `claim` the filling, one at a time:
it inserts the shard's updates up to some sealed time, and publishes. The since that the contents
are advanced to respects all users that come before; so all views of an input meet in one
arrangement after a restart, whatever their order and progress. A user whose `lo` lies beyond the
upper reads the missing updates from the shard, and offers them.

A newcomer for whose `lo` no arrangement serves gets a new one, as does a laggard: a user that alone
keeps too many bytes from being compacted is *detached*; its reads are refused, and it opens another
handle. An arrangement without users is closed and its files are removed.

Rules. Handles may be used from any thread, each by one at a time; readers never wait for inserts or
merges. Within one arrangement one thread inserts at a time (`inserting`); `_lock` of the registry
guards the users and is held for an instant, never while waiting for another lock. `merge` runs on
the calling thread, one merge at a time in the process. A read is right or refused
(`ReadBelowSince`), never stale.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import pyarrow as pa

from actors.durable.arrangement.arrangement import (
    Arrangement,
    ArrangementLimits,
    ArrangementStatistics,
    check_key,
)
from actors.durable.persist.part_filter import PartFilter
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import between, consolidate_if_smaller
from actors.runtime.errors import InvalidUsage, ReadBelowSince, ResourceClosed, StorageError
from actors.runtime.memory_ledger import MemoryUse
from actors.runtime.progress import Frontier, ShardId, Time
from actors.runtime.threshold_probes import ARRANGEMENT_LAG

log = logging.getLogger("penstock.arrangement")

_Name: TypeAlias = tuple[ShardId, tuple[str, ...]]


class SharedStatistics(msgspec.Struct, frozen=True):
    """One arrangement of a registry at one moment."""

    shard: ShardId
    key: tuple[str, ...]
    users: int
    since: Time
    upper: Frontier
    """Upper of the arrangement; 0 while it is not filled."""
    arrangement: ArrangementStatistics
    columns: tuple[str, ...]
    filter: str = ""
    """Filter of its rows; empty: all rows."""
    private: bool = False
    """True for one that a single dataflow owns (`SharedArrangements.note_private`)."""


class SharedArrangements:
    """The shared arrangements of a process."""

    def __init__(
        self,
        directory: Path,
        *,
        lag_bytes_max: int = 256 << 20,
        slack: int = 1_000,
        limits: ArrangementLimits | None = None,
    ) -> None:
        """Take the folder for files.

        `lag_bytes_max`: inserts that one user may keep from being compacted. `slack`: how far (in
        times) the since stays behind what users need.
        """
        self.lag_bytes_max = lag_bytes_max
        self.slack = slack
        self._directory = directory
        self._limits = limits
        self._lock = threading.Lock()
        self._entries: dict[_Name, list[_Entry]] = {}
        """Arrangements by name, oldest first."""
        self._private: WeakKeyDictionary[Arrangement, ShardId] = WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._due: dict[Arrangement, None] = {}
        self._merging = False

    def open(
        self,
        shard: ShardId,
        key: tuple[str, ...],
        schema: TableSchema,
        lo: Frontier,
        rows: PartFilter | None = None,
    ) -> ArrangementHandle:
        """Add a user that stands at `lo`.

        Args:
            shard: The shard of the updates.
            key: The key columns.
            schema: The columns that it needs, the key's and those of `rows` among them.
            lo: It reads at times before.
            rows: The filter of the rows that it needs; None: all.

        Raises `InvalidUsage` for a key that has no equality.
        """
        check_key(schema, key)
        name = (shard, key)
        with self._lock:
            entries = self._entries.setdefault(name, [])
            good = [each for each in entries if each.serves(schema, rows) and each.good_for(lo)]
            if not good:
                place = self._directory / str(next(self._numbers))
                entries.append(_Entry(name, schema, rows, place))
                good = entries[-1:]
            # The narrowest, and of those the newest.
            entry = min(reversed(good), key=lambda each: (each.rows is None, len(each.columns)))
            handle = ArrangementHandle(self, entry, lo, rows)
            # Under the same lock as the choice: the since cannot pass `lo` in between.
            entry.users.add(handle)
        return handle

    def merge(self, arrangements: Iterable[Arrangement]) -> None:
        """Merge the runs of those arrangements where it is due; blocks until none is. A failed
        merge changes nothing."""
        due = {each: None for each in arrangements if each.merge_due()}
        with self._lock:
            self._due |= due
            # One merge at a time: the thread at work takes these, too.
            if self._merging:
                return
            self._merging = True
        try:
            while (arrangement := self._next_due()) is not None:
                try:
                    arrangement.maintain()
                except StorageError as error:
                    if arrangement.closed:
                        continue  # closed, and its files removed, during the merge
                    log.warning("runs were not merged: %s", error)
        except BaseException:
            with self._lock:
                self._merging = False
            raise

    def _next_due(self) -> Arrangement | None:
        with self._lock:
            if not self._due:
                self._merging = False
                return None
            arrangement = next(iter(self._due))
            del self._due[arrangement]
            return arrangement

    def memory(self) -> list[MemoryUse]:
        """Return the memory of all arrangements, for a `MemoryLedger`."""
        return [
            MemoryUse(
                "hidden" if each.private else "shared",
                each.shard,
                each.arrangement.rows,
                each.arrangement.bytes_memory,
                each.arrangement.bytes_mapped,
            )
            for each in self.statistics()
        ]

    def note_private(self, arrangement: Arrangement, shard: ShardId) -> None:
        """List an arrangement that one dataflow keeps of a shard for itself, until it is closed."""
        with self._lock:
            self._private[arrangement] = shard

    def statistics(self) -> list[SharedStatistics]:
        """Return all arrangements, the unfilled and the private ones too."""
        with self._lock:
            entries = [entry for entries in self._entries.values() for entry in entries]
            found = [entry.statistics() for entry in entries]
            for held, shard in self._private.items():
                if not held.closed:
                    own = held.since, held.upper, held.statistics(), tuple(held.schema.names)
                    found.append(SharedStatistics(shard, held.key, 1, *own, private=True))
            return found


class _Entry:
    """One arrangement and its users; guarded by the registry's lock, except inserts
    (`inserting`)."""

    def __init__(
        self, name: _Name, schema: TableSchema, rows: PartFilter | None, directory: Path
    ) -> None:
        self.name = name
        self.schema = schema
        self.columns = frozenset(schema.columns)
        self.rows = rows
        self.directory = directory
        self.users: set[ArrangementHandle] = set()
        self.arrangement: Arrangement | None = None
        """The arrangement; None until it is filled."""
        self.filling: ArrangementFill | None = None
        self.fillings = 0
        self.retired = False
        """True if newcomers must not use it."""
        self.inserting = threading.Lock()
        self.inserted = 0
        """Bytes offered and inserted."""
        self.marks: list[tuple[Frontier, int]] = []
        """Pairs (upper, bytes inserted when it was reached), ascending and a little apart."""

    def serves(self, schema: TableSchema, rows: PartFilter | None) -> bool:
        """Return whether it holds these columns, and the rows that pass."""
        same = self.rows is None or (rows is not None and rows.name == self.rows.name)
        return same and self.columns.issuperset(schema.columns)

    def own(self, updates: pa.Table) -> pa.Table:
        """Return the columns and rows that it holds, of updates with all columns."""
        if self.rows is not None:
            updates = self.rows.passing(updates)
        shape = self.schema.arrow_updates()
        narrower = len(shape) < updates.num_columns
        updates = updates.select(shape.names).cast(shape)
        # Without some columns updates may cancel.
        return consolidate_if_smaller(updates) if narrower else updates

    def good_for(self, lo: Frontier) -> bool:
        if self.retired:
            return False
        if self.arrangement is not None:
            return self.arrangement.since < max(lo, 1)
        since = None if self.filling is None else self.filling.since
        return since is None or since < max(lo, 1)

    def floor(self, slack: int) -> Time:
        """Return the since that the users allow."""
        # A since of ``lo - 1`` allows reads before `lo`.
        return max(0, min((user.lo for user in self.users), default=0) - 1 - slack)

    def moved(self, slack: int) -> None:
        """Advance the since after a user's `lo` has moved, and drop marks that all users have
        passed."""
        if self.arrangement is not None and self.users:
            self.arrangement.allow_compaction(self.floor(slack))
            least = min(user.lo for user in self.users)
            passed = bisect.bisect_right(self.marks, least, key=lambda mark: mark[0])
            del self.marks[: min(passed, len(self.marks) - 1)]

    def backlog(self, lo: Frontier) -> int:
        """Return the bytes inserted beyond `lo`, without the first insert there."""
        # Not yet done with the next step, however large, is no lag.
        passed = bisect.bisect_right(self.marks, lo, key=lambda mark: mark[0])
        return self.inserted - self.marks[passed][1] if passed < len(self.marks) else 0

    def detach_laggards(self, bytes_max: int, slack: int) -> list[ArrangementHandle]:
        """Detach users that hold up compaction; never the one that is furthest on."""
        if self.inserted <= bytes_max:
            return []
        front = max((user.lo for user in self.users), default=0)
        late = [
            user
            for user in self.users
            if user.lo < front - slack and self.backlog(user.lo) > bytes_max
        ]
        self.users.difference_update(late)
        return late

    def statistics(self) -> SharedStatistics:
        shard, key = self.name
        what = tuple(self.schema.names), "" if self.rows is None else str(self.rows)
        users = len(self.users)
        held = self.arrangement
        if held is None and self.filling is not None:
            held = self.filling.arrangement  # its upper is 0
        if held is None:
            nothing = ArrangementStatistics(0, 0, 0, 0, 0)
            return SharedStatistics(shard, key, users, 0, 0, nothing, *what)
        own = held.since, held.upper, held.statistics()
        return SharedStatistics(shard, key, users, *own, *what)


class ArrangementHandle:
    """One user of a shared arrangement."""

    def __init__(
        self,
        registry: SharedArrangements,
        entry: _Entry,
        lo: Frontier,
        rows: PartFilter | None,
    ) -> None:
        self.lo = lo
        """The user reads at times before it."""
        self._rows = None if entry.rows is not None else rows
        """Filter of the arrangement's rows for this user; None: all."""
        self._registry = registry
        self._entry = entry
        self._refused: str | None = None
        self._closed = False

    @property
    def shard(self) -> ShardId:
        """Return the shard of the updates."""
        return self._entry.name[0]

    @property
    def key(self) -> tuple[str, ...]:
        """Return the key columns."""
        return self._entry.name[1]

    @property
    def schema(self) -> TableSchema:
        """Return the columns of the reads, which may be more than were asked for."""
        return self._entry.schema

    @property
    def rows(self) -> PartFilter | None:
        """Return the filter of the arrangement's rows; None: all."""
        return self._entry.rows

    @property
    def upper(self) -> Frontier:
        """Return the upper: all updates below are inserted; 0 while it is not filled."""
        arrangement = self._entry.arrangement
        return 0 if arrangement is None else arrangement.upper

    @property
    def ready(self) -> bool:
        """Return whether all updates before `lo` can be read."""
        return self._entry.arrangement is not None and self.upper >= self.lo

    # -- filling ----------------------------------------------------------------------------------

    def claim(self) -> ArrangementFill | None:
        """Claim the filling; None when it is filled, or when another user fills it."""
        self._check()
        entry, registry = self._entry, self._registry
        with registry._lock:
            if entry.arrangement is not None or entry.filling is not None:
                return None
            entry.fillings += 1
            place = entry.directory / str(entry.fillings)
            entry.filling = ArrangementFill(registry, entry, place)
            return entry.filling

    def when_settled(self, call: Callable[[], None]) -> bool:
        """Call back, once, when the filling under way is published or abandoned, on the thread that
        ends it; return False (and never call) when none is under way."""
        with self._registry._lock:
            filling = self._entry.filling
            if filling is None:
                return False
            filling.waiting.append(call)
            return True

    def retire(self) -> None:
        """Hide this arrangement from newcomers: it cannot be advanced to this user's `lo`."""
        with self._registry._lock:
            self._entry.retired = True

    # -- going on ---------------------------------------------------------------------------------

    def offer(self, updates: pa.Table, lower: Frontier, upper: Frontier) -> None:
        """Insert the new part of the shard's updates with ``lower <= time < upper`` (all columns).

        An offer that would leave a gap is ignored. Raises `ReadBelowSince` (detached),
        `ResourceClosed` and `StorageError` (then nothing was inserted).
        """
        self._check()
        entry, registry = self._entry, self._registry
        if upper <= self.upper:
            return  # another user has inserted it: no need to wait for the lock
        with entry.inserting:
            arrangement = entry.arrangement
            # Checked again under the lock: another user may have inserted meanwhile.
            if arrangement is None or not lower <= arrangement.upper < upper:
                return
            new = updates
            if updates.num_rows and arrangement.upper > lower:
                new = between(updates, arrangement.upper, upper)
            new = entry.own(new)
            arrangement.insert(new, upper)
            with registry._lock:
                entry.inserted += new.nbytes if new.num_rows else 0
                if entry.inserted - entry.marks[-1][1] >= max(1, registry.lag_bytes_max // 64):
                    entry.marks.append((upper, entry.inserted))

    def step(self, updates: pa.Table, hi: Frontier) -> None:
        """Offer the updates of ``[lo, hi)``, which the user has processed, and advance its `lo` to
        `hi`.

        Raises as `offer` does.
        """
        self.offer(updates, self.lo, hi)
        self.move(hi)

    def move(self, lo: Frontier) -> None:
        """Advance the user's `lo`. An earlier one raises `InvalidUsage`."""
        if lo < self.lo:
            raise InvalidUsage(f"a user of {self.shard} at {self.lo} cannot go back to {lo}")
        entry, registry = self._entry, self._registry
        with registry._lock:
            self.lo = lo
            laggards = entry.detach_laggards(registry.lag_bytes_max, registry.slack)
            ARRANGEMENT_LAG.crossed(bool(laggards))
            for late in laggards:
                log.warning("%s at %d lags behind: it is detached", self.shard, late.lo)
                late._refused = (
                    f"the arrangement of {self.shard} went on without its user at {late.lo}"
                )
            entry.moved(registry.slack)

    def merging(self) -> list[Arrangement]:
        """Return the arrangement if a merge of it is due."""
        arrangement = self._entry.arrangement
        return [arrangement] if arrangement is not None and arrangement.merge_due() else []

    # -- reading ----------------------------------------------------------------------------------

    def lookup(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Return the updates before `lo` that match a row of any table: a superset
        (`Arrangement.lookup`).

        Raises `ReadBelowSince` when the user was detached, `InvalidUsage` when it is not `ready`,
        and `ResourceClosed`.
        """
        return self._passing(self._readable().lookup_all(tables, self.lo))

    def scan(self) -> pa.Table:
        """Return all updates before `lo`. Raises as `lookup` does."""
        return self._passing(self._readable().scan(self.lo))

    def _passing(self, found: pa.Table) -> pa.Table:
        return found if self._rows is None else self._rows.passing(found)

    def _readable(self) -> Arrangement:
        self._check()
        arrangement = self._entry.arrangement
        if arrangement is None:
            raise InvalidUsage(f"the arrangement of {self.shard} is not filled yet")
        return arrangement

    def _check(self) -> None:
        if self._closed:
            raise ResourceClosed(f"this user of the arrangement of {self.shard} was closed")
        # A detached user must not read: the since may be beyond its `lo`.
        if self._refused is not None:
            raise ReadBelowSince(self._refused)

    def close(self) -> None:
        """Remove the user, and the arrangement with its last one; idempotent."""
        entry, registry = self._entry, self._registry
        with registry._lock:
            self._closed = True
            entry.users.discard(self)
            if entry.users:
                entry.moved(registry.slack)
                return
            entries = registry._entries.get(entry.name, [])
            if entry not in entries:
                return
            entries.remove(entry)
            if not entries:
                del registry._entries[entry.name]
        # No newcomer can find it any more. A filling under way removes its own files.
        if entry.arrangement is not None:
            entry.arrangement.close()
        shutil.rmtree(entry.directory, ignore_errors=True)


class ArrangementFill:
    """The first contents of an arrangement, inserted by one user, up to `publish` or `abandon`."""

    def __init__(self, registry: SharedArrangements, entry: _Entry, place: Path) -> None:
        self.since: Time | None = None
        self.waiting: list[Callable[[], None]] = []
        self._registry = registry
        self._entry = entry
        self._place = place
        self.arrangement: Arrangement | None = None
        self._ended = False

    def start(self, shard_since: Time) -> None:
        """Begin, with a shard that is readable from `shard_since` on; newcomers that need earlier
        times get another arrangement from now on. Raises `ResourceClosed` after the end."""
        entry, registry = self._entry, self._registry
        arrangement = Arrangement(self._place, entry.schema, entry.name[1], registry._limits)
        # Made outside of the lock (files); an end meanwhile removes them again.
        with registry._lock:
            ended = self._ended
            if not ended:
                self.since = max(shard_since, self._entry.floor(registry.slack))
                arrangement.allow_compaction(self.since)
                self.arrangement = arrangement
        if ended:
            shutil.rmtree(self._place, ignore_errors=True)
            raise ResourceClosed("the filling was given up before it began")

    def insert(self, updates: pa.Table) -> None:
        """Add the arrangement's share of updates with all columns, in any order. Raises
        `StorageError`, and `ResourceClosed` after the end."""
        assert self.arrangement is not None, "start comes first"
        self.arrangement.fill(self._entry.own(updates))

    def publish(self, upper: Frontier) -> None:
        """Make the arrangement readable: all updates before `upper` are in. Raises
        `StorageError`."""
        arrangement, entry, registry = self.arrangement, self._entry, self._registry
        assert arrangement is not None, "start comes first"
        arrangement.insert(arrangement.schema.arrow_updates().empty_table(), upper)
        with registry._lock:
            # Its last user may have closed meanwhile: then nobody would close the arrangement.
            used = bool(entry.users)
            if used:
                entry.arrangement = arrangement
                entry.marks = [(upper, 0)]
                self._ended = True
                entry.filling = None
                entry.moved(registry.slack)
        if used:
            # Outside of the lock: callbacks may use the registry.
            self._settled()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Give up, unless it has ended: the contents are removed, another user may begin again."""
        with self._registry._lock:
            if self._ended:
                return
            self._ended = True
            self._entry.filling = None
        if self.arrangement is not None:
            self.arrangement.close()
        shutil.rmtree(self._place, ignore_errors=True)
        self._settled()

    def _settled(self) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()
