"""Asks Spark about a query: its schema, the tables it reads, whether it is deterministic, its plan.

Tables are empty views of the session, which belongs to one thread and one job at a time. This
module needs a session whose plans can be seen; `actors.engine.spark.remote_analysis` serves one
behind Spark Connect.
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
    """Return Spark's analysis of a query; if wanted, with its relational plan, which is refused
    over `nodes_max` nodes.

    Raises `QueryRejected` or Spark's own error for a text that is refused, `AccessDenied` for one
    that uses more than it may.
    """
    if job.restricted:
        # Before anything of it is resolved: to look for a path tells whether it is there.
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
            # By their classes now, whatever name they had.
            check_analysed(bridge, found)
        schema = analyzed_schema(job, found.schema)
        used = bridge.tables(found)
        volatility = bridge.volatility(job.sql, found)
        translation = None
        # A volatile query has no delta plan, unless all that it reads of the clock is a temporal
        # filter's.
        if job.translate and (volatility is None or volatility.temporal):
            given = {number: job.tables[number] for number in used}
            translation = bridge.translate(found, given, nodes_max)
    inputs = tuple(job.tables[number][0] for number in used)
    return QueryAnalyzed(job.job_id, schema, inputs, volatility, translation)


def missing_table(error: AnalysisException) -> str:
    """Return the name of the table that Spark does not find. Raises any other error as it is."""
    name: str = (error.getMessageParameters() or {}).get("relationName", "")
    if condition_of(error) != _NO_TABLE or not name:
        raise error
    return name


def output_schema(struct: StructType) -> TableSchema:
    """Return a query's schema. Raises `QueryRejected` for a column of a type that we cannot
    store."""
    return check_stored(schema_of(struct))


def check_stored(
    schema: TableSchema, arrow_of: Callable[[str], pa.DataType] = arrow_type
) -> TableSchema:
    """Return the schema. Raises `QueryRejected` for a column of a type that `arrow_of` does not
    know: by default one that we cannot store."""
    try:
        check_columns(schema, arrow_of)
    except InvalidUsage as error:
        raise QueryRejected(str(error)) from None
    return schema


def result_schema(struct: StructType) -> TableSchema:
    """Return a query's schema where its rows are answered and not stored. Raises `QueryRejected`
    for a column of a type that cannot be answered."""
    return check_stored(schema_of(struct), result_type)


def analyzed_schema(job: AnalyzeStatement, struct: StructType) -> TableSchema:
    """Return the schema of a query that is analysed: one to be maintained is stored, any other
    answered. Raises `QueryRejected`."""
    return output_schema(struct) if job.translate else result_schema(struct)


def check_types(made: TableSchema, wanted: TableSchema, what: str, *, names: bool) -> None:
    """Raise `QueryRejected` unless columns agree in number, type and (with `names`) name."""
    mine, theirs = _shape(made, names), _shape(wanted, names)
    if mine != theirs:
        raise QueryRejected(f"{what} makes ({_text(made)}); expected were ({_text(wanted)})")


def _shape(schema: TableSchema, names: bool) -> Sequence[tuple[str, Any]]:
    kinds = schema.result_arrow().types
    return [(name if names else "", kind) for name, kind in zip(schema.names, kinds, strict=True)]


def _text(schema: TableSchema) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in schema.columns)
