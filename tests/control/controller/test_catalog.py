"""The catalog: names, dependencies and the durable document. Names and holds."""

from __future__ import annotations

import msgspec
import pytest

from actors.control.controller.catalog.catalog import (
    INDEX,
    TABLE,
    VIEW,
    CatalogObject,
    CatalogSnapshot,
)
from actors.control.controller.catalog.quarantine import decode_catalog, find_unusable
from actors.control.controller.holds import RetainHolds
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import (
    CorruptData,
    InvalidUsage,
    ObjectExists,
    ObjectInUse,
    StateDirectoryError,
    UnknownObject,
)
from actors.runtime.progress import EMPTY

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
    with pytest.raises(ObjectExists, match="'flights' already exists: it is a table"):
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
    again = decode_catalog(catalog.encode())
    assert again.objects == catalog.objects
    assert again.new_id == catalog.new_id
    assert [e.name for e in again.indexes("u2")] == ["late_by_id"]
    assert set(again.readable()) == {"Flights", "late"}


@pytest.mark.parametrize(("format_", "advice"), [(4, "newer"), (1, "another state directory")])
def test_document_of_another_format(format_: int, advice: str) -> None:
    other = msgspec.msgpack.encode({"format": format_, "objects": "of another shape"})
    said = f"format {format_}, but this version reads only format 3: .* {advice}"
    with pytest.raises(StateDirectoryError, match=said):
        decode_catalog(other)
    with pytest.raises(CorruptData):
        decode_catalog(b"garbage")


FIELDS = [field.name for field in msgspec.structs.fields(CatalogObject)]
NEEDED = {"id", "name", "kind"}


@pytest.mark.parametrize("field", sorted({*FIELDS} - NEEDED))
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_object_that_cannot_be_read_is_kept_aside_with_what_reads_it(
    number: int, field: str
) -> None:
    """Whichever field another release writes otherwise."""
    catalog = _three()
    document = msgspec.msgpack.decode(catalog.encode())
    document["objects"][number][field] = {"of": ["another", "release"]}
    stored = msgspec.msgpack.encode(document)
    read = decode_catalog(stored)
    names = ["Flights", "late", "late_by_id"]
    assert [entry.name for entry in read.objects] == names
    # A plan alone is compiled again; settings are a map of texts.
    below = [] if field == "plan" else [f"u{each + 1}" for each in range(number, 3)]
    if field == "depends" and number:
        below = [f"u{each + 1}" for each in range(number, 3)]
    assert list(read.quarantined) == below
    for id_ in below:
        with pytest.raises(InvalidUsage, match=r"is quarantined: (this release|it reads)"):
            read.find(read.by_id(id_).name)
    if below:
        assert field in read.quarantined[below[0]].reason
        # Whoever can read it finds it as it was.
        again = msgspec.msgpack.decode(_with(read, "more").encode())
        assert again["objects"][:3] == document["objects"]
    last = read.find(names[-1], quarantined=True)
    assert list(read.remove(last).quarantined) == [id_ for id_ in below if id_ != "u3"]


@pytest.mark.parametrize("field", sorted(NEEDED))
def test_an_object_without_a_name_is_no_object(field: str) -> None:
    document = msgspec.msgpack.decode(_three().encode())
    document["objects"][1][field] = 7
    with pytest.raises(CorruptData):
        decode_catalog(msgspec.msgpack.encode(document))


def test_what_one_object_raises_keeps_it_alone_aside() -> None:
    catalog = _three()

    def describe(entry: CatalogObject) -> None:
        if entry.kind == VIEW:
            raise KeyError("hidden")
        if entry.kind == INDEX:
            raise InvalidUsage("no such key")

    found = find_unusable(catalog.objects, describe)
    reasons = {id_: each.reason for id_, each in found.items()}
    assert reasons == {"u2": "internal fault: KeyError: 'hidden'", "u3": "no such key"}
    aside = catalog.quarantine(found)
    # It can be read: nothing else is stored than before.
    assert aside.encode() == catalog.encode()
    replaced = msgspec.structs.replace(catalog.by_id("u2"), sql="SELECT 1")
    assert list(aside.put(replaced).quarantined) == ["u3"]


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
