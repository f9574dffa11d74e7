"""Arrangements shared by the dataflows of a process, by (shard, key columns, columns, filter).

`open` returns an `ArrangementHandle`, which is one user's view of an arrangement. The user reads at
times before its `lo`. When it advances, it releases what is before ``lo - 1``. An arrangement
contains the columns, and the rows that pass the filter, of the user for whom it was made, so
changes of other columns and rows cost nothing. Users that need no more columns and rows share it,
each with its own filter. It keeps real times. Its since follows the lowest `lo` of its users, with
some slack, so that a new view still finds its first time.

Every user offers the deltas that it processed. They are from one shard, so they agree: of ``[lower,
hi)``, the updates beyond the upper are inserted, and the rest is already there. The first user
advances the arrangement for all.

A new arrangement cannot be read until it is filled. Any user may `claim` the filling, one at a
time: it inserts the shard's updates up to some sealed time, and publishes them. The since to which
the contents are advanced respects all users that arrive before that. So all views of an input share
one arrangement after a restart, whatever their order and progress. A user whose `lo` is beyond the
upper reads the missing updates from the shard, and offers them.

If no arrangement suits a new user's `lo`, a new one is made. The same happens to a laggard: a user
that alone keeps too many bytes from being compacted is *detached*, its reads are refused, and it
opens another handle. An arrangement without users is closed and its files are removed.

Rules. Handles may be used from any thread, each by one thread at a time; readers never wait for
inserts or merges. Within one arrangement one thread inserts at a time (`inserting`). The registry's
`_lock` guards the users; it is held only briefly, and never while waiting for another lock. `merge`
runs on the calling thread, one merge at a time in the process. A read is correct or refused
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
    """Upper of the arrangement; 0 until it is filled."""
    arrangement: ArrangementStatistics
    columns: tuple[str, ...]
    filter: str = ""
    """Filter of its rows; "" for all rows."""
    private: bool = False
    """True if it belongs to a single dataflow (`SharedArrangements.note_private`)."""


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
        """Make a registry with files in `directory`.

        `lag_bytes_max` limits the inserts that one user may keep from being compacted. `slack` is
        how far (in times) the since stays behind what users need.
        """
        self.lag_bytes_max = lag_bytes_max
        self.slack = slack
        self._directory = directory
        self._limits = limits
        self._lock = threading.Lock()
        self._entries: dict[_Name, list[_Entry]] = {}
        """Arrangements by name, oldest first."""
        self._private: WeakKeyDictionary[Arrangement, ShardId] = WeakKeyDictionary()
        """Private arrangements, for statistics."""
        self._numbers = itertools.count(1)
        """Numbers for folder names."""
        self._due: dict[Arrangement, None] = {}
        """Arrangements to merge, in order."""
        self._merging = False
        """True while a thread merges."""

    def open(
        self,
        shard: ShardId,
        key: tuple[str, ...],
        schema: TableSchema,
        lo: Frontier,
        rows: PartFilter | None = None,
    ) -> ArrangementHandle:
        """Add a user at `lo`.

        Args:
            shard: The shard of the updates.
            key: The key columns.
            schema: The columns that it needs, including those of the key and of `rows`.
            lo: It reads at times before this one.
            rows: Filter of the rows that it needs; None for all.

        Raises `InvalidUsage` for a key without equality.
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
            # The narrowest one, and the newest of those.
            entry = min(reversed(good), key=lambda each: (each.rows is None, len(each.columns)))
            handle = ArrangementHandle(self, entry, lo, rows)
            # Under the same lock as the choice, so that the since cannot pass `lo` in between.
            entry.users.add(handle)
        return handle

    def merge(self, arrangements: Iterable[Arrangement]) -> None:
        """Merge the runs of those arrangements where due. Blocks until no merge is due. A failed
        merge changes nothing."""
        due = {each: None for each in arrangements if each.merge_due()}
        with self._lock:
            self._due |= due
            # One merge at a time; the thread that is merging takes these, too.
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
                    log.warning("could not merge runs: %s", error)
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
        """Include an arrangement of a shard that belongs to one dataflow in the statistics, until
        it is closed."""
        with self._lock:
            self._private[arrangement] = shard

    def statistics(self) -> list[SharedStatistics]:
        """Return all arrangements, including unfilled and private ones."""
        with self._lock:
            entries = [entry for entries in self._entries.values() for entry in entries]
            found = [entry.statistics() for entry in entries]
            for held, shard in self._private.items():
                if not held.closed:
                    own = held.since, held.upper, held.statistics(), tuple(held.schema.names)
                    found.append(SharedStatistics(shard, held.key, 1, *own, private=True))
            return found


class _Entry:
    """One arrangement and its users. Guarded by the registry's lock, except for inserts
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
        """Users that keep the since back; detached users are not among them."""
        self.arrangement: Arrangement | None = None
        """The arrangement; None until it is filled."""
        self.filling: ArrangementFill | None = None
        """The filling in progress; None if there is none."""
        self.fillings = 0
        """Number of fillings started; names their folders."""
        self.retired = False
        """True if new users must not use it."""
        self.inserting = threading.Lock()
        """Held while updates are inserted."""
        self.inserted = 0
        """Bytes offered and inserted so far."""
        self.marks: list[tuple[Frontier, int]] = []
        """Pairs (upper, bytes inserted when it was reached), in ascending order and some distance
        apart."""

    def serves(self, schema: TableSchema, rows: PartFilter | None) -> bool:
        """Return whether it contains these columns and the rows that pass the filter."""
        same = self.rows is None or (rows is not None and rows.name == self.rows.name)
        return same and self.columns.issuperset(schema.columns)

    def own(self, updates: pa.Table) -> pa.Table:
        """Return the columns and rows that it contains, given updates with all columns."""
        if self.rows is not None:
            updates = self.rows.passing(updates)
        shape = self.schema.arrow_updates()
        narrower = len(shape) < updates.num_columns
        updates = updates.select(shape.names).cast(shape)
        # Without some of their columns, updates may cancel out.
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
        """Return the bytes inserted beyond `lo`, except for the first insert there."""
        # A user that has not finished the next step, however large, does not lag.
        passed = bisect.bisect_right(self.marks, lo, key=lambda mark: mark[0])
        return self.inserted - self.marks[passed][1] if passed < len(self.marks) else 0

    def detach_laggards(self, bytes_max: int, slack: int) -> list[ArrangementHandle]:
        """Detach users that hold back compaction, but never the most advanced one."""
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
        """Filter of the arrangement's rows for this user; None for all."""
        self._registry = registry
        self._entry = entry
        self._refused: str | None = None
        """Why its reads are refused; None unless it was detached."""
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
        """Return the columns of the reads, which may be more than were requested."""
        return self._entry.schema

    @property
    def rows(self) -> PartFilter | None:
        """Return the filter of the arrangement's rows; None for all."""
        return self._entry.rows

    @property
    def upper(self) -> Frontier:
        """Return the upper: all updates below it are inserted; 0 until it is filled."""
        arrangement = self._entry.arrangement
        return 0 if arrangement is None else arrangement.upper

    @property
    def ready(self) -> bool:
        """Return whether all updates before `lo` can be read."""
        return self._entry.arrangement is not None and self.upper >= self.lo

    # -- filling ----------------------------------------------------------------------------------

    def claim(self) -> ArrangementFill | None:
        """Claim the filling; None if it is filled already, or another user is filling it."""
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
        """Call back once when the filling in progress is published or abandoned, on the thread that
        ends it. Return False, and never call, if there is none."""
        with self._registry._lock:
            filling = self._entry.filling
            if filling is None:
                return False
            filling.waiting.append(call)
            return True

    def retire(self) -> None:
        """Hide this arrangement from new users, because it cannot be advanced to this user's
        `lo`."""
        with self._registry._lock:
            self._entry.retired = True

    # -- advancing --------------------------------------------------------------------------------

    def offer(self, updates: pa.Table, lower: Frontier, upper: Frontier) -> None:
        """Insert the new part of the shard's updates with ``lower <= time < upper`` (all columns).

        An offer that would leave a gap is ignored. Raises `ReadBelowSince` (detached),
        `ResourceClosed` and `StorageError` (then nothing was inserted).
        """
        self._check()
        entry, registry = self._entry, self._registry
        if upper <= self.upper:
            return  # another user has inserted it, so do not wait for the lock
        with entry.inserting:
            arrangement = entry.arrangement
            # Checked again under the lock, because another user may have inserted meanwhile.
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

        Raises the same errors as `offer`.
        """
        self.offer(updates, self.lo, hi)
        self.move(hi)

    def move(self, lo: Frontier) -> None:
        """Advance the user's `lo`. Raises `InvalidUsage` for an earlier one."""
        if lo < self.lo:
            raise InvalidUsage(f"a user of {self.shard} at {self.lo} cannot go back to {lo}")
        entry, registry = self._entry, self._registry
        with registry._lock:
            self.lo = lo
            laggards = entry.detach_laggards(registry.lag_bytes_max, registry.slack)
            ARRANGEMENT_LAG.crossed(bool(laggards))
            for late in laggards:
                log.warning(
                    "detached a user of %s at %d, because it lags behind", self.shard, late.lo
                )
                late._refused = (
                    f"the arrangement of {self.shard} advanced without its user at {late.lo}"
                )
            entry.moved(registry.slack)

    def merging(self) -> list[Arrangement]:
        """Return the arrangement in a list if a merge of it is due, else an empty list."""
        arrangement = self._entry.arrangement
        return [arrangement] if arrangement is not None and arrangement.merge_due() else []

    # -- reading ----------------------------------------------------------------------------------

    def lookup(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Return the updates before `lo` that match a row of any table: a superset
        (`Arrangement.lookup`).

        Raises `ReadBelowSince` if the user was detached, `InvalidUsage` if it is not `ready`, and
        `ResourceClosed`.
        """
        return self._passing(self._readable().lookup_all(tables, self.lo))

    def scan(self) -> pa.Table:
        """Return all updates before `lo`. Raises the same errors as `lookup`."""
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
            raise ResourceClosed(f"this user of the arrangement of {self.shard} is closed")
        # A detached user must not read, because the since may be beyond its `lo`.
        if self._refused is not None:
            raise ReadBelowSince(self._refused)

    def close(self) -> None:
        """Remove the user, and with the last user the arrangement. May be called twice."""
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
        # No new user can find it any more. A filling in progress removes its own files.
        if entry.arrangement is not None:
            entry.arrangement.close()
        shutil.rmtree(entry.directory, ignore_errors=True)


class ArrangementFill:
    """The first contents of an arrangement, inserted by one user until `publish` or `abandon`."""

    def __init__(self, registry: SharedArrangements, entry: _Entry, place: Path) -> None:
        self.since: Time | None = None
        """The since to which the contents are advanced; None before `start`."""
        self.waiting: list[Callable[[], None]] = []
        """Callbacks for the end of the filling."""
        self._registry = registry
        self._entry = entry
        self._place = place
        self.arrangement: Arrangement | None = None
        """Made by `start`."""
        self._ended = False
        """True after `publish` or `abandon`."""

    def start(self, shard_since: Time) -> None:
        """Start, with a shard that is readable from `shard_since` on. From now on, new users that
        need earlier times get another arrangement. Raises `ResourceClosed` if the filling has
        ended."""
        entry, registry = self._entry, self._registry
        arrangement = Arrangement(self._place, entry.schema, entry.name[1], registry._limits)
        # Made outside the lock, because it creates files; removed again if the filling ended
        # meanwhile.
        with registry._lock:
            ended = self._ended
            if not ended:
                self.since = max(shard_since, self._entry.floor(registry.slack))
                arrangement.allow_compaction(self.since)
                self.arrangement = arrangement
        if ended:
            shutil.rmtree(self._place, ignore_errors=True)
            raise ResourceClosed("the filling was abandoned before it started")

    def insert(self, updates: pa.Table) -> None:
        """Add the arrangement's share of updates with all columns, in any order. Raises
        `StorageError`, and `ResourceClosed` if the filling has ended."""
        assert self.arrangement is not None, "call start first"
        self.arrangement.fill(self._entry.own(updates))

    def publish(self, upper: Frontier) -> None:
        """Make the arrangement readable: all updates before `upper` have been inserted. Raises
        `StorageError`."""
        arrangement, entry, registry = self.arrangement, self._entry, self._registry
        assert arrangement is not None, "call start first"
        arrangement.insert(arrangement.schema.arrow_updates().empty_table(), upper)
        with registry._lock:
            # If its last user has closed meanwhile, nobody would close the arrangement.
            used = bool(entry.users)
            if used:
                entry.arrangement = arrangement
                entry.marks = [(upper, 0)]
                self._ended = True
                entry.filling = None
                entry.moved(registry.slack)
        if used:
            # Outside the lock, because callbacks may use the registry.
            self._settled()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Give up unless the filling has ended. The contents are removed, and another user may
        start again."""
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
