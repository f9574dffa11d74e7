"""The history of every shard, read from durable state: the truth with which answers are compared.

Theory of operation. `ShardHistories` sees each durable change of documents, at its instant. From
the shards' documents and their parts it keeps every update ever appended, with its time, so that it
knows the contents at any time, also below the since of a compaction. It shares the formats of
documents and parts with the service, and none of its reading paths.

Rules that are checked here, as no other checker sees every state (`CheckerViolation`):

- since and upper of a shard, and the tables' upper, never go back (`frontiers`);
- every part, and list of parts, that a durable state names is durable (`durability`);
- compacted batches have, at every time from the since on, the contents of before (`compaction`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from actors.control.controller.catalog.catalog import CATALOG_KEY, INDEX, CatalogSnapshot
from actors.control.controller.catalog.quarantine import decode_catalog
from actors.durable.persist.documents import decode_shard, decode_tables
from actors.durable.persist.location import CompareAndSet
from actors.durable.persist.part_lists import decode_list, unread, with_parts
from actors.durable.persist.parts import decode
from actors.durable.persist.schemas import schema_of
from actors.durable.persist.shard import TABLES_UPPER, BatchPart, ShardBatch, ShardState
from actors.model.plan.schema import DIFF, ERROR, TIME
from actors.runtime.progress import EMPTY
from tests.simulators.service.queries import Bag, Row, trimmed
from tests.simulators.service.stores import SimulatedDisk

Update = tuple[Row, int, int]


class CheckerViolation(Exception):
    """A broken invariant; the text begins with the name of the checker."""


def whole(state: ShardState, disk: SimulatedDisk) -> ShardState:
    """Return the state with the parts of its lists. Raises `CheckerViolation`."""
    known = {}
    for listed in unread(state):
        data = disk.blobs.peek(listed.key)
        if data is None:
            raise CheckerViolation(
                f"durability: shard {state.id} names {listed.key}, which is not durable"
            )
        known[listed.key] = decode_list(listed, data)
    return with_parts(state, known)


class ShardHistory:
    """The history of one shard."""

    def __init__(self, state: ShardState) -> None:
        self.state = state
        self.updates: list[Update] = []
        """Updates as they were appended; never compacted."""
        self.errors = False
        self.first = state.since
        """The earliest since: contents below it were never readable."""

    def at(self, time: int) -> Bag:
        """Return the contents at a time."""
        found: Bag = Counter()
        for row, when, diff in self.updates:
            if when <= time:
                found[row] += diff
        return Counter({row: n for row, n in found.items() if n})


class ShardHistories:
    """The histories of all shards."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self.shards: dict[str, ShardHistory] = {}
        self.tables_upper = 0
        self.catalog = CatalogSnapshot()
        self.names: dict[str, str] = {}
        """Shard → the name of the object whose contents it holds, dropped ones included."""
        self._read: dict[tuple[str, int, int], list[Update]] = {}
        self.grown: list[tuple[str, int, int]] = []
        """(shard, lower, upper) of the appends since the last check of these."""

    def committed(self, ops: Sequence[CompareAndSet]) -> None:
        """Check and note documents that changed. Raises `CheckerViolation`."""
        for op in ops:
            if op.key == CATALOG_KEY and op.data is not None:
                self.catalog = decode_catalog(op.data)
                for entry in self.catalog.objects:
                    if entry.shard is not None and entry.kind != INDEX:
                        self.names[entry.shard] = entry.name
            elif op.key == TABLES_UPPER and op.data is not None:
                upper = decode_tables(op.data).upper
                if upper < self.tables_upper:
                    raise CheckerViolation(
                        f"frontiers: tables' upper {self.tables_upper} → {upper}"
                    )
                self.tables_upper = upper
        for op in ops:
            if op.key.startswith("shard/"):
                self._changed(op)

    def _changed(self, op: CompareAndSet) -> None:
        id_ = op.key.removeprefix("shard/")
        if op.data is None:
            self.shards.pop(id_, None)
            return
        state = whole(decode_shard(op.key, op.data), self._disk)
        held = self.shards.get(id_)
        if held is None:
            held = self.shards[id_] = ShardHistory(state)
            old = None
        else:
            old = held.state
            if state.since < old.since or state.upper < old.upper:
                raise CheckerViolation(
                    f"frontiers: shard {id_} went from since {old.since} upper {old.upper} "
                    f"to since {state.since} upper {state.upper}"
                )
        held.state = state
        known = set() if old is None else {part for batch in old.batches for part in batch.parts}
        fresh = [p for batch in state.batches for p in batch.parts if p not in known]
        for part in fresh:
            self._check_durable(id_, part)
        lower = 0 if old is None else old.upper
        if state.upper > lower:
            self._appended(held, lower)
        if old is not None and (fresh and state.upper == lower):
            self._check_compaction(held)

    def _check_durable(self, id_: str, part: BatchPart) -> None:
        if part.inline is None and self._disk.blobs.peek(part.key) is None:
            raise CheckerViolation(
                f"durability: shard {id_} names {part.key}, which is not durable"
            )

    def _appended(self, held: ShardHistory, lower: int) -> None:
        state = held.state
        for batch in state.batches:
            if batch.lower >= lower:
                held.updates += self._updates(state, batch)
                held.errors = held.errors or any(part.has_errors for part in batch.parts)
        self.grown.append((state.id, lower, state.upper))

    def _updates(self, state: ShardState, batch: ShardBatch) -> list[Update]:
        found: list[Update] = []
        for part in batch.parts:
            key = (part.key, part.checksum, part.rows)
            if key not in self._read:
                self._read[key] = self._decode(state, part)
            found += self._read[key]
        return found

    def _decode(self, state: ShardState, part: BatchPart) -> list[Update]:
        data = part.inline if part.inline is not None else self._disk.blobs.peek(part.key)
        if data is None:
            raise CheckerViolation(
                f"durability: shard {state.id} names {part.key}, which is not durable"
            )
        schema = schema_of(state, part.schema_id)
        table: pa.Table = decode(part, data, schema)
        if ERROR in table.column_names:
            raise CheckerViolation(
                f"errors: shard {state.id} holds an error update, and no row is bad"
            )
        columns = [table[name].to_pylist() for name in (*schema.names, TIME, DIFF)]
        rows = zip(*columns, strict=True)
        return [(trimmed(row[:-2]), row[-2], row[-1]) for row in rows]

    def _check_compaction(self, held: ShardHistory) -> None:
        state = held.state
        now: Counter[tuple[Row, int]] = Counter()
        for batch in state.batches:
            for row, time, diff in self._updates(state, batch):
                now[row, max(time, state.since)] += diff
        for row, time, diff in held.updates:
            now[row, max(time, state.since)] -= diff
        wrong = {at: n for at, n in now.items() if n}
        if wrong:
            raise CheckerViolation(
                f"compaction: shard {state.id} ({self.names.get(state.id)}) at since "
                f"{state.since} differs by {dict(list(wrong.items())[:4])}"
            )

    def shard_of(self, name: str) -> ShardHistory | None:
        """Return the shard of a live object."""
        for entry in self.catalog.objects:
            if entry.name == name and entry.shard is not None:
                return self.shards.get(entry.shard)
        return None

    def sealed(self, held: ShardHistory) -> int:
        """Return the shard's upper, for a table at least the tables' upper."""
        return max(held.state.upper, self.tables_upper) if held.state.tables else held.state.upper

    def tables_at(self, time: int) -> dict[str, Bag]:
        """Return the contents of every table at a time; empty where there is none of that name
        yet."""
        found: dict[str, Bag] = {}
        for entry in self.catalog.objects:
            if entry.kind in ("table", "source table") and entry.shard in self.shards:
                found[entry.name] = self.shards[entry.shard].at(time)
        return found

    def times(self, lower: int, upper: int) -> list[int]:
        """Return the times of any change, ``lower <= time < upper``, and both ends."""
        inside = {
            time
            for shard in self.shards.values()
            for _, time, _ in shard.updates
            if lower <= time < upper
        }
        return sorted(inside | {lower} | ({upper - 1} if lower < upper < EMPTY else set()))
