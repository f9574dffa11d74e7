"""State lookups: the past rows of imports and hidden states that a step needs.

Theory of operation. For every (import, key) that a lookup of the plan names, the view uses an
arrangement that all dataflows share (`arrangement.shared`), and reads the updates below its `lo`.
Hidden states have a single writer and private arrangements. A step's lookups run in the plan's
order: their key values come from deltas, from rows that earlier lookups returned, or from the
output of an earlier stratum. The matching rows are the step's state input, a superset that Spark
filters. Rows passed to a step are consolidated, at time ``lo - 1``.

Invariants: lookups read every update of the import (or the hidden shard) below the dataflow's `lo`
exactly once. The state is a cache of durable state, created and dropped by one incarnation. All
methods that read, insert or close block on files: call them off the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement import Arrangement, ArrangementHandle, SharedArrangements
from actors.durable.arrangement.hashing import hash_columns
from actors.engine.views.input_uses import input_uses
from actors.model.plan.delta import DUE_BUCKET_MS, DeltaPlan, PlanStratum, StateLookup
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.nearby import ComparedRange, covered_changes, rows_in_range
from actors.model.plan.schema import DIFF, TIME, TableSchema
from actors.model.plan.updates import concat, consolidate, consolidate_keyed, set_column
from actors.runtime.errors import InvalidUsage
from actors.runtime.progress import Frontier, ShardId, Time
from actors.runtime.threshold_probes import HIDDEN_ROWS

DUE_BUCKETS_MAX = 10_000
"""Maximum number of buckets of due rows that are looked up one by one; beyond it, everything is
read."""


def met_pairs(changed: pa.Table, rows: pa.Table) -> int:
    """Return how many pairs of rows have keys that a lookup treats as equal: the cost of their
    join.

    Two NULLs are equal here. If a key has many rows and changes at many times of a step, the two
    multiply: a few changed rows at each of a hundred times, each matching a hundred thousand rows,
    are more than ten million pairs. Looking up the keys costs only the sum, so the product is
    computed before the join.

    >>> changed = pa.table({"k": [1, 1, 2, None]})
    >>> met_pairs(changed, pa.table({"key": [1, 1, 1, 2, 3, None]}))
    8

    Args:
        changed: Keys of the changed rows, one for each row.
        rows: Keys of the other rows, with the columns in the same order and any names.

    Raises:
        InvalidUsage: A column has a type without equality.
    """
    few, often = np.unique(hash_columns(changed.columns, changed.num_rows), return_counts=True)
    many, oftener = np.unique(hash_columns(rows.columns, rows.num_rows), return_counts=True)
    if not len(many):
        return 0
    places = np.minimum(np.searchsorted(many, few), len(many) - 1)
    met = many[places] == few
    return int(np.sum(often[met] * oftener[places[met]]))


class ImportArrangements:
    """A view's handles on the shared arrangements of its imports."""

    def __init__(
        self,
        plan: DeltaPlan,
        shards: Sequence[ShardId],
        arrangements: SharedArrangements,
        lo: Frontier,
    ) -> None:
        """Open the handles at `lo`, unfilled (`filling` fills them).

        `shards` are those of the plan's inputs, in order.
        """
        self.lo = lo
        """Frontier of the next step; every applied step advances it."""
        self.uses = input_uses(plan)
        self.handles: dict[tuple[str, tuple[str, ...]], ArrangementHandle] = {}
        """Handles by (``s{n}``, key). The key is empty if any arrangement can serve."""
        for target, key in _wanted(plan, InputKind.STATE):
            index = InputName.parse(target).number
            shard, use = shards[index], self.uses[index]
            try:
                handle = arrangements.open(shard, key, use.schema, lo, use.state)
            except InvalidUsage:
                # The key cannot be compared by hash, so every lookup is a scan.
                handle = arrangements.open(shard, (), use.schema, lo, use.state)
            self.handles[target, key] = handle

    @property
    def ready(self) -> bool:
        """Return whether a step from `lo` on can read all of them."""
        return all(handle.ready for handle in self.handles.values())

    def close(self) -> None:
        """Release the handles."""
        for handle in self.handles.values():
            handle.close()


class HiddenArrangements:
    """A view's own arrangements of its hidden states."""

    def __init__(
        self,
        plan: DeltaPlan,
        shards: Sequence[ShardId],
        arrangements: SharedArrangements,
        directory: Path,
    ) -> None:
        """Open the arrangements, empty. `shards` are those of the hidden states, in order."""
        self.by_target: dict[str, dict[tuple[str, ...], Arrangement]] = {}
        """Arrangements by ``h{k}``, then by key."""
        self.rows = 0
        """Number of rows (groups) of all hidden states."""
        self.schemas = {
            InputKind.HIDDEN.text(k): state.schema for k, state in enumerate(plan.hidden)
        }
        self._inserts: dict[str, int] = {}
        """Number of inserts into each hidden state."""
        for number, (target, key) in enumerate(_wanted(plan, InputKind.HIDDEN)):
            place = directory / f"{target}-{number}"
            by_key = self.by_target.setdefault(target, {})
            try:
                by_key[key] = Arrangement(place, self.schemas[target], key)
            except InvalidUsage:
                by_key[key] = Arrangement(place, self.schemas[target], ())
            shard = shards[InputName.parse(target).number] if shards else target
            arrangements.note_private(by_key[key], shard)

    def insert(self, target: str, updates: pa.Table) -> None:
        """Add plain updates of a hidden state (``h0``)."""
        arranged = self.by_target.get(target)
        if not arranged or not updates.num_rows:
            return
        number = self._inserts.get(target, 0)
        shape = self.schemas[target].arrow_updates()
        # Times have no meaning here: insert number n gets time n, and all but the last are
        # compacted.
        stamped = _at(updates.select(shape.names).cast(shape), number)
        for arrangement in arranged.values():
            arrangement.insert(stamped, number + 1)
            arrangement.allow_compaction(number)
        self._inserts[target] = number + 1
        self.rows += pc.sum(updates[DIFF]).as_py() or 0

    def all(self) -> list[Arrangement]:
        """Return all arrangements."""
        return [each for arranged in self.by_target.values() for each in arranged.values()]

    def close(self) -> None:
        """Close the arrangements and remove their files."""
        # They are a cache of the shards, so none of it is needed again.
        for arrangement in self.all():
            arrangement.close(remove=True)


class StateLookups:
    """Arrangements that one incarnation of a view reads: shared ones of imports, and private ones
    of hidden states."""

    def __init__(
        self,
        plan: DeltaPlan,
        shards: Sequence[ShardId],
        arrangements: SharedArrangements,
        lo: Frontier,
        directory: Path,
        hidden: Sequence[ShardId] = (),
    ) -> None:
        """Open the arrangements. `hidden` are the shards of the hidden states, in order."""
        self.imports = ImportArrangements(plan, shards, arrangements, lo)
        self._arrangements = arrangements
        self._schemas = {
            InputKind.STATE.text(i): use.schema for i, use in enumerate(self.imports.uses)
        }
        self.covered = plan.covered
        self._due = {
            InputKind.HIDDEN.text(k): state for k, state in enumerate(plan.hidden) if state.due
        }
        self.hidden_shards = tuple(hidden)
        self._open_hidden = partial(HiddenArrangements, plan, hidden, arrangements, directory)
        self.hidden = self._open_hidden()
        self._schemas |= self.hidden.schemas
        self.hidden_filled = not (hidden and self.hidden.by_target)
        """True if `hidden` contains all rows below `lo`. Without shards its user adds them."""
        self.rows_read = 0
        """Number of rows that lookups have returned so far."""

    @property
    def empty(self) -> bool:
        """Return whether the view reads no earlier state."""
        return not self.imports.handles and not self.hidden.by_target

    @property
    def ready(self) -> bool:
        """Return whether a step from `lo` on can read everything it needs."""
        return self.imports.ready and self.hidden_filled

    def empty_hidden(self) -> None:
        """Replace the hidden states' arrangements with empty ones, without what an attempt has
        left."""
        # Close the old ones last: a thread left by an attempt then only finds closed arrangements.
        before, self.hidden = self.hidden, self._open_hidden()
        before.close()

    def step(self, imports: Sequence[pa.Table], hidden: Sequence[pa.Table], hi: Frontier) -> None:
        """Apply a committed step ``[lo, hi)``.

        Args:
            imports: Plain updates of the imports with all columns; empty if there were none.
            hidden: Plain updates of the hidden states. They are read from the shards if that was
                not done yet.
            hi: The step's upper.
        """
        for (target, _), handle in self.imports.handles.items():
            nothing = handle.schema.arrow_updates().empty_table()
            handle.step(imports[InputName.parse(target).number] if imports else nothing, hi)
        # Until the hidden states are read, a step's rows are only in the shard, and are read from
        # there.
        if self.hidden_filled:
            for index, delta in enumerate(hidden):
                self.hidden.insert(InputKind.HIDDEN.text(index), delta)
        self.imports.lo = hi

    def merge(self) -> None:
        """Merge runs where there are many. May run concurrently with all other methods."""
        self._arrangements.merge(self._mergeable())

    def merge_due(self) -> bool:
        """Return whether `merge` has something to do."""
        return any(arrangement.merge_due() for arrangement in self._mergeable())

    def _mergeable(self) -> list[Arrangement]:
        found = self.hidden.all()
        for handle in self.imports.handles.values():
            found += handle.merging()
        return found

    def close(self) -> None:
        """Remove the private arrangements, and release the shared ones."""
        self.imports.close()
        self.hidden.close()

    def hidden_whole(self, groups_max: int) -> bool:
        """Return whether the hidden states are small enough to be passed to a step in full."""
        return not HIDDEN_ROWS.crossed(self.hidden.rows > groups_max)

    def schema(self, target: str) -> TableSchema:
        """Return the schema of an import or a hidden state."""
        return self._schemas[target]

    def scan(self, target: str) -> pa.Table:
        """Return all updates of an import or a hidden state."""
        return self._counted(self._scanned(target))

    def _scanned(self, target: str) -> pa.Table:
        if InputName.parse(target).kind is InputKind.HIDDEN:
            arrangement = next(iter(self.hidden.by_target[target].values()))
            return arrangement.scan(arrangement.upper)
        handles = self.imports.handles.items()
        return next(handle for (name, _), handle in handles if name == target).scan()

    def find(self, target: str, key: tuple[str, ...], keys: Sequence[pa.Table]) -> pa.Table:
        """Return at least the updates of `target` that match a row of any of `keys` (by
        position)."""
        if not key:
            return self.scan(target)
        if InputName.parse(target).kind is InputKind.HIDDEN:
            arrangement = self.hidden.by_target[target][key]
            # The key cannot be compared by hash, so scan.
            if not arrangement.key:
                return self.scan(target)
            return self._counted(arrangement.lookup_all(keys, arrangement.upper))
        handle = self.imports.handles[target, key]
        return self._counted(handle.lookup(keys) if handle.key else handle.scan())

    def find_between(
        self, target: str, changes: pa.Table | None, within: ComparedRange
    ) -> pa.Table:
        """Return at least the updates of `target` whose comparison changes with the changed
        bounds."""
        rows = self._scanned(target)
        return self._counted(rows if changes is None else rows_in_range(rows, changes, within))

    def due(self, lo: Time, hi: Frontier) -> dict[str, pa.Table]:
        """Return the rows that come due in ``[lo, hi)``, each at that time, by input name
        (``c{k}``)."""
        first, last = lo // DUE_BUCKET_MS, (hi - 1) // DUE_BUCKET_MS
        found = {}
        for target, state in self._due.items():
            if last - first >= DUE_BUCKETS_MAX:
                rows = self.scan(target)
            else:
                buckets = pa.table({"k0": pa.array(range(first, last + 1), pa.int64())})
                rows = self.find(target, (state.bucket,), [buckets])
            rows = rows.filter(pc.less(rows[state.due], pa.scalar(hi, pa.int64())))
            shape = state.schema.arrow_updates()
            timed = set_column(rows.select(shape.names).cast(shape), TIME, rows[state.due])
            name = InputKind.DUE.text(InputName.parse(target).number)
            found[name] = consolidate(timed)
        return found

    def _counted(self, found: pa.Table) -> pa.Table:
        self.rows_read += found.num_rows
        return found


def _wanted(plan: DeltaPlan, kind: InputKind) -> list[tuple[str, tuple[str, ...]]]:
    """Return the (target, key) pairs of one kind of targets that lookups name."""
    lookups = [lookup for stratum in plan.strata for lookup in stratum.lookups]
    own = (each for each in lookups if InputName.parse(each.target).kind is kind)
    found = dict.fromkeys((each.target, each.key) for each in own)
    if kind is InputKind.HIDDEN:
        found |= {
            (InputKind.HIDDEN.text(k), (s.bucket,)): None
            for k, s in enumerate(plan.hidden)
            if s.due
        }
    # Any arrangement of a target can be scanned, so one with an empty key is needed only if there
    # is no other.
    keyed = {target for target, key in found if key}
    return [(target, key) for target, key in found if key or target not in keyed]


class StepLookups:
    """Runs the lookups of one step, stratum by stratum."""

    def __init__(
        self,
        touched: StateLookups,
        deltas: Sequence[pa.Table],
        lo: Time,
        due: Mapping[str, pa.Table],
    ) -> None:
        """Create the lookups. `due` contains the changes caused by the clock, by input name."""
        self._touched = touched
        self._rows: dict[str, pa.Table] = {
            InputKind.CHANGES.text(i): delta for i, delta in enumerate(deltas)
        }
        """Known rows of each input, by its name."""
        self._rows |= due
        self._state_time = max(lo - 1, 0)
        self._whole: set[str] = set()
        """Hidden states that are passed in full."""
        self._found: dict[int, list[pa.Table]] = {}
        """Rows that each lookup returned, by its number."""
        self.pairs = 0
        """Approximate number of pairs that rows form with the rows they looked up."""

    def rows(self, name: str) -> pa.Table | None:
        """Return the rows of an input by its name, as far as they are known."""
        kind, number = InputName.parse(name)
        if kind is InputKind.COVERED and name not in self._rows:
            covered = self._touched.covered[number]
            edges_name = InputKind.HIDDEN.text(covered.edges)
            changes = self._rows[InputKind.CHANGES.text(covered.input_index)]
            edges = self._rows.get(edges_name)
            if edges is None:
                # The edges have not been looked up yet; until then all changes count.
                return changes
            # Replacing the edges is safe, because only the covered changes read them.
            self._rows[name], self._rows[edges_name] = covered_changes(changes, edges, covered)
        return self._rows.get(name)

    def made(self, index: int, rows: pa.Table) -> None:
        """Add the output of a stratum that has run."""
        self._rows[InputKind.RESULT.text(index)] = rows

    def follow(self, strata: Sequence[PlanStratum], *, whole_hidden: bool) -> None:
        """Run the lookups of the strata. Afterwards `rows` returns their state inputs.

        With `whole_hidden`, all rows of the hidden states are passed, whether touched or not.
        """
        touched = self._touched
        ranges = {each.lookup: each for stratum in strata for each in stratum.ranges}
        for lookup in (lookup for stratum in strata for lookup in stratum.lookups):
            target = lookup.target
            earlier = self._rows.get(target)
            if target in self._whole:
                continue
            if whole_hidden and InputName.parse(target).kind is InputKind.HIDDEN:
                # This replaces the part that an earlier run may have looked up.
                found, earlier = self._at_state_time(target, touched.scan(target)), None
                self._whole.add(target)
            else:
                within = ranges.get(lookup.number)
                if within is not None and self._is_wanted(lookup):
                    found = touched.find_between(target, self._origin_rows(lookup, 0), within)
                elif lookup.key:
                    keys = self._keys(lookup)
                    found = touched.find(target, lookup.key, keys)
                    self._count_pairs(keys, found.select(lookup.key))
                elif self._is_wanted(lookup):
                    found = touched.find(target, (), ())
                else:
                    found = touched.schema(target).arrow_updates().empty_table()
                found = self._at_state_time(target, found)
                self._found.setdefault(lookup.number, []).append(found)
            self._rows[target] = found if earlier is None else _each_once(earlier, found)

    def _count_pairs(self, keys: Sequence[pa.Table], rows: pa.Table) -> None:
        """Count the pairs of keys and rows found."""
        for each in keys:
            try:
                self.pairs += met_pairs(each, rows)
            except InvalidUsage:  # a key without equality, for which everything was read
                self.pairs += rows.num_rows

    def _at_state_time(self, target: str, rows: pa.Table) -> pa.Table:
        """Return the rows consolidated, at the time of the state."""
        schema = self._touched.schema(target)
        shape = schema.arrow_updates()
        settled = _at(rows.select(shape.names).cast(shape), self._state_time)
        return consolidate_keyed(settled, schema.key)

    def _is_wanted(self, lookup: StateLookup) -> bool:
        """Return whether a lookup without a key must read: it is unconditional, or its condition
        holds."""
        if not lookup.origins:
            return True
        found = (self._origin_rows(lookup, place) for place in range(len(lookup.origins)))
        return any(rows is not None and rows.num_rows for rows in found)

    def _origin_rows(self, lookup: StateLookup, place: int) -> pa.Table | None:
        """Return the rows of an origin: those returned by the lookups that fill it."""
        name = lookup.origins[place][0]
        rows = self.rows(name)
        if name not in self._whole and lookup.fills and lookup.fills[place]:
            found = [each for n in lookup.fills[place] for each in self._found.get(n, ())]
            rows = concat(found, self._touched.schema(name).arrow_updates()) if found else None
        if rows is None and InputName.parse(name).is_looked_up:
            raise InvalidUsage(
                f"lookup of {lookup.target} needs rows of {name}, which were not looked up"
            )
        return rows

    def _keys(self, lookup: StateLookup) -> list[pa.Table]:
        shape = self._touched.schema(lookup.target).arrow()
        tables = []
        for index, (_, columns) in enumerate(lookup.origins):
            rows = self._origin_rows(lookup, index)
            if rows is None or not rows.num_rows or not columns:
                continue
            if not lookup.nulls and not all(columns):
                continue
            values = [
                rows[column] if column else pa.nulls(rows.num_rows, shape.field(own).type)
                for own, column in zip(lookup.key, columns, strict=True)
            ]
            names = [f"k{index}" for index in range(len(values))]
            table = pa.Table.from_arrays(values, names)
            tables.append(table if lookup.nulls else _without_nulls(table))
        return [table for table in tables if table.num_rows]


def _without_nulls(keys: pa.Table) -> pa.Table:
    """Return the keys without NULL, the only ones that ``=`` can match."""
    # A key that is often NULL, as foreign keys are, would otherwise fetch all such rows for
    # nothing.
    return keys.drop_null() if any(column.null_count for column in keys.columns) else keys


def _at(updates: pa.Table, time: Time) -> pa.Table:
    """Return the updates, all at one time."""
    times = pa.repeat(pa.scalar(time, pa.int64()), updates.num_rows)
    return set_column(updates, TIME, times)


def _each_once(earlier: pa.Table, later: pa.Table) -> pa.Table:
    """Return the rows of both tables, each once."""
    if not earlier.num_rows or not later.num_rows:
        return earlier if earlier.num_rows else later
    # Two lookups of one import may return the same row for different keys. Each returns a row with
    # its full weight, so the duplicates have equal weights.
    whole = pa.concat_tables([earlier, later])
    weight = "__weight"
    ones = pa.repeat(pa.scalar(1, pa.int64()), whole.num_rows)
    weighted = set_column(whole.append_column(weight, whole[DIFF]), DIFF, ones)
    once = consolidate(weighted)
    return set_column(once, DIFF, once[weight]).drop_columns([weight])
