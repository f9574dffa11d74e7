"""What Spark says of a view's text: what its answer depends on, and whether another text means it.

One engine, and one job a text. The rules of the comparison are those of `PlanInspector.java`.
"""

from __future__ import annotations

import pytest
import sqlglot
from engine_child import ChildProcess, job_id  # type: ignore[import-not-found]

from actors.plan.jobs import Analyze, Analyzed, Volatility
from actors.plan.schema import Column, Schema
from actors.views.grouping import spelled_out
from actors.views.parse import DIALECT
from actors.views.renditions import renditions

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

TABLES = (
    (
        "t",
        Schema(
            (
                Column("s", "string"),
                Column("u", "string"),
                Column("n", "int"),
                Column("m", "int"),
                Column("b", "boolean"),
                Column("at", "timestamp"),
                Column("d", "date"),
                Column("current_date", "date"),
            )
        ),
    ),
    ("r", Schema((Column("k", "int"), Column("p", "int"), Column("q", "boolean")))),
)


def asked(child: ChildProcess, text: str, *again: str) -> Analyzed:
    answer = child.ask(Analyze(job_id(), TABLES, (text,), (), again))
    assert isinstance(answer, Analyzed), answer
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
    "exists(SELECT 1 FROM r WHERE r.p > rand())": "rand()",
}
CLOCK = {
    "now()": "now()",
    "current_date()": "current_date()",
    "curdate()": "current_date()",
    "unix_timestamp()": "current_timestamp()",
    "date_add(current_date(), n)": "current_date()",
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
    assert found == Volatility({**VOLATILE, **CLOCK}[call], clock=call in CLOCK)


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
    ],
)
def test_it_is_found_anywhere_in_the_plan(child: ChildProcess, text: str) -> None:
    assert asked(child, text).volatility is not None


SAME = (
    ("SELECT n FROM t WHERE s IS NOT NULL AND m > 1",
     "SELECT n FROM t WHERE 1 < m AND NOT s IS NULL"),
    ("SELECT n FROM t, r WHERE n = k", "SELECT n FROM t CROSS JOIN r WHERE (n = k)"),
    ("SELECT nvl(n, -1) AS x, -128Y AS y FROM t WHERE d > date '2020-01-01'",
     "SELECT coalesce(n, -1), cast(-128 AS tinyint) FROM t WHERE d > cast('2020-01-01' AS date)"),
    ("SELECT timestampadd(month, 1, at) AS x FROM t", "SELECT dateadd(MONTH, 1, at) AS x FROM t"),
    ("WITH c AS (SELECT n FROM t) SELECT n FROM c", "SELECT n FROM (SELECT n FROM t) AS q"),
    ("TABLE t", "SELECT * FROM t"),
    ("SELECT n FROM t WHERE n IN (SELECT k FROM r WHERE p IS NOT NULL)",
     "SELECT n FROM t WHERE n IN (SELECT k FROM r WHERE NOT p IS NULL)"),
)  # fmt: skip
OTHER = (
    ("SELECT instr(s, 'o', 1, 2) AS x FROM t", "SELECT locate('o', s) AS x FROM t"),
    ("SELECT date_trunc(u, at) AS x FROM t", "SELECT date_trunc('u', at) AS x FROM t"),
    ("SELECT at - INTERVAL 1 DAY 2 HOURS AS x FROM t",
     "SELECT at - INTERVAL '1' DAY + INTERVAL '2' HOUR AS x FROM t"),
    ("SELECT n FROM t JOIN r ON b = q < b", "SELECT n FROM t JOIN r ON b = (q < b)"),
    ("SELECT n FROM t WHERE n IN (SELECT k FROM r WHERE p > 1)",
     "SELECT n FROM t WHERE n IN (SELECT k FROM r WHERE p > 2)"),
    ("SELECT count(DISTINCT n) AS x FROM t", "SELECT count(n) AS x FROM t"),
    ("SELECT n FROM t LEFT JOIN r ON n = k", "SELECT n FROM t JOIN r ON n = k"),
    ("SELECT n, m FROM t", "SELECT m, n FROM t"),
    ("SELECT n FROM t", "SELECT nowhere FROM t"),
    ("SELECT n FROM t", "SELECT n FRM t"),
    ("SELECT n FROM t", "DROP VIEW t"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "again"), SAME)
def test_two_writings_of_one_query(child: ChildProcess, text: str, again: str) -> None:
    assert asked(child, text, text, again).difference == ""


@pytest.mark.parametrize(("text", "again"), OTHER)
def test_texts_that_mean_something_else(child: ChildProcess, text: str, again: str) -> None:
    assert asked(child, text, text, again).difference != ""


@pytest.mark.parametrize(
    "written",
    [
        "at - interval 1 day 2 hours",
        "at - interval 1 year 2 months",
        "b = q < b",
        "s || n + m",
    ],
)
def test_a_tree_that_binds_otherwise_than_spark_differs(child: ChildProcess, written: str) -> None:
    text = f"SELECT {written} AS x FROM t JOIN r ON n = k"
    tree = spelled_out(sqlglot.parse_one(text, dialect=DIALECT))
    assert asked(child, text, *renditions(tree)).difference != ""


@pytest.mark.parametrize(
    "written",
    [
        "n & 6 | m ^ 3 & n",
        "NOT n = m AND b OR n BETWEEN m + 1 AND m * 2 - n",
        "- n * m - - 3 % m",
        "s LIKE 'a%' ESCAPE '!' AND s NOT RLIKE 'b' OR n NOT IN (m + 1, -m)",
        "date_trunc(u, at) > trunc(d, u)",
        "instr(s, 'o', 1, 2) DIV 2 - n",
        "at - interval '1' day > timestamp '2020-01-01 00:00:00'",
        "n <=> m AND s IS NOT NULL AND s IS DISTINCT FROM u",
    ],
)
def test_a_tree_that_binds_as_spark_does(child: ChildProcess, written: str) -> None:
    text = f"SELECT {written} AS x FROM t"
    tree = spelled_out(sqlglot.parse_one(text, dialect=DIALECT))
    assert asked(child, text, *renditions(tree)).difference == ""
