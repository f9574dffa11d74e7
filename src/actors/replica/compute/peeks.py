"""Answers peeks: the rows of a collection at one time, as Arrow IPC.

The rows at `t` are the sum of the updates with ``time <= t``. If an error update is present at `t`,
the answer is `ViewInError` instead, so an answer is either correct or an error. A negative sum
means invalid data and makes the answer `CorruptData`, unless it was complete before.

Rows pass in batches through these stages: keys, check, filter, columns, thinning, pieces. Each
stage holds one batch, so memory is bounded by what the answer needs, and a limit ends the scan
early. Keys compare null-safe; all NaNs are equal, and -0.0 equals 0.0. The order of the named
columns does not matter.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.arrangement.arrangement import Arrangement
from actors.durable.arrangement.gathered_updates import (
    CollectionContents,
    check_positive,
    raise_error,
)
from actors.durable.arrangement.hashing import Hashes, hash_columns, hash_values, is_exact_kind
from actors.durable.arrangement.snapshot import ArrangementSnapshot, is_plain
from actors.durable.persist.stashed_blobs import StashedBlobs
from actors.model.plan.one_row import RowForm, form_of
from actors.model.plan.schema import DIFF, TableSchema
from actors.model.plan.updates import (
    ResultPiece,
    assemble_stream,
    encode_stream_header,
    from_ipc,
    pieces,
)
from actors.model.protocol.compute import (
    Peek,
    PeekError,
    PeekRows,
    PeekStashed,
    StashPart,
)
from actors.model.protocol.row_filter import (
    R,
    check_column,
    check_comparable,
    passing_rows,
    prepare_comparison,
)
from actors.model.protocol.row_finishing import limit_batches
from actors.runtime.errors import InvalidUsage, PenstockError, to_wire
from actors.runtime.kernel import ActorClock
from actors.runtime.threshold_probes import INLINE_ANSWER

POINT_ROWS_MAX = 256
"""Maximum number of rows of one key that are compared on the event loop."""
_KEY_BYTES_MAX: Final = 4_096
"""Maximum size of an encoded key that `_decode_key` handles, and thus of its cache's entries."""

SECOND_REMOVAL_MS: Final = 60_000
"""Delay in ms before the blobs of a cancelled peek are removed a second time."""
NOTHING: Final = PeekRows(b"", 0)
"""Response of a worker that does not contribute rows to the peek."""
_FORMS: Final[dict[tuple[tuple[str, ...], int], RowForm]] = {}
"""Layouts of integer keys that were read before, by the names of their columns and their length."""
_FORMS_MAX: Final = 256


class PeekStash:
    """Stash of one worker, for results that are too large for a response.

    A result is a sequence of `ResultPiece`s, each an Arrow IPC stream of about the size of a
    response. A single piece is the answer itself (`PeekRows`). Otherwise each piece is written to a
    blob before the next one is computed, and the answer names the blobs (`PeekStashed`). A worker
    therefore holds one piece at a time, however large the result.

    The reader of a stashed result removes it. A blob that still exists `orphan_ms` after it was
    written is an orphan, because its reader is gone or another worker failed; `collect` removes it.
    When a process starts, it removes the blobs of earlier processes.
    """

    def __init__(self, blobs: StashedBlobs, clock: ActorClock, writer: str, orphan_ms: int) -> None:
        """Create the stash. `writer` must be unique among the workers of this process."""
        self._blobs = blobs
        self._clock = clock
        self._writer = writer
        self._orphan_ms = orphan_ms
        self._count = 0
        """Number of blobs written so far; it names the next one."""
        self._due: dict[str, float] = {}
        """Monotonic time in ms at which to remove each blob; 0 for a cancelled peek's."""

    def __len__(self) -> int:
        return len(self._due)

    async def answer(
        self, found: Iterator[ResultPiece], bytes_max: int
    ) -> PeekRows | PeekStashed | PeekError:
        """Consume all pieces and return the answer.

        Raise the errors of the pieces, `StoreFull` and `StorageError`.
        """
        parts: list[StashPart] = []
        clock = self._clock
        try:
            while True:
                piece = await clock.run_blocking(lambda: next(found))
                if not parts and not INLINE_ANSWER.crossed(not piece.last):
                    if len(piece.arrow) > bytes_max:
                        return row_too_large(bytes_max)
                    return PeekRows(piece.arrow, piece.rows)
                self._count += 1
                key = self._blobs.key(f"{self._writer}-{self._count:08x}")
                # Never due while it is being written: a removal before the write would leave the
                # blob forever.
                self._due[key] = math.inf
                parts.append(StashPart(key, piece.rows, len(piece.arrow)))
                await self._blobs.set(key, piece.arrow)
                self._due[key] = clock.monotonic_ms() + self._orphan_ms
                if piece.last:
                    rows = sum(part.rows for part in parts)
                    return PeekStashed(tuple(parts), rows, sum(part.size_bytes for part in parts))
        except BaseException:
            for part in parts:
                self._due[part.key] = 0.0
            raise

    async def collect(self) -> None:
        """Remove the blobs that are due."""
        now = self._clock.monotonic_ms()
        due = [key for key, when in self._due.items() if when <= now]
        left = set(await self._blobs.delete(due))
        for key in due:
            if key in left:
                continue
            if self._due[key] == 0.0:
                # Remove it once more later: the write of a cancelled peek may end after the peek.
                self._due[key] = now + SECOND_REMOVAL_MS
            else:
                del self._due[key]

    @property
    def collects(self) -> bool:
        """Return whether any blob is due."""
        now = self._clock.monotonic_ms()
        return any(when <= now for when in self._due.values())


def row_too_large(bytes_max: int) -> PeekError:
    """Return the error for a row that is larger than a response."""
    text = f"a row is larger than result_bytes_max ({bytes_max} bytes): omit its large columns"
    return PeekError("InvalidUsage", text, "bytes")


# -- the keys of a peek ----------------------------------------------------------------------------


def decode_keys(data: bytes) -> pa.Table:
    """Decode the keys of a peek. Raise `InvalidUsage` if they are not an Arrow IPC stream."""
    try:
        return from_ipc(data)
    except PenstockError as error:
        raise InvalidUsage(f"invalid keys: {error}") from None


def wanted_keys(schema: TableSchema, peek: Peek) -> pa.Table | None:
    """Return the peek's keys with the names and types of the schema's columns; None if it has none.

    Raise `InvalidUsage` if a column is unknown or a value does not fit it.
    """
    if peek.keys is None:
        return None
    given = decode_keys(peek.keys)
    if given.num_columns != len(peek.key_columns):
        raise InvalidUsage(
            f"got {given.num_columns} key columns for {len(peek.key_columns)} column names"
        )
    if not peek.key_columns:
        raise InvalidUsage("a read by key must name at least one column")
    held = schema.arrow()
    columns: list[Any] = []
    for name, values in zip(peek.key_columns, given.columns, strict=True):
        if name not in schema.names:
            raise InvalidUsage(
                f"unknown key column {name}: expected one of {', '.join(schema.names)}"
            )
        kind = held.field(name).type
        try:
            columns.append(values.cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise InvalidUsage(
                f"a key value does not fit column {name} ({kind}): {error}"
            ) from None
    return pa.table(columns, names=list(peek.key_columns))


def lookup_hashes(key: tuple[str, ...], keys: pa.Table | None) -> Hashes | None:
    """Return the hashes under which an index on `key` stores the rows of these keys.

    The hashes are ascending and distinct. None means that any hash is possible.
    """
    if keys is None or not key or not set(key) <= set(keys.column_names):
        return None
    return np.unique(hash_columns([keys[name] for name in key], keys.num_rows))


class OneKey(msgspec.Struct, frozen=True, gc=False):
    """A single key of integers, booleans and text, with its column types and hash."""

    types: tuple[pa.DataType, ...]
    values: tuple[Any, ...]
    hash: int


@functools.lru_cache(maxsize=256)
def _decode_key(names: tuple[str, ...], data: bytes) -> OneKey | None:
    """Decode a stream that holds a single key of types that `OneKey` supports; None if it does not.

    The result is cached, because a key is looked at twice: when the read is fitted to its object,
    and when the key is looked up.
    """
    # Try a known layout first: decoding the key with Arrow makes a peek take 1.25 times as long.
    form = _FORMS.get((names, len(data)))
    if form is not None and (integers := form.read(data)) is not None:
        found = hash_values(integers)
        assert found is not None, "integers have a hash"
        return OneKey(form.types, integers, found)
    form = form_of(data)
    if form is not None and len(_FORMS) < _FORMS_MAX:
        _FORMS[names, len(data)] = form
    try:
        with pa.ipc.open_stream(data) as stream:
            batch = stream.read_next_batch()
            if batch.num_rows != 1 or not all(map(is_exact_kind, batch.schema.types)):
                return None
            for _ in stream:
                return None
    except (pa.ArrowException, StopIteration, OSError, ValueError):
        return None
    values = tuple(column[0].as_py() for column in batch.columns)
    hash_ = hash_values(values)
    return None if hash_ is None else OneKey(tuple(batch.schema.types), values, hash_)


def one_key(names: tuple[str, ...], types: tuple[pa.DataType, ...], data: bytes) -> OneKey | None:
    """Return the key of a stream that holds exactly one key of exactly these types, else None.

    `names` are its columns. `types` must be types that `OneKey` supports.
    """
    found = None if len(data) > _KEY_BYTES_MAX else _decode_key(names, data)
    return found if found is not None and found.types == types else None


def select_keys(rows: R, keys: pa.Table) -> R:
    """Return the rows whose key columns equal some row of `keys`."""
    mask: Any = None
    for name in keys.column_names:
        found = _is_in(rows.column(name), keys[name])
        mask = found if mask is None else pc.and_(mask, found)
    rows = rows.filter(mask)
    if keys.num_columns > 1 and keys.num_rows > 1 and rows.num_rows:
        # So far each column matches some key on its own; all columns must match the same key.
        wanted = set(_tuples(keys))
        found = [row in wanted for row in _tuples(rows.select(keys.column_names))]
        rows = rows.filter(pa.array(found, pa.bool_()))
    return rows


def _plain(column: Any) -> Any:
    """Normalize floats so that -0.0 becomes 0.0 and all NaNs are equal."""
    if not pa.types.is_floating(column.type):
        return column
    column = pc.add(column, pa.scalar(0.0, column.type))
    return pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)


def _is_in(values: Any, wanted: pa.ChunkedArray) -> Any:
    if pa.types.is_nested(values.type) or pa.types.is_null(values.type):
        texts = {repr(value) for value in wanted.to_pylist()}
        return pa.array([repr(value) in texts for value in values.to_pylist()], pa.bool_())
    return pc.is_in(_plain(values), value_set=_plain(wanted).combine_chunks())


def _tuples(table: Any) -> list[str]:
    columns = [_plain(column).to_pylist() for column in table.columns]
    return [repr(row) for row in zip(*columns, strict=True)]


# -- the filter and the columns of a peek ----------------------------------------------------------


class PeekFilter:
    """The filter and the projection of a peek."""

    def __init__(self, schema: TableSchema, peek: Peek) -> None:
        """Check the peek against the schema.

        Raise `InvalidUsage` for an unknown or repeated column, a value that does not fit its
        column, or an order by a column that cannot be ordered.
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
                raise InvalidUsage(f"duplicate column in projection {', '.join(peek.project)}")
            # The rows of all workers are ordered again, so the columns to order by must be sent
            # too.
            more = dict.fromkeys(by.column for by in ordered if by.column not in peek.project)
            self.columns = [*peek.project, *more]

    @property
    def schema_names(self) -> list[str]:
        """Return the columns of the answer, with `DIFF` last."""
        return [*self.columns, DIFF]

    def equalities(self) -> dict[str, Any]:
        """Return the columns that the filter fixes to a single value, with that value."""
        return {test.column: test.value for test in self.tests if test.op == "="}

    def apply(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that pass, projected. Empty batches are skipped."""
        names = self.schema_names
        for batch in batches:
            kept = self.passing(batch)
            if kept.num_rows:
                yield kept if kept.schema.names == names else kept.select(names)

    def passing(self, rows: R) -> R:
        """Return the rows that pass the filter, with all columns."""
        return passing_rows(self.tests, rows)


def checked_columns(schema: TableSchema, columns: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of an answer: these columns and `DIFF`."""
    held = schema.arrow()
    return pa.schema([*(held.field(name) for name in columns), pa.field(DIFF, pa.int64())])


# -- answers ---------------------------------------------------------------------------------------


def chosen_worker(name: str, count: int) -> int:
    """Return the index of the worker that does work needed only once. It is the same in every
    process."""
    return zlib.crc32(name.encode()) % count


def error_of(error: Exception) -> PeekError:
    """Return an error as the answer to a peek."""
    code, text, _ = to_wire(error)
    return PeekError(code, text)


def one_key_answer(
    arrangement: Arrangement, views: Sequence[ArrangementSnapshot], peek: Peek, bytes_max: int
) -> PeekRows | None:
    """Answer a peek of one key on the event loop, if that is cheaper than using a thread.

    This needs a key of integers, booleans and text, and few rows. Return None otherwise: then call
    `PeekSpec.answer`, which also finds errors.

    Args:
        arrangement: One of the arrangements, which are partitioned by the key's hash.
        views: Contents of all of them at the peek's time, in order.
        peek: The peek.
        bytes_max: Limit of the answer.
    """
    if peek.filter or peek.project is not None or peek.finishing is not None:
        return None
    if peek.keys is None or peek.key_columns != arrangement.key:
        return None
    key = one_key(arrangement.key, arrangement.key_types, peek.keys)
    if key is None:
        return None
    rows = rows_of_key(views, key.hash, tuple(zip(arrangement.key, key.values, strict=True)))
    if rows is None:
        return None
    arrow = assemble_stream(arrangement.opening, (rows,) if rows.num_rows else ())
    return PeekRows(arrow, rows.num_rows) if len(arrow) <= bytes_max else None


def rows_of_key(
    views: Sequence[ArrangementSnapshot], wanted: int, values: Sequence[tuple[str, Any]]
) -> pa.RecordBatch | None:
    """Return the rows with these values, with their weights.

    Return None if there are many, or if the contents may be in error, which only the general path
    reports.

    Args:
        views: Contents that are partitioned by the hash of a key, in order.
        wanted: The hash of the key.
        values: The columns' values, including those of the key. Python's equality must match that
            of the columns' types.
    """
    # An error belongs to every answer.
    if any(run.has_errors for view in views for run in view.runs):
        return None
    view = views[wanted % len(views)]
    places = view.point(wanted)
    if places is None:
        return None
    if sum(beyond - first for _, _, first, beyond in places) > POINT_ROWS_MAX:
        return None
    if len(places) == 1 and is_plain(places[0][0], view.before) and places[0][0].positive:
        _, block, first, beyond = places[0]
        rows = block.values.slice(first, beyond - first)
    else:
        # Rows that changed recently are in several places.
        summed = [each for each in view.rows(np.array([wanted], np.uint64)) if each.num_rows]
        if not summed:
            return pa.RecordBatch.from_pylist([], checked_columns(view.schema, view.schema.names))
        if len(summed) > 1 or any(weight < 0 for weight in summed[0].column(DIFF).to_pylist()):
            return None
        rows = summed[0]
    columns = [rows.column(name).to_pylist() for name, _ in values]
    given = [value for _, value in values]
    # Another key may have the same hash.
    same = [row for row in range(rows.num_rows) if [each[row] for each in columns] == given]
    return rows if len(same) == rows.num_rows else rows.take(pa.array(same, pa.int64()))


class PeekSpec:
    """The validated selection of a peek: its keys, filter, columns and finishing."""

    def __init__(self, schema: TableSchema, peek: Peek) -> None:
        """Validate the peek against the schema. Raise `InvalidUsage`."""
        self.keys = wanted_keys(schema, peek)
        self.filter = PeekFilter(schema, peek)
        self.finishing = peek.finishing
        self.opening = encode_stream_header(checked_columns(schema, self.filter.columns))

    def narrowed(self, key: tuple[str, ...]) -> Hashes | None:
        """Return the hashes under which an index on `key` stores all selected rows; None means
        any."""
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
        """Yield the answer, piece by piece. Blocks. Raise `ViewInError` or `CorruptData`."""
        raise_error(contents.errors())
        batches = self.filter.apply(selected(contents.rows(wanted), self.keys))
        yield from pieces(limit_batches(batches, self.finishing), self.opening, piece_bytes)


def index_answer(arrangement: Arrangement, peek: Peek, piece_bytes: int) -> Iterator[ResultPiece]:
    """Yield the rows of one worker's partition at the peek's time. Blocks.

    Raise `ViewInError`, `CorruptData`, `InvalidUsage`, `ReadBelowSince`, or `ResourceClosed` if the
    arrangement was replaced meanwhile.
    """
    spec = PeekSpec(arrangement.schema, peek)
    view = arrangement.view(peek.time + 1)
    yield from spec.answer(view, spec.narrowed(arrangement.key), piece_bytes)


def selected(batches: Iterator[pa.RecordBatch], keys: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """Yield the rows with these keys. Raise `CorruptData` for a row whose diffs sum to less than
    0."""
    for batch in batches:
        if keys is not None:
            batch = select_keys(batch, keys)
        if batch.num_rows:
            check_positive(batch)
            yield batch
