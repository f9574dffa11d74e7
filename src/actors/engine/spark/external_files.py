"""Reads files of external systems as rows through Spark, for file sources and copies from files.

Paths are taken literally and one by one: no globs, no partition columns from names of folders, and
no file is skipped because it is torn or missing. Everything else is up to Spark's reader: its
options, its modes for malformed records, its inference of columns.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import Column, DataFrame, functions
from pyspark.sql.types import StructType

from actors.engine.spark.analysis import output_schema
from actors.engine.spark.answer_files import too_large, write_files
from actors.engine.spark.bridge import SessionBridge
from actors.engine.spark.failures import short_text
from actors.engine.spark.fragments import spark_struct
from actors.engine.spark.rows import rows_done
from actors.engine.spark.steps import ThreadSlot
from actors.model.plan.jobs import InferFiles, QueryAnalyzed, RowsDone, TakeFiles
from actors.model.plan.schema import quote
from actors.runtime.errors import DefiniteError, InvalidUsage
from actors.runtime.threshold_probes import COLLECTED

_OPTIONS: Final = {
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
}
_READING: Final = re.compile(r"while reading file (.+)")
_END: Final = re.compile(r"\.?(?:\s|$)")
_SPECIAL: Final = re.compile(r"[\\{}\[\]*?]")
_LINKS_MAX: Final = 10
_UNREADABLE: Final = re.compile(r"\[(?:FAILED_READ_FILE|MALFORMED_RECORD_IN_PARSING)\b")


def read_files(slot: ThreadSlot, job: TakeFiles) -> RowsDone:
    """Return the rows of the files. Raises `DefiniteError` for what cannot be read, with the path
    of the file first if Spark names it, and Spark's own errors."""
    started = time.perf_counter()
    bridge = slot.sessions.get((), small=False)
    wanted = job.read.arrow()
    taken = pa.schema([(field.name, _type_as_taken(field, job.format)) for field in wanted])
    struct = StructType(list(spark_struct(taken).fields))
    found = _frame(bridge, job.paths, job.format, job.options, struct)
    found = found.select(*(_meant(name, taken, wanted, job.options) for name in job.keep))
    columns = {column.name: column for column in job.read.columns}
    # The files may have their columns in another order.
    shape = type(job.read)(tuple(columns[name] for name in job.keep))
    slot.check()
    try:
        large = job.into_files and COLLECTED.crossed(job.bytes > slot.collected_bytes_max)
        if not large:
            try:
                table = bridge.collect(found, shape.arrow)
            except Exception as error:
                if not too_large(error):
                    raise
                if not job.into_files:
                    raise InvalidUsage(
                        "the rows of the files take more than spark.driver.maxResultSize: read"
                        " fewer files at a time"
                    ) from None
                large = True
        if large:
            files = write_files(found, None, slot.out)
            rows = sum(file.rows for file in files)
            return RowsDone(job.job_id, rows, spark_ms=_since(started), files=files)
    except Exception as error:
        raise _named(error, job.paths) from error
    return rows_done(job.job_id, table, slot.out, slot.inline_bytes_max, _since(started))


def _type_as_taken(field: pa.Field, kind: str) -> pa.DataType:
    """Return the type that Spark's reader reads from the files, if it cannot read the column's own
    type: binary values in CSV are base64 text, as in JSON; keys of a JSON map are text. Raises
    `InvalidUsage` for keys that cannot be converted from their text."""
    if kind == "csv" and pa.types.is_binary(field.type):
        return pa.string()
    return _with_text_keys(field.type, field.name) if kind == "json" else field.type


def _with_text_keys(kind: pa.DataType, column: str) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_with_text_keys(kind.value_type, column))
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, _with_text_keys(each.type, column)) for each in kind])
    if not pa.types.is_map(kind):
        return kind
    if pa.types.is_nested(kind.key_type) or pa.types.is_binary(kind.key_type):
        raise InvalidUsage(
            f"column {column}: Spark cannot read JSON maps with keys of type {kind.key_type}"
        )
    return pa.map_(pa.string(), _with_text_keys(kind.item_type, column))


def _meant(
    name: str, taken: pa.Schema, wanted: pa.Schema, options: Sequence[tuple[str, str]]
) -> Column:
    """Return a column, converted from the type that was read to its own type."""
    column = functions.col(quote(name))
    if taken.field(name).type == wanted.field(name).type:
        return column
    if pa.types.is_binary(wanted.field(name).type):
        strict = dict(options).get("mode", "").upper() == "FAILFAST"
        decode = functions.to_binary if strict else functions.try_to_binary
        return decode(column, functions.lit("base64")).alias(name)
    (field,) = spark_struct(pa.schema([wanted.field(name)])).fields
    return column.cast(field.dataType).alias(name)


def infer_files(slot: ThreadSlot, job: InferFiles) -> QueryAnalyzed:
    """Return the columns of the files as Spark infers them. Raises `QueryRejected` for a type that
    cannot be stored, and Spark's own errors."""
    bridge = slot.sessions.get((), small=False)
    found = _frame(bridge, job.paths, job.format, job.options, None)
    return QueryAnalyzed(job.job_id, output_schema(found.schema))


def _frame(
    bridge: SessionBridge,
    paths: Sequence[str],
    kind: str,
    options: Sequence[tuple[str, str]],
    struct: StructType | None,
) -> DataFrame:
    # Our options come last: whatever the user sets, a torn or missing file is an error.
    reader = bridge.session.read.format(kind).options(**{**dict(options), **_OPTIONS})
    if struct is not None:
        reader = reader.schema(struct)
    return reader.load([_literal(path) for path in paths])


def _named(error: Exception, paths: Sequence[str]) -> Exception:
    """Return an error that names the file at fault; the same error if none is named."""
    link: BaseException | None = error
    texts: list[str] = []
    while link is not None and len(texts) < _LINKS_MAX:
        texts.append(str(link))
        link = link.__cause__
    for text in texts:
        fault = _UNREADABLE.search(text)
        if fault is None:
            continue
        named = _READING.search(text)
        path = next((p for p in paths if named and _says(named[1], p)), None)
        malformed = text.rfind("[MALFORMED_RECORD_IN_PARSING")
        said = short_text(text[malformed if malformed >= 0 else fault.start() :])
        return DefiniteError(said if path is None else f"{path}: {said}")
    return error


def _says(said: str, path: str) -> bool:
    """Return whether Spark's text after the word `file` is this path, plain or as a URI."""
    plain = path.lstrip("/")
    for text in (said, unquote(said)):
        found = text.removeprefix("file:").lstrip("/")
        if found.startswith(plain) and _END.match(found[len(plain) :]):
            return True
    return False


def _literal(path: str) -> str:
    """Return a pattern that matches only this file."""
    # Spark treats a path as a pattern. Switching patterns off does not help: each path that looks
    # like a pattern would then stand for all of them.
    return "file://" + _SPECIAL.sub(r"\\\g<0>", path)


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
