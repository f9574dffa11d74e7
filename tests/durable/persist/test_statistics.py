"""Statistics of parts are sound, short, and worth something; so is the filter that asks them."""

from __future__ import annotations

import datetime
import io
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from persist_world import SCHEMA, TINY, add, rows_of, updates  # type: ignore[import-not-found]

from actors.durable.persist import PersistClient
from actors.durable.persist.documents import decode_shard
from actors.durable.persist.documents import encode as encode_document
from actors.durable.persist.part_filter import (
    FilterAudit,
    Op,
    PartCondition,
    PartFilter,
    PartVerdict,
)
from actors.durable.persist.parts import encode
from actors.durable.persist.shard import (
    BatchPart,
    NewShard,
    ShardAppend,
    ShardState,
    appended,
    created,
)
from actors.durable.persist.statistics import BOUND_BYTES_MAX, ColumnStatistics, of_footer
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema, arrow_type
from actors.model.plan.updates import to_ipc
from actors.model.protocol.message_parts import ColumnComparison
from actors.runtime.errors import InvalidUsage
from actors.runtime.kernel import SystemClock
from suite_lanes import examples  # type: ignore[import-not-found]

FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf])
INSTANTS = st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30))  # noqa: DTZ001
LONG = "x" * (BOUND_BYTES_MAX - 1)
TEXTS = st.text(max_size=4) | st.sampled_from(
    [LONG, LONG + "é", LONG + "z" * 9, "\U0010ffff" * 9, "\U0010ffff" * 9 + "a", "\ud7ff" * 20]
)
BINARY = st.binary(max_size=4) | st.sampled_from(
    [b"\xff" * 40, b"\xff" * 32, b"a" * 31 + b"\xff" * 4]
)
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "int": st.integers(-(1 << 31), (1 << 31) - 1),
    "bigint": st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 2),
    "float": FLOATS,
    "double": FLOATS | st.floats(),
    "decimal(12,2)": st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: Decimal(n).scaleb(-2)),
    "decimal(38,0)": st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: Decimal(n)),
    "string": TEXTS,
    "varchar(9)": TEXTS,
    "char(9)": st.text(max_size=2),
    "binary": BINARY,
    "date": st.dates(),
    "timestamp": INSTANTS.map(lambda t: t.replace(tzinfo=datetime.UTC)),
    "timestamp_ntz": INSTANTS,
    "array<int>": st.lists(st.integers(0, 9), max_size=2),
}
UNORDERED = ("char(9)", "array<int>")
OPS: list[Op] = ["=", "<", "<=", ">", ">=", "in", "is null", "is not null"]


def table_of(schema: TableSchema, rows: list[tuple[Any, ...]]) -> pa.Table:
    kinds = schema.arrow().types
    columns = [pa.array([row[at] for row in rows], kind) for at, kind in enumerate(kinds)]
    ones = pa.array([1] * len(rows), pa.int64())
    return pa.table([*columns, ones, ones], names=[*schema.names, TIME, DIFF])


def written(schema: TableSchema, table: pa.Table, budget: int = 4096) -> BatchPart:
    (piece,) = encode(
        table, schema, inline_bytes_max=0, bytes_target=1 << 30, statistics_bytes_max=budget
    )
    return piece.part


def condition(name: str, op: Op, *values: Any, kind: str = "bigint") -> PartCondition:
    return PartCondition(name, op, tuple(pa.scalar(value, arrow_type(kind)) for value in values))


def order(value: Any) -> Any:
    """A key that sorts values as Spark does."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value.encode() if isinstance(value, str) else value


def passes(value: Any, op: Op, operands: list[Any]) -> bool:
    """SQL, row by row."""
    if op in ("is null", "is not null"):
        return (value is None) == (op == "is null")
    if value is None:
        return False
    mine, others = order(value), [order(each) for each in operands]
    if op == "in" or op == "=":
        return mine in others
    (other,) = others
    tests = {"<": mine < other, "<=": mine <= other, ">": mine > other, ">=": mine >= other}
    return bool(tests[op])


def as_stored(kind: str, value: Any) -> Any:
    """What a column of that type makes of a value."""
    return pa.scalar(value, arrow_type(kind)).as_py()


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[Any], list[tuple[Op, list[Any]]]]:
    kind = draw(st.sampled_from(sorted(DRAWN)))
    pool = draw(st.lists(DRAWN[kind], min_size=1, max_size=4))
    some = st.none() | st.sampled_from(pool)
    values = draw(st.lists(some, min_size=1, max_size=6))
    conditions: list[tuple[Op, list[Any]]] = []
    for _ in range(draw(st.integers(1, 2))):
        op = draw(st.sampled_from(OPS))
        if kind in UNORDERED:
            op = draw(st.sampled_from(OPS[-2:]))
        count = {"in": draw(st.integers(0, 3)), "is null": 0, "is not null": 0}.get(op, 1)
        operand = st.sampled_from(pool) | DRAWN[kind]
        operands = draw(st.lists(operand, min_size=count, max_size=count))
        conditions.append((op, [as_stored(kind, each) for each in operands]))
    return kind, values, conditions


@settings(max_examples=examples(400))
@given(cases(), st.booleans())
def test_no_row_that_passes_is_in_a_discarded_part(
    case: tuple[str, list[Any], list[tuple[Op, list[Any]]]], from_spark: bool
) -> None:
    kind, values, wanted = case
    schema = TableSchema((TableColumn("a", kind),))
    table = table_of(schema, [(value,) for value in values])
    part = written(schema, table)
    if from_spark:  # as another writer writes files: several row groups, decimals as integers
        file = io.BytesIO()
        pq.write_table(table, file, row_group_size=2, store_decimal_as_integer=True)
        footer = pq.read_metadata(file)
        part = replace(part, statistics=of_footer(footer, table.schema, schema, 4096))
    filter_ = PartFilter(schema, [condition("a", op, *each, kind=kind) for op, each in wanted])
    right = [all(passes(v, op, each) for op, each in wanted) for v in table["a"].to_pylist()]
    assert filter_.passing(table).num_rows == sum(right)
    assert filter_.verdict(part) is PartVerdict.KEEP or not any(right)


NUMBERS = TableSchema(
    (TableColumn("a", "bigint"), TableColumn("f", "double"), TableColumn("s", "string"))
)
ROWS = [(10, 1.5, "m"), (20, -2.0, "n"), (None, None, "o")]


@pytest.mark.parametrize(
    ("wanted", "verdict"),
    [
        (condition("a", "=", 9), PartVerdict.DISCARD),
        (condition("a", "=", 11), PartVerdict.KEEP),
        (condition("a", "<", 10), PartVerdict.DISCARD),
        (condition("a", "<=", 10), PartVerdict.KEEP),
        (condition("a", ">", 20), PartVerdict.DISCARD),
        (condition("a", ">=", 20), PartVerdict.KEEP),
        (condition("a", "in", 9, 21), PartVerdict.DISCARD),
        (condition("a", "in", 9, 20), PartVerdict.KEEP),
        (condition("a", "in"), PartVerdict.DISCARD),
        (condition("a", "is null"), PartVerdict.KEEP),
        (condition("s", "is null"), PartVerdict.DISCARD),
        (condition("f", ">", 1.5, kind="double"), PartVerdict.DISCARD),
        (condition("f", ">", math.nan, kind="double"), PartVerdict.DISCARD),
        (condition("f", "<", math.nan, kind="double"), PartVerdict.KEEP),
        (condition("s", "=", "a", kind="string"), PartVerdict.DISCARD),
        (condition("s", ">", "n", kind="string"), PartVerdict.KEEP),
    ],
    ids=lambda given: (
        given.name if isinstance(given, PartVerdict) else f"{given.column} {given.op}"
    ),
)
def test_a_part_without_such_values_is_discarded(
    wanted: PartCondition, verdict: PartVerdict
) -> None:
    part = written(NUMBERS, table_of(NUMBERS, ROWS))
    assert PartFilter(NUMBERS, [wanted]).verdict(part) is verdict


def test_one_condition_that_cannot_hold_is_enough() -> None:
    part = written(NUMBERS, table_of(NUMBERS, ROWS))
    both = [condition("a", ">", 0), condition("s", "is null")]
    assert PartFilter(NUMBERS, both).verdict(part) is PartVerdict.DISCARD
    assert PartFilter(NUMBERS, []).verdict(part) is PartVerdict.KEEP
    one, other = condition("a", "<", 10), condition("a", ">", 19)
    assert PartFilter(NUMBERS, [one], [other]).verdict(part) is PartVerdict.KEEP
    assert PartFilter(NUMBERS, [one], both).verdict(part) is PartVerdict.DISCARD
    assert PartFilter(NUMBERS, [one], [other]).passing(table_of(NUMBERS, ROWS)).num_rows == 1
    assert PartFilter(NUMBERS, [one], []).passing(table_of(NUMBERS, ROWS)).num_rows == 3


def test_a_column_of_nulls_has_no_values() -> None:
    part = written(NUMBERS, table_of(NUMBERS, [(None, None, None)]))
    for op in ("=", "<", ">=", "in", "is not null"):
        values = () if op == "is not null" else (1,)
        found = PartFilter(NUMBERS, [condition("a", op, *values)])
        assert found.verdict(part) is PartVerdict.DISCARD, op


def test_what_has_no_statistics_is_kept() -> None:
    table = table_of(NUMBERS, ROWS)
    (piece,) = encode(table, NUMBERS, inline_bytes_max=1 << 20, bytes_target=1 << 20)
    never = PartFilter(NUMBERS, [condition("a", "=", 9)])
    assert piece.part.inline is not None
    assert never.verdict(piece.part) is PartVerdict.KEEP
    part = written(NUMBERS, table)
    assert never.verdict(replace(part, has_errors=True)) is PartVerdict.KEEP
    assert never.verdict(replace(part, statistics=())) is PartVerdict.KEEP


def test_a_nan_is_greater_than_every_bound() -> None:
    part = written(NUMBERS, table_of(NUMBERS, [(1, math.nan, "a"), (2, 5.0, "a")]))
    more = PartFilter(NUMBERS, [condition("f", ">", 1e300, kind="double")])
    less = PartFilter(NUMBERS, [condition("f", "<", 5.0, kind="double")])
    assert more.verdict(part) is PartVerdict.KEEP
    assert less.verdict(part) is PartVerdict.DISCARD


def test_statistics_of_a_footer_know_no_upper_bound_of_floats() -> None:
    file = io.BytesIO()
    table = table_of(NUMBERS, [(1, math.nan, "a"), (2, 5.0, "a")])
    pq.write_table(table, file)
    found = of_footer(pq.read_metadata(file), table.schema, NUMBERS, 4096)
    assert found[1] == ColumnStatistics("f", 0, 5.0, None)


def test_a_row_group_without_bounds_leaves_the_whole_without() -> None:
    file = io.BytesIO()
    table = table_of(NUMBERS, [(1, 1.0, "b"), (2, 2.0, "\0" * 5000), (3, 3.0, "c")])
    pq.write_table(table, file, row_group_size=1)
    found = of_footer(pq.read_metadata(file), table.schema, NUMBERS, 4096)
    assert found[0] == ColumnStatistics("a", 0, 1, 3)
    assert (found[2].low, found[2].high) == (None, None)


def test_timestamps_of_old_files_and_columns_of_other_types_have_none() -> None:
    schema = TableSchema((TableColumn("t", "timestamp"), TableColumn("a", "bigint")))
    file = io.BytesIO()
    stamps = pa.array([1, 2], pa.timestamp("us", "UTC"))
    table = pa.table({"t": stamps, "a": pa.array([1, 2], pa.int32())})
    pq.write_table(table, file, use_deprecated_int96_timestamps=True)
    found = of_footer(pq.read_metadata(file), table.schema, schema, 4096)
    assert all(each.low is None and each.high is None for each in found)
    assert [each.column for each in found if each.column == "a"] == []


def test_statistics_keep_to_their_budget_and_the_longest_columns_go_first() -> None:
    names = [f"n{at}" for at in range(30)]
    schema = TableSchema(
        (TableColumn("long", "string"), *(TableColumn(name, "bigint") for name in names))
    )
    table = table_of(schema, [("x" * 90, *range(30)), ("y" * 90, *range(30))])
    whole = written(schema, table, 4096).statistics
    assert {each.column for each in whole} == {"long", *names}
    assert len(whole[0].low) == len(whole[0].high) == BOUND_BYTES_MAX  # type: ignore[arg-type]
    some = written(schema, table, 100).statistics
    assert 0 < len(some) < 30
    assert "long" not in {each.column for each in some}
    assert written(schema, table, 0).statistics == ()


def test_statistics_survive_the_state_document() -> None:
    kinds = [kind for kind in sorted(DRAWN) if kind not in UNORDERED]
    schema = TableSchema(tuple(TableColumn(f"c{at}", kind) for at, kind in enumerate(kinds)))
    drawn: dict[str, Any] = {"timestamp": datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)}
    drawn |= {"timestamp_ntz": datetime.datetime(2000, 1, 1), "date": datetime.date(2000, 1, 1)}  # noqa: DTZ001
    drawn |= {"string": "é", "varchar(9)": "é", "binary": b"\xff", "boolean": True}
    row = tuple(drawn.get(kind, 1) for kind in kinds)
    part = replace(written(schema, table_of(schema, [row])), key="s/x")
    assert len(part.statistics) == len(kinds)
    state = appended(
        created(NewShard("s", schema), "w", 1), ShardAppend("s", 0, 2, (part,)), 0, "w", 2
    )
    assert isinstance(state, ShardState)
    back = decode_shard("shard/s", encode_document(state))
    assert back.batches[0].parts == (part,)
    assert [type(each.low) for each in back.batches[0].parts[0].statistics] == [
        type(each.low) for each in part.statistics
    ]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (condition("b", "=", 1), "column does not exist .available: a, f, s"),
        (condition("a", "=", 1, 2), "expected one value, got 2"),
        (condition("a", "is null", 2), "expected no value, got 1"),
        (condition("a", "=", 1.0, kind="double"), "is not a value of type int64"),
        (condition("a", "=", None), "is not a value of type int64"),
    ],
)
def test_a_condition_that_means_nothing_is_refused(wanted: PartCondition, says: str) -> None:
    with pytest.raises(InvalidUsage, match=says):
        PartFilter(NUMBERS, [wanted])


def test_a_filter_of_a_peek_takes_what_helps() -> None:
    def compared(name: str, op: Any, value: Any) -> ColumnComparison:
        return ColumnComparison(name, op, to_ipc(pa.table({name: [value]})))

    given = [
        compared("a", "=", 1),
        compared("a", "<>", 1),
        compared("a", "<", None),
        compared("s", "<", "b"),
        ColumnComparison("f", "is null"),
        ColumnComparison("nowhere", "is null"),
        ColumnComparison("a", "=", b"junk"),
    ]
    found = PartFilter.of(NUMBERS, given)
    assert found is not None
    assert [(each.column, each.op) for each in found.conjunctions[0]] == [
        ("a", "="),
        ("s", "<"),
        ("f", "is null"),
    ]
    assert PartFilter.of(NUMBERS, given[1:3]) is None
    keys = pa.table({"a": [1, 2], "s": ["x", None], "f": [math.nan, -0.0]})
    by_key = PartFilter.of(NUMBERS, [], keys)
    assert by_key is not None
    assert str(by_key) == "a in 1 2 AND f in nan -0.0"
    part = written(NUMBERS, table_of(NUMBERS, [(1, 0.0, "x"), (9, 1.0, "x")]))
    assert by_key.verdict(part) is PartVerdict.KEEP
    rows = [(1, 0.0, "x"), (2, math.nan, "x"), (2, 1.0, "")]
    assert by_key.passing(table_of(NUMBERS, rows)).num_rows == 2
    assert PartFilter.of(NUMBERS, [], pa.table({"a": list(range(65))})) is None


async def test_a_reader_takes_only_parts_that_may_hold_what_is_wanted(tmp_path: Path) -> None:
    client = await PersistClient.open(tmp_path / "state", TINY, SystemClock())
    await client.create_shards([NewShard("s", SCHEMA)])
    for first in (0, 100, 200):
        await add(client, "s", first + 5, (first + 1, first + 1, 1), (first + 2, first + 2, 1))
    reader = await client.open_reader("s", "r")
    wanted = PartFilter(SCHEMA, [condition("a", ">", 101), condition("a", "<", 200)])
    parts, upper = await reader.snapshot(204, wanted)
    assert upper == 205
    assert await rows_of(client, parts) == [(101, 101, 1), (102, 102, 1)]
    assert len((await reader.snapshot(204))[0]) == 3
    # What compaction writes and what is adopted has statistics, too.
    for at in range(6):
        await add(client, "s", 206 + at, (300 + at, 205 + at, 1))
    await client.maintain("s")
    (first_batch, *_) = (await client.state("s")).batches
    (merged,) = first_batch.parts
    (known,) = merged.statistics
    assert (known.low, known.nulls) == (1, 0)
    assert isinstance(known.high, int)
    assert known.high >= 202
    file = tmp_path / "x.parquet"
    pq.write_table(updates((7, 250, 1), (9, 250, 1)), file)
    part = await client.adopt_file("s", file, 2, 250, 250)
    assert part.statistics == (ColumnStatistics("a", 0, 7, 9),)
    await client.close()


def test_an_audit_chooses_one_in_so_many_within_its_budget() -> None:
    part = replace(written(NUMBERS, table_of(NUMBERS, ROWS)), bytes=10)
    parts = [replace(part, key=f"s/{at:08x}.parquet") for at in range(4000)]
    chosen = [each.key for each in parts if FilterAudit(100, 1 << 20).chooses(each)]
    assert 10 <= len(chosen) <= 90
    assert chosen == [each.key for each in parts if FilterAudit(100, 1 << 20).chooses(each)]
    audit = FilterAudit(1, 25)
    assert [audit.chooses(each) for each in parts[:4]] == [True, True, False, False]
    audit.kept(replace(part, bytes=5))
    assert audit.chooses(parts[5])
    assert not audit.chooses(parts[6])
