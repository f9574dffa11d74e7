"""Touched state: what a step needs to know of the imports' and the hidden state's past.

Theory of operation. For every (import, key) that a lookup of the plan names there is one
private arrangement of the import's rows; for hidden state one by its group keys. A step's
lookups are followed in the plan's order: the key values come from deltas, from rows that
earlier lookups returned, or from an earlier stratum's output; what matches is the step's state
input (a superset, Spark decides).

Times below a step's `lo` carry no meaning, so the arrangements are not kept by time: insert
number n is at time n, and everything but the last insert is compacted. Rows given to a step
are consolidated and stand at ``lo - 1``.

Invariants: an arrangement holds its import's (or the hidden shard's) updates below the
dataflow's `lo`, all of them, once; two lookups of one import may return the same row by
different keys: it is given once. It is a cache of durable state, made by one incarnation and
removed with it. All methods block (files): call them off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from actors.arrangement import Arrangement
from actors.errors import InvalidUsage
from actors.plan.delta import DeltaPlan, Lookup, Stratum
from actors.plan.schema import DIFF, TIME, Schema
from actors.plan.updates import concat, consolidate, set_column
from actors.progress import Time

HIDDEN = "h"


def imports_looked_up(plan: DeltaPlan) -> tuple[bool, ...]:
    """Which imports need their state kept, in the order of the plan's sources."""
    targets = {lookup.target for stratum in plan.strata for lookup in stratum.lookups}
    return tuple(f"s{index}" in targets for index in range(len(plan.sources)))


class Touched:
    """The private arrangements of one incarnation of a view."""

    def __init__(self, plan: DeltaPlan, directory: Path) -> None:
        self._plan = plan
        self._directory = directory
        self._schemas = {f"s{i}": schema for i, schema in enumerate(plan.source_schemas)}
        if plan.hidden is not None:
            self._schemas[HIDDEN] = plan.hidden.schema
        self._arranged: dict[str, dict[tuple[str, ...], Arrangement]] = {}
        self._inserts: dict[str, int] = {}
        self.hidden_groups = 0
        """Rows of hidden state: groups."""
        for stratum in plan.strata:
            for lookup in stratum.lookups:
                self._arrange(lookup.target, lookup.key)

    def _arrange(self, target: str, key: tuple[str, ...]) -> None:
        by_key = self._arranged.setdefault(target, {})
        if key in by_key or (not key and by_key):
            return  # any arrangement can be scanned
        place = self._directory / f"{target}-{len(by_key)}"
        try:
            by_key[key] = Arrangement(place, self._schemas[target], key)
        except InvalidUsage:
            # A key that cannot be compared by hash: every lookup is a scan.
            by_key[key] = Arrangement(place, self._schemas[target], ())

    def insert(self, target: str, updates: pa.Table) -> None:
        """Adds plain updates of an import (``s2``) or of the hidden state (``h``)."""
        arranged = self._arranged.get(target)
        if not arranged or not updates.num_rows:
            return
        number = self._inserts.get(target, 0)
        shape = self._schemas[target].arrow_updates()
        stamped = _at(updates.select(shape.names).cast(shape), number)
        for arrangement in arranged.values():
            arrangement.insert(stamped, number + 1)
            arrangement.allow_compaction(number)
        self._inserts[target] = number + 1
        if target == HIDDEN:
            self.hidden_groups += pc.sum(updates[DIFF]).as_py() or 0

    def maintain(self) -> None:
        """Merges runs where there are many."""
        for arranged in self._arranged.values():
            for arrangement in arranged.values():
                arrangement.maintain()

    def close(self) -> None:
        """Removes everything."""
        for arranged in self._arranged.values():
            for arrangement in arranged.values():
                arrangement.close(remove=True)

    def hidden_whole(self, groups_max: int) -> bool:
        """Whether hidden state is small enough to go into a step whole."""
        return self.hidden_groups <= groups_max

    def schema(self, target: str) -> Schema:
        """The columns of an import or of the hidden state."""
        return self._schemas[target]

    def scan(self, target: str) -> pa.Table:
        """All updates."""
        arrangement = next(iter(self._arranged[target].values()))
        return arrangement.scan(arrangement.upper)

    def find(self, target: str, key: tuple[str, ...], keys: Sequence[pa.Table]) -> pa.Table:
        """At least the updates of `target` that match a row of any of `keys` (by position)."""
        if not key:
            return self.scan(target)
        arrangement = self._arranged[target][key]
        if not arrangement.key:
            return arrangement.scan(arrangement.upper)
        found = [arrangement.lookup(table, arrangement.upper) for table in keys if table.num_rows]
        return _distinct(found, self._schemas[target], 0)


class Lookups:
    """The lookups of one step, followed stratum by stratum."""

    def __init__(self, touched: Touched, deltas: Sequence[pa.Table], lo: Time) -> None:
        self._touched = touched
        self._rows: dict[str, pa.Table] = {f"d{i}": delta for i, delta in enumerate(deltas)}
        self._state_time = max(lo - 1, 0)

    def rows(self, name: str) -> pa.Table | None:
        """An input by its name, as far as it is known."""
        return self._rows.get(name)

    def made(self, index: int, rows: pa.Table) -> None:
        """The output of a stratum that has run."""
        self._rows[f"r{index}"] = rows

    def follow(self, strata: Sequence[Stratum], *, whole_hidden: bool) -> None:
        """Looks up what the strata need; afterwards `rows` knows their state inputs.

        With `whole_hidden` all of the hidden state is given, whatever is touched.
        """
        touched = self._touched
        for lookup in (lookup for stratum in strata for lookup in stratum.lookups):
            schema = touched.schema(lookup.target)
            if lookup.target == HIDDEN and whole_hidden:
                found = touched.scan(HIDDEN)
            else:
                found = touched.find(lookup.target, lookup.key, self._keys(lookup))
            earlier = self._rows.get(lookup.target)
            tables = [found] if earlier is None else [earlier, found]
            self._rows[lookup.target] = _distinct(tables, schema, self._state_time)

    def _keys(self, lookup: Lookup) -> list[pa.Table]:
        tables = []
        for name, columns in lookup.origins:
            rows = self._rows.get(name)
            if rows is not None and rows.num_rows and columns:
                tables.append(rows.select(list(columns)))
        return tables


def _at(updates: pa.Table, time: Time) -> pa.Table:
    """The updates, all at one time."""
    times = pa.repeat(pa.scalar(time, pa.int64()), updates.num_rows)
    return set_column(updates, TIME, times)


def _distinct(tables: Sequence[pa.Table], schema: Schema, time: Time) -> pa.Table:
    """The rows of all tables at `time`, each once: every table has each of its rows whole, so
    that a row in two of them has the same weight in both."""
    shape = schema.arrow_updates()
    sums = [consolidate(_at(table.select(shape.names), time)) for table in tables]
    whole = concat(sums, shape)
    if sum(table.num_rows > 0 for table in sums) < 2:
        return whole
    weight = "__weight"
    ones = pa.repeat(pa.scalar(1, pa.int64()), whole.num_rows)
    weighted = set_column(whole.append_column(weight, whole[DIFF]), DIFF, ones)
    once = consolidate(weighted)
    return set_column(once, DIFF, once[weight]).drop_columns([weight])
