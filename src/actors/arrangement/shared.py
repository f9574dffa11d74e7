"""Arrangements that the dataflows of a process share, by (shard, key columns, columns, filter).

Theory of operation. `open` hands out a `Handle`: one user's view of an arrangement. It has a
`lo`; the user reads what lies before it, and lets go of what lies before ``lo - 1`` when it
moves on. An arrangement holds the columns, and the rows that pass the filter, of the user that it
was made for, so that changes of other columns and rows take no room and no time in it; whoever
needs no more of both may use it, too, and gets what passes its own filter. The arrangement keeps
real times; its since follows the least `lo` of its users, a little behind, so that a view which has
just been made still finds its first time here.

Every user offers the deltas that it went through, whole. They are of one shard, so they agree:
of ``[lower, hi)`` what lies beyond the upper is inserted, and the rest was there before. Whoever
is first brings the arrangement on for all; nobody reads anything twice.

It begins empty and unreadable. Any user may `claim` the filling of it, one at a time: it puts in
the shard's updates from the start to some time that the shard has sealed, and publishes. Users
who come before that have a say in the since that the contents are advanced to; that is how all
views of a source meet in one arrangement after a restart, whatever the order in which they come
and however far each had got. One whose `lo` lies beyond the upper brings the arrangement there
itself, with an offer read from the shard.

A newcomer for whose `lo` no arrangement of that name is good gets a new one, as does a laggard:
a user that alone keeps too many bytes from being compacted is *detached*. Its reads are refused
from then on; it closes its handle and opens another. An arrangement that lost its last user is
closed and its files are removed.

Rules. Handles may be used from any thread, each by one at a time; readers never wait for
inserts or merges. Within one arrangement one thread inserts at a time (`inserting`); `_lock`
of the registry guards who uses what and is held for an instant, never while waiting for
another lock. `merge` runs on whatever thread calls it, one merge at a time in the process.
What a reader gets is right or refused (`ReadBelowSince`), never stale.
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

from actors.arrangement.arrangement import (
    Arrangement,
    ArrangementStatistics,
    Limits,
    check_key,
)
from actors.errors import Closed, InvalidUsage, ReadBelowSince, StorageError
from actors.memory_ledger import MemoryUse
from actors.persist.filtering import PartFilter
from actors.plan.schema import Schema
from actors.plan.updates import between, condensed
from actors.progress import Frontier, ShardId, Time
from actors.threshold_probes import ARRANGEMENT_LAG

log = logging.getLogger("penstock.arrangement")

_Name: TypeAlias = tuple[ShardId, tuple[str, ...]]


class SharedStatistics(msgspec.Struct, frozen=True):
    """One arrangement of a registry at one moment."""

    shard: ShardId
    key: tuple[str, ...]
    users: int
    since: Time
    upper: Frontier
    """0: not filled yet."""
    arrangement: ArrangementStatistics
    columns: tuple[str, ...]
    filter: str = ""
    """Which rows it holds; empty: all."""
    private: bool = False
    """True for one that a single dataflow owns (`SharedArrangements.note_private`)."""


class SharedArrangements:
    """The registry of a process."""

    def __init__(
        self,
        directory: Path,
        *,
        lag_bytes_max: int = 256 << 20,
        slack: int = 1_000,
        limits: Limits | None = None,
    ) -> None:
        """Files live below `directory`. `lag_bytes_max`: of inserts that one user may keep from
        being compacted. `slack`: how far (in times) the since stays behind what users need."""
        self.lag_bytes_max = lag_bytes_max
        self.slack = slack
        self._directory = directory
        self._limits = limits
        self._lock = threading.Lock()
        self._entries: dict[_Name, list[_Entry]] = {}
        """By age; the newest that is good for a newcomer takes it."""
        self._private: WeakKeyDictionary[Arrangement, ShardId] = WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._due: dict[Arrangement, None] = {}
        self._merging = False

    def open(
        self,
        shard: ShardId,
        key: tuple[str, ...],
        schema: Schema,
        lo: Frontier,
        rows: PartFilter | None = None,
    ) -> Handle:
        """Add a user that stands at `lo`.

        Args:
            shard: Whose updates it reads.
            key: By which columns.
            schema: The columns that it needs, the key's and those of `rows` among them.
            lo: It reads what lies before.
            rows: Which rows it needs; None: all.

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
            handle = Handle(self, entry, lo, rows)
            entry.users.add(handle)
        return handle

    def merge(self, arrangements: Iterable[Arrangement]) -> None:
        """Merges runs of those where it is due; blocks until nothing is. When another thread is
        at it already the work is left to it. A merge that fails leaves everything as it was."""
        due = {each: None for each in arrangements if each.merge_due()}
        with self._lock:
            self._due |= due
            if self._merging:
                return
            self._merging = True
        try:
            while (arrangement := self._next_due()) is not None:
                try:
                    arrangement.maintain()
                except StorageError as error:
                    if arrangement.closed:
                        continue  # its files went while it was merged
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
        """Tell what all arrangements take, for a `MemoryLedger`."""
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
        """All arrangements, the unfilled and the private ones too."""
        with self._lock:
            entries = [entry for entries in self._entries.values() for entry in entries]
            found = [entry.statistics() for entry in entries]
            for held, shard in self._private.items():
                if not held.closed:
                    own = held.since, held.upper, held.statistics(), tuple(held.schema.names)
                    found.append(SharedStatistics(shard, held.key, 1, *own, private=True))
            return found


class _Entry:
    """One arrangement and its users. Everything here is guarded by the registry's lock, but for
    inserts, which `inserting` keeps apart."""

    def __init__(
        self, name: _Name, schema: Schema, rows: PartFilter | None, directory: Path
    ) -> None:
        self.name = name
        self.schema = schema
        self.columns = frozenset(schema.columns)
        self.rows = rows
        self.directory = directory
        self.users: set[Handle] = set()
        self.arrangement: Arrangement | None = None
        """None until it is filled."""
        self.filling: Filling | None = None
        self.fillings = 0
        self.retired = False
        """Takes no newcomers."""
        self.inserting = threading.Lock()
        self.inserted = 0
        """Bytes offered and inserted."""
        self.marks: list[tuple[Frontier, int]] = []
        """(upper, bytes inserted when it was reached), ascending and a little apart."""

    def serves(self, schema: Schema, rows: PartFilter | None) -> bool:
        """Return whether it holds these columns, and the rows that pass."""
        same = self.rows is None or (rows is not None and rows.name == self.rows.name)
        return same and self.columns.issuperset(schema.columns)

    def own(self, updates: pa.Table) -> pa.Table:
        """Return what it holds of updates that have all columns."""
        if self.rows is not None:
            updates = self.rows.passing(updates)
        shape = self.schema.arrow_updates()
        narrower = len(shape) < updates.num_columns
        updates = updates.select(shape.names).cast(shape)
        return condensed(updates) if narrower else updates

    def good_for(self, lo: Frontier) -> bool:
        if self.retired:
            return False
        if self.arrangement is not None:
            return self.arrangement.since < max(lo, 1)
        since = None if self.filling is None else self.filling.since
        return since is None or since < max(lo, 1)

    def floor(self, slack: int) -> Time:
        """The since that the users leave room for."""
        return max(0, min((user.lo for user in self.users), default=0) - 1 - slack)

    def moved(self, slack: int) -> None:
        """Some user's `lo` has moved."""
        if self.arrangement is not None and self.users:
            self.arrangement.allow_compaction(self.floor(slack))
            least = min(user.lo for user in self.users)
            passed = bisect.bisect_right(self.marks, least, key=lambda mark: mark[0])
            del self.marks[: min(passed, len(self.marks) - 1)]

    def backlog(self, lo: Frontier) -> int:
        """Bytes inserted beyond `lo`, without the first insert there: however large the next
        step is, not to have done it yet is no lag."""
        passed = bisect.bisect_right(self.marks, lo, key=lambda mark: mark[0])
        return self.inserted - self.marks[passed][1] if passed < len(self.marks) else 0

    def detach_laggards(self, bytes_max: int, slack: int) -> list[Handle]:
        """Users that hold up compaction, taken out. Never the one that is furthest on."""
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


class Handle:
    """One user of a shared arrangement."""

    def __init__(
        self,
        registry: SharedArrangements,
        entry: _Entry,
        lo: Frontier,
        rows: PartFilter | None,
    ) -> None:
        self.lo = lo
        """What the user reads lies before it."""
        self._rows = None if entry.rows is not None else rows
        """Says which of the arrangement's rows pass; None: all."""
        self._registry = registry
        self._entry = entry
        self._refused: str | None = None
        self._closed = False

    @property
    def shard(self) -> ShardId:
        """Whose updates these are."""
        return self._entry.name[0]

    @property
    def key(self) -> tuple[str, ...]:
        """Key columns."""
        return self._entry.name[1]

    @property
    def schema(self) -> Schema:
        """Tell the columns of what is read, which may be more than were asked for."""
        return self._entry.schema

    @property
    def rows(self) -> PartFilter | None:
        """Tell which rows the arrangement holds; None: all."""
        return self._entry.rows

    @property
    def upper(self) -> Frontier:
        """Everything below is in; 0: not filled yet."""
        arrangement = self._entry.arrangement
        return 0 if arrangement is None else arrangement.upper

    @property
    def ready(self) -> bool:
        """Whether everything before `lo` is there to be read."""
        return self._entry.arrangement is not None and self.upper >= self.lo

    # -- filling ----------------------------------------------------------------------------------

    def claim(self) -> Filling | None:
        """The filling of the arrangement; None when it is filled, or when another is at it."""
        self._check()
        entry, registry = self._entry, self._registry
        with registry._lock:
            if entry.arrangement is not None or entry.filling is not None:
                return None
            entry.fillings += 1
            place = entry.directory / str(entry.fillings)
            entry.filling = Filling(registry, entry, place)
            return entry.filling

    def when_settled(self, call: Callable[[], None]) -> bool:
        """Calls back, once, when the filling under way ends in one way or the other, on the
        thread that ends it; False (and no call) when there is none under way."""
        with self._registry._lock:
            filling = self._entry.filling
            if filling is None:
                return False
            filling.waiting.append(call)
            return True

    def retire(self) -> None:
        """No newcomer gets this arrangement any more: it cannot be brought to where this user
        stands."""
        with self._registry._lock:
            self._entry.retired = True

    # -- going on ---------------------------------------------------------------------------------

    def offer(self, updates: pa.Table, lower: Frontier, upper: Frontier) -> None:
        """All updates of the shard with ``lower <= time < upper``, all columns: what is new, and
        is for the arrangement, is inserted.

        An offer that would leave a gap is passed over. Raises `ReadBelowSince` (detached),
        `Closed` and `StorageError` (then nothing was inserted).
        """
        self._check()
        entry, registry = self._entry, self._registry
        if upper <= self.upper:
            return  # without waiting for whoever inserts just now
        with entry.inserting:
            arrangement = entry.arrangement
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
        """The user has gone through ``[lo, hi)``, with these updates: offers them, and moves.

        Raises as `offer` does.
        """
        self.offer(updates, self.lo, hi)
        self.move(hi)

    def move(self, lo: Frontier) -> None:
        """The user stands at a later `lo`. An earlier one raises `InvalidUsage`."""
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
        """What to merge, if that is due."""
        arrangement = self._entry.arrangement
        return [arrangement] if arrangement is not None and arrangement.merge_due() else []

    # -- reading ----------------------------------------------------------------------------------

    def lookup(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Updates before `lo` that match a row of any table, at least (`Arrangement.lookup`).

        Raises `ReadBelowSince` when the user was detached, `InvalidUsage` when it is not
        `ready`, and `Closed`.
        """
        return self._passing(self._readable().lookup_all(tables, self.lo))

    def scan(self) -> pa.Table:
        """All updates before `lo`. Raises as `lookup` does."""
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
            raise Closed(f"this user of the arrangement of {self.shard} was closed")
        if self._refused is not None:
            raise ReadBelowSince(self._refused)

    def close(self) -> None:
        """The user goes; the arrangement with the last one. Closing twice is fine."""
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
        # Nobody can find it any more. A filling that is still under way removes its own.
        if entry.arrangement is not None:
            entry.arrangement.close()
        shutil.rmtree(entry.directory, ignore_errors=True)


class Filling:
    """The first contents of an arrangement, put in by one user, up to `publish` or `abandon`."""

    def __init__(self, registry: SharedArrangements, entry: _Entry, place: Path) -> None:
        self.since: Time | None = None
        self.waiting: list[Callable[[], None]] = []
        self._registry = registry
        self._entry = entry
        self._place = place
        self.arrangement: Arrangement | None = None
        self._ended = False

    def start(self, shard_since: Time) -> None:
        """Begins: whoever holds the shard readable from `shard_since` on will give its updates.
        From now on a newcomer that needs earlier times gets another arrangement. Raises `Closed`
        after the end."""
        entry, registry = self._entry, self._registry
        arrangement = Arrangement(self._place, entry.schema, entry.name[1], registry._limits)
        with registry._lock:
            ended = self._ended
            if not ended:
                self.since = max(shard_since, self._entry.floor(registry.slack))
                arrangement.allow_compaction(self.since)
                self.arrangement = arrangement
        if ended:
            shutil.rmtree(self._place, ignore_errors=True)
            raise Closed("the filling was given up before it began")

    def insert(self, updates: pa.Table) -> None:
        """Adds what is for the arrangement of updates with all columns, in any order. Raises
        `StorageError`, and `Closed` after the end."""
        assert self.arrangement is not None, "start comes first"
        self.arrangement.fill(self._entry.own(updates))

    def publish(self, upper: Frontier) -> None:
        """All updates before `upper` are in: everybody may read. Raises `StorageError`."""
        arrangement, entry, registry = self.arrangement, self._entry, self._registry
        assert arrangement is not None, "start comes first"
        arrangement.insert(arrangement.schema.arrow_updates().empty_table(), upper)
        with registry._lock:
            used = bool(entry.users)
            if used:
                entry.arrangement = arrangement
                entry.marks = [(upper, 0)]
                self._ended = True
                entry.filling = None
                entry.moved(registry.slack)
        if used:
            self._settled()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Gives up, unless it has ended: what was put in goes, another user may begin again."""
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
