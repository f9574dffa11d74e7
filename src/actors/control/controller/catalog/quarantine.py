"""Decodes the catalog's document and quarantines the objects that this release cannot use.

No single object prevents a service from starting. An object that cannot be decoded, and everything
that reads its contents, is *quarantined*: it is listed with the reason and does not run, and can be
dropped or replaced like any other. Its stored form is kept unchanged for a release that can read
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from actors.control.controller.catalog.catalog import (
    CATALOG_KEY,
    FORMAT_VERSION,
    SOURCE_TABLE,
    CatalogObject,
    CatalogSnapshot,
    Quarantine,
)
from actors.model.plan.delta import AUTO, DeltaPlan
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import CorruptData, PenstockError, StateDirectoryError
from actors.runtime.progress import ObjectId

_NEEDED: Final = ("id", "name", "kind")
"""Fields without which an object cannot even be listed or dropped."""
_UNREAD: Final = object()


class _Format(msgspec.Struct, frozen=True):
    """The part of the document that every version can read."""

    format: int


class _Document(msgspec.Struct, frozen=True):
    next_id: int
    objects: tuple[msgspec.Raw, ...]


def decode_catalog(data: bytes) -> CatalogSnapshot:
    """Decode the catalog. Raises `StateDirectoryError` (unknown format) and `CorruptData` (not a
    catalog at all)."""
    try:
        # Check the format first, so that a document of another version is refused as such and not
        # as corrupt.
        found = msgspec.msgpack.decode(data, type=_Format).format
        if found not in (2, FORMAT_VERSION):
            than = "a newer one" if found > FORMAT_VERSION else "another state directory"
            raise StateDirectoryError(
                f"the catalog has format {found}, but this version reads only format "
                f"{FORMAT_VERSION}: use the version that wrote it, or {than}"
            )
        document = msgspec.msgpack.decode(data, type=_Document)
        quarantined: dict[ObjectId, Quarantine] = {}
        objects: dict[ObjectId, CatalogObject] = {}
        for raw in document.objects:
            entry, why = _read(bytes(raw))
            objects[entry.id] = entry
            why = why or _cause(entry, objects, quarantined)
            if why:
                quarantined[entry.id] = Quarantine(why, bytes(raw))
    except msgspec.MsgspecError as error:
        raise CorruptData(f"consensus key {CATALOG_KEY!r}: {error}", determinate=True) from None
    return CatalogSnapshot(tuple(objects.values()), document.next_id, quarantined)


def _read(raw: bytes) -> tuple[CatalogObject, str]:
    """Decode one object and return it with the reason why part of it cannot be read, or "". An
    unreadable plan alone is not such a reason, since `upgrade_views` compiles it again."""
    try:
        return msgspec.msgpack.decode(raw, type=CatalogObject), ""
    except msgspec.ValidationError as error:
        why = f"this release cannot read its definition: {error}"
    stored: dict[str, Any] = msgspec.msgpack.decode(raw, type=dict)
    read: dict[str, Any] = {}
    lost: list[str] = []
    for field in msgspec.structs.fields(CatalogObject):
        if field.name not in stored:
            continue
        try:
            read[field.name] = msgspec.convert(stored[field.name], field.type)
        except msgspec.ValidationError:
            if field.name in _NEEDED:
                raise
            lost.append(field.name)
    if "plan" in lost:
        plan = stored["plan"]
        policy = plan.get("policy", AUTO) if isinstance(plan, dict) else AUTO
        # Without a digest the view counts as stale and is compiled again.
        read |= {"plan": _unreadable_plan(str(policy)), "fingerprint": "", "compiled_by": ""}
    # Keep what can be read, so that the object's shards can be dropped with it.
    entry = CatalogObject(**{"schema": TableSchema(()), **read})
    return entry, "" if lost == ["plan"] else why


def _unreadable_plan(policy: str) -> DeltaPlan:
    """Return a placeholder for the plan of another version, until its view is compiled again."""
    return DeltaPlan((), (), TableSchema(()), "", "opaque", "of another version", policy=policy)


def _cause(
    entry: CatalogObject,
    objects: dict[ObjectId, CatalogObject],
    quarantined: dict[ObjectId, Quarantine],
) -> str:
    """Return why an object cannot run because of what it reads, or "" if it can."""
    for id_ in entry.depends:
        below = objects.get(id_)
        # A table that a source has filled can be read without the source.
        if below is not None and id_ in quarantined and entry.kind != SOURCE_TABLE:
            return f"it reads {below.kind} {below.name}, which is quarantined"
    return ""


def find_unusable(
    objects: Iterable[CatalogObject], describe: Callable[[CatalogObject], object]
) -> dict[ObjectId, Quarantine]:
    """Return the objects whose dataflow cannot be described, with the reasons."""
    found = {}
    for entry in objects:
        try:
            describe(entry)
        except Exception as error:  # noqa: BLE001 - whatever one object raises harms no other
            found[entry.id] = Quarantine(fault_text(error))
    return found


def fault_text(error: Exception) -> str:
    """Return the reason that an error gives; an internal fault is reported with its class."""
    if isinstance(error, PenstockError):
        return str(error)
    return f"internal fault: {type(error).__name__}: {error}"
