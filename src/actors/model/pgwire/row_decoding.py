"""Decodes the stream of a COPY in text, CSV or binary format into Arrow batches.

Theory of operation. Bytes are collected until decoding them pays; then all complete rows are
decoded at a time, and the rest waits. In text and CSV, one pass finds the few characters with a
meaning. Everything else (which ones are escaped or quoted, where fields end) is arithmetic on their
positions. In binary format every position that could start a row is parsed as one; the actual rows
are those on the chain that starts at the first.

The pieces of the stream only affect where batches end. Memory is bounded by `batch_bytes` and the
largest row. Errors are `InvalidClientData` and name the line (in binary, the row) and the column.
The formats are PostgreSQL's, except that a single carriage return does not end a line.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from actors.model.pgwire.column_parsing import ColumnError, parse_binary_column, parse_text_column
from actors.model.pgwire.copy_options import BINARY_SIGNATURE, CopyFormat, RowFormat
from actors.model.pgwire.encoded_values import (
    PAD_BYTES,
    ByteValues,
    Lengths,
    RowMask,
    be32,
    take_values,
)
from actors.model.pgwire.sqlstate import (
    BAD_COPY_FORMAT,
    LIMIT_EXCEEDED,
    NULL_NOT_ALLOWED,
    InvalidClientData,
)
from actors.model.plan.schema import TableColumn, TableSchema

_LINE, _DELIMITER, _RETURN, _QUOTE, _ESCAPE = 1, 2, 3, 4, 5
"""Classes of the characters that have a meaning."""
_NEWLINE: Final = ord("\n")
_NO_PLACES: Final = np.zeros(0, np.int64)


class CopyDecoder(Protocol):
    """Decodes the stream of one COPY."""

    def feed(self, data: bytes | memoryview) -> list[pa.RecordBatch]:
        """Add the next bytes and return the rows that are complete now. Raises
        `InvalidClientData`."""
        ...

    def finish(self) -> list[pa.RecordBatch]:
        """Return the last rows after CopyDone. Raises `InvalidClientData`."""
        ...


def copy_decoder(
    schema: TableSchema,
    form: RowFormat | None = None,
    *,
    batch_bytes: int,
    row_bytes_max: int,
    time_zone: str = "UTC",
) -> CopyDecoder:
    """Return a decoder for a COPY into these columns.

    Batches are made of about `batch_bytes` of the stream. Times without a zone are in `time_zone`.
    """
    form = form or RowFormat()
    kinds: dict[CopyFormat, type[_StreamDecoder]] = {
        CopyFormat.TEXT: _TextDecoder,
        CopyFormat.CSV: _CsvDecoder,
        CopyFormat.BINARY: _BinaryDecoder,
    }
    return kinds[form.kind](schema, form, batch_bytes, row_bytes_max, time_zone)


class _StreamDecoder:
    """Collects bytes. Subclasses decode the complete rows among them."""

    unit = "line"

    def __init__(
        self,
        schema: TableSchema,
        form: RowFormat,
        batch_bytes: int,
        row_bytes_max: int,
        time_zone: str,
    ) -> None:
        self._columns = schema.columns
        self._schema = schema.arrow()
        self._form = form
        self._batch_bytes = batch_bytes
        self._row_bytes_max = row_bytes_max
        self._time_zone = time_zone
        self._buffer = bytearray()
        """Bytes that were not decoded yet."""
        self._decode_at = batch_bytes
        """Number of buffered bytes from which decoding pays."""
        self._ended = False
        """True once the stream's end marker was read."""
        self._done = 0
        """Number of lines (in binary, rows) decoded so far."""

    def feed(self, data: bytes | memoryview) -> list[pa.RecordBatch]:
        """Add the next bytes and return the rows that are complete now."""
        batches: list[pa.RecordBatch] = []
        view = memoryview(data)
        # Split a large piece, so that the memory for decoding stays bounded.
        for start in range(0, len(view), self._batch_bytes):
            if self._ended:
                self._check_after_end(view[start:])
                break
            self._buffer += view[start : start + self._batch_bytes]
            if len(self._buffer) >= self._decode_at:
                batches += self._decode_buffer()
        return batches

    def finish(self) -> list[pa.RecordBatch]:
        """Return the last rows."""
        raise NotImplementedError

    def _check_after_end(self, rest: memoryview) -> None:
        """Raise `InvalidClientData` if nothing may follow the end marker."""

    def _decode_buffer(self) -> list[pa.RecordBatch]:
        size = len(self._buffer)
        data = np.frombuffer(bytes(self._buffer) + bytes(PAD_BYTES), np.uint8)
        used, batch = self._decode(data, size)
        del self._buffer[:used]
        rest = len(self._buffer)
        if self._ended:
            self._check_after_end(memoryview(bytes(self._buffer)))
            self._buffer.clear()
        elif rest > self._row_bytes_max:
            raise InvalidClientData(
                f"COPY {self.unit} {self._done + 1}: it has more than {self._row_bytes_max} bytes",
                LIMIT_EXCEEDED,
            )
        # A row that is longer than a batch is scanned only a few times while it arrives.
        self._decode_at = max(self._batch_bytes, 2 * rest)
        return [batch] if batch is not None and batch.num_rows else []

    def _decode(self, data: ByteValues, size: int) -> tuple[int, pa.RecordBatch | None]:
        """Decode the complete rows. Return the number of bytes that they take, and the rows."""
        raise NotImplementedError

    def _check_nulls(self, array: pa.Array, at: int) -> None:
        """Raise `ColumnError` for a NULL in a column that is NOT NULL."""
        column = self._columns[at]
        if array.null_count and not column.nullable:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            why = f'null value in column "{column.name}" violates not-null constraint'
            raise ColumnError(row, InvalidClientData(why, NULL_NOT_ALLOWED))

    def _error(self, line: int, why: str, sqlstate: str = BAD_COPY_FORMAT) -> InvalidClientData:
        return InvalidClientData(f"COPY {self.unit} {line}: {why}", sqlstate)


# -- text and CSV ----------------------------------------------------------------------------------


class _LineMarks(msgspec.Struct):
    """The characters with a meaning in some lines, as ascending positions."""

    ends: Lengths
    """Delimiters and line ends that end a field."""
    is_line: RowMask
    """Mask of those `ends` that end a line."""
    returns: Lengths
    """Carriage returns that do not belong to a value."""
    dropped: Lengths = _NO_PLACES
    """Characters within fields that do not belong to a value."""
    quotes: Lengths = _NO_PLACES
    escapes: Lengths = _NO_PLACES
    """Backslashes that change the meaning of the next character."""

    def before(self, end: int) -> _LineMarks:
        """Return the marks before a position."""
        count = int(np.searchsorted(self.ends, end))
        cut = [
            places[: int(np.searchsorted(places, end))]
            for places in (self.returns, self.dropped, self.quotes, self.escapes)
        ]
        return _LineMarks(self.ends[:count], self.is_line[:count], *cut)

    def until(self, stop: int) -> tuple[_LineMarks, int]:
        """Return the marks before the end marker, and the end of the last line.

        The text before the marker on its line is a line as well.
        """
        marks = self.before(stop)
        lines = marks.ends[marks.is_line]
        end = int(lines[-1]) + 1 if len(lines) else 0
        if end < stop:
            marks.ends = np.append(marks.ends, stop)
            marks.is_line = np.append(marks.is_line, True)
            end = stop + 1
        return marks, end


class _LineDecoder(_StreamDecoder):
    """Decodes lines of fields, which text and CSV have in common."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._header = self._form.header
        """True until the header line was read."""
        self._classes = bytearray(256)
        self._classes[_NEWLINE] = _LINE
        self._classes[ord("\r")] = _RETURN

    def finish(self) -> list[pa.RecordBatch]:
        """Return the last rows."""
        # CopyDone without any row is an empty table, not an error.
        if self._ended or not self._buffer:
            return []
        # The last line may lack its line end.
        if self._buffer[-1] != _NEWLINE:
            self._buffer += b"\n"
        batches = self._decode_buffer()
        if self._buffer:
            raise self._error(self._done + 1, self._unfinished())
        return batches

    def _unfinished(self) -> str:
        """Return the error for a stream that ends within a row."""
        raise NotImplementedError

    def _marks(self, data: ByteValues, size: int) -> _LineMarks:
        """Find the characters with a meaning."""
        raise NotImplementedError

    def _classified(self, data: ByteValues, size: int) -> ByteValues:
        """Return the class of each character; 0 for those without a meaning."""
        # Several times as fast as a lookup in numpy, which widens each byte to an index.
        return np.frombuffer(data[:size].tobytes().translate(self._classes), np.uint8)

    def _stop(self, data: ByteValues, marks: _LineMarks, size: int) -> int | None:
        """Return the position of the end marker if it is complete."""
        raise NotImplementedError

    def _decode(self, data: ByteValues, size: int) -> tuple[int, pa.RecordBatch | None]:
        marks = self._marks(data, size)
        lines = marks.ends[marks.is_line]
        stop = self._stop(data, marks, size)
        end = int(lines[-1]) + 1 if len(lines) else 0
        if stop is not None:
            self._ended = True
            marks, end = marks.until(stop)
            lines = marks.ends[marks.is_line]
        marks = marks.before(end)
        start = 0
        if self._header and end:
            self._header = False
            start = int(lines[0]) + 1
            if self._form.header_match:
                self._check_header(data[:start].tobytes())
            first = int(np.flatnonzero(marks.is_line)[0]) + 1
            marks.ends, marks.is_line = marks.ends[first:], marks.is_line[first:]
        batch = self._batch(data, marks, start, end) if len(marks.ends) else None
        if stop is not None and not _ends_line(data, stop + 2):
            raise self._error(self._line_at(data, stop), "end-of-copy marker corrupt")
        self._done += int(np.count_nonzero(data[:end] == _NEWLINE))
        return (size if self._ended else end), batch

    def _check_header(self, line: bytes) -> None:
        """Raise `InvalidClientData` if the header line does not have the names of the columns."""
        names = [column.name for column in self._columns]
        texts = TableSchema(tuple(TableColumn(name, "string") for name in names))
        form = msgspec.structs.replace(self._form, header=False, header_match=False)
        decoder = type(self)(texts, form, len(line), self._row_bytes_max, self._time_zone)
        rows = [
            row for batch in [*decoder.feed(line), *decoder.finish()] for row in batch.to_pylist()
        ]
        found = list(rows[0].values()) if rows else []
        for number, (given, name) in enumerate(zip(found, names, strict=False), 1):
            if given != name:
                shown = "a null value" if given is None else f'"{given}"'
                raise self._error(
                    1,
                    f"column name mismatch in header line field {number}: got {shown}, "
                    f'expected "{name}"',
                )

    def _line_at(self, data: ByteValues, place: int) -> int:
        """Return the number of the line at a position."""
        return self._done + int(np.count_nonzero(data[:place] == _NEWLINE)) + 1

    def _batch(self, data: ByteValues, marks: _LineMarks, start: int, end: int) -> pa.RecordBatch:
        count = len(self._columns)
        starts = np.concatenate([[start], marks.ends[:-1] + 1])
        rows, error = self._check_lines(data, marks, starts)
        starts = starts[: rows * count]
        # A carriage return before a line end belongs to it.
        ends = marks.ends - np.isin(marks.ends - 1, marks.returns)
        ends = ends[: rows * count]
        null = self._nulls(data, starts, ends, marks)
        values, firsts, lasts = self._values(data, starts, ends, marks, end)
        lengths = lasts - firsts
        arrays = []
        for at, field in enumerate(self._schema):
            cells = slice(at, rows * count, count)
            none = null[cells]
            texts = take_values(values, firsts[cells], lengths[cells], none if none.any() else None)
            try:
                array = parse_text_column(texts, field.type, self._time_zone)
                self._check_nulls(array, at)
            except ColumnError as wrong:
                line = self._line_at(data, int(starts[wrong.row * count]))
                why = f'column "{field.name}": {wrong.error}'
                error = self._error(line, why, wrong.error.sqlstate)
                # Report the first invalid line: later columns are decoded only up to it.
                rows = wrong.row
                continue
            arrays.append(array)
        if error is not None:
            raise error
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _check_lines(
        self, data: ByteValues, marks: _LineMarks, starts: Lengths
    ) -> tuple[int, InvalidClientData | None]:
        """Return how many lines have a field for each column, and the error of the next line."""
        count = len(self._columns)
        last = np.flatnonzero(marks.is_line)
        wrong = np.flatnonzero(last != np.arange(1, len(last) + 1) * count - 1)
        rows = int(wrong[0]) if len(wrong) else len(last)
        lone = marks.returns[data[marks.returns + 1] != _NEWLINE]
        lone = lone[lone >= starts[0]]
        if len(lone) and (row := int(np.searchsorted(marks.ends[last], lone[0]))) <= rows:
            line = self._line_at(data, int(lone[0]))
            why = "a carriage return within a value must be escaped or quoted"
            return row, self._error(line, why)
        if not len(wrong):
            return rows, None
        fields = int(last[rows]) + 1 - rows * count
        line = self._line_at(data, int(starts[rows * count]))
        if fields < count:
            name = self._columns[fields].name
            return rows, self._error(line, f'missing data for column "{name}"')
        return rows, self._error(line, f"extra data after last expected column, the {count}.")

    def _nulls(
        self, data: ByteValues, starts: Lengths, ends: Lengths, marks: _LineMarks
    ) -> RowMask:
        """Return a mask of the fields that are NULL: those that equal the NULL option byte by byte,
        before unescaping."""
        text = self._form.null
        null: RowMask = ends - starts == len(text)
        for at, byte in enumerate(text):
            # Bytes beyond a short field belong to another one: they are read but ignored.
            null &= data[np.minimum(starts + at, len(data) - 1)] == byte
        return null

    def _values(
        self, data: ByteValues, starts: Lengths, ends: Lengths, marks: _LineMarks, end: int
    ) -> tuple[ByteValues, Lengths, Lengths]:
        """Return (data, starts, ends) of the values, without escapes and quotes."""
        if not len(marks.dropped):
            return data, starts, ends
        keep = np.ones(end + 1, np.bool_)
        keep[marks.dropped] = False
        moved = np.zeros(end + 2, np.int64)
        np.cumsum(keep, out=moved[1:])
        return data[: end + 1][keep], moved[starts], moved[ends]


class _TextDecoder(_LineDecoder):
    """Decodes the text format, in which a backslash changes the meaning of the next character."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._classes[self._form.delimiter[0]] = _DELIMITER
        self._classes[ord("\\")] = _ESCAPE

    def _unfinished(self) -> str:
        return "it ends with a backslash"

    def _marks(self, data: ByteValues, size: int) -> _LineMarks:
        classes = self._classified(data, size)
        places = np.flatnonzero(classes)
        kinds = classes[places]
        escapes = _odd_ones(places[kinds == _ESCAPE])
        if len(escapes):
            escaped = np.zeros(size + 1, np.bool_)
            escaped[escapes + 1] = True
            bare = ~escaped[places]
            places, kinds = places[bare], kinds[bare]
        ends = (kinds == _LINE) | (kinds == _DELIMITER)
        return _LineMarks(
            places[ends],
            kinds[ends] == _LINE,
            places[kinds == _RETURN],
            dropped=escapes,
            escapes=escapes,
        )

    def _stop(self, data: ByteValues, marks: _LineMarks, size: int) -> int | None:
        found = marks.escapes[data[marks.escapes + 1] == ord(".")]
        # The marker may be anywhere in a line. Whether a line end follows is checked when the rows
        # before it are decoded.
        return int(found[0]) if len(found) and _has_mark(data, int(found[0]), size) else None

    def _values(
        self, data: ByteValues, starts: Lengths, ends: Lengths, marks: _LineMarks, end: int
    ) -> tuple[ByteValues, Lengths, Lengths]:
        escapes = marks.escapes
        if len(escapes):
            data = data.copy()
            named = data[escapes + 1]
            data[escapes + 1] = _ESCAPED[named]
            coded = escapes[_IS_CODE[named]]
            if len(coded):
                marks.dropped = np.concatenate([escapes, _put_codes(data, coded)])
        return super()._values(data, starts, ends, marks, end)


def _has_mark(data: ByteValues, place: int, size: int) -> bool:
    """Return whether both characters of a marker, and what follows them, have arrived."""
    return place + 2 + int(data[place + 2] == ord("\r")) < size


def _ends_line(data: ByteValues, place: int) -> bool:
    """Return whether there is a line end at a position."""
    return bool(data[place + (data[place] == ord("\r"))] == _NEWLINE)


def _odd_ones(places: Lengths) -> Lengths:
    """Return every other position, starting with the first, of each run of adjacent positions."""
    if not len(places):
        return places
    begins = np.concatenate([[True], np.diff(places) != 1])
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    odd: Lengths = places[(np.arange(len(places)) - first) % 2 == 0]
    return odd


_ESCAPED: Final = np.arange(256, dtype=np.uint8)
_ESCAPED[list(b"bfnrtv")] = list(b"\b\f\n\r\t\v")
"""Meaning of each character after a backslash."""
_IS_CODE: Final = np.zeros(256, np.bool_)
_IS_CODE[list(b"01234567x")] = True
"""Characters that start a byte code after a backslash: octal or hexadecimal."""
_OCTAL: Final = frozenset(b"01234567")
_HEXADECIMAL: Final = frozenset(b"0123456789abcdefABCDEF")


def _put_codes(data: ByteValues, escapes: Lengths) -> Lengths:
    r"""Replace the backslash of each byte code (``\101``, ``\x41``) by the byte. Return the
    positions of the other characters of the codes."""
    dropped: list[int] = []
    for place in escapes.tolist():
        is_hex = data[place + 1] == ord("x")
        digits, most, first = (_HEXADECIMAL, 2, place + 2) if is_hex else (_OCTAL, 3, place + 1)
        last = first
        while last < first + most and int(data[last]) in digits:
            last += 1
        # Without a hexadecimal digit it is the letter x.
        if last > first:
            code = data[first:last].tobytes()
            data[place + 1] = int(code, 16 if is_hex else 8) & 0xFF
            dropped += range(place + 2, last)
    return np.array(dropped, np.int64)


class _CsvDecoder(_LineDecoder):
    """Decodes CSV, in which characters between quotes have no special meaning."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        form = self._form
        self._classes[form.delimiter[0]] = _DELIMITER
        self._classes[form.escape[0]] = _ESCAPE
        self._classes[form.quote[0]] = _QUOTE

    def _unfinished(self) -> str:
        return "unterminated CSV quoted field"

    def _marks(self, data: ByteValues, size: int) -> _LineMarks:
        classes = self._classified(data, size)
        places = np.flatnonzero(classes)
        kinds = classes[places]
        if self._form.escape != self._form.quote:
            return self._marks_one_by_one(data, size, places, kinds)
        is_quote = kinds == _QUOTE
        quotes = places[is_quote]
        if len(quotes):
            # Characters outside of quotes have an even number of quotes before them.
            outside = (np.cumsum(is_quote) - is_quote) % 2 == 0
            places, kinds = places[outside], kinds[outside]
        ends = (kinds == _LINE) | (kinds == _DELIMITER)
        # Two quotes within quotes are one quote of the value. Keep the first, which seems to close.
        kept = np.zeros(len(quotes), np.bool_)
        kept[1:-1:2] = quotes[2::2] == quotes[1:-1:2] + 1
        return _LineMarks(
            places[ends],
            kinds[ends] == _LINE,
            places[kinds == _RETURN],
            dropped=quotes[~kept],
            quotes=quotes,
        )

    def _stop(self, data: ByteValues, marks: _LineMarks, size: int) -> int | None:
        # Only alone on a line; elsewhere the two characters are a value.
        starts = np.concatenate([[0], marks.ends[marks.is_line] + 1])
        found = starts[(data[starts] == ord("\\")) & (data[starts + 1] == ord("."))]
        for place in found.tolist():
            if _has_mark(data, place, size) and _ends_line(data, place + 2):
                return int(place)
        return None

    def _marks_one_by_one(
        self, data: ByteValues, size: int, places: Lengths, kinds: ByteValues
    ) -> _LineMarks:
        """Find the characters with a meaning if the escape differs from the quote. Then each
        character depends on all those before it."""
        special = (self._form.quote[0], self._form.escape[0])
        quoted, skipped = False, -1
        ends: list[int] = []
        is_line: list[bool] = []
        returns: list[int] = []
        dropped: list[int] = []
        quotes: list[int] = []
        for place, kind in zip(places.tolist(), kinds.tolist(), strict=True):
            if place == skipped:
                continue
            if quoted and kind == _ESCAPE and data[place + 1] in special and place + 1 < size:
                dropped.append(place)
                skipped = place + 1
            elif kind == _QUOTE:
                quoted = not quoted
                dropped.append(place)
                quotes.append(place)
            elif not quoted and kind == _RETURN:
                returns.append(place)
            elif not quoted and kind in (_LINE, _DELIMITER):
                ends.append(place)
                is_line.append(kind == _LINE)
        return _LineMarks(
            np.array(ends, np.int64),
            np.array(is_line, np.bool_),
            np.array(returns, np.int64),
            np.array(dropped, np.int64),
            np.array(quotes, np.int64),
        )

    def _nulls(
        self, data: ByteValues, starts: Lengths, ends: Lengths, marks: _LineMarks
    ) -> RowMask:
        null = super()._nulls(data, starts, ends, marks)
        if len(marks.quotes):
            # A quoted field is a value even if it looks like NULL.
            first = np.searchsorted(marks.quotes, starts)
            null &= first == np.searchsorted(marks.quotes, ends)
        return null


# -- binary ----------------------------------------------------------------------------------------


class _BinaryDecoder(_StreamDecoder):
    """Decodes the binary format: a header, rows with a field count and fields with lengths, and a
    trailer."""

    unit = "row"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._headed = False
        """True once the header was read."""

    def finish(self) -> list[pa.RecordBatch]:
        """Return the last rows."""
        if self._ended:
            return []
        batches = self._decode_buffer()
        if not self._headed:
            raise InvalidClientData("COPY: the stream ends within its header", BAD_COPY_FORMAT)
        # Like PostgreSQL, accept a stream without a trailer, unless it ends within a row.
        if self._buffer:
            raise self._error(self._done + 1, "unexpected end of the stream")
        return batches

    def _check_after_end(self, rest: memoryview) -> None:
        if len(rest):
            raise InvalidClientData("COPY: data after the trailer", BAD_COPY_FORMAT)

    def _decode(self, data: ByteValues, size: int) -> tuple[int, pa.RecordBatch | None]:
        start = 0
        if not self._headed:
            start = self._header_bytes(data, size)
            if not start:
                return 0, None
            self._headed = True
        count = len(self._columns)
        places, lengths, end = _walk_rows(data, start, size, count)
        batch = self._batch(data, places, lengths) if len(places[0]) else None
        self._done += len(places[0])
        return self._check_rest(data, end, size), batch

    def _header_bytes(self, data: ByteValues, size: int) -> int:
        """Return the size of the stream's header; 0 if it is incomplete."""
        head = data[: min(size, 19)].tobytes()
        if head[:11] != BINARY_SIGNATURE[: len(head)]:
            raise InvalidClientData("COPY file signature not recognized", BAD_COPY_FORMAT)
        if size < 19:
            return 0
        flags = int.from_bytes(head[11:15], "big")
        if flags >> 16:
            # The upper bits change what follows; one of them once meant that rows have OIDs.
            raise InvalidClientData(f"COPY: unrecognized flags {flags:#x}", BAD_COPY_FORMAT)
        extension = int.from_bytes(head[15:19], "big")
        if extension > self._row_bytes_max:
            raise InvalidClientData(
                f"COPY: header too large: {extension} bytes (limit {self._row_bytes_max})",
                BAD_COPY_FORMAT,
            )
        return 19 + extension if size >= 19 + extension else 0

    def _batch(
        self, data: ByteValues, places: list[Lengths], lengths: list[Lengths]
    ) -> pa.RecordBatch:
        arrays = []
        rows, error = len(places[0]), None
        for at, field in enumerate(self._schema):
            try:
                array = parse_binary_column(data, places[at][:rows], lengths[at][:rows], field.type)
                self._check_nulls(array, at)
            except ColumnError as wrong:
                why = f'column "{field.name}": {wrong.error}'
                error = self._error(self._done + 1 + wrong.row, why, wrong.error.sqlstate)
                # Report the first invalid row: later columns are decoded only up to it.
                rows = wrong.row
                continue
            arrays.append(array)
        if error is not None:
            raise error
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _check_rest(self, data: ByteValues, end: int, size: int) -> int:
        """Return where the rows end, after checking that an incomplete row or the trailer follows.

        Raises `InvalidClientData` for anything else.
        """
        if size - end < 2:
            return end
        count = int.from_bytes(data[end : end + 2].tobytes(), "big", signed=True)
        if count == -1:
            self._ended = True
            return end + 2
        if count != len(self._columns):
            raise self._error(
                self._done + 1, f"row field count is {count}, expected {len(self._columns)}"
            )
        at = end + 2
        for column in self._columns:
            if size - at < 4:
                break
            length = int.from_bytes(data[at : at + 4].tobytes(), "big", signed=True)
            if length < -1 or length > self._row_bytes_max:
                why = f'column "{column.name}": invalid field size {length}'
                raise self._error(self._done + 1, why)
            at += 4 + max(length, 0)
        return end


def _walk_rows(
    data: ByteValues, start: int, size: int, count: int
) -> tuple[list[Lengths], list[Lengths], int]:
    """Return (positions of each column's values, their lengths, the end of the last complete
    row)."""
    window = np.ndarray((max(size - start - 1, 0),), ">i2", data, offset=start, strides=(1,))
    found = np.flatnonzero(window == count) + start
    # The bytes cannot contain more rows than this. If too many positions look like a row, walk row
    # by row, so that the work stays proportional to the bytes.
    if len(found) > 4 * ((size - start) // (2 + 4 * count) + 1):
        found = np.array(_rows_in_turn(data, start, size, count), np.int64)
    places: list[Lengths] = []
    lengths: list[Lengths] = []
    at, alive = found + 2, np.ones(len(found), np.bool_)
    for _ in range(count):
        alive &= at + 4 <= size
        length = be32(data, np.where(alive, at, 0))
        at = at + 4
        places.append(at)
        lengths.append(length)
        at = at + np.maximum(length, 0)
        alive &= (length >= -1) & (at <= size)
    rows, end = _chained(found[alive], at[alive], start)
    chosen = np.flatnonzero(alive)[rows]
    return [each[chosen] for each in places], [each[chosen] for each in lengths], end


def _chained(starts: Lengths, ends: Lengths, start: int) -> tuple[Lengths, int]:
    """Return which of the candidates form a chain from `start`, and the end of the last one."""
    if len(starts) and int(starts[0]) == start and bool((starts[1:] == ends[:-1]).all()):
        return np.arange(len(starts)), int(ends[-1])
    # Values can contain what looks like a row, so only following the rows from the first one is
    # reliable.
    steps = zip(range(len(starts)), ends.tolist(), strict=True)
    following = dict(zip(starts.tolist(), steps, strict=True))
    rows: list[int] = []
    while (step := following.get(start)) is not None:
        rows.append(step[0])
        start = step[1]
    return np.array(rows, np.int64), start


def _rows_in_turn(data: ByteValues, start: int, size: int, count: int) -> list[int]:
    """Return the positions of complete rows, found one after the other."""
    raw = data[:size].tobytes()
    starts: list[int] = []
    while size - start >= 2 and int.from_bytes(raw[start : start + 2], "big") == count:
        at = start + 2
        for _ in range(count):
            length = int.from_bytes(raw[at : at + 4], "big", signed=True)
            at += 4 + max(length, 0)
            if length < -1 or at > size:
                return starts
        starts.append(start)
        start = at
    return starts
