"""Read requests as peeks, fitted to an object's names and types. Pure."""

from __future__ import annotations

from typing import Final

import msgspec
import pyarrow as pa

from actors.control.controller.catalog.boot import shard_import
from actors.control.controller.catalog.catalog import INDEX, CatalogObject, CatalogSnapshot
from actors.control.controller.catalog.ddl import columns_named
from actors.control.controller.tables.rows import fit
from actors.model.plan.schema import arrow_type
from actors.model.plan.updates import from_ipc, to_ipc
from actors.model.protocol.api import ReadObject
from actors.model.protocol.compute import Peek, ShardImport, ShardTarget
from actors.model.protocol.message_parts import ColumnComparison, OrderBy
from actors.model.protocol.row_finishing import check_finishing
from actors.replica.compute.peek_keys import is_exact_integer_key
from actors.replica.compute.peeks import PeekFilter
from actors.runtime.errors import InvalidUsage, PenstockError
from actors.runtime.progress import Time


def fit_keys(entry: CatalogObject, request: ReadObject) -> tuple[tuple[str, ...], bytes | None]:
    """Return the key columns and values, fitted to the object. Raises `InvalidUsage`."""
    if (request.key is None) != (not request.key_columns):
        raise InvalidUsage(f"read of {entry.name}: give key and key_columns together")
    if request.key is None:
        return (), None
    columns = columns_named(entry, request.key_columns)
    types = {column.name: column.type for column in entry.schema.columns}
    # Fast path: values that have the columns' types already need no decoding.
    if is_exact_integer_key(
        columns, tuple(arrow_type(types[name]) for name in columns), request.key
    ):
        return columns, request.key
    rows = _decoded(entry, request.key)
    if rows.num_columns != len(columns):
        raise InvalidUsage(
            f"read of {entry.name}: {rows.num_columns} key values for {len(columns)} key columns"
        )
    fitted = fit(
        entry.name, entry.schema, rows.rename_columns(list(columns)), columns, stored=False
    )
    return columns, to_ipc(fitted.select(list(columns)))


def _decoded(entry: CatalogObject, data: bytes) -> pa.Table:
    try:
        return from_ipc(data)
    except PenstockError as error:
        raise InvalidUsage(f"read of {entry.name}: {error}") from None


def fit_peek(entry: CatalogObject, request: ReadObject, peek: Peek) -> Peek:
    """Return the peek with the request's filter, columns and finishing. Raises `InvalidUsage`."""
    finishing = request.finishing
    if finishing is not None:
        check_finishing(finishing)
        order_by = tuple(
            OrderBy(_column(entry, by.column), by.descending, by.nulls_first)
            for by in finishing.order_by
        )
        finishing = msgspec.structs.replace(finishing, order_by=order_by)
    made = msgspec.structs.replace(
        peek,
        filter=tuple(_fit_comparison(entry, one) for one in request.filter),
        project=None if request.project is None else columns_named(entry, request.project),
        finishing=finishing,
    )
    # Made only for its checks: a bad comparison is refused here and not by a worker.
    PeekFilter(entry.schema, made)
    return made


def _column(entry: CatalogObject, name: str) -> str:
    return columns_named(entry, (name,))[0]


def _fit_comparison(entry: CatalogObject, given: ColumnComparison) -> ColumnComparison:
    column, value = _column(entry, given.column), given.value
    if value:
        rows = _decoded(entry, value)
        if rows.num_columns == 1 and not rows.column(0).null_count:
            named = rows.rename_columns([column])
            rows = fit(entry.name, entry.schema, named, (column,), stored=False)
            value = to_ipc(rows.select([column]))
    return ColumnComparison(column, given.op, value)


def prototype(entry: CatalogObject, request: ReadObject, time: Time, imported: ShardImport) -> Peek:
    """Return the shard peek that answers the request, without its uuid. Raises `InvalidUsage`."""
    key_columns, keys = fit_keys(entry, request)
    peek = Peek("", ShardTarget(entry.id, imported), time, key_columns, keys)
    return fit_peek(entry, request, peek)


class ReadShape(msgspec.Struct, frozen=True):
    """The parts of a peek that reads of the same name and key columns share."""

    entry: CatalogObject
    columns: tuple[str, ...]
    """Key columns in the object's spelling."""
    types: tuple[pa.DataType, ...]
    imported: ShardImport

    @classmethod
    def of(cls, entry: CatalogObject, request: ReadObject) -> ReadShape:
        """Return the shape of a request. Raises `InvalidUsage`."""
        columns = columns_named(entry, request.key_columns)
        types = {column.name: column.type for column in entry.schema.columns}
        wanted = tuple(arrow_type(types[name]) for name in columns)
        return cls(entry, columns, wanted, shard_import(entry))

    def peek(self, request: ReadObject, time: Time) -> Peek:
        """Return the shard peek that answers the request, without its uuid. Raises
        `InvalidUsage`."""
        key = request.key
        bare = not request.filter and request.project is None and request.finishing is None
        if (
            bare
            and key is not None
            and self.columns
            and is_exact_integer_key(self.columns, self.types, key)
        ):
            return Peek("", ShardTarget(self.entry.id, self.imported), time, self.columns, key)
        return prototype(self.entry, request, time, self.imported)


SHAPES_MAX: Final = 1024


class ReadShapeCache:
    """A cache of shapes, cleared when the catalog changes."""

    def __init__(self) -> None:
        self._catalog: CatalogSnapshot | None = None
        self._shapes: dict[tuple[str, tuple[str, ...]], ReadShape] = {}

    def of(self, catalog: CatalogSnapshot, request: ReadObject) -> ReadShape:
        """Return the request's shape. Raises `InvalidUsage` and `UnknownObject`."""
        if catalog is not self._catalog or len(self._shapes) >= SHAPES_MAX:
            self._catalog = catalog
            # Bounded by clearing: it is a cache, and shapes of a former catalog must not be used.
            self._shapes.clear()
        named = request.name, request.key_columns
        found = self._shapes.get(named)
        if found is None:
            entry = catalog.find_stored(request.name, "read")
            if entry.kind == INDEX:
                on = catalog.by_id(entry.depends[0])
                raise InvalidUsage(f"{entry.name} is an index: read {on.name}, which it serves")
            found = self._shapes[named] = ReadShape.of(entry, request)
        return found


def index_can_answer(key: tuple[str, ...], peek: Peek) -> bool:
    """Return whether an index on `key` can answer the peek: by lookup, or by a scan if the peek has
    no key."""
    if peek.key_columns:
        return set(key) == set(peek.key_columns)
    return True


def filter_fixes_key(key: tuple[str, ...], peek: Peek) -> bool:
    """Return whether the filter's equalities fix every column of `key`."""
    return bool(key) and set(key) <= {one.column for one in peek.filter if one.op == "="}
