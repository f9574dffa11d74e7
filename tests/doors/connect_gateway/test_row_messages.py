"""Rows and types in the messages of Spark Connect, read back by PySpark's own client code."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.connect.types import proto_schema_to_pyspark_data_type
from pyspark.sql.types import StructType

from actors.doors.connect_gateway.row_messages import (
    BATCH_BYTES,
    RowGatherer,
    empty_relation,
    read_batches,
    row_answers,
    rows_relation,
    schema_text,
    spark_struct_of,
    spark_type,
    stream_of,
    table_answers,
)
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage, MalformedFrame

TYPES = {
    "boolean": True,
    "tinyint": 1,
    "smallint": 2,
    "int": 3,
    "bigint": 4,
    "float": 1.5,
    "double": 2.5,
    "string": "s",
    "char(3)": "ab ",
    "binary": b"b",
    "date": datetime.date(2024, 1, 2),
    "timestamp": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
    "timestamp_ntz": datetime.datetime(2024, 1, 2),  # noqa: DTZ001
    "decimal(12,2)": decimal.Decimal("1.25"),
    "array<string>": ["a", None],
    "map<string,int>": [("a", 1)],
    "struct<A:int,b:array<double>>": {"A": 1, "b": [1.0]},
    "void": None,
}
SCHEMA = TableSchema(
    tuple(TableColumn(f"c{n}", kind, kind == "void" or n % 2 == 0) for n, kind in enumerate(TYPES))
)


def gathered(answers: list[Any]) -> pa.Table | None:
    made = RowGatherer()
    for answer in answers:
        made.add(answer)
    return made.table()


def rows_of(count: int) -> pa.Table:
    values = [dict(zip(SCHEMA.names, TYPES.values(), strict=True))] * count
    return pa.Table.from_pylist(values, schema=SCHEMA.arrow())


def test_types_are_those_that_spark_reads() -> None:
    made = proto_schema_to_pyspark_data_type(spark_struct_of(SCHEMA.arrow()))
    told = [field.dataType.simpleString() for field in made.fields]
    wanted = ["string" if kind == "char(3)" else kind for kind in TYPES]
    assert told == wanted


def test_the_text_of_a_schema_is_sparks_json() -> None:
    struct = StructType.fromJson(json.loads(schema_text(SCHEMA)))
    assert [field.nullable for field in struct.fields] == [c.nullable for c in SCHEMA.columns]
    assert struct["c8"].metadata == {"__CHAR_VARCHAR_TYPE_STRING": "char(3)"}
    assert struct["c16"].dataType.simpleString() == "struct<A:int,b:array<double>>"


def test_a_type_that_spark_has_not() -> None:
    with pytest.raises(InvalidUsage, match="not supported by Spark"):
        spark_type(pa.time64("us"))


def test_relations() -> None:
    rows = rows_of(3)
    made = rows_relation(SCHEMA, rows).local_relation
    with pa.ipc.open_stream(made.data) as reader:
        table = reader.read_all()
    assert table.to_pylist() == rows.to_pylist()
    assert [field.nullable for field in table.schema] == [c.nullable for c in SCHEMA.columns]
    assert rows_relation(SCHEMA, rows_of(0)) == empty_relation(SCHEMA)
    assert empty_relation(SCHEMA).local_relation.data == b""


@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_answers_hold_all_rows_in_order(count: int) -> None:
    rows = pa.table({"n": pa.array(range(count), pa.int64()), "s": ["x" * 100] * count})
    answers = list(table_answers(rows))
    assert answers[0].HasField("schema")
    assert answers[-1].HasField("result_complete")
    read = gathered(answers)
    assert read is not None
    assert read.equals(rows) or (count == 0 and read.num_rows == 0)
    offset = 0
    for answer in answers[1:-1]:
        assert answer.arrow_batch.start_offset == offset
        assert len(answer.arrow_batch.data) < 2 * BATCH_BYTES
        offset += answer.arrow_batch.row_count
    assert offset == count
    assert len(answers) > (3 if count > 1 else 2)


def test_a_row_is_never_cut() -> None:
    batch = pa.RecordBatch.from_pydict({"s": ["x" * (3 * BATCH_BYTES)] * 2})
    assert [answer.arrow_batch.row_count for answer in row_answers(batch, 5)] == [1, 1]


def test_chunks_of_a_batch_are_put_together() -> None:
    (whole,) = list(row_answers(pa.RecordBatch.from_pydict({"a": [1, 2]}), 0))
    data = whole.arrow_batch.data

    def chunk(index: int, piece: bytes) -> Any:
        made = type(whole)()
        made.arrow_batch.data, made.arrow_batch.chunk_index = piece, index
        made.arrow_batch.num_chunks_in_batch = 2
        return made

    read = gathered([chunk(0, data[:50]), chunk(1, data[50:])])
    assert read is not None
    assert read.to_pydict() == {"a": [1, 2]}
    assert gathered([]) is None
    assert read_batches([data])[0].num_rows == 2


def test_a_stream_that_decodes_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.model.plan.ipc_bounds.DECODED_BYTES_MAX", 1 << 20)
    once = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int8()), ["x" * 4096])
    with pytest.raises(MalformedFrame, match="decode to"):
        read_batches([stream_of(pa.table({"a": once}))])
    sink = pa.BufferOutputStream()
    zeros = pa.table({"a": pa.array([0] * (1 << 18), pa.int64())})
    with pa.ipc.new_stream(
        sink, zeros.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(zeros)
    with pytest.raises(MalformedFrame, match="decompresses"):
        read_batches([sink.getvalue().to_pybytes()])
    assert read_batches([stream_of(zeros.slice(0, 9))])[0].num_rows == 9
