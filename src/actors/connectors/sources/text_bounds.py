"""Limits text files before Spark reads them: their decompressed size and the length of their lines.

Theory of operation. Spark decompresses a file according to its suffix, and holds each line as one
string on the heap of its JVM, which fails for all users when it is full. So the file is first read
here in pieces, only to count: a compressed file completely, another one only if it is longer than a
line may be. This takes a fraction of the time of Spark's parser.
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
"""Arrow's names of the codecs, by the suffixes that Hadoop recognizes."""
_BLOCK_CODECS: Final = (".snappy", ".lz4")
"""Suffixes of Hadoop's own block formats."""
_BLOCK_BYTES_MAX: Final = 64 << 20
_PLAIN_ENCODINGS: Final = ("utf-8", "ascii", "iso8859-1", "cp1252")
"""Encodings in which the bytes of a line ending never occur within another character."""


def check_text(
    path: str, kind: str, options: Mapping[str, str], bound: DecodingBound, record_bytes_max: int
) -> None:
    """Raise `DecodesTooLarge` for a CSV or JSON file that exceeds the limits when decompressed, or
    has a record longer than `record_bytes_max`. Raises OSError if it cannot be read."""
    size = os.stat(path).st_size
    suffix = PurePath(path).suffix.lower()
    packed = _is_packed(path)
    # No record can be longer than the file.
    if not packed and size <= record_bytes_max:
        return
    given = {name.lower(): value for name, value in options.items()}
    meter = _LineMeter(_line_ends(given), record_bytes_max, whole=_is_whole(kind, given))
    streams_lines = not (kind == "csv" and _is_true(given, "multiline"))
    decoded = 0
    for chunk in _decompressed(path, suffix):
        decoded += len(chunk)
        if packed:
            bound.check("the file", decoded, size)
        if streams_lines:
            meter.see(chunk)


def own_options(
    kind: str, options: Sequence[tuple[str, str]], paths: Sequence[str], record_bytes_max: int
) -> tuple[tuple[str, str], ...]:
    """Return additional options for Spark's reader that limit its memory per record. They are
    needed for CSV with `multiLine`, where line endings do not limit a record."""
    given = {name.lower(): value for name, value in options}
    if kind != "csv" or not _is_true(given, "multiline") or "maxcharspercolumn" in given:
        return ()
    # The parser allocates this many characters in advance, so set it only if a value can be that
    # long.
    if not any(_is_packed(path) or os.stat(path).st_size > record_bytes_max for path in paths):
        return ()
    return (("maxCharsPerColumn", str(record_bytes_max)),)


def _is_packed(path: str) -> bool:
    return PurePath(path).suffix.lower() in (*_CODECS, *_BLOCK_CODECS, ".deflate")


def longest_line(path: str, record_bytes_max: int) -> None:
    """Raise `DecodesTooLarge` for an uncompressed file with a line longer than
    `record_bytes_max`."""
    if os.stat(path).st_size > record_bytes_max:
        meter = _LineMeter((b"\n",), record_bytes_max, whole=False)
        for chunk in _decompressed(path, ""):
            meter.see(chunk)


class _LineMeter:
    """Detects a line that is too long, reading pieces shorter than the limit."""

    def __init__(self, ends: tuple[bytes, ...], bytes_max: int, *, whole: bool) -> None:
        self._ends = ends
        self._bytes_max = bytes_max
        self._whole = whole
        self._line = 0
        """Number of bytes since the last line ending."""

    def see(self, chunk: bytes) -> None:
        """Count another piece. Raises `DecodesTooLarge`."""
        # Pieces are at most as long as the limit, so no line within a piece exceeds it.
        for start in range(0, len(chunk), self._bytes_max):
            self._see(chunk[start : start + self._bytes_max])

    def _see(self, piece: bytes) -> None:
        places = [] if self._whole else [piece.find(end) for end in self._ends]
        first = min((place for place in places if place >= 0), default=-1)
        self._line += len(piece) if first < 0 else first
        if self._line > self._bytes_max:
            what = "a file that is a single record" if self._whole else "a line"
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
        raise DecodesTooLarge(f"the file cannot be decompressed: {error}") from None


def _inflated(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            inflater = zlib.decompressobj()
            # In pieces, because there is no limit to what one piece of the file decompresses to.
            while not inflater.eof:
                yield inflater.decompress(data, CHUNK_BYTES)
                data = inflater.unconsumed_tail or file.read(CHUNK_BYTES)
                if not data and not inflater.eof:
                    return
            # Another stream may follow the first one.
            file.seek(-len(inflater.unused_data), os.SEEK_CUR)


def _unblocked(path: str, suffix: str) -> Iterator[bytes]:
    """Yield the decompressed contents of Hadoop's blocks. A block starts with its decompressed
    length, followed by compressed chunks with their own lengths."""
    codec = pa.Codec("snappy" if suffix == ".snappy" else "lz4_raw")
    with open(path, "rb") as file:
        while head := file.read(4):
            left = int.from_bytes(head, "big")
            if left > _BLOCK_BYTES_MAX:
                raise DecodesTooLarge(f"a compressed block declares {left} bytes")
            while left > 0:
                length = int.from_bytes(file.read(4), "big")
                data = file.read(min(length, _BLOCK_BYTES_MAX))
                # Snappy data contains its length; with LZ4, a block is a single chunk.
                size = _leading_varint(data) if suffix == ".snappy" else left
                if not data or not 0 < size <= left:
                    raise DecodesTooLarge(
                        "a compressed block is truncated, or does not match its declared length"
                    )
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
    """Return whether the reader's memory is not limited by line endings."""
    if kind == "json" and _is_true(given, "multiline"):
        return True
    encoding = given.get("encoding", given.get("charset", "utf-8"))
    try:
        return codecs.lookup(encoding).name not in _PLAIN_ENCODINGS
    except LookupError:
        # Java may know this encoding.
        return True


def _is_true(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "").strip().lower() == "true"
