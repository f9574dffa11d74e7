"""Schema evolution of a shard: which changes are allowed, and how old parts are read.

A shard starts with schema 0. `evolve` adds the next one, as a compare-and-set on the number of the
newest, and accepts only backward-compatible schemas. Every part names the schema with which it was
written.

Rules
- Columns keep their names and positions. New columns come last and are nullable; they are NULL in
  older parts.
- A type stays, or becomes a wider type that represents every value exactly (`WIDER`), so that equal
  rows stay equal. NOT NULL may be dropped but not added. The key stays.
- A part can be read with any schema of its shard (`read_as`): with a newer one always; with an
  older one, without the later columns, if its values fit.
- Compaction writes with the newest schema. So do writers, once they know it; parts written earlier
  with an older schema may be appended later.

Parts are never rewritten for a schema, and readers may keep using an older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from actors.durable.persist.change import ChangeOutcome, ShardDocuments
from actors.durable.persist.location import CompareAndSet
from actors.durable.persist.machine import ShardMachine
from actors.durable.persist.parts import part_schema
from actors.durable.persist.shard import BatchPart, ShardState
from actors.model.plan.schema import DIFF, ERROR, TIME, TableSchema, arrow_type
from actors.runtime.errors import CorruptData, IncompatibleSchema, TypeMismatch
from actors.runtime.progress import ShardId

SCHEMAS_MAX: Final = 256
"""Maximum number of schemas per shard."""
WIDER: Final[dict[pa.DataType, tuple[pa.DataType, ...]]] = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64()),
    pa.int16(): (pa.int32(), pa.int64()),
    pa.int32(): (pa.int64(),),
    pa.float32(): (pa.float64(),),
}
"""Types to which a type may be changed."""


class SchemaEvolved(msgspec.Struct, frozen=True):
    """The schema is the shard's newest, with this number."""

    schema_id: int


class SchemaMismatch(msgspec.Struct, frozen=True):
    """The schema was not changed, because the newest one is not the expected one."""

    shard: ShardId
    expected: int
    current: int
    schema: TableSchema


def schema_of(state: ShardState, schema_id: int) -> TableSchema:
    """Return a schema of the shard. Raises `CorruptData` for an unknown number."""
    if not 0 <= schema_id <= state.schema_id:
        raise CorruptData(
            f"shard {state.id} has schemas 0 to {state.schema_id}, but a part names schema "
            f"{schema_id}",
            determinate=True,
        )
    return (*state.older, state.schema)[schema_id]


def check_compatible(shard: ShardId, old: TableSchema, new: TableSchema) -> None:
    """Raise `IncompatibleSchema`, which names the first rule that the new schema breaks."""

    def refuse(what: str) -> IncompatibleSchema:
        return IncompatibleSchema(
            f"shard {shard}: {what}; cannot change its schema from {old.ddl()} to {new.ddl()}"
        )

    if len(set(new.names)) < len(new.names):
        raise refuse("duplicate column names")
    for place, column in enumerate(old.columns):
        if column.name not in new.names:
            # A guess, only for the message: a column with another name in the same position.
            named = len(new.columns) == len(old.columns) and new.names[place] not in old.names
            what = f"renamed to {new.names[place]}" if named else "dropped"
            raise refuse(f"column {column.name} would be {what}")
        if new.names[place] != column.name:
            raise refuse(f"column {column.name} would be moved: new columns come last")
        then = new.columns[place]
        was, becomes = arrow_type(column.type), arrow_type(then.type)
        # `char(n)` and `varchar(n)` have the same Arrow type, but their length is part of their
        # meaning.
        same = was == becomes and _padded(column.type) == _padded(then.type)
        if not same and becomes not in WIDER.get(was, ()):
            raise refuse(
                f"column {column.name} cannot be changed from {column.type} to {then.type}"
            )
        if column.nullable and not then.nullable:
            raise refuse(f"column {column.name} may contain NULLs and cannot become NOT NULL")
    for column in new.columns[len(old.columns) :]:
        arrow_type(column.type)
        if not column.nullable:
            raise refuse(f"new column {column.name} must be nullable: older rows have no value")
    if new.key != old.key:
        raise refuse(f"the key ({', '.join(old.key)}) would become ({', '.join(new.key)})")


def _padded(text: str) -> str:
    """Return the text of a ``char`` or ``varchar`` type, whose length matters in addition to its
    Arrow type; "" for other types."""
    low = text.strip().lower()
    return low if low.startswith(("char", "varchar")) else ""


def evolved(state: ShardState, expected: int, schema: TableSchema) -> ShardState | SchemaMismatch:
    """Return the state with this schema as the newest, if `expected` is the number of the current
    newest. Unchanged if it is the newest already. Raises `IncompatibleSchema`."""
    current = state.schema_id
    # A retry after a lost answer finds the schema in place.
    if schema == state.schema and current in (expected, expected + 1):
        return state
    if current != expected:
        return SchemaMismatch(state.id, expected, current, state.schema)
    check_compatible(state.id, state.schema, schema)
    # Old schemas stay in the document forever.
    if current + 1 >= SCHEMAS_MAX:
        raise IncompatibleSchema(
            f"shard {state.id} has already had {SCHEMAS_MAX} schemas: copy its contents into a new "
            "shard"
        )
    return replace(state, schema=schema, older=(*state.older, state.schema))


def read_as(name: str, written: pa.Table, schema: TableSchema) -> pa.Table:
    """Return a part's updates in a schema's columns: later columns are dropped, missing ones are
    NULL, narrower ones are cast.

    `name` is for errors. Raises `TypeMismatch` if a value does not fit an older schema's type, and
    `CorruptData` for a part of another kind.
    """
    shape = _shape(schema, ERROR in written.column_names)
    if written.schema.equals(shape):
        return written
    columns = []
    absent = ""
    for field in shape:
        if field.name in written.column_names:
            if absent and field.name not in (TIME, DIFF, ERROR):
                raise _another(name, written, schema, f"it has {field.name} but not {absent}")
            columns.append(_as(name, field, written[field.name]))
        elif _may_lack(schema, field.name):
            absent = absent or field.name
            columns.append(pa.chunked_array([pa.nulls(written.num_rows, field.type)]))
        else:
            raise _another(name, written, schema, f"it has no {field.name}")
    return pa.table(columns, schema=shape)


@lru_cache(maxsize=1024)
def _shape(schema: TableSchema, errors: bool) -> pa.Schema:
    return part_schema(schema, errors=errors)


def _may_lack(schema: TableSchema, name: str) -> bool:
    """Return whether an older part may lack the column, because it is a later, nullable one."""
    # The first column belongs to schema 0, and so to every part.
    return any(column.name == name and column.nullable for column in schema.columns[1:])


def _as(name: str, field: pa.Field, values: pa.ChunkedArray) -> pa.ChunkedArray:
    if values.type == field.type:
        return values
    if field.type in WIDER.get(values.type, ()):
        return values.cast(field.type)
    if values.type in WIDER.get(field.type, ()):
        found, fits = values.cast(field.type, safe=False), False
        # A round trip, because a narrowing cast may wrap or round without an error.
        back = found.cast(values.type)
        if pa.types.is_floating(field.type):
            fits = pc.all(pc.or_(pc.equal(back, values), pc.is_nan(values))).as_py() is not False
        else:
            fits = back.equals(values)
        if fits:
            return found
        raise TypeMismatch(
            f"{name} was written with a newer schema, where {field.name} is {values.type}, and a "
            f"value does not fit {field.type}; read it with the newest schema"
        )
    raise CorruptData(
        f"{name} contains {field.name} as {values.type}, which cannot become {field.type}",
        determinate=True,
    )


def _another(name: str, written: pa.Table, schema: TableSchema, why: str) -> CorruptData:
    return CorruptData(
        f"{name} does not contain the columns {schema.ddl()}: {why}; it contains "
        f"{', '.join(written.column_names)}",
        determinate=True,
    )


class SchemaRegistry:
    """The schemas of all shards. Each change is durable."""

    def __init__(self, machine: ShardMachine) -> None:
        self._machine = machine

    def written_with(self, part: BatchPart) -> TableSchema | None:
        """Return the schema of a part without waiting. Return None for an inline part or a shard
        that is not cached; then the part's own columns count. Raises `CorruptData`."""
        state = self._machine.cached(part.key.partition("/")[0]) if part.key else None
        return None if state is None else schema_of(state, part.schema_id)

    async def schemas(self, shard: ShardId) -> tuple[TableSchema, ...]:
        """Return all schemas, oldest first; the index of each is its number. Raises `UnknownObject`
        and `StorageError`."""
        state = await self._machine.state(shard)
        return (*state.older, state.schema)

    async def evolve(
        self,
        shard: ShardId,
        expected: int,
        schema: TableSchema,
        *,
        extra: Sequence[CompareAndSet] = (),
    ) -> SchemaEvolved | SchemaMismatch:
        """Make this the shard's newest schema, if `expected` is the number of the current newest,
        and set the `extra` keys with it.

        Raises `IncompatibleSchema`, `UnknownObject` and `StorageError`, and `SeqnoMismatch` if an
        extra key was changed.
        """

        def change(documents: ShardDocuments) -> ChangeOutcome[SchemaEvolved | SchemaMismatch]:
            state = documents.shard(shard)
            then = evolved(state, expected, schema)
            if isinstance(then, SchemaMismatch):
                return ChangeOutcome(then)
            done = SchemaEvolved(then.schema_id)
            return ChangeOutcome(done) if then is state else ChangeOutcome(done, {shard: then})

        await self._machine.refresh(shard)  # a stale cache must not report a mismatch
        return await self._machine.change([shard], change, extra=extra)
