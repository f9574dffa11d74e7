"""Partition pruning: decides from statistics alone which parts a reader may skip. Pure.

A filter is a disjunction of conjunctions of conditions on columns. A row passes as in SQL's WHERE:
NULL does not pass, NaN equals itself and is greater than every number, and -0.0 equals 0.0. The
verdict on a part is `DISCARD` only if none of its rows can pass, because each conjunction has a
condition that no value of its column can meet. Otherwise it is `KEEP`.

Soundness: with sound statistics (`statistics.py`), a row that passes is never in a discarded part.
`PartFilter.passing` applies the same rule row by row. Readers use it on a sample of the discarded
parts to prove that the verdict was right (`FilterAudit`).
"""

from __future__ import annotations

import decimal
import enum
import logging
import math
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.durable.persist.shard import BatchPart
from actors.durable.persist.statistics import ColumnStatistics, Value, column_of, has_bounds
from actors.model.plan.schema import TableSchema
from actors.model.plan.updates import from_ipc
from actors.model.protocol.internal import FilteredParts
from actors.model.protocol.message_parts import ColumnComparison
from actors.runtime.errors import (
    CorruptData,
    InvalidUsage,
    PenstockError,
    StorageError,
    UnsoundFilter,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import FILTER_AUDIT

log = logging.getLogger("penstock.persist")

Op: TypeAlias = Literal["=", "<", "<=", ">", ">=", "in", "is null", "is not null"]


class PartVerdict(enum.Enum):
    """Decision to read a part or to skip it."""

    KEEP = "keep"
    DISCARD = "discard"


class PartCondition(msgspec.Struct, frozen=True, gc=False):
    """A test of one column.

    `values` are scalars with exactly the column's Arrow type: one, any number for ``in``, or none
    for the NULL tests.
    """

    column: str
    op: Op
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.column, self.op, *(str(value) for value in self.values)))


_KERNELS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal,
    "in": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
KEYS_MAX = 64
"""Maximum number of keys of a peek that are used to skip parts, because each is compared with each
part's bounds."""
_NULL_TESTS: Final = ("is null", "is not null")
_EXACT: Final = decimal.Context(prec=76)


class PartFilter:
    """Conjunctions of conditions on the columns of one schema."""

    def __init__(self, schema: TableSchema, *conjunctions: Sequence[PartCondition]) -> None:
        """Check the conjunctions.

        Raises `InvalidUsage` if there are none, for a column that does not exist, a type without an
        order, a value that is NULL or of another type, and a wrong number of values.
        """
        if not conjunctions:
            raise InvalidUsage("a filter needs at least one conjunction of conditions")
        self.conjunctions = tuple(tuple(each) for each in conjunctions)
        columns = zip(schema.columns, schema.arrow(), strict=True)
        kinds = {column.name: (column.type, field.type) for column, field in columns}
        for conjunction in self.conjunctions:
            for condition in conjunction:
                _check(condition, kinds)
        self._stored = [
            [(each.column, each.op, tuple(stored(value) for value in each.values)) for each in one]
            for one in self.conjunctions
        ]

    def __str__(self) -> str:
        return " OR ".join(
            " AND ".join(str(condition) for condition in conjunction) or "true"
            for conjunction in self.conjunctions
        )

    @classmethod
    def of(
        cls,
        schema: TableSchema,
        comparisons: Sequence[ColumnComparison],
        keys: pa.Table | None = None,
    ) -> PartFilter | None:
        """Make a filter from a peek's comparisons and key values (which have the columns' types),
        using those that can prune; None if none can."""
        columns = zip(schema.columns, schema.arrow(), strict=True)
        kinds = {c.name: field.type for c, field in columns if has_bounds(c.type, field.type)}
        known = (
            _of_comparison(each, kinds[each.column]) for each in comparisons if each.column in kinds
        )
        found = [condition for condition in known if condition is not None]
        if keys is not None and keys.num_rows <= KEYS_MAX:
            helping = [n for n in keys.column_names if n in kinds and not keys[n].null_count]
            found += [PartCondition(name, "in", tuple(keys[name])) for name in helping]
        return cls(schema, found) if found else None

    def verdict(self, part: BatchPart) -> PartVerdict:
        """Decide whether a part must be read."""
        # Inline parts cost nothing to read, and error updates count whatever the filter.
        if part.inline is not None or part.has_errors:
            return PartVerdict.KEEP
        may = any(_may_pass(conjunction, part) for conjunction in self._stored)
        return PartVerdict.KEEP if may else PartVerdict.DISCARD

    @property
    def name(self) -> tuple[object, ...]:
        """Return an identity: filters of one schema with equal names let the same rows pass."""
        return tuple(tuple(each) for each in self._stored)

    def passing(self, rows: pa.Table) -> pa.Table:
        """Return the rows that pass. Evaluates every row."""
        passed: Any = pa.scalar(False)
        for conjunction in self.conjunctions:
            mask: Any = pa.scalar(True)
            for condition in conjunction:
                mask = pc.and_(mask, _mask(condition, rows[condition.column]))
            passed = pc.or_(passed, mask)
        if isinstance(passed, pa.Scalar):
            return rows if passed.as_py() else rows.slice(0, 0)
        return rows.filter(passed)


def _check(condition: PartCondition, kinds: Mapping[str, tuple[str, pa.DataType]]) -> None:
    where = f"filter on {condition.column} {condition.op}"
    if condition.column not in kinds:
        raise InvalidUsage(f"{where}: column does not exist (available: {', '.join(kinds)})")
    text, kind = kinds[condition.column]
    count = len(condition.values)
    if condition.op in _NULL_TESTS:
        if count:
            raise InvalidUsage(f"{where}: expected no value, got {count}")
        return
    if not has_bounds(text, kind):
        raise InvalidUsage(f"{where}: filters do not support the order of type {text}")
    if count != 1 and condition.op != "in":
        raise InvalidUsage(f"{where}: expected one value, got {count}")
    for value in condition.values:
        if value.type != kind or not value.is_valid:
            raise InvalidUsage(f"{where}: {value!r} is not a value of type {kind}")


def _of_comparison(given: ColumnComparison, kind: pa.DataType) -> PartCondition | None:
    """Convert a comparison to a condition; None if it cannot prune or its value cannot be cast."""
    if given.op == "is null" or given.op == "is not null":
        return PartCondition(given.column, given.op)
    if given.op == "<>":
        return None
    try:
        value = from_ipc(given.value).column(0).cast(kind)[0]
    except (PenstockError, pa.ArrowException, IndexError):
        return None  # evaluating the rows reports the error
    return PartCondition(given.column, given.op, (value,)) if value.is_valid else None


def stored(value: pa.Scalar) -> Value:
    """Return a value in the form used in statistics."""
    kind = value.type
    # Without rounding: a wrong bound would make pruning unsound.
    if pa.types.is_temporal(kind):
        return int(value.value)
    if pa.types.is_decimal(kind):
        number = value.as_py()
        return int(number.scaleb(kind.scale, _EXACT))
    found = value.as_py()
    plain: Value = found.encode() if isinstance(found, str) else found
    return plain


def _may_pass(conjunction: Sequence[tuple[str, Op, tuple[Any, ...]]], part: BatchPart) -> bool:
    for column, op, values in conjunction:
        known = column_of(part.statistics, column)
        # A column without statistics may contain anything.
        if known is not None and not _may_hold(op, values, known, part.rows):
            return False
    return True


def _may_hold(op: Op, values: tuple[Any, ...], known: ColumnStatistics, rows: int) -> bool:
    """Return whether some row of a part can meet a condition."""
    if op == "is null":
        return known.nulls != 0
    if known.nulls is not None and known.nulls >= rows:
        return False  # all values are NULL
    if op == "is not null":
        return True
    return any(_may_compare(op, value, known.low, known.high) for value in values)


def _may_compare(op: Op, value: Any, low: Any, high: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        # A column that contains NaN has no upper bound (`statistics.py`), so a bound proves that it
        # contains none.
        return high is None or op in ("<", "<=")
    if op in ("<", "<="):
        return low is None or low < value or (op == "<=" and low == value)
    if op in (">", ">="):
        return high is None or high > value or (op == ">=" and high == value)
    return (low is None or low <= value) and (high is None or value <= high)


def _mask(condition: PartCondition, values: Any) -> Any:
    """Return a mask of the values that meet the condition. The mask is never NULL."""
    if condition.op in _NULL_TESTS:
        found = pc.is_null(values)
        return found if condition.op == "is null" else pc.invert(found)
    mask: Any = pa.scalar(False)
    for value in condition.values:
        mask = pc.or_(mask, _compared(condition.op, values, value))
    return pc.fill_null(pc.and_(mask, pc.is_valid(values)), False)


def _compared(op: Op, values: Any, value: pa.Scalar) -> Any:
    if not pa.types.is_floating(value.type):
        return _KERNELS[op](values, value)
    # Arrow follows IEEE; in Spark, NaN is above every number and equal to itself.
    nan = pc.is_nan(values)
    if not math.isnan(value.as_py()):
        found = _KERNELS[op](values, value)
        return pc.or_(found, nan) if op in (">", ">=") else found
    if op in ("=", "in", ">="):
        return nan
    if op == "<":
        return pc.invert(nan)
    return pc.is_valid(values) if op == "<=" else pc.and_(nan, pc.invert(nan))


AUDITED_BYTES_MAX: Final = 128 * 1024 * 1024
"""Maximum bytes of audited parts per input of a dataflow, in addition to a fixed share of what it
reads."""


class FilterAudit:
    """Chooses discarded parts that are read anyway, to prove that the filter was right."""

    def __init__(self, one_in: int, bytes_max: int) -> None:
        self._one_in = one_in
        self._bytes = bytes_max
        """Bytes that may still be audited."""

    def kept(self, part: BatchPart) -> None:
        """Add a share of a part that is read anyway to the byte budget."""
        self._bytes += part.bytes // self._one_in

    def chooses(self, part: BatchPart) -> bool:
        """Return whether to read a discarded part, and charge its size to the budget."""
        # By a hash of the key, so that every process chooses the same parts at any time. The byte
        # budget limits the cost of audits.
        passed_over = zlib.crc32(part.key.encode()) % self._one_in or part.bytes > self._bytes
        if FILTER_AUDIT.crossed(bool(passed_over)):
            return False
        self._bytes -= part.bytes
        return True


# -- pruning of one input --------------------------------------------------------------------------


class PartPruner:
    """The filter and the audit of one input.

    Some of the skipped parts are read anyway (`FilterAudit`), before their interval is sealed. If
    one of their rows passes the filter, `UnsoundFilter` is raised.
    """

    def __init__(self, wanted: PartFilter, audit: FilterAudit) -> None:
        self._wanted = wanted
        self._audit = audit
        # Number and bytes of skipped parts, and number of audits.
        self._parts = self._bytes = self._audited = 0

    def __str__(self) -> str:
        return str(self._wanted)

    def counts(self) -> FilteredParts:
        """Return the number of skipped parts, their bytes, and the number of audits so far."""
        return FilteredParts(self._parts, self._bytes, self._audited)

    def discards(self, part: BatchPart) -> bool:
        """Return whether a part is skipped, and count it."""
        if self._wanted.verdict(part) is PartVerdict.KEEP:
            self._audit.kept(part)
            return False
        self._parts += 1
        self._bytes += part.bytes
        return True

    def chooses(self, part: BatchPart) -> bool:
        """Return whether to audit a skipped part."""
        return self._audit.chooses(part)

    async def prove(
        self,
        parts: Iterable[BatchPart],
        fetch: Callable[[BatchPart], Awaitable[pa.Table]],
        clock: ActorClock,
    ) -> None:
        """Audit skipped parts: read them, and filter their rows in a thread. Raises `UnsoundFilter`
        and `CorruptData`."""
        for part in parts:
            try:
                rows = await fetch(part)
            except CorruptData:
                raise
            except StorageError as error:
                # A failing store says nothing about the filter. A corrupt part matters to every
                # reader.
                log.warning("part %s was skipped but could not be audited: %s", part.key, error)
                continue
            self._audited += 1
            passed = await clock.run_blocking(partial(self._wanted.passing, rows))
            if passed.num_rows:
                raise UnsoundFilter(
                    f"part {part.key} contains {passed.num_rows} rows that pass {self._wanted}, "
                    f"although its statistics {part.statistics!r} exclude this: report this, and "
                    "set filter_parts = false until it is fixed",
                    determinate=True,
                )


def part_pruner(wanted: PartFilter, settings: Settings) -> PartPruner:
    """Return a pruner with the audit that the settings configure."""
    return PartPruner(wanted, FilterAudit(settings.filter_audit_one_in, AUDITED_BYTES_MAX))
