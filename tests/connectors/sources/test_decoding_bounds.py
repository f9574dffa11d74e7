"""What files decode to is known before they are decoded: their pages, batches, lines and totals.

`tests/proof/decoding_bombs.py` draws larger ones, and measures memory.
"""

from __future__ import annotations

import bz2
import gzip
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.connectors.sources import copied_files, parquet_bounds, parquet_pages
from actors.connectors.sources.file_listing import FoundFile
from actors.connectors.sources.file_reading import FileReader
from actors.connectors.sources.json_rows import RowMisfit, RowsOfTable
from actors.connectors.sources.kinds import decode
from actors.connectors.sources.parquet_bounds import (
    DecodesTooLarge,
    DecodingBound,
    bounded_batches,
    check_parquet,
)
from actors.connectors.sources.source import (
    CONFIGURATION_BYTES_MAX,
    ConnectorContext,
    SourceUnreachable,
)
from actors.connectors.sources.text_bounds import check_text, longest_line, own_options
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import EngineLost, InvalidUsage
from actors.runtime.kernel.clock import SystemClock
from actors.runtime.settings import Settings
from service_house import running_service  # type: ignore[import-not-found]

MIB = 1 << 20
BOUND = DecodingBound(MIB)


def put(tmp_path: Path, column: pa.Array, **more: Any) -> str:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"s": column}), path, **({"store_schema": False} | more))
    return path


def repeated(length: int, rows: int, *, before: int = 0) -> pa.Array:
    indices = np.concatenate([np.ones(before, np.int32), np.zeros(rows, np.int32)])
    return pa.DictionaryArray.from_arrays(indices, pa.array(["x" * length, "y"]))


def read(path: str, bound: DecodingBound = BOUND) -> pa.Table:
    return pa.Table.from_batches(list(bounded_batches(path, ["s"], bound)))


# -- Parquet ---------------------------------------------------------------------------------------

DRAWN = random.Random(5)
TEXTS = pa.array([None if n % 7 == 0 else "v" * DRAWN.randrange(60) for n in range(20_000)])


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("encoding", [None, "PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_every_way_to_write_is_read_as_arrow_reads_it(
    tmp_path: Path, compression: str, version: str, encoding: str | None
) -> None:
    more: dict[str, Any] = {"column_encoding": encoding, "use_dictionary": False}
    path = put(
        tmp_path,
        TEXTS,
        compression=compression,
        data_page_version=version,
        data_page_size=10_000,
        row_group_size=9_000,
        **(more if encoding else {}),
    )
    assert read(path, DecodingBound(4 * MIB)).equals(pa.table({"s": TEXTS}))
    check_parquet(path, DecodingBound(4 * MIB))


@pytest.mark.parametrize(
    "column",
    [
        pa.array(np.arange(20_000) % 7),
        pa.array([1.5, None] * 10_000),
        pa.array([True, None, False] * 5_000),
        pa.array([b"12345678"] * 9_000, pa.binary(8)),
        pa.array([1, None] * 5_000).cast(pa.decimal128(30, 2)),
        pa.array([[1, 2], None, [], [3]] * 3_000),
        pa.array([[{"a": "x"}], None] * 3_000),
    ],
)
def test_every_kind_of_column_is_read_as_arrow_reads_it(tmp_path: Path, column: pa.Array) -> None:
    path = put(tmp_path, column, data_page_size=5_000)
    assert read(path, DecodingBound(8 * MIB)).equals(pq.read_table(path))


def test_batches_are_as_small_as_they_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = repeated(10_000, 50, before=5_000)
    path = put(tmp_path, column)
    sizes = [batch.nbytes for batch in bounded_batches(path, ["s"], BOUND)]
    assert sum(sizes) > 500_000
    assert max(sizes) <= MIB // 4 + 100_000
    monkeypatch.setattr(parquet_bounds, "BATCH_BYTES", 40_000)
    assert max(batch.nbytes for batch in bounded_batches(path, ["s"], BOUND)) <= 90_000
    assert read(path)["s"].to_pylist() == column.to_pylist()


POOLS: list[pa.MemoryPool] = []
"""Kept: memory of a pool may be freed after its last use here."""


def allocated_by(path: str, bound: DecodingBound, match: str) -> int:
    """Read a file that must be refused; return the peak of Arrow's memory, beyond what was."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(DecodesTooLarge, match=match):
            for _ in bounded_batches(path, ["s"], bound):
                pass
        with pytest.raises(DecodesTooLarge, match=match):
            check_parquet(path, bound)
        return int(pool.max_memory())
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize("before", [0, 200_000])
@pytest.mark.parametrize("groups", [None, 300])
def test_a_dictionary_of_one_long_text_is_refused_before_a_row_is_made(
    tmp_path: Path, before: int, groups: int | None
) -> None:
    path = put(
        tmp_path,
        repeated(100_000, 3_000, before=before if groups is None else 0),
        compression="zstd",
        row_group_size=groups,
    )
    words = r"row group \d+ decodes to more than \d+ bytes \(file_decoded_bytes_max = 8388608, or"
    assert allocated_by(path, DecodingBound(8 * MIB), words) < 16 * MIB


@pytest.mark.parametrize("shape", ["list", "struct"])
def test_texts_within_others_are_counted_too(tmp_path: Path, shape: str) -> None:
    texts = repeated(100_000, 2_000)
    column: pa.Array = pa.ListArray.from_arrays(pa.array([0, 1, 2_000], pa.int32()), texts)
    if shape == "struct":
        column = pa.StructArray.from_arrays([texts], names=["a"])
    path = put(tmp_path, column, compression="zstd")
    with pytest.raises(DecodesTooLarge, match="decodes to more"):
        check_parquet(path, DecodingBound(8 * MIB))
    check_parquet(path, DecodingBound(300 * MIB))


def test_texts_that_repeat_the_one_before_come_in_small_batches(tmp_path: Path) -> None:
    path = put(
        tmp_path,
        pa.array(["x" * 1_000] * 3_000),
        use_dictionary=False,
        column_encoding="DELTA_BYTE_ARRAY",
    )
    with pytest.raises(DecodesTooLarge, match="row group 0 decodes to more than"):
        read(path)
    sizes = [batch.nbytes for batch in bounded_batches(path, ["s"], DecodingBound(4 * MIB))]
    assert sum(sizes) > 3_000_000
    assert max(sizes) < 1_100_000


def test_a_page_that_is_too_large_is_never_decompressed(tmp_path: Path) -> None:
    path = put(tmp_path, pa.array(["x" * 3 * MIB]), use_dictionary=False, compression="zstd")
    assert allocated_by(path, BOUND, "column s: a page decompresses to 3145") < 100_000


def test_columns_that_are_small_apart_and_large_together_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    columns = {f"c{number}": ["x" * 200_000] for number in range(20)}
    pq.write_table(pa.table(columns), path, use_dictionary=False, compression="zstd")
    with pytest.raises(DecodesTooLarge, match="at a time"):
        list(bounded_batches(path, list(columns), BOUND))


def varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def altered(path: str, old: bytes, new: bytes) -> None:
    data = Path(path).read_bytes()
    assert old in data
    Path(path).write_bytes(data.replace(old, new, 1))


WORDS = pa.array([f"{number:08}" for number in range(20_000)])


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_page_that_announces_more_lengths_than_values_is_refused(
    tmp_path: Path, encoding: str, version: str
) -> None:
    path = put(
        tmp_path,
        WORDS,
        use_dictionary=False,
        column_encoding=encoding,
        data_page_version=version,
        compression="none",
    )
    block = varint(128) + varint(4)
    altered(path, block + varint(20_000), block + varint(2_000_000))
    with pytest.raises(DecodesTooLarge, match=r"announces 2000000 lengths|within its lengths"):
        read(path, DecodingBound(8 * MIB))


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_lengths_that_would_fit_are_counted_too(tmp_path: Path, encoding: str) -> None:
    path = put(tmp_path, WORDS, use_dictionary=False, column_encoding=encoding, compression="none")
    block = varint(128) + varint(4)
    # The last block has room for them.
    altered(path, block + varint(20_000), block + varint(20_050))
    with pytest.raises(DecodesTooLarge, match="a page of 20000 values declares 20050 lengths"):
        read(path, DecodingBound(8 * MIB))


def test_a_column_of_too_many_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, WORDS, use_dictionary=False, data_page_size=1_000)
    monkeypatch.setattr(parquet_pages, "PAGES_MAX", 5)
    with pytest.raises(DecodesTooLarge, match="more than 5 pages"):
        read(path, DecodingBound(8 * MIB))


def test_columns_that_share_their_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, WORDS)
    with pq.ParquetFile(path) as parquet:
        # As a footer may say of many columns: the same place for each.
        columns = [0] * 3
        with open(path, "rb") as file, pytest.raises(DecodesTooLarge, match="longer than its file"):
            parquet_bounds._group_shape(parquet, file, 0, columns, DecodingBound(8 * MIB))


def test_a_dictionary_that_announces_more_than_it_has_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, WORDS, compression="none")
    altered(path, varint(2 * 20_000), varint(2 * 1_000_000))
    with pytest.raises(DecodesTooLarge, match="declares 1000000 values"):
        read(path, DecodingBound(8 * MIB))


def test_a_large_footer_is_refused(tmp_path: Path) -> None:
    table = pa.table({"s": ["x"]}).replace_schema_metadata({"k": "v" * 10_000})
    path = str(tmp_path / "a.parquet")
    pq.write_table(table, path)
    with pytest.raises(DecodesTooLarge, match=r"its footer of \d+ bytes decodes"):
        read(path)


def test_garbage_in_place_of_pages_is_refused_or_read_and_never_a_fault(tmp_path: Path) -> None:
    path = Path(put(tmp_path, WORDS, data_page_size=4_000, compression="snappy"))
    data, draw = path.read_bytes(), random.Random(11)
    refused = 0
    for _ in range(60):
        wrong = bytearray(data)
        at = draw.randrange(4, 30_000)
        wrong[at : at + 3] = draw.randbytes(3)
        path.write_bytes(wrong)
        try:
            read(str(path), DecodingBound(8 * MIB))
        except (DecodesTooLarge, OSError, pa.ArrowException):
            refused += 1
    assert refused


# -- CSV and JSON ----------------------------------------------------------------------------------


def hadoop(codec: str, data: bytes) -> bytes:
    made = b""
    for start in range(0, len(data), 100_000):
        piece = data[start : start + 100_000]
        inner = pa.Codec(codec).compress(piece, asbytes=True)
        made += struct.pack(">II", len(piece), len(inner)) + inner
    return made


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: bytes(pa.Codec("zstd").compress(data, asbytes=True)),
    ".deflate": zlib.compress,
    ".lz4": lambda data: hadoop("lz4_raw", data),
    ".snappy": lambda data: hadoop("snappy", data),
}
RECORD = 10_000


def check(path: Path, kind: str = "csv", bound: DecodingBound = BOUND, **options: str) -> None:
    check_text(str(path), kind, options, bound, RECORD)


@pytest.mark.parametrize("suffix", PACKED)
def test_compressed_files_are_counted_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(PACKED[suffix](b"1,x\n" * 100_000))
    check(path)
    path.write_bytes(PACKED[suffix](b"1,x\n" * 100_000) * 2)  # one behind another
    check(path)
    # Beyond a hundred times its size, or the setting.
    path.write_bytes(PACKED[suffix](b"1,x\n" * 1_000_000))
    if suffix == ".snappy":  # never so much smaller
        check(path, bound=DecodingBound(10))
    else:
        with pytest.raises(DecodesTooLarge, match=r"the file decodes to more than \d+ bytes"):
            check(path)
    path.write_bytes(PACKED[suffix](b"1,x\n" + b"x" * (RECORD + 1)))
    with pytest.raises(DecodesTooLarge, match="a line has more than 10000 bytes"):
        check(path)
    whole = PACKED[suffix](b"1,x\n" * 100_000)
    path.write_bytes(whole[:-30])
    if suffix != ".deflate":  # its end is not told from a stream that is cut off
        with pytest.raises(DecodesTooLarge, match=r"cut off|cannot be decompressed"):
            check(path)


@pytest.mark.parametrize("chunk", [1, 7, 9_999, 10_000, 10_001, 1 << 20])
def test_lines_are_measured_over_pieces(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.connectors.sources import text_bounds

    monkeypatch.setattr(text_bounds, "CHUNK_BYTES", max(chunk, 500))
    path = tmp_path / "a.csv"
    for before, length, after in ((0, RECORD, 3), (5, RECORD, 0), (1, RECORD - 1, 30_000)):
        path.write_bytes(b"x\n" * before + b"y" * length + b"\n" + b"z\n" * after)
        check(path)
        longest_line(str(path), RECORD)
        for end in (b"\n", b""):
            rest = end + b"z\n" * after * len(end)
            path.write_bytes(b"x\n" * before + b"y" * (RECORD + 1) + rest)
            with pytest.raises(DecodesTooLarge, match="a line has more"):
                check(path)
            with pytest.raises(DecodesTooLarge, match="a line has more"):
                longest_line(str(path), RECORD)


def test_what_bounds_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x\r" * RECORD)
    check(path)  # also ends a line
    with pytest.raises(DecodesTooLarge, match="a line"):
        check(path, lineSep="\n")
    path.write_bytes(b"x;" * RECORD)
    check(path, lineSep=";")
    path.write_bytes(b"{}\n" * RECORD)
    check(path, "json")
    with pytest.raises(DecodesTooLarge, match=r"a single record.*file_record_bytes_max"):
        check(path, "json", multiLine="true")
    check(path, "csv", multiLine="TRUE")
    for encoding in ("UTF-16", "utf-32le", "none such"):
        with pytest.raises(DecodesTooLarge, match="a single record"):
            check(path, encoding=encoding)
    check(path, charset="ISO-8859-1")


def test_a_value_of_many_lines_is_bounded_by_the_parser(tmp_path: Path) -> None:
    small, large = tmp_path / "small.csv", tmp_path / "large.csv"
    small.write_text("x")
    large.write_text("x\n" * RECORD)
    packed = tmp_path / "a.csv.gz"
    packed.write_bytes(gzip.compress(b"x"))
    multi = (("MultiLine", "true"),)
    bounds = (("maxCharsPerColumn", str(RECORD)),)
    assert own_options("csv", multi, [str(small), str(large)], RECORD) == bounds
    assert own_options("csv", multi, [str(packed)], RECORD) == bounds
    assert own_options("csv", multi, [str(small)], RECORD) == ()
    assert own_options("csv", (), [str(large)], RECORD) == ()
    assert own_options("json", multi, [str(large)], RECORD) == ()
    given = (*multi, ("maxcharspercolumn", "5"))
    assert own_options("csv", given, [str(large)], RECORD) == ()


# -- What is read before Spark is asked ------------------------------------------------------------

JOBS: list[Any] = []


def refusal(path: Path, kind: str, options: dict[str, str], *, copied: bool = False) -> str:
    """Have a reader read a file that it refuses; return its error. Spark is asked for none."""

    async def run_job(job: Any) -> Any:
        JOBS.append(job)
        raise EngineLost("no Spark")

    settings = Settings(file_decoded_bytes_max=MIB, file_record_bytes_max=RECORD)
    around = ConnectorContext(SystemClock(), settings, path.parent, run_job)
    schema = TableSchema((TableColumn("s", "string"),))
    size = path.stat().st_size
    reader: Any = FileReader(kind, options, schema, schema, around, copied=copied)  # type: ignore[arg-type]

    async def main() -> None:
        async for _ in reader.pieces([FoundFile(0, b"", path.name, str(path), size, 0)]):
            pass

    JOBS.clear()
    with pytest.raises(SourceUnreachable) as caught:
        anyio.run(main)
    return str(caught.value)


def test_files_for_spark_are_judged_before_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"1,x\n" * 1_000_000))
    assert f"{path}: the file decodes to more than" in refusal(path, "csv", {})
    assert not JOBS
    nested = pa.ListArray.from_arrays(pa.array([0, 2_000], pa.int32()), repeated(100_000, 2_000))
    bomb = Path(put(tmp_path, nested, compression="zstd"))
    assert f"{bomb}: row group 0 decodes to more than" in refusal(bomb, "parquet", {})
    assert not JOBS
    large = tmp_path / "large.csv"
    large.write_text("x\n" * RECORD)
    assert "no Spark" in refusal(large, "csv", {"multiLine": "true"})
    assert ("maxCharsPerColumn", str(RECORD)) in JOBS[0].options


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_line_of_a_copy_is_bounded(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    body = "x" * (RECORD + 1)
    path.write_text(f'{{"s":"{body}"}}\n' if kind == "json" else f"s\n{body}\n")
    assert "a line has more than 10000 bytes" in refusal(path, kind, {}, copied=True)


def test_rows_of_a_copy_gather_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copied_files, "BYTES_AT_ONCE", 50_000)
    path = tmp_path / "a.json"
    path.write_text('{"s":"' + "x" * 1_000 + '"}\n' + '{"s":"y"}\n')
    path.write_text(path.read_text() * 200)
    schema = TableSchema((TableColumn("s", "string"),))
    pieces = list(copied_files.read_copied(str(path), "json", schema))
    assert sum(piece.num_rows for piece in pieces) == 400
    assert max(piece.nbytes for piece in pieces) < 60_000


# -- Rows of JSON, and configurations --------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("array<array<int>>", b"[" + b"[]," * 3_000_000 + b"[]]"),
        ("array<struct<a:int,b:int,c:int,d:int>>", b"[" + b"{}," * 3_000_000 + b"{}]"),
        ("array<int>", b"[" + b"1," * 8_000_000 + b"1]"),
        ("array<map<string,int>>", b"[" + b"{}," * 3_000_000 + b"{}]"),
    ],
)
def test_a_row_of_many_small_objects_is_refused(kind: str, body: bytes) -> None:
    schema = TableSchema((TableColumn("s", kind),))
    rows = RowsOfTable(schema, schema, skips=False)
    with pytest.raises(RowMisfit, match="may decode to"):
        rows.add(b'{"s": ' + body + b"}", 1)
    few = body[: len(body) // 1_000 // 6 * 6]
    rows.add(b'{"s": ' + few[: few.rindex(b",")] + b"]}", 1)
    assert len(rows) == 1


@pytest.mark.parametrize("depth", [1_000, 1_000_000])
def test_a_row_that_is_nested_deep_is_refused(depth: int) -> None:
    schema = TableSchema((TableColumn("s", "string"),))
    for skips in (False, True):
        rows = RowsOfTable(schema, schema, skips=skips)
        with pytest.raises(RowMisfit):
            rows.add(b'{"t": ' + b"[" * depth + b"]" * (depth - 1) + b"}", 1)


def test_a_long_configuration_is_not_decoded() -> None:
    with pytest.raises(InvalidUsage, match="configuration too long: 4194305 bytes"):
        decode(b"[" * (CONFIGURATION_BYTES_MAX + 1))
    with pytest.raises(InvalidUsage, match="invalid configuration of a source"):
        decode(b"[" * CONFIGURATION_BYTES_MAX)
    with pytest.raises(InvalidUsage, match="invalid configuration of a source"):
        decode(b'{"type": "files", "more": ' + b"[" * 1_000_000)


# -- In the service --------------------------------------------------------------------------------


async def test_a_bomb_stops_its_source_alone(tmp_path: Path) -> None:
    for name in ("bomb", "good"):
        (tmp_path / name).mkdir()
    pq.write_table(pa.table({"s": ["fine"]}), tmp_path / "good" / "a.parquet")
    put(tmp_path / "bomb", repeated(100_000, 3_000), compression="zstd")
    settings = Settings(
        state_dir=str(tmp_path / "state"),
        listen="127.0.0.1:0",
        source_dirs=str(tmp_path),
        file_decoded_bytes_max=4 * MIB,
        source_tick_ms=50,
    )
    columns = [{"name": "s", "type": "string"}]
    async with running_service(settings) as (_, client):
        for name in ("bomb", "good"):
            config = {"folder": str(tmp_path / name), "format": "parquet", "columns": columns}
            await client.create_source(name, {"type": "files", **config}, None)
        seen: dict[str, Any] = {}
        while not (seen and seen["bomb"].error and seen["good"].status == "running"):
            seen = {source.name: source.health for source in await client.sources()}
            await anyio.sleep(0.05)
        assert seen["bomb"].status == "stalled"
        assert "a.parquet: row group 0 decodes to more than 4194304 bytes" in seen["bomb"].error
        while not await client.peek("good"):
            await anyio.sleep(0.05)
