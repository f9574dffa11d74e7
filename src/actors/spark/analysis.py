"""What Spark says of a query: its schema, whether it is deterministic, or why it is refused.

A text is analysed without being executed: `spark.sql` would run a command (``DROP TABLE``, an
``INSERT``) while it is asked what it means. Tables are empty views of the session, which belongs
to one thread and one job at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from actors.errors import InvalidUsage, QueryRejected
from actors.plan.jobs import Analyze, Analyzed
from actors.plan.schema import Schema
from actors.spark.bridge import Bridge
from actors.spark.failures import is_gone, short_text
from actors.spark.rows import schema_of


def empty_frame(bridge: Bridge, schema: Schema) -> DataFrame:
    """No rows, with the columns' types and nullability."""
    return bridge.empty(schema)


def query(bridge: Bridge, text: str) -> DataFrame:
    """The query's frame, analysed and not run.

    Raises `QueryRejected` when the text is a command; Spark's own error when it is refused.
    """
    return bridge.query(text)


def analyze(bridge: Bridge, job: Analyze, nodes_max: int) -> Analyzed:
    """Return the schemas of all texts, and what Spark says of the first one; with its relational
    plan, where one is wanted and its tree has at most `nodes_max` nodes.

    Raises `QueryRejected` or Spark's own error for a text that is refused; a rendition that is
    refused differs.
    """
    schemas: list[Schema] = []
    frames: list[DataFrame] = []
    tables = {name: bridge.numbered(kind, i) for i, (name, kind) in enumerate(job.tables)}
    translation = None
    with bridge.views(tables):
        for text in job.texts:
            found = query(bridge, text)
            schemas.append(output_schema(found.schema))
            frames.append(found)
        volatility = bridge.volatility(job.texts[0], frames[0]) if frames else None
        differences = (_difference(bridge, frames[0], text) for text in job.renditions)
        difference = "" if volatility else next(filter(None, differences), "")
        if job.translate and not volatility:
            translation = bridge.translate(frames[0], job.tables, nodes_max)
    named = bridge.names_volatility
    return Analyzed(job.job_id, tuple(schemas), volatility, named, difference, translation)


def _difference(bridge: Bridge, found: DataFrame, rendition: str) -> str:
    """Return how a rendition's plan differs from that of `found`; empty: it does not."""
    try:
        return bridge.difference(found, query(bridge, rendition))
    except QueryRejected as error:
        return str(error)
    except PySparkException as error:
        if is_gone(error):
            raise
        return f"as written again it is refused: {short_text(str(error))}"


def output_schema(struct: StructType) -> Schema:
    """A query's schema. Raises `QueryRejected` for a column we cannot store."""
    try:
        return schema_of(struct)
    except InvalidUsage as error:
        raise QueryRejected(str(error)) from None


def check_types(made: Schema, wanted: Schema, what: str, *, names: bool) -> None:
    """Raises `QueryRejected` unless columns agree in number, type and (with `names`) name."""
    mine, theirs = _shape(made, names), _shape(wanted, names)
    if mine != theirs:
        raise QueryRejected(f"{what} makes ({_text(made)}); expected were ({_text(wanted)})")


def _shape(schema: Schema, names: bool) -> Sequence[tuple[str, Any]]:
    kinds = schema.arrow().types
    return [(name if names else "", kind) for name, kind in zip(schema.names, kinds, strict=True)]


def _text(schema: Schema) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in schema.columns)
