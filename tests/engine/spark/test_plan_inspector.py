"""What Spark says of a view's text: what else than its tables its answer depends on."""

from __future__ import annotations

import pytest
from engine_child import ChildProcess, job_id  # type: ignore[import-not-found]

from actors.model.plan.jobs import AnalyzeStatement, QueryAnalyzed, VolatileCall
from actors.model.plan.schema import TableColumn, TableSchema

pytestmark = pytest.mark.spark

TABLES = (
    (
        "t",
        TableSchema(
            (
                TableColumn("s", "string"),
                TableColumn("u", "string"),
                TableColumn("n", "int"),
                TableColumn("m", "int"),
                TableColumn("b", "boolean"),
                TableColumn("at", "timestamp"),
                TableColumn("d", "date"),
                TableColumn("current_date", "date"),
            )
        ),
    ),
    (
        "r",
        TableSchema(
            (TableColumn("k", "int"), TableColumn("p", "int"), TableColumn("q", "boolean"))
        ),
    ),
)


def asked(child: ChildProcess, text: str) -> QueryAnalyzed:
    answer = child.ask(AnalyzeStatement(job_id(), TABLES, text))
    assert isinstance(answer, QueryAnalyzed), answer
    return answer


VOLATILE = {
    "rand()": "rand()",
    "uniform(1, 3, 5)": "uniform()",
    "shuffle(array(n), 1)": "shuffle()",
    "input_file_name()": "input_file_name()",
    "reflect('java.util.UUID', 'randomUUID')": "reflect()",
    "base64(aes_encrypt(s, u))": "aes_encrypt()",
    "aes_encrypt(s, u, 'GCM')": "aes_encrypt()",
    "aes_encrypt(s, u, u)": "aes_encrypt()",
    "transform(array(1), x -> rand())": "rand()",
    "n IN (SELECT id FROM range(3) WHERE randn() > 0)": "randn()",
    "now() > timestamp_seconds(rand())": "rand()",
    "exists(SELECT 1 FROM r WHERE r.p > rand())": "rand()",
}
FOLLOWED = {
    "now()": "now()",
    "current_date()": "current_date()",
    "curdate()": "current_date()",
    "unix_timestamp()": "current_timestamp()",
    "date_add(current_date(), n)": "current_date()",
    "localtimestamp()": "localtimestamp()",
}
"""Calls of the clock, which a temporal filter may follow."""
CLOCK = {
    **FOLLOWED,
    "now() > timestamp 'now'": "the literal timestamp'now'",
    "date_format(now(), current_timezone())": "current_timezone()",
    "current_user": "current_user()",
    "current_database()": "current_schema()",
    "current_timezone()": "current_timezone()",
    "version()": "version()",
    "timestamp 'now'": "the literal timestamp'now'",
    "date\n  /* at */ 'Today'": "the literal date'Today'",
    "timestamp_ntz ' tomorrow '": "the literal timestamp_ntz' tomorrow '",
    "cast('now' AS timestamp)": "the timestamp 'now'",
    "cast(concat('yester', 'day') AS date)": "the date 'yesterday'",
    "to_date('today')": "the date 'today'",
    "at > 'today'": "the timestamp 'today'",
    "(SELECT max(p) FROM r WHERE date '2020-01-01' < 'tomorrow')": "the date 'tomorrow'",
}
STEADY = (
    "current_date",
    "t.current_date",
    "aes_encrypt(s, u, 'ECB')",
    "aes_encrypt(s, u, 'GCM', 'DEFAULT', unhex('000000000000000000000000'))",
    "unix_timestamp(at)",
    "timestamp 'epoch'",
    "s LIKE 'now'",
    "s = 'today'",
    "to_date(s)",
    "first(s)",
    "max_by(s, n)",
)


@pytest.mark.parametrize("call", [*VOLATILE, *CLOCK])
def test_what_makes_an_answer_no_function_of_its_tables(child: ChildProcess, call: str) -> None:
    found = asked(child, f"SELECT {call} AS x FROM t").volatility
    told = {**VOLATILE, **CLOCK}[call]
    assert found == VolatileCall(told, clock=call in CLOCK, temporal=call in FOLLOWED)


@pytest.mark.parametrize("call", STEADY)
def test_what_its_tables_determine(child: ChildProcess, call: str) -> None:
    assert asked(child, f"SELECT {call} AS x FROM t").volatility is None


@pytest.mark.parametrize(
    "text",
    [
        "WITH c AS (SELECT rand() AS x FROM t) SELECT 1 AS x FROM c",
        "SELECT n FROM t TABLESAMPLE (10 PERCENT)",
        "SELECT n FROM t ORDER BY rand()",
        "SELECT n, sum(m) AS s FROM t GROUP BY n HAVING sum(m) > rand()",
        "SELECT n FROM t EXCEPT SELECT n FROM t WHERE rand() > 0",
        "SELECT at FROM t UNION ALL SELECT * FROM VALUES (now())",
    ],
)
def test_it_is_found_anywhere_in_the_plan(child: ChildProcess, text: str) -> None:
    assert asked(child, text).volatility is not None
