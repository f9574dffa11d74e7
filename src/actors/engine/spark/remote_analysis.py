"""Asks a Spark Connect server about a query, and the engine's own Spark for its plan.

The server is the authority for the schema, and for what is rejected. The tables that a text reads
are taken from the server's text of its analysed plan: Penstock's tables are views there, and only
relations of a catalog have a qualified name. If the engine has no Java of its own, volatile calls
are found by the words of the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.errors import AnalysisException

from actors.engine.spark.analysis import analyzed_schema, missing_table
from actors.engine.spark.fragments import bare_name
from actors.engine.spark.statement_check import check_parsed
from actors.model.plan.jobs import (
    AnalyzeStatement,
    ParseText,
    QueryAnalyzed,
    QueryTranslation,
    VolatileCall,
)
from actors.model.plan.schema import quote
from actors.runtime.errors import QueryRejected

if TYPE_CHECKING:
    from pyspark.sql.connect.dataframe import DataFrame

    from actors.engine.spark.connect import ConnectBridge

# -- volatile calls, found by words ----------------------------------------------------------------

_CLOCK_WORDS: Final = """
now current_timestamp current_date curdate localtimestamp current_time localtime
current_user user session_user current_database current_schema current_catalog
current_timezone version
"""
_CLOCK: Final = frozenset(_CLOCK_WORDS.split())
_CHANCE_WORDS: Final = """
rand random randn randstr uniform uuid shuffle monotonically_increasing_id
spark_partition_id input_file_name input_file_block_start input_file_block_length
reflect java_method try_reflect aes_encrypt
"""
_CHANCE: Final = frozenset(_CHANCE_WORDS.split())
_ORDER_DEPENDENT_WORDS: Final = """
first first_value last last_value any_value collect_list array_agg collect_set listagg
string_agg mode max_by min_by
"""
_ORDER_DEPENDENT: Final = frozenset(_ORDER_DEPENDENT_WORDS.split())
"""Aggregates whose result Spark may choose. They are not deterministic, but permitted."""
_BARE_WORDS: Final = """
current_catalog current_date current_schema current_time current_timestamp current_user
localtime localtimestamp session_user user
"""
_BARE: Final = frozenset(_BARE_WORDS.split())
"""Calls that may be written without parentheses."""
_MOVING_DAY: Final = re.compile(
    r"""(['"])\s*(?:now|today|yesterday|tomorrow)\b[^'"]*\1""", re.IGNORECASE
)
"""Literals that may denote the current day. This matches too many, since the text does not show
what a literal is compared with."""
_QUOTED: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?:[^`]|``)*`|--[^\n]*|/\*.*?\*/""", re.DOTALL
)
_CALLED: Final = re.compile(r"([a-z_]\w*)\s*\(")
_WORD: Final = re.compile(r"[a-z_]\w*")
_NOW: Final = re.compile(r"\bunix_timestamp\s*\(\s*\)")


def volatility_of(sql: str, columns: Collection[str] = ()) -> VolatileCall | None:
    """Return the first volatile call of a text, or None. `columns`: the names, in lower case, of
    all columns that it may read.

    It serves engines that do not show Catalyst's own flags: a server behind Spark Connect without a
    local Java, and the in-memory engine. It looks for names of functions that are called, words
    that Spark treats as calls unless a column has that name, and literals that denote the current
    day. An engine in the child's own JVM inspects the analysed plan instead
    (``PlanInspector.java``).
    """
    moving = _MOVING_DAY.search(sql)
    if moving is not None:
        return VolatileCall(f"the literal {moving.group(0)}", clock=True)
    bare = _bare(sql)
    words = set(_WORD.findall(bare))
    # Spark first tries to resolve a bare word as a column.
    names = _called(bare) | (words & _BARE).difference(columns)
    for name in sorted(names & (_CLOCK | _CHANCE)):
        return VolatileCall(f"{name}()", clock=name in _CLOCK)
    # With an argument it is a function of that argument.
    if _NOW.search(bare):
        return VolatileCall("unix_timestamp()", clock=True)
    if "tablesample" in words:
        return VolatileCall("TABLESAMPLE")
    return None


def has_free_choice(sql: str) -> bool:
    """Return whether a text calls an aggregate that may choose among the rows of a group."""
    return bool(_called(_bare(sql)) & _ORDER_DEPENDENT)


def _bare(sql: str) -> str:
    """Return the text in lower case, without literals, quoted names and comments."""
    return _QUOTED.sub("''", sql).lower()


def _called(bare: str) -> set[str]:
    return set(_CALLED.findall(bare))


# -- the server's analysis -------------------------------------------------------------------------

_ANALYSED: Final = re.compile(
    r"^== Analyzed Logical Plan ==$(.*?)^== Optimized", re.DOTALL | re.MULTILINE
)
_VIEW: Final = re.compile(r"View \((`(?:[^`]|``)*`), ")
_OF_A_CATALOG: Final = re.compile(r"SubqueryAlias ((?:`(?:[^`]|``)*`|[^\s`.]+)\.\S+)")


def analyze_remotely(bridge: ConnectBridge, job: AnalyzeStatement, nodes_max: int) -> QueryAnalyzed:
    """Return the analysis of a query (see `actors.engine.spark.analysis.analyze`).

    A restricted query is checked by the engine's own Spark, before the server is asked and, by its
    own analysis, afterwards. Raises `AccessDenied` for one that it cannot read.
    """
    if job.restricted:
        parsed = bridge.parsed(ParseText(job.job_id, job.sql, conf=job.conf))
        missing = check_parsed(parsed, job.sql, [name for name, _ in job.tables])
        if missing:
            return QueryAnalyzed(job.job_id, missing=missing)
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
            f"the query reads {foreign[1]}, which is not a table of the service; use CREATE SOURCE"
            " to ingest it first"
        )
    # Spark compares names case-insensitively, since `spark.sql.caseSensitive` is false.
    known = {name.lower(): (name, schema) for name, schema in job.tables}
    for name in read:  # The server keeps some views longer than the call that sends them.
        if name.lower() not in known:
            return QueryAnalyzed(job.job_id, missing=quote(name))
    tables = tuple(dict.fromkeys(known[name.lower()] for name in read))
    schema = analyzed_schema(job, found.schema)
    analyzed = bridge.reader.read(msgspec.structs.replace(job, tables=tables), nodes_max)
    if isinstance(analyzed, QueryAnalyzed):
        if analyzed.schema == schema:
            return analyzed
        analyzed = "the engine's own Spark finds different columns than the server"
    translation = QueryTranslation(None, analyzed) if job.translate else None
    inputs = tuple(name for name, _ in tables)
    return QueryAnalyzed(job.job_id, schema, inputs, _by_words(bridge, job, found), translation)


def _by_words(
    bridge: ConnectBridge, job: AnalyzeStatement, found: DataFrame
) -> VolatileCall | None:
    """Return what makes the result depend on more than its tables, judged without the plan."""
    columns = {column.name.lower() for _, schema in job.tables for column in schema.columns}
    volatility = volatility_of(job.sql, columns)
    if volatility is None and not bridge.deterministic(found) and not has_free_choice(job.sql):
        return VolatileCall("the query")
    return volatility
