"""Answering peeks: rows at one time, wherever they are kept, as Arrow IPC.

The rows of a collection at `t` are its updates with ``time <= t``, summed. An error update
present at `t` is the answer instead (`ViewInError`: error or correct, never wrong), and so is a
negative sum (`Corrupt`: invalid data), unless the answer was complete before it was met.

Rows go by in batches: keys → check → filter → columns → thinning → pieces; every stage takes
one batch at a time, so what is held is what the answer needs, and a limit ends the walk.
`at_once` answers a peek of one key on the event loop; what it declines goes to a thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa

from actors.arrangement.arrangement import Arrangement
from actors.arrangement.gathered import Contents, check_positive, raise_error
from actors.arrangement.hashing import Hashes
from actors.arrangement.reading import View, is_plain
from actors.compute.answers import NOTHING
from actors.compute.filtering import Filter, checked_columns
from actors.compute.finishing import thinned
from actors.compute.keys import OneKey, narrowed, one_key, select_keys, wanted_keys
from actors.errors import to_wire
from actors.plan.pieces import Piece, pieces
from actors.plan.schema import Schema
from actors.plan.updates import opening_of, stream_of
from actors.protocol.compute import Peek, PeekError, PeekRows
from actors.threshold_probes import POINT_ROWS


class Share(msgspec.Struct, frozen=True, gc=False):
    """Which part of an index a worker has: that of the hashes with ``hash % count == index``."""

    index: int
    count: int


def chosen_worker(name: str, count: int) -> int:
    """The worker that does what only one must do; the same in every process."""
    return zlib.crc32(name.encode()) % count


def error_of(error: Exception) -> PeekError:
    """A failure as the answer to a peek."""
    code, text, _ = to_wire(error)
    return PeekError(code, text)


# -- of an index ---------------------------------------------------------------------------------


def at_once(arrangement: Arrangement, peek: Peek, share: Share, bytes_max: int) -> PeekRows | None:
    """The answer where it costs less than a thread: one key of integers and text, few rows. None:
    it does not, or there is something to be said about it; ask `index_answer`. Raises
    `ReadBelowSince`, `InvalidUsage` and `Closed`."""
    key = _only_key(arrangement, peek)
    if key is None:
        return None
    view = arrangement.view(peek.time + 1)
    if key.hash % share.count != share.index:
        return None if _has_errors(view) else NOTHING
    return _rows(arrangement, view, key, bytes_max)


def all_at_once(arrangements: Sequence[Arrangement], peek: Peek, bytes_max: int) -> PeekRows | None:
    """As `at_once`, out of all workers' partitions: one answer for all of them."""
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


def _has_errors(view: View) -> bool:
    return any(run.has_errors for run in view.runs)


def _rows(arrangement: Arrangement, view: View, key: OneKey, bytes_max: int) -> PeekRows | None:
    places = view.point(key.hash)
    if places is None or len(places) > 1:
        return None
    if not places:
        nothing = stream_of(arrangement.opening, ())
        return PeekRows(nothing, 0) if len(nothing) <= bytes_max else None
    ((run, block, first, beyond),) = places
    if not (is_plain(run, view.before) and run.positive):
        return None
    # So many rows are not looked through on the event loop.
    if POINT_ROWS.exceeded_by(beyond - first):
        return None
    for name, value in zip(arrangement.key, key.values, strict=True):
        held = block.values.column(name)
        if any(held[row].as_py() != value for row in range(first, beyond)):
            return None  # another key of the same hash
    rows = block.values.slice(first, beyond - first)
    arrow = stream_of(arrangement.opening, (rows,))
    return PeekRows(arrow, rows.num_rows) if len(arrow) <= bytes_max else None


class Wish:
    """What a peek wants of a collection, checked: keys, filter, columns, finishing."""

    def __init__(self, schema: Schema, peek: Peek) -> None:
        """Raises `InvalidUsage`."""
        self.keys = wanted_keys(schema, peek)
        self.filter = Filter(schema, peek)
        self.finishing = peek.finishing
        self.opening = opening_of(checked_columns(schema, self.filter.columns))

    def narrowed(self, key: tuple[str, ...]) -> Hashes | None:
        """Hashes of an index on `key` under which all wanted rows stand; None: under any."""
        if self.keys is not None:
            return narrowed(key, self.keys)
        values = self.filter.equalities()
        if not key or not set(key) <= values.keys():
            return None
        columns = {name: pa.array([values[name].as_py()], values[name].type) for name in key}
        return narrowed(key, pa.table(columns))

    def answer(
        self, contents: Contents, wanted: Hashes | None, piece_bytes: int
    ) -> Iterator[Piece]:
        """The answer, piece by piece. Blocking. Raises `ViewInError` and `Corrupt`."""
        raise_error(contents.errors())
        batches = self.filter.apply(selected(contents.rows(wanted), self.keys))
        yield from pieces(thinned(batches, self.finishing), self.opening, piece_bytes)


def index_answer(arrangement: Arrangement, peek: Peek, piece_bytes: int) -> Iterator[Piece]:
    """Rows of one worker's partition at the peek's time. Blocking.

    Raises `ViewInError`, `Corrupt`, `InvalidUsage`, `ReadBelowSince` and `Closed` (the
    arrangement was replaced meanwhile).
    """
    wish = Wish(arrangement.schema, peek)
    view = arrangement.view(peek.time + 1)
    yield from wish.answer(view, wish.narrowed(arrangement.key), piece_bytes)


def selected(batches: Iterator[pa.RecordBatch], keys: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """Rows of the keys, checked. Raises `Corrupt` for one that sums to less than 0."""
    for batch in batches:
        if keys is not None:
            batch = select_keys(batch, keys)
        if batch.num_rows:
            check_positive(batch)
            yield batch
