"""Asks Spark about a query: its schema, the tables it reads, whether it is deterministic, and its
plan.

Tables are empty views of the session, which belongs to one thread and one job at a time. This
module needs a session whose plans are visible; `actors.engine.spark.remote_analysis` handles
sessions behind Spark Connect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql.types import StructType

from actors.engine.spark.failures import condition_of
from actors.engine.spark.rows import check_columns, schema_of
from actors.engine.spark.statement_check import check_analysed, check_parsed
from actors.model.plan.jobs import AnalyzeStatement, ParseText, QueryAnalyzed
from actors.model.plan.schema import TableSchema, arrow_type, result_type
from actors.runtime.errors import InvalidUsage, QueryRejected

if TYPE_CHECKING:
    from actors.engine.spark.bridge import ClassicBridge

_NO_TABLE: Final = "TABLE_OR_VIEW_NOT_FOUND"


def analyze(bridge: ClassicBridge, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed:
    """Return Spark's analysis of a query and, if wanted, its relational plan, which is refused
    above `nodes_max` nodes.

    Raises `QueryRejected` or Spark's own error for a text that is rejected, and `AccessDenied` for
    one that uses more than it may.
    """
    if job.restricted:
        # Before any name is resolved, since looking for a path reveals whether it exists.
        parsed = bridge.parsed(ParseText(job.job_id, job.sql))
        missing = check_parsed(parsed, job.sql, [name for name, _ in job.tables])
        if missing:
            return QueryAnalyzed(job.job_id, missing=missing)
    tables = {name: bridge.numbered(kind, i) for i, (name, kind) in enumerate(job.tables)}
    with bridge.views(tables):
        try:
            # Not `spark.sql`, which would run a command (DROP TABLE, INSERT) instead of analysing
            # it.
            found = bridge.query(job.sql)
        except AnalysisException as error:
            return QueryAnalyzed(job.job_id, missing=missing_table(error))
        if job.restricted:
            # Checked again by class, whatever name a function had.
            check_analysed(bridge, found)
        schema = analyzed_schema(job, found.schema)
        used = bridge.tables(found)
        volatility = bridge.volatility(job.sql, found)
        translation = None
        # A volatile query has no delta plan, unless it uses the clock only in a temporal filter.
        if job.translate and (volatility is None or volatility.temporal):
            given = {number: job.tables[number] for number in used}
            translation = bridge.translate(found, given, nodes_max)
    inputs = tuple(job.tables[number][0] for number in used)
    return QueryAnalyzed(job.job_id, schema, inputs, volatility, translation)


def missing_table(error: AnalysisException) -> str:
    """Return the name of the table that Spark cannot find. Raises any other error unchanged."""
    name: str = (error.getMessageParameters() or {}).get("relationName", "")
    if condition_of(error) != _NO_TABLE or not name:
        raise error
    return name


def output_schema(struct: StructType) -> TableSchema:
    """Return the schema of a query. Raises `QueryRejected` for a column whose type cannot be
    stored."""
    return check_stored(schema_of(struct))


def check_stored(
    schema: TableSchema, arrow_of: Callable[[str], pa.DataType] = arrow_type
) -> TableSchema:
    """Return the schema. Raises `QueryRejected` for a column whose type `arrow_of` does not
    support; by default, one that cannot be stored."""
    try:
        check_columns(schema, arrow_of)
    except InvalidUsage as error:
        raise QueryRejected(str(error)) from None
    return schema


def result_schema(struct: StructType) -> TableSchema:
    """Return the schema of a query whose rows are returned but not stored. Raises `QueryRejected`
    for a column whose type cannot be returned."""
    return check_stored(schema_of(struct), result_type)


def analyzed_schema(job: AnalyzeStatement, struct: StructType) -> TableSchema:
    """Return the schema of an analysed query: for a view its columns are stored, for any other
    query only returned. Raises `QueryRejected`."""
    return output_schema(struct) if job.translate else result_schema(struct)


def check_types(made: TableSchema, wanted: TableSchema, what: str, *, names: bool) -> None:
    """Raise `QueryRejected` unless the columns agree in number, type and (with `names`) name."""
    mine, theirs = _shape(made, names), _shape(wanted, names)
    if mine != theirs:
        raise QueryRejected(f"{what} makes ({_text(made)}), expected ({_text(wanted)})")


def _shape(schema: TableSchema, names: bool) -> Sequence[tuple[str, Any]]:
    kinds = schema.result_arrow().types
    return [(name if names else "", kind) for name, kind in zip(schema.names, kinds, strict=True)]


def _text(schema: TableSchema) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in schema.columns)
