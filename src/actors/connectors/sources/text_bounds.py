"""Bounds of files of text, before Spark reads them: what they decompress to, and their lines.

Theory of operation. Spark decompresses a file by the suffix of its name, and holds a line as one
text on the heap of its JVM, which ends for everybody when that is full. So a file is read here
first, in pieces and to no purpose but counting: a compressed one whole, another one only if it is
longer than a line may be. It costs a part of what Spark's parser takes.
"""

from __future__ import annotations

import codecs
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Final

import pyarrow as pa

from actors.connectors.sources.parquet_bounds import DecodesTooLarge, DecodingBound

RECORD_SETTING: Final = "file_record_bytes_max"
CHUNK_BYTES: Final = 1 << 20
_CODECS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Arrow's names of Hadoop's codecs, by the suffixes by which Spark chooses them."""
_BLOCK_CODECS: Final = (".snappy", ".lz4")
"""Suffixes of Hadoop's own formats of blocks."""
_BLOCK_BYTES_MAX: Final = 64 << 20
_PLAIN_ENCODINGS: Final = ("utf-8", "ascii", "iso8859-1", "cp1252")
"""Encodings in which a byte of a line's end is nothing else."""


def check_text(
    path: str, kind: str, options: Mapping[str, str], bound: DecodingBound, record_bytes_max: int
) -> None:
    """Raise `DecodesTooLarge` for a CSV or JSON file that decompresses to more than it may, or
    holds a longer record; OSError for one that cannot be read."""
    size = os.stat(path).st_size
    suffix = PurePath(path).suffix.lower()
    packed = _is_packed(path)
    # Nothing in it can be longer than the whole.
    if not packed and size <= record_bytes_max:
        return
    given = {name.lower(): value for name, value in options.items()}
    meter = _LineMeter(_line_ends(given), record_bytes_max, whole=_is_whole(kind, given))
    streams_lines = not (kind == "csv" and _is_true(given, "multiline"))
    decoded = 0
    for chunk in _decompressed(path, suffix):
        decoded += len(chunk)
        if packed:
            bound.check("it", decoded, size)
        if streams_lines:
            meter.see(chunk)


def own_options(
    kind: str, options: Sequence[tuple[str, str]], paths: Sequence[str], record_bytes_max: int
) -> tuple[tuple[str, str], ...]:
    """Return further options for Spark's reader that bound what it holds of a record: in CSV with
    `multiLine` no line's end does."""
    given = {name.lower(): value for name, value in options}
    if kind != "csv" or not _is_true(given, "multiline") or "maxcharspercolumn" in given:
        return ()
    # The parser makes room for so many at once: only where a value can be that long.
    if not any(_is_packed(path) or os.stat(path).st_size > record_bytes_max for path in paths):
        return ()
    return (("maxCharsPerColumn", str(record_bytes_max)),)


def _is_packed(path: str) -> bool:
    return PurePath(path).suffix.lower() in (*_CODECS, *_BLOCK_CODECS, ".deflate")


def longest_line(path: str, record_bytes_max: int) -> None:
    """Raise `DecodesTooLarge` for a plain file with a longer line."""
    if os.stat(path).st_size > record_bytes_max:
        meter = _LineMeter((b"\n",), record_bytes_max, whole=False)
        for chunk in _decompressed(path, ""):
            meter.see(chunk)


class _LineMeter:
    """Finds a line that is too long, in pieces shorter than it."""

    def __init__(self, ends: tuple[bytes, ...], bytes_max: int, *, whole: bool) -> None:
        self._ends = ends
        self._bytes_max = bytes_max
        self._whole = whole
        self._line = 0
        """Bytes since the last end of a line."""

    def see(self, chunk: bytes) -> None:
        """Count a further piece. Raises `DecodesTooLarge`."""
        # Then no line lies within a piece that is too long.
        for start in range(0, len(chunk), self._bytes_max):
            self._see(chunk[start : start + self._bytes_max])

    def _see(self, piece: bytes) -> None:
        places = [] if self._whole else [piece.find(end) for end in self._ends]
        first = min((place for place in places if place >= 0), default=-1)
        self._line += len(piece) if first < 0 else first
        if self._line > self._bytes_max:
            what = "a file that is one record" if self._whole else "a line"
            raise DecodesTooLarge(
                f"{what} has more than {self._bytes_max} bytes ({RECORD_SETTING})"
            )
        if first >= 0:
            self._line = len(piece) - max(piece.rfind(end) for end in self._ends) - 1


def _decompressed(path: str, suffix: str) -> Iterator[bytes]:
    try:
        if suffix == ".deflate":
            yield from _inflated(path)
            return
        if suffix in _BLOCK_CODECS:
            yield from _unblocked(path, suffix)
            return
        with pa.input_stream(path, compression=_CODECS.get(suffix), buffer_size=None) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except (zlib.error, OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DecodesTooLarge(f"it cannot be decompressed: {error}") from None


def _inflated(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            inflater = zlib.decompressobj()
            # In pieces: what one piece of the file decompresses to is not bounded.
            while not inflater.eof:
                yield inflater.decompress(data, CHUNK_BYTES)
                data = inflater.unconsumed_tail or file.read(CHUNK_BYTES)
                if not data and not inflater.eof:
                    return
            # Another stream may follow the first one.
            file.seek(-len(inflater.unused_data), os.SEEK_CUR)


def _unblocked(path: str, suffix: str) -> Iterator[bytes]:
    """Yield what Hadoop's blocks decompress to: each is the length of that, and compressed chunks
    with their own lengths."""
    codec = pa.Codec("snappy" if suffix == ".snappy" else "lz4_raw")
    with open(path, "rb") as file:
        while head := file.read(4):
            left = int.from_bytes(head, "big")
            if left > _BLOCK_BYTES_MAX:
                raise DecodesTooLarge(f"a block announces {left} bytes")
            while left > 0:
                length = int.from_bytes(file.read(4), "big")
                data = file.read(min(length, _BLOCK_BYTES_MAX))
                # Snappy tells the length itself, and of LZ4 a block is one chunk.
                size = _leading_varint(data) if suffix == ".snappy" else left
                if not data or not 0 < size <= left:
                    raise DecodesTooLarge("a block is cut off, or not what it announces")
                chunk = codec.decompress(data, size, asbytes=True)
                yield chunk
                left -= len(chunk)


def _leading_varint(data: bytes) -> int:
    value = 0
    for place, byte in enumerate(data[:5]):
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value
    return 0


def _line_ends(given: Mapping[str, str]) -> tuple[bytes, ...]:
    end = given.get("linesep", "")
    return (end.encode(),) if end else (b"\n", b"\r")


def _is_whole(kind: str, given: Mapping[str, str]) -> bool:
    """Return whether lines do not bound what a reader holds."""
    if kind == "json" and _is_true(given, "multiline"):
        return True
    encoding = given.get("encoding", given.get("charset", "utf-8"))
    try:
        return codecs.lookup(encoding).name not in _PLAIN_ENCODINGS
    except LookupError:
        # Java may know it.
        return True


def _is_true(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "").strip().lower() == "true"
