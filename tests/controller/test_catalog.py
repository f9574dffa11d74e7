"""The catalog: names, dependencies and the durable document. Names and holds."""

from __future__ import annotations

import msgspec
import pytest

from actors.controller.catalog.catalog import (
    INDEX,
    TABLE,
    VIEW,
    CatalogObject,
    CatalogSnapshot,
)
from actors.controller.holds import RetainHolds
from actors.errors import (
    CorruptData,
    ObjectExists,
    ObjectInUse,
    StateDirectoryError,
    UnknownObject,
)
from actors.plan.schema import TableColumn, TableSchema
from actors.progress import EMPTY

SCHEMA = TableSchema((TableColumn("id", "bigint", False),), ("id",))


def _with(
    catalog: CatalogSnapshot, name: str, kind: str = TABLE, on: tuple[str, ...] = ()
) -> CatalogSnapshot:
    id_ = catalog.new_id
    shard = None if kind == INDEX else id_
    entry = CatalogObject(id=id_, name=name, kind=kind, schema=SCHEMA, shard=shard, depends=on)
    return catalog.add(entry)


def _three() -> CatalogSnapshot:
    catalog = _with(CatalogSnapshot(), "Flights")
    catalog = _with(catalog, "late", VIEW, ("u1",))
    return _with(catalog, "late_by_id", INDEX, ("u2",))


def test_names_do_not_regard_case() -> None:
    catalog = _three()
    assert catalog.find("FLIGHTS").name == "Flights"
    with pytest.raises(ObjectExists, match="'flights' is taken by a table"):
        _with(catalog, "flights")
    with pytest.raises(UnknownObject, match="'nothing'"):
        catalog.find("nothing")


def test_dependents_keep_an_object() -> None:
    catalog = _three()
    with pytest.raises(ObjectInUse, match="view late"):
        catalog.remove(catalog.find("flights"))
    catalog = catalog.remove(catalog.find("late_by_id"))
    catalog = catalog.remove(catalog.find("late"))
    assert [entry.name for entry in catalog.objects] == ["Flights"]
    assert catalog.new_id == "u4", "ids are never used twice"


def test_document_round_trip() -> None:
    catalog = _three()
    again = CatalogSnapshot.decode(catalog.encode())
    assert again.objects == catalog.objects
    assert again.new_id == catalog.new_id
    assert [e.name for e in again.indexes("u2")] == ["late_by_id"]
    assert set(again.readable()) == {"Flights", "late"}


@pytest.mark.parametrize(("format_", "advice"), [(4, "newer"), (1, "another state directory")])
def test_document_of_another_format(format_: int, advice: str) -> None:
    other = msgspec.msgpack.encode({"format": format_, "objects": "of another shape"})
    said = f"format {format_}; this version knows 3: .* {advice}"
    with pytest.raises(StateDirectoryError, match=said):
        CatalogSnapshot.decode(other)
    with pytest.raises(CorruptData):
        CatalogSnapshot.decode(b"garbage")


def test_retained_history() -> None:
    holds = RetainHolds(grain_ms=10)
    holds.track("s", 1000, 0)
    assert holds.move("s", 500) is None
    assert holds.move("s", 1049) is None, "a move must be worth its write"
    assert holds.move("s", 1050) == 50
    assert holds.move("s", EMPTY) is None
    assert holds.move("stranger", 5000) is None
    holds.moved("s", 50)
    assert holds.since("s") == 50
    assert holds.move("s", 1050) is None
    holds.moved("s", 10)
    assert holds.since("s") == 50, "a hold never goes back"
