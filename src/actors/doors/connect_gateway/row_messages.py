"""Spark Connect messages for types, relations with rows, and responses. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.connect.proto import base_pb2, relations_pb2, types_pb2

from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.engine.spark.spark_releases import chunks_of_batch
from actors.model.plan.ipc_bounds import check_stream, check_values
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import InvalidUsage

BATCH_BYTES: Final = 2 * 1024 * 1024
"""Approximate limit of the rows in one response. A row is never split."""
BATCH_ROWS: Final = 65_536
CHAR_LENGTH: Final = "__CHAR_VARCHAR_TYPE_STRING"
"""Spark's key in the metadata of a CHAR(n) or VARCHAR(n) column."""
GLOBAL_DATABASE: Final = "global_temp"
"""Spark's database for global temporary views."""

_SIMPLE: Final[dict[pa.DataType, tuple[str, str]]] = {
    pa.bool_(): ("boolean", "boolean"),
    pa.int8(): ("byte", "byte"),
    pa.int16(): ("short", "short"),
    pa.int32(): ("integer", "integer"),
    pa.int64(): ("long", "long"),
    pa.float32(): ("float", "float"),
    pa.float64(): ("double", "double"),
    pa.binary(): ("binary", "binary"),
    pa.large_binary(): ("binary", "binary"),
    pa.date32(): ("date", "date"),
    pa.null(): ("null", "void"),
}
"""For types without parameters: the field of `DataType`, and the name in Spark's JSON."""


# -- types -----------------------------------------------------------------------------------------


def spark_type(kind: pa.DataType) -> ProtoMessage:
    """Convert an Arrow type to Spark's. Raises `InvalidUsage` if Spark has no such type."""
    made = types_pb2.DataType()
    if kind in _SIMPLE:
        getattr(made, _SIMPLE[kind][0]).SetInParent()
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        made.string.collation = "UTF8_BINARY"
    elif pa.types.is_timestamp(kind):
        (made.timestamp_ntz if kind.tz is None else made.timestamp).SetInParent()
    elif pa.types.is_decimal128(kind):
        made.decimal.precision, made.decimal.scale = kind.precision, kind.scale
    elif pa.types.is_list(kind):
        made.array.element_type.CopyFrom(spark_type(kind.value_type))
        made.array.contains_null = True
    elif pa.types.is_map(kind):
        made.map.key_type.CopyFrom(spark_type(kind.key_type))
        made.map.value_type.CopyFrom(spark_type(kind.item_type))
        made.map.value_contains_null = True
    elif pa.types.is_struct(kind):
        made.struct.SetInParent()
        for field in kind:
            made.struct.fields.add(
                name=field.name, data_type=spark_type(field.type), nullable=field.nullable
            )
    else:
        raise InvalidUsage(f"type {kind} is not supported by Spark")
    return made


def spark_struct_of(schema: pa.Schema) -> ProtoMessage:
    """Convert an Arrow schema to Spark's struct type."""
    made = types_pb2.DataType()
    made.struct.SetInParent()
    for field in schema:
        made.struct.fields.add(
            name=field.name, data_type=spark_type(field.type), nullable=field.nullable
        )
    return made


def _json_type(kind: pa.DataType) -> Any:
    if kind in _SIMPLE:
        return _SIMPLE[kind][1]
    if pa.types.is_timestamp(kind):
        return "timestamp_ntz" if kind.tz is None else "timestamp"
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        element = _json_type(kind.value_type)
        return {"type": "array", "elementType": element, "containsNull": True}
    if pa.types.is_map(kind):
        return {
            "type": "map",
            "keyType": _json_type(kind.key_type),
            "valueType": _json_type(kind.item_type),
            "valueContainsNull": True,
        }
    if pa.types.is_struct(kind):
        return {"type": "struct", "fields": [_json_field(each) for each in kind]}
    return "string"


def _json_field(field: pa.Field, marks: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "name": field.name,
        "type": _json_type(field.type),
        "nullable": field.nullable,
        "metadata": marks or {},
    }


def declared_arrow(schema: TableSchema) -> pa.Schema:
    """Return the Arrow schema of a table, with the declared nullability."""
    fields = zip(schema.arrow(), schema.columns, strict=True)
    return pa.schema([field.with_nullable(column.nullable) for field, column in fields])


def schema_text(schema: TableSchema) -> str:
    """Return a schema in Spark's JSON form."""
    fields = []
    for field, column in zip(declared_arrow(schema), schema.columns, strict=True):
        low = column.type.lower()
        # With this, Spark pads values that are compared with a CHAR(n).
        fields.append(_json_field(field, {CHAR_LENGTH: low} if low.startswith("char(") else None))
    return json.dumps({"type": "struct", "fields": fields})


# -- relations -------------------------------------------------------------------------------------


def empty_relation(schema: TableSchema) -> ProtoMessage:
    """Return a relation with these columns and no rows."""
    return relations_pb2.Relation(
        local_relation=relations_pb2.LocalRelation(schema=schema_text(schema))
    )


def rows_relation(schema: TableSchema, rows: pa.Table) -> ProtoMessage:
    """Return a relation with these rows."""
    if not rows.num_rows:
        return empty_relation(schema)
    # Use the declared nullability: Spark rejects rows that are nullable where the schema is not.
    declared = declared_arrow(schema)
    made = relations_pb2.LocalRelation(schema=schema_text(schema))
    made.data = stream_of(rows.select(declared.names).cast(declared))
    return relations_pb2.Relation(local_relation=made)


def answer_relation(rows: pa.Table) -> ProtoMessage:
    """Return a relation with the result rows of a statement, as Spark does for commands."""
    made = relations_pb2.LocalRelation(data=stream_of(rows))
    return relations_pb2.Relation(local_relation=made)


def lent_relation(name: str) -> ProtoMessage:
    """Return a relation that reads a global temporary view."""
    made = relations_pb2.Relation()
    made.read.named_table.unparsed_identifier = f"{GLOBAL_DATABASE}.{name}"
    return made


def stream_of(rows: pa.Table) -> bytes:
    """Encode rows as an Arrow stream with at least one batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=BATCH_ROWS)
        # Clients require at least one batch.
        if not rows.num_rows:
            writer.write_batch(pa.RecordBatch.from_pylist([], schema=rows.schema))
    return bytes(sink.getvalue().to_pybytes())


# -- answers ---------------------------------------------------------------------------------------


def schema_answer(schema: pa.Schema) -> ProtoMessage:
    """Return the response with the schema."""
    return base_pb2.ExecutePlanResponse(schema=spark_struct_of(schema))


def row_answers(batch: pa.RecordBatch, offset: int) -> Iterator[ProtoMessage]:
    """Yield the responses with a batch, split into parts of about `BATCH_BYTES`; one response for
    an empty batch. `offset`: the number of rows before it."""
    rows_max = max(1, BATCH_ROWS)
    if batch.num_rows and batch.nbytes > BATCH_BYTES:
        rows_max = max(1, batch.num_rows * BATCH_BYTES // batch.nbytes)
    for start in range(0, max(1, batch.num_rows), rows_max):
        piece = batch.slice(start, rows_max)
        made = base_pb2.ExecutePlanResponse()
        made.arrow_batch.row_count = piece.num_rows
        made.arrow_batch.start_offset = offset + start
        # Through a `Table`, so that the stream contains only the slice's rows.
        made.arrow_batch.data = stream_of(pa.Table.from_batches([piece]))
        yield made


def command_answer(relation: ProtoMessage) -> ProtoMessage:
    """Return the response to an SQL statement, with the relation of its result."""
    made = base_pb2.ExecutePlanResponse()
    made.sql_command_result.relation.CopyFrom(relation)
    return made


def complete_answer() -> ProtoMessage:
    """Return the last response of an operation."""
    made = base_pb2.ExecutePlanResponse()
    made.result_complete.SetInParent()
    return made


def table_answers(rows: pa.Table) -> Iterator[ProtoMessage]:
    """Yield all responses of an operation with these result rows."""
    yield schema_answer(rows.schema)
    offset = 0
    for batch in rows.to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]:
        yield from row_answers(batch, offset)
        offset += batch.num_rows
    yield complete_answer()


class RowGatherer:
    """Collects the rows in responses of Spark, whose batches may be split into chunks."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        """The chunks of the current batch."""
        self._batches: list[pa.RecordBatch] = []
        """The complete batches."""
        self.bytes = 0
        """Total encoded size so far."""

    def add(self, answer: ProtoMessage) -> None:
        """Add a response."""
        if not answer.HasField("arrow_batch"):
            return
        self._chunks.append(answer.arrow_batch.data)
        self.bytes += len(answer.arrow_batch.data)
        if len(self._chunks) >= chunks_of_batch(answer.arrow_batch):
            self._batches += read_batches(self._chunks)
            self._chunks.clear()

    def table(self) -> pa.Table | None:
        """Return the rows; None if there were no batches."""
        return pa.Table.from_batches(self._batches) if self._batches else None


def read_batches(chunks: Sequence[bytes]) -> list[pa.RecordBatch]:
    """Decode the batches of an Arrow stream that was split into chunks. Raises `MalformedFrame` if
    the decoded rows would be too large."""
    data = b"".join(chunks)
    check_stream(data)
    with pa.ipc.open_stream(data) as reader:
        return check_values(reader.read_all()).to_batches() or [
            pa.RecordBatch.from_pylist([], schema=reader.schema)
        ]
