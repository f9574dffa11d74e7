"""Small files that decode to very much, as a source or a copy of files meets them.

Run: ``python tests/proof/decoding_bombs.py [--bombs 10] [--seed 1] [--bound 33554432]``.

For each format it draws bombs, and has a separate process read them all, one after another,
with `file_decoded_bytes_max` at the bound (and a record of an eighth of it). Each must be refused
with an error that names the file and the setting, before Spark is asked; the process must not grow
by more than twice the bound; and files beside them are read. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import bz2
import gzip
import json
import random
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors.connectors.sources.file_listing import FoundFile
from actors.connectors.sources.file_reading import FileReader, MalformedFile
from actors.connectors.sources.source import ConnectorContext
from actors.model.plan.jobs import Answer, Job
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.kernel.clock import SystemClock
from actors.runtime.settings import Settings

SETTINGS: Final = ("file_decoded_bytes_max", "file_record_bytes_max")
TEXT: Final = TableSchema((TableColumn("s", "string"),))
LISTS: Final = TableSchema((TableColumn("s", "array<string>"),))


class Bomb(NamedTuple):
    """A file, and how it is read."""

    path: str
    format: str
    options: dict[str, str] = {}  # noqa: RUF012 - never changed
    copied: bool = False
    nested: bool = False


class Draw(NamedTuple):
    """What a bomb is made with."""

    random: random.Random
    bound: int
    path: Path
    """Without a suffix."""

    def rows(self, each: int) -> int:
        """Return how many values of so many bytes are far beyond the bound."""
        return self.bound * self.random.randint(4, 40) // each + 1


# -- Parquet


def repeated(draw: Draw, length: int | None = None) -> pa.Array:
    length = length or draw.random.choice([1_000, 50_000, draw.bound // 32])
    texts = pa.array(["x" * length, "short"])
    indices = np.zeros(draw.rows(length), np.int32)
    if draw.random.random() < 0.5:  # rows of the long text come last
        indices = np.concatenate([np.ones(70_000, np.int32), indices])
    return pa.DictionaryArray.from_arrays(indices, texts)


def put(draw: Draw, column: pa.Array, **more: Any) -> Bomb:
    path = draw.path.with_suffix(".parquet")
    given = {"compression": draw.random.choice(["zstd", "snappy", "gzip", "none", "lz4"])}
    pq.write_table(pa.table({"s": column}), path, store_schema=False, **(given | more))
    return Bomb(str(path), "parquet")


def one_dictionary(draw: Draw) -> Bomb:
    version = draw.random.choice(["1.0", "2.0"])
    limit = draw.random.choice([1 << 26, 1 << 30])
    return put(draw, repeated(draw), data_page_version=version, dictionary_pagesize_limit=limit)


def many_groups(draw: Draw) -> Bomb:
    return put(
        draw,
        repeated(draw, 50_000),
        compression="zstd",
        row_group_size=draw.random.randint(50, 500),
    )


def deltas(draw: Draw) -> Bomb:
    length = draw.random.choice([1_000, 20_000])
    column = pa.array(["x" * length] * (draw.rows(length) // 2))
    return put(
        draw,
        column,
        compression="zstd",
        use_dictionary=False,
        column_encoding="DELTA_BYTE_ARRAY",
        data_page_version=draw.random.choice(["1.0", "2.0"]),
    )


def large_page(draw: Draw) -> Bomb:
    column = pa.array(["x" * (2 * draw.bound)])
    return put(draw, column, compression="zstd", use_dictionary=draw.random.random() < 0.5)


def nulls(draw: Draw) -> Bomb:
    return put(draw, pa.nulls(draw.bound * 2, pa.string()), compression="zstd")


def within_lists(draw: Draw) -> Bomb:
    values = repeated(draw, 50_000)
    step = draw.random.choice([1, 1000])
    offsets = pa.array([*range(0, len(values) - 1, step), len(values)], pa.int32())
    return put(draw, pa.ListArray.from_arrays(offsets, values))._replace(nested=True)


def lying_page(draw: Draw) -> Bomb:
    """A page's header announces more than the bound."""
    bomb = put(draw, pa.array(["x" * 9_000_000]), compression="zstd", use_dictionary=False)
    return altered(bomb, varint(zigzag(9_000_010)), varint(zigzag((1 << 27) - 1 >> 1)), draw)


def lying_dictionary(draw: Draw) -> Bomb:
    """A dictionary announces more entries than it has bytes."""
    column = pa.array([f"{n:08}" for n in range(20_000)])
    bomb = put(draw, column, compression="none")
    return altered(bomb, varint(zigzag(20_000)), varint(zigzag((1 << 20) - 1)), draw)


def lying_lengths(draw: Draw) -> Bomb:
    """A page announces more lengths than it has values."""
    encoding = draw.random.choice(["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
    column = pa.array([f"{n:08}" for n in range(20_000)])
    bomb = put(draw, column, compression="none", use_dictionary=False, column_encoding=encoding)
    data = bytearray(Path(bomb.path).read_bytes())
    # Blocks of 128 in 4: then the count of a page, which is the column's only one.
    place = data.index(varint(128) + varint(4) + varint(20_000)) + 3
    data[place : place + 3] = varint((1 << 21) - 1)
    Path(bomb.path).write_bytes(data)
    return bomb


def large_footer(draw: Draw) -> Bomb:
    table = pa.table({"s": ["x"]}).replace_schema_metadata({"k": "v" * (draw.bound // 64)})
    path = draw.path.with_suffix(".parquet")
    pq.write_table(table, path)
    return Bomb(str(path), "parquet")


def altered(bomb: Bomb, old: bytes, new: bytes, draw: Draw) -> Bomb:
    data = Path(bomb.path).read_bytes()
    assert old in data
    assert len(old) == len(new)
    Path(bomb.path).write_bytes(data.replace(old, new, 1))
    return bomb


def varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


def zigzag(value: int) -> int:
    return value << 1


# -- Text


def line(draw: Draw) -> bytes:
    return b'{"s": "' + b"x" * draw.random.choice([10, 1000]) + b'"}\n'


def packed(draw: Draw, kind: str) -> Bomb:
    """Many short lines, compressed."""
    text = line(draw) if kind == "json" else b"x" * draw.random.choice([10, 1000]) + b"\n"
    data = text * (5 * draw.bound // len(text))
    suffix = draw.random.choice([".gz", ".bz2", ".zst", ".deflate", ".lz4"])
    return written(draw, kind, data, suffix)


def written(draw: Draw, kind: str, data: bytes, suffix: str, **options: str) -> Bomb:
    path = Path(f"{draw.path}.{kind}{suffix}")
    path.write_bytes(PACK[suffix](data))
    return Bomb(str(path), kind, options)


def hadoop(codec: str) -> Callable[[bytes], bytes]:
    def pack(data: bytes) -> bytes:
        made = []
        for start in range(0, len(data), 1 << 18):
            piece = data[start : start + (1 << 18)]
            inner = pa.Codec(codec).compress(piece, asbytes=True)
            made.append(struct.pack(">II", len(piece), len(inner)) + inner)
        return b"".join(made)

    return pack


PACK: Final[dict[str, Callable[[bytes], bytes]]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, 6),
    ".bz2": lambda data: bz2.compress(data),
    ".zst": lambda data: bytes(pa.Codec("zstd").compress(data, asbytes=True)),
    ".deflate": lambda data: zlib.compress(data, 6),
    ".lz4": hadoop("lz4_raw"),
    ".snappy": hadoop("snappy"),
}


def endless_line(draw: Draw, kind: str) -> Bomb:
    body = b"x" * draw.random.randint(draw.bound // 6, draw.bound)
    data = (b'{"s": "' + body + b'"}') if kind == "json" else body
    before = (line(draw) if kind == "json" else b"x\n") * draw.random.choice([0, 1000])
    suffix = draw.random.choice(list(PACK))
    return written(draw, kind, before + data + b"\n", suffix)


def nested_line(draw: Draw) -> Bomb:
    depth = draw.random.randint(draw.bound // 6, draw.bound // 3)
    opening, closing = draw.random.choice([(b"[", b"]"), (b'{"s":', b"}")])
    return written(draw, "json", opening * depth + b"1" + closing * depth + b"\n", "")


def one_record(draw: Draw) -> Bomb:
    data = b"[" + (line(draw)[:-1] + b",\n") * (draw.bound // 16)
    return written(draw, "json", data[: draw.bound] + b"{}]", "", multiLine="true")


def other_encoding(draw: Draw, kind: str) -> Bomb:
    """No byte of a line's end is one."""
    data = ("\u0a0a" * (draw.bound // 4)).encode("utf-16-le")
    return written(draw, kind, data, "", encoding="UTF-16LE")


def copied_line(draw: Draw, kind: str) -> Bomb:
    body = b"x" * draw.random.randint(draw.bound // 6, draw.bound)
    data = b'{"s":"' + body + b'"}\n' if kind == "json" else b"s\n" + body + b"\n"
    return written(draw, kind, data, "")._replace(copied=True)


KINDS: Final[dict[str, list[Callable[[Draw], Bomb]]]] = {
    "parquet": [
        one_dictionary, many_groups, deltas, large_page, nulls, within_lists, lying_page,
        lying_dictionary, lying_lengths, large_footer,
    ],
    "csv": [
        lambda draw: packed(draw, "csv"),
        lambda draw: endless_line(draw, "csv"),
        lambda draw: other_encoding(draw, "csv"),
        lambda draw: copied_line(draw, "csv"),
    ],
    "json": [
        lambda draw: packed(draw, "json"),
        lambda draw: endless_line(draw, "json"),
        nested_line,
        one_record,
        lambda draw: other_encoding(draw, "json"),
        lambda draw: copied_line(draw, "json"),
    ],
}  # fmt: skip


# -- The process that reads


def found(path: str) -> FoundFile:
    """Return a file as a listing has it."""
    return FoundFile(0, b"", "x", path, Path(path).stat().st_size, 0)


async def read(bomb: Bomb, bound: int) -> tuple[str, int]:
    """Return the error, and the rows that came."""

    async def no_spark(job: Job) -> Answer:
        raise AssertionError("Spark was asked")

    settings = Settings(file_decoded_bytes_max=bound, file_record_bytes_max=bound // 8)
    around = ConnectorContext(SystemClock(), settings, Path("/nowhere"), no_spark)
    shape = LISTS if bomb.nested else TEXT
    kind: Any = bomb.format
    reader = FileReader(kind, bomb.options, shape, shape, around, copied=bomb.copied)
    file = found(bomb.path)
    rows = 0
    try:
        async for piece in reader.pieces([file]):
            rows += piece.num_rows
    except MalformedFile as error:
        return str(error), rows
    return "", rows


def resident(name: str) -> int:
    """Return a measure of this process's memory, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def forget_peak() -> int:
    """Make the peak of this process's memory what is resident now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


async def read_all(bombs: list[Bomb], good: Bomb, bound: int) -> None:
    assert (await read(good, bound))[1] == 3
    for bomb in bombs:
        before = forget_peak()
        error, rows = await read(bomb, bound)
        grown = resident("VmHWM") - before
        print(json.dumps([error, rows, grown]), flush=True)
        assert (await read(good, bound))[1] == 3


def judge(format: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """Have a process read bombs of a format; return what is wrong."""
    count, bound = options.bombs, options.bound
    draws = random.Random(f"{options.seed} {format}")
    kinds = KINDS[format]
    chosen = [kinds[number % len(kinds)] for number in range(count)]
    bombs = [
        kind(Draw(draws, bound, folder / f"{format}-{number}"))
        for number, kind in enumerate(chosen)
    ]
    pq.write_table(pa.table({"s": ["a", "b", "c"]}), folder / f"{format}-good.parquet")
    good = Bomb(str(folder / f"{format}-good.parquet"), "parquet")
    given = json.dumps([[list(bomb) for bomb in bombs], list(good), bound])
    done = subprocess.run(
        [sys.executable, __file__, "--read"], input=given, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    wrong = [] if done.returncode == 0 else [f"{format}: the reader ended: {done.stderr[-2000:]}"]
    said = [json.loads(line) for line in done.stdout.splitlines()]
    for bomb, (error, rows, grown) in zip(bombs, said, strict=False):
        name = f"{Path(bomb.path).name} ({Path(bomb.path).stat().st_size} bytes)"
        if not (bomb.path in error and any(setting in error for setting in SETTINGS)):
            wrong.append(f"{name}: {rows} rows came, and the error {error!r}")
        if options.verbose:
            print(f"  {name}: {grown >> 20} MiB, {error[-150:]}")
        if grown > 2 * bound:
            wrong.append(f"{name}: the process grew by {grown} bytes")
    peak = max((grown for _, _, grown in said), default=0)
    print(f"{format}: {len(said)} bombs, {len(wrong)} wrong, {peak >> 20} MiB", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bombs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bound", type=int, default=32 << 20)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--read", action="store_true")
    given = parser.parse_args()
    if given.read:
        bombs, good, bound = json.load(sys.stdin)
        asyncio.run(read_all([Bomb(*each) for each in bombs], Bomb(*good), bound))
        return 0
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for format in KINDS:
            wrong += judge(format, given, Path(folder))
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
