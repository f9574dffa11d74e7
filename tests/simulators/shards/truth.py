"""The durable state of every shard, change by change: the truth with which answers are compared.

`ShardsTruth` sees each durable change of documents at its instant, before any process can act on
it, and each deletion of a blob. It keeps every update ever appended, with its time, so that it
knows the contents at any time, also below the since of a compaction. It shares the formats of
documents and parts with persist, and none of its reading paths.

Rules that are checked here (`CheckerViolation` names the one that was broken):

- *frontiers*: since and upper never go back, and no since passes a hold;
- *durability*: every part that a state names is durable, and fits its description; so is every
  list of parts;
- *compaction*: compacted batches have, at every time from the since on, the contents of before;
  updates below the since stay below it, so that a listener from there sees none of them twice;
- *leases*: only its owner drops a lease that was renewed within its duration;
- *deletion*: a blob is not deleted while a state names it as contents, nor while a reader whose
  lease stands in the state has it: a process that takes a lease as expired drops it first.

Checked elsewhere: the answers to readers (`work`), and answers to appends (`calls`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from actors.durable.persist.documents import decode_shard
from actors.durable.persist.location import CompareAndSet
from actors.durable.persist.parts import decode
from actors.durable.persist.shard import BatchPart, ShardState
from actors.model.plan.schema import DIFF, TIME
from tests.simulators.service.history import CheckerViolation, whole
from tests.simulators.service.stores import SimulatedDisk

Rows = Counter[tuple[int, int]]
"""Diffs by (value, time)."""


class CommittedInterval(msgspec.Struct, frozen=True):
    """An interval that was appended."""

    lower: int
    upper: int
    rows: frozenset[tuple[int, int, int]]
    at: int
    """Instant of the change."""


class ShardTruth:
    """The history of one shard."""

    def __init__(self, state: ShardState) -> None:
        self.state = state
        self.rows: Rows = Counter()
        """Rows of all appends, at their times; never compacted."""
        self.appends: dict[int, CommittedInterval] = {}
        """Appends by their lower."""
        self.uppers: list[tuple[int, int]] = []
        """(instant, upper) of every change of the upper, in order."""
        self.renewed_ms: dict[str, float] = {}
        """Lease → time of its last change."""
        self.lost: set[str] = set()
        """Leases that processes other than their owners have dropped."""

    def at(self, time: int) -> Counter[int]:
        """Return the contents at a time."""
        found: Counter[int] = Counter()
        for (value, when), diff in self.rows.items():
            if when <= time:
                found[value] += diff
        return Counter({value: n for value, n in found.items() if n})

    def between(self, lower: int, upper: int) -> Rows:
        """Return the updates with lower <= time < upper."""
        return Counter(
            {key: n for key, n in self.rows.items() if lower <= key[1] < upper and n},
        )


class ShardsTruth:
    """The histories of all shards."""

    def __init__(self, disk: SimulatedDisk, instant: Callable[[], int], lease_ms: int) -> None:
        self._disk = disk
        self._lease_ms = lease_ms
        self._instant = instant
        self._read: dict[tuple[str, int, int], Rows] = {}
        self.shards: dict[str, ShardTruth] = {}

    def committed(self, ops: Sequence[CompareAndSet], process: Any) -> None:
        """Check and note documents that a process changed. Raises `CheckerViolation`."""
        for op in ops:
            assert op.data is not None, "no shard of a run is dropped"
            state = msgspec.structs.replace(decode_shard(op.key, op.data), seqno=op.seqno)
            state = whole(state, self._disk)
            held = self.shards.get(state.id)
            if held is None:
                self.shards[state.id] = held = ShardTruth(state)
                held.uppers.append((self._instant(), state.upper))
                continue
            old, held.state = held.state, state
            self._check_frontiers(old, state)
            self._check_leases(held, old, process)
            known = {part for batch in old.batches for part in batch.parts}
            now = [part for batch in state.batches for part in batch.parts]
            fresh = [part for part in now if part not in known]
            if state.upper > old.upper:
                rows = self._rows_of(state, fresh)
                held.rows.update(rows)
                flat = frozenset((value, time, n) for (value, time), n in rows.items())
                made = CommittedInterval(old.upper, state.upper, flat, self._instant())
                held.appends[old.upper] = made
                held.uppers.append((made.at, state.upper))
            if state.upper == old.upper and set(now) != known:
                self._check_compaction(held)

    def _check_frontiers(self, old: ShardState, new: ShardState) -> None:
        if new.since < old.since or new.upper < old.upper:
            raise CheckerViolation(
                f"frontiers: shard {new.id} went from since {old.since} upper {old.upper}"
                f" to since {new.since} upper {new.upper}"
            )

    def _check_leases(self, held: ShardTruth, old: ShardState, process: Any) -> None:
        now_ms = process.clock.monotonic_ms()
        for name, lease in held.state.leases.items():
            if old.leases.get(name) != lease:
                held.renewed_ms[name] = now_ms
        for name in old.leases:
            if name in held.state.leases or process.owns(name):
                continue
            held.lost.add(name)
            left = held.renewed_ms[name] + self._lease_ms - now_ms
            if left > 0 and not process.alone:
                raise CheckerViolation(
                    f"leases: process {process.number} dropped the lease {name} of shard"
                    f" {old.id} {left} ms too early"
                )

    def _rows_of(self, state: ShardState, parts: Iterable[BatchPart]) -> Rows:
        found: Rows = Counter()
        for part in parts:
            key = (part.key, part.checksum, part.rows)
            if key not in self._read:
                self._read[key] = self._decode(state, part)
            found.update(self._read[key])
        return found

    def _decode(self, state: ShardState, part: BatchPart) -> Rows:
        data = part.inline if part.inline is not None else self._disk.blobs.peek(part.key)
        if data is None:
            raise CheckerViolation(
                f"durability: shard {state.id} names {part.key}, which is not durable"
            )
        table = decode(part, data, state.schema)
        return rows_of(table)

    def _check_compaction(self, held: ShardTruth) -> None:
        state = held.state
        now: Rows = Counter()
        parts = [part for batch in state.batches for part in batch.parts]
        for (value, time), diff in self._rows_of(state, parts).items():
            now[value, max(time, state.since - 1)] += diff
        for (value, time), diff in held.rows.items():
            now[value, max(time, state.since - 1)] -= diff
        wrong = {at: n for at, n in now.items() if n}
        if wrong:
            raise CheckerViolation(
                f"compaction: shard {state.id} at since {state.since} differs by"
                f" {dict(list(wrong.items())[:4])}"
            )

    def deleting(self, key: str, readers: Iterable[Any]) -> None:
        """Check the deletion of a blob against `readers` of all living processes. Raises
        `CheckerViolation`."""
        shard = self.shards.get(key.partition("/")[0])
        if shard is None:
            return
        if key in named(shard.state):
            raise CheckerViolation(
                f"deletion: {key} is deleted, and shard {shard.state.id} names it"
            )
        for reader in readers:
            holds = reader.shard == shard.state.id and key in reader._keys
            if holds and not reader.lost and reader.lease_id in shard.state.leases:
                raise CheckerViolation(
                    f"deletion: {key} is deleted, and reader {reader.lease_id} has it"
                )


def named(state: ShardState) -> set[str]:
    """Return every blob of the contents."""
    keys = {batch.listed.key for batch in state.batches if batch.listed is not None}
    return keys | {part.key for batch in state.batches for part in batch.parts if part.key}


def rows_of(table: Any) -> Rows:
    """Return the updates of a table with the column ``a``."""
    found: Rows = Counter()
    columns = (table["a"].to_pylist(), table[TIME].to_pylist(), table[DIFF].to_pylist())
    for value, time, diff in zip(*columns, strict=True):
        found[value, time] += diff
    return found
