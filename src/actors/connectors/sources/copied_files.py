"""Reads the files of a copy exactly as `copy-to` wrote them, so that every value is preserved.
Blocking.

A manifest describes the copy, so no options are needed. Spark cannot read these files exactly: its
CSV and JSON readers do not distinguish an empty text from NULL, or read maps whose keys are not
text. Columns are found by name, and read in the types of the target.
"""

from __future__ import annotations

import base64
import binascii
import csv
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.csv

from actors.connectors.sources.json_rows import RowMisfit, RowsOfTable
from actors.model.plan.copy_manifest import CopyManifest
from actors.model.plan.schema import DIFF, TableSchema
from actors.runtime.errors import InvalidUsage

BLOCK_BYTES_MAX: Final = 64 << 20
"""Maximum length of one CSV row."""
LINES_AT_ONCE: Final = 10_000
BYTES_AT_ONCE: Final = 8 << 20
_READING: Final = (pa.ArrowException, OSError, RowMisfit, UnicodeDecodeError)


class UnreadableCopy(Exception):
    """A file of a copy differs from what was written. The text says how."""


def columns_of_copy(manifest: CopyManifest, target: TableSchema) -> TableSchema:
    """Return the target's columns that the copy contains, in the copy's order. Raises
    `InvalidUsage` for a column that the target does not have."""
    own = {column.name.lower(): column for column in target.columns}
    strangers = [c.name for c in manifest.schema if c.name.lower() not in own]
    if strangers:
        raise InvalidUsage(
            f"the copy of {manifest.object} has columns that the table does not have: "
            f"{', '.join(strangers)}"
        )
    return TableSchema(tuple(own[column.name.lower()] for column in manifest.schema))


def read_copied(
    path: str, kind: str, columns: TableSchema, record_bytes_max: int = BLOCK_BYTES_MAX
) -> Iterator[pa.Table]:
    """Yield the rows of a CSV or JSON file with these columns, in pieces.

    A CSV row may be at most `record_bytes_max` long. Raises `UnreadableCopy`.
    """
    try:
        if kind == "csv":
            yield from _read_csv(path, columns, record_bytes_max)
        else:
            yield from _read_json(path, columns)
    except _READING as error:
        raise UnreadableCopy(str(error)) from None


def _read_json(path: str, columns: TableSchema) -> Iterator[pa.Table]:
    rows = RowsOfTable(columns, columns, skips=False, naive=True)
    gathered = 0
    with open(path, "rb") as lines:
        for line in lines:
            rows.add(line, 1)
            gathered += len(line)
            if len(rows) == LINES_AT_ONCE or gathered > BYTES_AT_ONCE:
                yield rows.updates().drop_columns([DIFF])
                rows.clear()
                gathered = 0
    if len(rows):
        yield rows.updates().drop_columns([DIFF])


def _read_csv(path: str, columns: TableSchema, record_bytes_max: int) -> Iterator[pa.Table]:
    shape = columns.arrow()
    # Arrow cannot decode base64, so binary columns are read as text first.
    texts = [pa.string() if pa.types.is_binary(field.type) else field.type for field in shape]
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        reader = pa.csv.open_csv(
            file,
            read_options=pa.csv.ReadOptions(
                use_threads=False, block_size=min(size + 1, BLOCK_BYTES_MAX, record_bytes_max)
            ),
            parse_options=pa.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict(zip(_header(path), texts, strict=True)),
                null_values=[""],
                strings_can_be_null=True,
                # An unquoted empty field is NULL; an empty text is written in quotes.
                quoted_strings_can_be_null=False,
            ),
        )
        for batch in reader:
            arrays = [
                _binary(column) if pa.types.is_binary(field.type) else column
                for field, column in zip(shape, batch.columns, strict=True)
            ]
            yield pa.Table.from_arrays(arrays, schema=shape)


def _header(path: str) -> Sequence[str]:
    """Return the column names in the first line."""
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def _binary(column: pa.Array) -> pa.Array:
    try:
        return pa.array(
            [None if v is None else base64.b64decode(v, validate=True) for v in column.to_pylist()],
            pa.binary(),
        )
    except binascii.Error as error:
        raise RowMisfit(f"invalid base64 in a binary column: {error}") from None
