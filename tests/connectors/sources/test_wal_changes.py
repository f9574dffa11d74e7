"""A log's records as changes of tables: pure, against an oracle of plain counters."""

from __future__ import annotations

import json
import random
from collections import Counter as Bag
from collections.abc import Sequence
from typing import Any

import pytest
from source_lab import Contents, around  # type: ignore[import-not-found]

from actors.connectors.sources.json_rows import RowMisfit, RowsOfTable
from actors.connectors.sources.kinds import decode
from actors.connectors.sources.source import (
    ExportFailed,
    Given,
    PositionMark,
    SourceExport,
    SourceRows,
)
from actors.connectors.sources.source_secrets import check_secrets
from actors.connectors.sources.wal import WalChanges, WalPosition, WalSource, read_position
from actors.connectors.sources.wal_config import WalConfig
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.connector_options import source_configuration
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import Settings
from actors.wal.framing import START_LSN, encode
from actors.wal.lsn import lsn_text

TENANT, TIMELINE = "0a" * 16, "0b" * 16
TABLES = {
    "orders": (TableColumn("id", "bigint", False), TableColumn("total", "decimal(12,2)")),
    "notes": (TableColumn("text", "string"),),
}


def config(**more: Any) -> WalConfig:
    given: dict[str, Any] = {
        "acceptors": "a:1,b:2", "tenant": TENANT, "timeline": TIMELINE, "tables": TABLES
    }  # fmt: skip
    return WalConfig(**given | more)


def exports(*names: str) -> list[SourceExport]:
    schemas = config().schemas()
    return [SourceExport(name, schemas[name]) for name in names or ("orders", "notes")]


def changes(lsn: int = START_LSN, *names: str, **more: Any) -> WalChanges:
    found = exports(*names)
    return WalChanges(config(**more), found, lsn, tables=[export.name for export in found])


class Log:
    """Records, with the place behind each."""

    def __init__(self) -> None:
        self.wal = b""
        self.ends = [START_LSN]
        self.lines: list[tuple[str, dict[str, Any], int]] = []

    def add(self, table: str, row: Any, diff: int = 1) -> None:
        self.raw(json.dumps({"table": table, "row": row, "diff": diff}).encode())
        self.lines.append((table, row, diff))

    def raw(self, payload: bytes) -> None:
        self.wal += encode(payload, self.ends[-1])
        self.ends.append(START_LSN + len(self.wal))

    def after(self, lsn: int) -> bytes:
        return self.wal[lsn - START_LSN :]


def made_up(count: int, seed: int) -> Log:
    """Orders that come, and go again; and notes between them, some over pages."""
    dice, log, there = random.Random(seed), Log(), list[dict[str, Any]]()
    for number in range(count):
        if there and dice.random() < 0.3:
            log.add("orders", there.pop(dice.randrange(len(there))), -1)
        elif dice.random() < 0.2:
            log.add("notes", {"text": "x" * dice.choice((0, 10, 9_000))})
        else:
            row = {"id": number % 40, "total": f"{dice.randrange(10_000) / 100:.2f}"}
            there.append(row)
            log.add("orders", row)
    return log


def oracle(log: Log) -> dict[str, Bag[tuple[Any, ...]]]:
    found: dict[str, Bag[tuple[Any, ...]]] = {}
    for table, row, diff in log.lines:
        bag = found.setdefault(table, Bag())
        bag[tuple(row.values())] += diff
    return {table: +bag for table, bag in found.items()}


def pieces(wal: bytes, dice: random.Random) -> list[bytes]:
    found, at = [], 0
    while at < len(wal):
        size = dice.choice((1, 7, 100, 3_000, 20_000))
        found.append(wal[at : at + size])
        at += size
    return found


def place(mark: PositionMark) -> int:
    return read_position(mark.position, config()).at


@pytest.mark.parametrize("seed", range(12))
def test_however_it_is_cut_and_stopped_each_change_is_there_once(seed: int) -> None:
    """Each life goes on at a mark that was durable; what was given behind it is lost."""
    dice, log = random.Random(seed), made_up(150, seed)
    contents, lsn = Contents(), START_LSN
    while lsn < log.ends[-1]:
        life, contents.waiting = changes(lsn), []
        for piece in pieces(log.after(lsn), dice):
            given = life.take(piece)
            assert all(isinstance(each, SourceRows) for each in given[:-1])
            assert not given or isinstance(given[-1], PositionMark)
            if dice.random() < 0.1:
                break  # killed before this is durable
            for each in given:
                contents.take(each)
        if contents.marks:
            lsn = place(contents.marks[-1])
            assert lsn in log.ends
    assert contents.bags == oracle(log)
    marked = [place(mark) for mark in contents.marks]
    assert marked == sorted(set(marked))


def test_a_mark_counts_its_records() -> None:
    log = made_up(30, 1)
    *_, mark = changes().take(log.wal)
    assert isinstance(mark, PositionMark)
    assert mark.messages == 30
    assert json.loads(mark.position) == {
        "lsn": lsn_text(log.ends[-1]), "timeline": TIMELINE, "tables": ["orders", "notes"]
    }  # fmt: skip


def test_a_table_that_was_added_is_filled_up_to_where_the_others_are() -> None:
    log = made_up(100, 3)
    until = log.ends[60]
    new = exports("notes")
    filling = WalChanges(
        config(), new, START_LSN, tables=["orders", "notes"], fills=["notes"], until_lsn=until
    )
    given: list[Given] = []
    for at in range(0, len(log.wal), 100):
        assert not filling.is_filled
        given += filling.take(log.wal[at : at + 100])
        if filling.is_filled:
            break
    *rows, mark = given
    assert isinstance(mark, PositionMark)
    assert (mark.filled, place(mark)) == (("notes",), until)
    wanted = sum(table == "notes" for table, _, _ in log.lines[:60])
    assert sum(each.updates.num_rows for each in rows if isinstance(each, SourceRows)) == wanted
    assert all(isinstance(each, SourceRows) and each.snapshot for each in rows)


def test_what_cannot_be_filled_fails_with_the_mark_that_would_fill_it() -> None:
    filling = WalChanges(
        config(), exports("notes"), START_LSN, tables=["notes"], fills=["notes"],
        until_lsn=START_LSN + 800,
    )  # fmt: skip
    failed, mark = filling.give_up("gone", "do")
    assert failed == ExportFailed("notes", "gone", "do")
    assert isinstance(mark, PositionMark)
    assert (mark.filled, place(mark)) == (("notes",), START_LSN + 800)
    assert filling.is_filled


# -- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "1"}, "Expected `int`, got `str` - at `\\$.id`"),
        ({"id": None}, "got `null`"),
        ({}, "missing required field `id`"),
        ({"id": 2**63}, "<= 9223372036854775807"),
        ({"id": 1, "more": 1}, "unknown field `more`"),
        ({"id": 1, "total": "1.234"}, r"column total \(decimal\(12,2\)\) cannot hold '1.234'"),
        ({"id": 1, "total": "NaN"}, "cannot hold 'NaN'"),
        ({"id": 1, "total": 10**10}, "cannot hold '10000000000'"),
        (5, "Expected `object`"),
    ],
)
def test_a_row_that_does_not_fit_ends_its_table_alone(row: Any, said: str) -> None:
    log = made_up(20, 2)
    log.add("orders", row)
    log.add("notes", {"text": "behind"})
    log.add("orders", {"id": 5})
    life = changes()
    given = life.take(log.wal)
    [failed] = [each for each in given if isinstance(each, ExportFailed)]
    assert failed.export == "orders"
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(failed.error)
    assert "`tables` fit the records" in failed.hint
    mark = given[-1]
    assert isinstance(mark, PositionMark)
    assert place(mark) == log.ends[-1]
    [notes] = [each for each in given if isinstance(each, SourceRows) and each.export == "notes"]
    assert notes.updates["text"].to_pylist()[-1] == "behind"
    assert life.stopped is None


@pytest.mark.parametrize(
    ("payload", "said", "hint"),
    [
        (b'{"table": "gone", "row": {}}',
         "belongs to table 'gone', which is not declared (declared: notes, orders)",
         "undeclared=skip"),
        (b"{", "is not a change", "start_lsn="),
        (b'{"table": "orders"}', "is not a change: Object missing required field `row`",
         "start_lsn="),
        (b'{"table": "orders", "row": {"id": 1}, "diff": 0}', "its diff is 0", "push"),
        (b'{"table": "orders", "row": {"id": 1}, "diff": 9223372036854775808}', "<=", "start_lsn"),
    ],
)  # fmt: skip
def test_what_nobody_can_place_stops_it_in_front(payload: bytes, said: str, hint: str) -> None:
    log = made_up(20, 2)
    log.raw(payload)
    log.add("notes", {"text": "behind"})
    life = changes()
    given = life.take(log.wal)
    mark = given[-1]
    assert isinstance(mark, PositionMark)
    assert place(mark) == log.ends[20]
    assert life.stopped is not None
    assert f"the record at {lsn_text(log.ends[20])} " in str(life.stopped)
    assert said in str(life.stopped)
    assert hint in life.stopped.hint
    again = changes(log.ends[20])
    assert again.take(log.after(log.ends[20])) == []
    assert str(again.stopped) == str(life.stopped)


def test_what_is_left_out_when_asked_for() -> None:
    log = Log()
    log.add("gone", {"x": 1})
    log.add("orders", {"id": 1, "more": 2})
    life = changes(undeclared="skip")
    rows, mark = life.take(log.wal)
    assert isinstance(rows, SourceRows)
    assert rows.updates.to_pylist() == [{"id": 1, "total": None, "__diff": 1}]
    assert isinstance(mark, PositionMark)
    assert place(mark) == log.ends[-1]


def test_tables_that_are_declared_and_not_wanted_are_passed_over() -> None:
    log = made_up(40, 5)
    given = changes(START_LSN, "orders").take(log.wal)
    assert {each.export for each in given if isinstance(each, SourceRows)} == {"orders"}
    assert isinstance(given[-1], PositionMark)


def test_a_log_that_breaks_gives_what_is_before() -> None:
    log = made_up(20, 2)
    broken = bytearray(log.wal)
    broken[log.ends[12] - START_LSN + 30] ^= 1
    life = changes()
    *_, mark = life.take(bytes(broken))
    assert isinstance(mark, PositionMark)
    assert place(mark) == log.ends[12]
    assert "record with a wrong CRC" in str(life.stopped)


# -- rows -----------------------------------------------------------------------------------------

KINDS: Sequence[tuple[str, Any, Any]] = (
    ("boolean", True, True),
    ("tinyint", -128, -128),
    ("float", 0.5, 0.5),
    ("double", 5, 5.0),
    ("decimal(38,10)", "1234567890123456789012345678.0123456789", None),
    ("binary", "AAE=", b"\0\1"),
    ("date", "2024-02-29", None),
    ("timestamp", "2024-02-29T12:00:00.25+02:00", None),
    ("timestamp_ntz", "2024-02-29T12:00:00.25", None),
    ("array<int>", [1, None], [1, None]),
    ("map<string,bigint>", {"a": 1}, [("a", 1)]),
    ("struct<a:int,b:array<struct<cD:string>>>", {"a": 1, "b": [{"cD": "x"}, None]}, None),
)


@pytest.mark.parametrize(("kind", "value", "wanted"), KINDS)
def test_values_of_each_type(kind: str, value: Any, wanted: Any) -> None:
    schema = TableSchema((TableColumn("v", kind), TableColumn("k", "int", False)))
    rows = RowsOfTable(schema, schema, skips=False)
    rows.add(json.dumps({"v": value, "k": 1}).encode(), -3)
    rows.add(b'{"k": 2}', 1)
    found = rows.updates()
    assert found.schema.names == ["v", "k", "__diff"]
    assert found.schema.field("v").type == schema.arrow().field("v").type
    assert found["__diff"].to_pylist() == [-3, 1]
    first, second = found["v"].to_pylist()
    assert second is None
    if wanted is not None:
        assert first == wanted
    elif kind.startswith("struct"):
        assert first == value
    elif kind.startswith("decimal"):
        assert str(first) == value
    elif kind == "timestamp":
        assert first.isoformat() == "2024-02-29T10:00:00.250000+00:00"
    else:
        assert first.isoformat() in (value, "2024-02-29T12:00:00.250000")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("tinyint", 128), ("int", 1.5), ("int", True), ("boolean", 1), ("float", 1e39),
        ("date", "2024-02-30"), ("timestamp", "2024-02-29T12:00:00"), ("string", 5),
        ("timestamp_ntz", "2024-02-29T12:00:00Z"), ("binary", "?"), ("array<int>", ["1"]),
        ("struct<a:int>", {"b": 1}), ("map<string,int>", {"a": "1"}), ("string", "\ud800"),
        ("array<decimal(3,1)>", ["1.25"]), ("decimal(12,2)", "1e999999999"),
        ("decimal(12,2)", "1e-999999999"), ("map<string,decimal(12,2)>", {"a": "0e-999999999"}),
        ("struct<a:array<struct<b:decimal(12,2)>>>", {"a": [{"b": "1e-999999999"}]}),
        ("decimal(12,2)", "0." + 8_000_000 * "1"),
    ],
)  # fmt: skip
def test_nothing_is_rounded_or_guessed(kind: str, value: Any) -> None:
    schema = TableSchema((TableColumn("v", kind),))
    rows = RowsOfTable(schema, schema, skips=False)
    with pytest.raises(RowMisfit):
        rows.add(json.dumps({"v": value}).encode(), 1)
        rows.updates()


# -- configuration and positions ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"acceptors": "a:b"}, "invalid address of an acceptor 'a:b'"),
        ({"acceptors": ""}, "invalid address of an acceptor ''"),
        ({"tenant": "0A" * 16}, "tenant .*32 lower-case hexadecimal digits"),
        ({"timeline": "1"}, "timeline '1'"),
        ({"tables": {}}, "number of tables 0"),
        ({"tables": {"t": ()}}, "'t' has no columns"),
        (
            {"tables": {"t": (TableColumn("a", "int"), TableColumn("A", "int"))}},
            "tables: t: duplicate column names",
        ),
        ({"tables": {"t": (TableColumn("a", "money"),)}}, "tables: t: column type 'money'"),
        (
            {"tables": {"t": (TableColumn("a", "map<struct<x:int>,int>"),)}},
            "tables: t: JSON cannot represent maps",
        ),
        ({"start_lsn": "0/3"}, "a record cannot start at 0/3"),
        ({"start_lsn": "x"}, "invalid LSN 'x'"),
        ({"token_env": "A", "token_file": "b"}, "one of token_env and token_file"),
        ({"look_ms": 0}, "look_ms 0: expected at least 10"),
    ],
)
def test_options_that_do_not_fit(option: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        config(**option).check()


def test_tables_are_declared_as_a_mapping_too() -> None:
    kind, encoded = source_configuration({
        "kind": "wal", "acceptors": "a:1", "tenant": TENANT, "timeline": TIMELINE,
        "tables": {"t": {"k": "bigint NOT NULL", "v": "struct<aB:int>"}},
    })  # fmt: skip
    found = decode(encoded)
    assert (kind, isinstance(found, WalConfig)) == ("wal", True)
    assert isinstance(found, WalConfig)
    assert found.tables == {
        "t": (TableColumn("k", "bigint", False), TableColumn("v", "struct<aB:int>"))
    }
    found.check()


def test_a_token_is_one_of_those_for_sources(tmp_path: Any) -> None:
    settings = Settings(secret_dir=str(tmp_path))
    check_secrets(config(token_env="PENSTOCK_SECRET_WAL"), settings)
    check_secrets(config(token_file=str(tmp_path / "token")), settings)
    with pytest.raises(InvalidUsage, match="token_env 'HOME': the name must start with"):
        check_secrets(config(token_env="HOME"), settings)
    with pytest.raises(
        InvalidUsage, match="token_file '/etc/passwd': expected an absolute path below"
    ):
        check_secrets(config(token_file="/etc/passwd"), settings)
    (tmp_path / "token").write_text("secret\nmore")
    assert config(token_file=str(tmp_path / "token")).token() == "secret"
    with pytest.raises(
        InvalidUsage, match=r"environment variable PENSTOCK_SECRET_NOT_THERE .*is not set"
    ):
        config(token_env="PENSTOCK_SECRET_NOT_THERE").token()


def test_positions_are_of_one_timeline() -> None:
    mine = WalPosition("0/1000028", TIMELINE, ("orders",))
    assert read_position(mine.text(), config()) == mine
    with pytest.raises(InvalidUsage, match=f"this is timeline {'0c' * 16}, but the ingested data"):
        read_position(mine.text(), config(timeline="0c" * 16))
    for wrong in ("", "{}", '{"lsn": "x", "timeline": "", "tables": []}'):
        with pytest.raises(InvalidUsage, match="invalid position"):
            read_position(wrong, config())


def test_names_of_tables_fit_a_position() -> None:
    tables = {f"{number:03}{'x' * 300}": TABLES["notes"] for number in range(250)}
    many = config(tables=tables)
    found = [SourceExport(name, schema) for name, schema in many.schemas().items()]
    with pytest.raises(InvalidUsage, match="split them over several sources"):
        WalChanges(many, found, START_LSN, tables=list(tables))


NOTE = TableColumn("note", "string")


def test_records_with_a_column_that_the_table_was_given() -> None:
    """Those without it have NULL; other tables and other columns are as strict as ever."""
    log = Log()
    log.add("orders", {"id": 1, "total": "1"})
    log.add("orders", {"id": 2, "total": "2", "note": "n"})
    (orders,) = exports("orders")
    wide = TableSchema((*orders.schema.columns, NOTE), orders.schema.key)
    found = WalChanges(config(), [SourceExport("orders", wide)], START_LSN, tables=["orders"])
    given = found.take(log.wal)
    assert isinstance(given[0], SourceRows)
    assert given[0].updates["note"].to_pylist() == [None, "n"]
    log.add("orders", {"id": 2, "total": "2", "other": "n"})
    (failed,) = (
        each for each in found.take(log.after(found.lsn)) if isinstance(each, ExportFailed)
    )
    assert "other" in failed.error


async def test_which_columns_a_table_can_be_given() -> None:
    (orders,) = exports("orders")
    source = WalSource(config(), around())
    assert await source.describe_added(orders, [NOTE]) == (NOTE,)
    with pytest.raises(
        InvalidUsage, match="the source declares total, but this table leaves them out"
    ):
        await source.describe_added(orders, [TableColumn("total", "int")])
    skips = WalSource(config(undeclared="skip"), around())
    with pytest.raises(
        InvalidUsage, match="records may have had values in note: create another source"
    ):
        await skips.describe_added(orders, [NOTE])
