"""Answers peeks: the rows of a collection at one time, as Arrow IPC.

The rows at `t` are the sum of the updates with ``time <= t``. If an error update is present at `t`
the answer is `ViewInError` instead (an answer is an error or correct, never wrong). A negative sum
makes it `CorruptData` (invalid data), unless the answer was complete before.

Rows pass in batches through keys, check, filter, columns, thinning and pieces. Each stage takes one
batch at a time, so memory holds what the answer needs, and a limit ends the walk.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from actors.durable.arrangement.arrangement import Arrangement
from actors.durable.arrangement.gathered import CollectionContents, check_positive, raise_error
from actors.durable.arrangement.hashing import Hashes
from actors.durable.arrangement.reading import ArrangementSnapshot, is_plain
from actors.model.plan.schema import DIFF, TableSchema
from actors.model.plan.updates import ResultPiece, opening_of, pieces, stream_of
from actors.model.protocol.compute import Peek, PeekError, PeekRows
from actors.model.protocol.row_filter import (
    R,
    check_column,
    check_comparable,
    passing_rows,
    prepare_comparison,
)
from actors.model.protocol.row_finishing import thinned
from actors.replica.compute.peek_keys import (
    OneKey,
    lookup_hashes,
    one_key,
    select_keys,
    wanted_keys,
)
from actors.runtime.errors import InvalidUsage, to_wire
from actors.runtime.threshold_probes import POINT_ROWS

# -- filter and projection -------------------------------------------------------------------------


class PeekFilter:
    """The filter and the projection of a peek."""

    def __init__(self, schema: TableSchema, peek: Peek) -> None:
        """Check the peek against the schema.

        Raise `InvalidUsage` for an unknown or repeated column, a value that does not fit, and an
        order by a column that has none.
        """
        self.tests = tuple(prepare_comparison(schema, comparison) for comparison in peek.filter)
        ordered = () if peek.finishing is None else peek.finishing.order_by
        for by in ordered:
            check_comparable("order by", schema, by.column)
        self.columns = list(schema.names)
        if peek.project is not None:
            for name in peek.project:
                check_column("projection", schema, name)
            if len(set(peek.project)) < len(peek.project):
                raise InvalidUsage(f"projection: a column twice in {', '.join(peek.project)}")
            # Rows are ordered again over all workers, so the order's columns must be sent.
            more = dict.fromkeys(by.column for by in ordered if by.column not in peek.project)
            self.columns = [*peek.project, *more]

    @property
    def schema_names(self) -> list[str]:
        """Return the columns of the answer, `DIFF` last."""
        return [*self.columns, DIFF]

    def equalities(self) -> dict[str, Any]:
        """Return the columns that the filter fixes to one value, with the value."""
        return {test.column: test.value for test in self.tests if test.op == "="}

    def apply(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that pass, projected, without empty batches."""
        names = self.schema_names
        for batch in batches:
            kept = self.passing(batch)
            if kept.num_rows:
                yield kept if kept.schema.names == names else kept.select(names)

    def passing(self, rows: R) -> R:
        """Return the rows that pass, with all columns."""
        return passing_rows(self.tests, rows)


def checked_columns(schema: TableSchema, columns: Sequence[str]) -> pa.Schema:
    """Return the schema of an answer: these columns and `DIFF`."""
    held = schema.arrow()
    return pa.schema([*(held.field(name) for name in columns), pa.field(DIFF, pa.int64())])


# -- answers without a read ------------------------------------------------------------------------


NOTHING: Final = PeekRows(b"", 0)
"""Response of a worker that has no part in the peek."""


class HashShare(msgspec.Struct, frozen=True, gc=False):
    """A worker's part of an index: the hashes with ``hash % count == index``."""

    index: int
    count: int


def chosen_worker(name: str, count: int) -> int:
    """Return the worker that does the work of only one; it is the same in every process."""
    return zlib.crc32(name.encode()) % count


def error_of(error: Exception) -> PeekError:
    """Return a failure as the answer to a peek."""
    code, text, _ = to_wire(error)
    return PeekError(code, text)


# -- of an index ---------------------------------------------------------------------------------


def answer_on_loop(
    arrangement: Arrangement, peek: Peek, share: HashShare, bytes_max: int
) -> PeekRows | None:
    """Return the answer if it is cheaper than a thread: one key of integers and text, few rows.

    Return None otherwise; then call `index_answer`. Raise `ReadBelowSince`, `InvalidUsage` and
    `ResourceClosed`.
    """
    key = _only_key(arrangement, peek)
    if key is None:
        return None
    view = arrangement.view(peek.time + 1)
    if key.hash % share.count != share.index:
        # An error update answers a peek of any key: leave it to `index_answer`.
        return None if _has_errors(view) else NOTHING
    return _rows(arrangement, view, key, bytes_max)


def all_at_once(arrangements: Sequence[Arrangement], peek: Peek, bytes_max: int) -> PeekRows | None:
    """Return one answer out of all workers' partitions, as `answer_on_loop` does for one."""
    key = _only_key(arrangements[0], peek)
    if key is None:
        return None
    views = [arrangement.view(peek.time + 1) for arrangement in arrangements]
    owner = key.hash % len(views)
    if any(_has_errors(view) for view in views):
        return None
    return _rows(arrangements[owner], views[owner], key, bytes_max)


def _only_key(arrangement: Arrangement, peek: Peek) -> OneKey | None:
    if peek.filter or peek.project is not None or peek.finishing is not None:
        return None
    return one_key(arrangement.key, arrangement.key_types, peek)


def _has_errors(view: ArrangementSnapshot) -> bool:
    return any(run.has_errors for run in view.runs)


def _rows(
    arrangement: Arrangement, view: ArrangementSnapshot, key: OneKey, bytes_max: int
) -> PeekRows | None:
    places = view.point(key.hash)
    # Rows in several places must be summed: leave that to a thread.
    if places is None or len(places) > 1:
        return None
    if not places:
        nothing = stream_of(arrangement.opening, ())
        return PeekRows(nothing, 0) if len(nothing) <= bytes_max else None
    ((run, block, first, beyond),) = places
    if not (is_plain(run, view.before) and run.positive):
        return None
    # Comparing more rows would block the event loop.
    if POINT_ROWS.exceeded_by(beyond - first):
        return None
    for name, value in zip(arrangement.key, key.values, strict=True):
        held = block.values.column(name)
        if any(held[row].as_py() != value for row in range(first, beyond)):
            return None  # another key of the same hash
    rows = block.values.slice(first, beyond - first)
    arrow = stream_of(arrangement.opening, (rows,))
    return PeekRows(arrow, rows.num_rows) if len(arrow) <= bytes_max else None


class PeekSpec:
    """A peek's checked selection of a collection: keys, filter, columns, finishing."""

    def __init__(self, schema: TableSchema, peek: Peek) -> None:
        """Check the peek. Raise `InvalidUsage`."""
        self.keys = wanted_keys(schema, peek)
        self.filter = PeekFilter(schema, peek)
        self.finishing = peek.finishing
        self.opening = opening_of(checked_columns(schema, self.filter.columns))

    def narrowed(self, key: tuple[str, ...]) -> Hashes | None:
        """Return the hashes under which an index on `key` has all wanted rows; None means any."""
        if self.keys is not None:
            return lookup_hashes(key, self.keys)
        values = self.filter.equalities()
        if not key or not set(key) <= values.keys():
            return None
        columns = {name: pa.array([values[name].as_py()], values[name].type) for name in key}
        return lookup_hashes(key, pa.table(columns))

    def answer(
        self, contents: CollectionContents, wanted: Hashes | None, piece_bytes: int
    ) -> Iterator[ResultPiece]:
        """Yield the answer, piece by piece. Blocks. Raise `ViewInError` and `CorruptData`."""
        raise_error(contents.errors())
        batches = self.filter.apply(selected(contents.rows(wanted), self.keys))
        yield from pieces(thinned(batches, self.finishing), self.opening, piece_bytes)


def index_answer(arrangement: Arrangement, peek: Peek, piece_bytes: int) -> Iterator[ResultPiece]:
    """Yield the rows of one worker's partition at the peek's time. Blocks.

    Raise `ViewInError`, `CorruptData`, `InvalidUsage`, `ReadBelowSince` and `ResourceClosed` (the
    arrangement was replaced meanwhile).
    """
    spec = PeekSpec(arrangement.schema, peek)
    view = arrangement.view(peek.time + 1)
    yield from spec.answer(view, spec.narrowed(arrangement.key), piece_bytes)


def selected(batches: Iterator[pa.RecordBatch], keys: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the keys, checked. Raise `CorruptData` for a row that sums to less than
    0."""
    for batch in batches:
        if keys is not None:
            batch = select_keys(batch, keys)
        if batch.num_rows:
            check_positive(batch)
            yield batch
