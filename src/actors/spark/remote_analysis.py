"""Asks a Spark Connect server about a query, and our own Spark for its plan.

The server is the authority for the schema, and for what is refused. The tables that a text reads
are found in the server's own words for its analysed plan: our tables are views there, and only
relations of a catalog have a qualified name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.errors import AnalysisException

from actors.errors import QueryRejected
from actors.plan.jobs import AnalyzeStatement, QueryAnalyzed, QueryTranslation, VolatileCall
from actors.spark.analysis import missing_table, output_schema
from actors.spark.spark_schemas import bare_name
from actors.spark.volatile_words import has_free_choice, volatility_of

if TYPE_CHECKING:
    from pyspark.sql.connect.dataframe import DataFrame

    from actors.spark.connect import ConnectBridge

_ANALYSED: Final = re.compile(
    r"^== Analyzed Logical Plan ==$(.*?)^== Optimized", re.DOTALL | re.MULTILINE
)
_VIEW: Final = re.compile(r"View \((`(?:[^`]|``)*`), ")
_OF_A_CATALOG: Final = re.compile(r"SubqueryAlias ((?:`(?:[^`]|``)*`|[^\s`.]+)\.\S+)")


def analyze_remotely(bridge: ConnectBridge, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed:
    """Return the analysis of a query; see `actors.spark.analysis.analyze`."""
    with bridge.views({name: bridge.empty(schema) for name, schema in job.tables}):
        try:
            found = bridge.query(job.sql)
        except AnalysisException as error:
            return QueryAnalyzed(job.job_id, missing=missing_table(error))
        plan = _ANALYSED.search(found._explain_string(extended=True))
        assert plan is not None
        read = [bare_name(name) for name in _VIEW.findall(plan[1])]
    foreign = _OF_A_CATALOG.search(plan[1])
    if foreign is not None:
        raise QueryRejected(
            f"the query reads what is none of the service's tables: {foreign[1]}; "
            "take it in as a source first"
        )
    # Spark compares names without regard to case, as `spark.sql.caseSensitive` is false.
    known = {name.lower(): (name, schema) for name, schema in job.tables}
    for name in read:  # the server keeps some views longer than the call that brings them
        if name.lower() not in known:
            return QueryAnalyzed(job.job_id, missing="`" + name.replace("`", "``") + "`")
    tables = tuple(dict.fromkeys(known[name.lower()] for name in read))
    schema = output_schema(found.schema)
    told = bridge.reader.read(msgspec.structs.replace(job, tables=tables), nodes_max)
    if isinstance(told, QueryAnalyzed):
        if told.schema == schema:
            return told
        told = "our own Spark finds other columns than the server"
    translation = QueryTranslation(None, told) if job.translate else None
    sources = tuple(name for name, _ in tables)
    return QueryAnalyzed(job.job_id, schema, sources, _by_words(bridge, job, found), translation)


def _by_words(
    bridge: ConnectBridge, job: AnalyzeStatement, found: DataFrame
) -> VolatileCall | None:
    """Return what makes the answer no function of its tables, judged without its plan."""
    columns = {column.name.lower() for _, schema in job.tables for column in schema.columns}
    told = volatility_of(job.sql, columns)
    if told is None and not bridge.deterministic(found) and not has_free_choice(job.sql):
        return VolatileCall("the query")
    return told
