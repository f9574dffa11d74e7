"""Slot files: rewritten in place, any storable type, one user at a time."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.spark.slot_files import (
    KEPT_BYTES_MAX,
    SlotBusy,
    SlotOverflow,
    SlotSet,
    positional,
    write,
)
from actors.model.plan.schema import TableColumn, TableSchema
from suite_lanes import examples  # type: ignore[import-not-found]

CAPACITY = 64 * 1024
SCHEMA = TableSchema((TableColumn("k", "bigint"), TableColumn("K", "string")))
KINDS = positional(SCHEMA.arrow_updates())


def read(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_all()


def rows(values: list[tuple[int | None, str | None]]) -> pa.Table:
    columns = [[v[0] for v in values], [v[1] for v in values], [1] * len(values)]
    arrays = [pa.array(c, f.type) for c, f in zip([*columns, columns[2]], KINDS, strict=True)]
    return pa.Table.from_arrays(arrays, schema=KINDS)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.none() | st.integers(-9, 9), st.none() | st.text(max_size=20))),
        min_size=1,
        max_size=4,
    )
)
def test_every_filling_is_read_back_as_one_batch(
    tmp_path_factory: pytest.TempPathFactory, fillings: list[list[tuple[int | None, str | None]]]
) -> None:
    path = tmp_path_factory.mktemp("slot") / "s.arrow"
    for values in fillings:
        table = rows(values)
        write(path, table, CAPACITY)
        assert read(path).equals(table)
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            assert len(list(stream)) == 1


def test_every_storable_type_keeps_its_bits(tmp_path: Path) -> None:
    kinds = [
        ("boolean", [True, None]),
        ("tinyint", [-128, None]),
        ("double", [-0.0, float("nan")]),
        ("binary", [b"\x00\xff", None]),
        ("date", [dt.date(1, 1, 1), None]),
        ("timestamp", [dt.datetime(1, 1, 1, tzinfo=dt.UTC), None]),
        ("timestamp_ntz", [dt.datetime(9999, 1, 1), None]),  # noqa: DTZ001 - it has no zone
        ("decimal(38,18)", [Decimal("-1.000000000000000001"), None]),
        ("decimal(9,2)", [Decimal("0.01"), None]),
        ("array<struct<x:int,y:array<string>>>", [[{"x": 1, "y": ["a", None]}, None], []]),
        ("void", [None, None]),
        ("map<string,decimal(4,1)>", [[("a", Decimal("1.5")), ("b", None)], None]),
    ]
    schema = TableSchema(tuple(TableColumn(f"x{i}", kind) for i, (kind, _) in enumerate(kinds)))
    arrow = positional(schema.arrow())
    values = [pa.array(v, f.type) for (_, v), f in zip(kinds, arrow, strict=True)]
    table = pa.Table.from_arrays(values, schema=arrow)
    path = tmp_path / "s.arrow"
    write(path, table, CAPACITY)
    found = read(path).cast(arrow)
    assert repr(found.to_pylist()) == repr(table.to_pylist())


def test_what_does_not_fit_is_refused_and_the_set_stays_sound(tmp_path: Path) -> None:
    slots = SlotSet(tmp_path / "set", {"d0": KINDS}, CAPACITY)
    with (
        pytest.raises(SlotOverflow, match=str(CAPACITY)),
        slots.use({"d0": rows([(1, "x" * CAPACITY)])}),
    ):
        pass
    with slots.use({"d0": rows([(1, "x")])}):
        assert read(slots.path("d0")).num_rows == 1


def test_slots_without_a_table_get_no_rows(tmp_path: Path) -> None:
    slots = SlotSet(tmp_path / "set", {"d0": KINDS, "s1": KINDS}, CAPACITY)
    with slots.use({"d0": rows([(1, "x")]), "s1": rows([(2, "y")])}):
        pass
    with slots.use({"s1": rows([(3, "z")])}):
        assert read(slots.path("d0")).num_rows == 0
        assert read(slots.path("s1"))["c0"].to_pylist() == [3]


def test_narrow_keeps_columns_that_are_read_and_the_number_of_rows(tmp_path: Path) -> None:
    slots = SlotSet(tmp_path / "set", {"d0": KINDS, "s0": KINDS, "s1": KINDS}, CAPACITY)
    slots.narrow({"d0": [1, 3], "s1": []})
    assert slots.names == {"d0", "s1"}
    assert not slots.path("s0").exists()
    with slots.use({"d0": rows([(1, "x")]), "s1": rows([(2, "y"), (3, "z")])}):
        assert read(slots.path("d0")).to_pydict() == {"c1": ["x"], "c3": [1]}
        assert read(slots.path("s1")).num_rows == 2


def test_many_rows_do_not_stay_on_disk(tmp_path: Path) -> None:
    slots = SlotSet(tmp_path / "s", {"d0": KINDS, "s0": KINDS}, 16 * KEPT_BYTES_MAX)
    slots.narrow({"d0": [0], "s0": [0, 1]})
    many, few = rows([(n, "x" * 20) for n in range(20_000)]), rows([(1, "a")])
    assert many.nbytes > KEPT_BYTES_MAX
    for _ in range(2):
        with slots.use({"d0": many, "s0": few}):
            assert read(slots.path("d0")).num_rows == 20_000
        assert slots.path("d0").stat().st_size < 1_000
        assert read(slots.path("s0")).num_rows == 1


def test_one_user_at_a_time(tmp_path: Path) -> None:
    slots = SlotSet(tmp_path / "set", {"d0": KINDS}, CAPACITY)
    with slots.use({"d0": rows([(1, "x")])}):
        with pytest.raises(SlotBusy), slots.use({"d0": rows([])}):
            pass
        assert read(slots.path("d0")).num_rows == 1
    with slots.use({}):
        assert read(slots.path("d0")).num_rows == 0


def test_a_failed_use_is_the_last(tmp_path: Path) -> None:
    slots = SlotSet(tmp_path / "set", {"d0": KINDS}, CAPACITY)
    with pytest.raises(ZeroDivisionError), slots.use({}):
        raise ZeroDivisionError
    assert not (tmp_path / "set").exists()
    with pytest.raises(SlotBusy), slots.use({}):
        pass


def test_an_abandoned_set_goes_when_its_user_is_done(tmp_path: Path) -> None:
    slots = SlotSet(tmp_path / "set", {"d0": KINDS}, CAPACITY)
    with slots.use({}):
        slots.abandon()
        assert slots.path("d0").exists()
    assert not (tmp_path / "set").exists()
    idle = SlotSet(tmp_path / "idle", {"d0": KINDS}, CAPACITY)
    idle.abandon()
    assert not (tmp_path / "idle").exists()
