"""What a restricted statement may reach, as Spark parses and analyses it."""

from __future__ import annotations

import random
import socket

import pytest
from engine_child import ChildProcess, job_id, table_of  # type: ignore[import-not-found]

from actors.engine.catalyst.permitted_functions import (
    FUNCTION_NAMES,
    REFUSED_FUNCTIONS,
    TABLE_FUNCTION_NAMES,
)
from actors.model.plan.jobs import (
    AnalyzeStatement,
    JobFailed,
    ParseText,
    QueryAnalyzed,
    QueryFiles,
    StatementParsed,
)
from actors.model.plan.schema import TableColumn, TableSchema
from suite_lanes import examples  # type: ignore[import-not-found]

pytestmark = pytest.mark.spark

COLUMNS = {
    "a": "int",
    "s": "string",
    "xs": "array<string>",
    "d": "date",
    "at": "timestamp",
    "x": "binary",
}
TABLES = (("t", TableSchema(tuple(TableColumn(*each) for each in COLUMNS.items()))),)
CANARY = "penstock.canary"
SET_CANARY = f"'java.lang.System', 'setProperty', '{CANARY}', 'set'"
PLACES = (
    "SELECT {} AS v",
    "SELECT a FROM t WHERE {} IS NULL",
    "SELECT transform(xs, x -> concat(x, {})) AS v FROM t",
    "SELECT aggregate(xs, '', (b, x) -> concat(b, x), b -> concat(b, {})) AS v FROM t",
    "SELECT (SELECT max({}) FROM t) AS v",
    "SELECT a FROM t WHERE s IN (SELECT {} FROM t)",
    "SELECT a FROM t WHERE EXISTS (SELECT 1 FROM t AS u WHERE {} = t.s)",
    "WITH q AS (SELECT {} AS v) SELECT * FROM q",
    "WITH q AS (SELECT {} AS v) SELECT 1 AS v",
    "SELECT * FROM (SELECT {} AS v) AS q",
    "SELECT * FROM explode(array({}))",
    "SELECT * FROM range(length({}))",
    "SELECT v FROM t LATERAL VIEW OUTER explode(array({})) e AS v",
    "SELECT * FROM t, LATERAL (SELECT {} AS v)",
    "SELECT * FROM VALUES ({}) AS q(v)",
    "VALUES (1, {})",
    "SELECT a FROM t ORDER BY {}",
    "SELECT a FROM t LIMIT length({})",
    "SELECT count(*) AS n FROM t GROUP BY {}",
    "SELECT count(*) AS n FROM t HAVING max({}) = ''",
    "SELECT count(*) FILTER (WHERE {} = '') AS n FROM t",
    "SELECT count(*) OVER (PARTITION BY {}) AS n FROM t",
    "SELECT count(*) OVER w AS n FROM t WINDOW w AS (ORDER BY {})",
    "SELECT t.a FROM t JOIN t AS u ON t.s = {}",
    "SELECT a FROM t UNION ALL SELECT length({})",
    "SELECT CASE WHEN a > 1 THEN {} END AS v FROM t",
    "SELECT CAST({} AS INT) AS v",
    "SELECT from_json(s, {}) AS v FROM t",
    "SELECT from_json(s, schema_of_json({})) AS v FROM t",
    "SELECT mask(s, upperChar => {}) AS v FROM t",
    "SELECT IDENTIFIER({}) AS v FROM t",
    "SELECT * FROM IDENTIFIER({})",
    "SELECT IDENTIFIER({})(s) AS v FROM t",
    "SELECT /*+ REPARTITION(2) */ {} AS v FROM t DISTRIBUTE BY a",
)
"""Texts in which an expression may stand."""


def parsed(child: ChildProcess, text: str, *, expression: bool = False) -> StatementParsed:
    answer = child.ask(ParseText(job_id(), text, expression))
    assert isinstance(answer, StatementParsed), answer
    return answer


def asked(child: ChildProcess, text: str, *, translate: bool = False) -> QueryAnalyzed | JobFailed:
    """The answer to a restricted query."""
    job = AnalyzeStatement(job_id(), TABLES, text, translate=translate, restricted=True)
    answer: QueryAnalyzed | JobFailed = child.ask(job)
    return answer


def denied(child: ChildProcess, text: str, *, translate: bool = False) -> str:
    answer = asked(child, text, translate=translate)
    assert isinstance(answer, JobFailed), (text, answer)
    assert answer.code == "AccessDenied", (text, answer)
    return answer.text


def value(child: ChildProcess, text: str, **conf: str) -> object:
    """The one value of a query that nothing restricts."""
    job = QueryFiles(job_id(), text, (), tuple(conf.items()))
    return table_of(child.ask(job)).column(0)[0].as_py()


# -- what a text names -----------------------------------------------------------------------------


def test_names_of_a_text_are_told(child: ChildProcess) -> None:
    text = """
        WITH c AS (SELECT * FROM t), d AS (SELECT * FROM c)
        SELECT upper(s), (SELECT max(a) FROM `u``v`) FROM d, x.y.z, c
        WHERE EXISTS (WITH e AS (SELECT 1) SELECT * FROM E) AND a IN (SELECT * FROM e)
    """
    found = parsed(child, text)
    assert set(found.relations) == {("t",), ("u`v",), ("x", "y", "z"), ("e",)}
    assert len(found.relations) == 4
    assert set(found.functions) == {"upper", "max"}
    assert (found.command, found.refused) == ("", "")
    found = parsed(child, "transform(xs, x -> nofunction(x))", expression=True)
    assert found.functions == ("transform", "nofunction")
    assert found.unknown == ("nofunction",)
    found = parsed(child, "WITH c AS (SELECT * FROM c) SELECT * FROM c")
    assert found.relations == (("c",),), "only a recursive one reads itself"


COMMANDS = {
    "DROP TABLE t": "DropTable",
    "SET spark.sql.variable.substitute = true": "SetCommand",
    "BEGIN SELECT 1; END": "CompoundBody",
    "INSERT INTO IDENTIFIER('t') SELECT 1": "InsertIntoStatement",
    "DECLARE x INT = 5": "CreateVariable",
}


def test_commands_are_told_and_refused(child: ChildProcess) -> None:
    assert {text: parsed(child, text).command for text in COMMANDS} == COMMANDS
    for text in COMMANDS:
        answer = asked(child, text)
        assert isinstance(answer, JobFailed)
        assert answer.code == "QueryRejected"


# -- functions -------------------------------------------------------------------------------------


def test_code_is_refused_in_each_place_and_never_run(child: ChildProcess) -> None:
    for number, place in enumerate(PLACES):
        name = ("reflect", "`Java_Method`", "builtin.try_reflect")[number % 3]
        text = place.format(f"{name}({SET_CANARY})")
        told = denied(child, text, translate=number % 2 == 0)
        assert "only administrators" in told, text
    read = f"SELECT reflect('java.lang.System', 'getProperty', '{CANARY}') AS v"
    assert value(child, read) == "null"


def test_each_function_that_reaches_outside_is_refused(child: ChildProcess) -> None:
    drawn = random.Random(7)
    for name in sorted(frozenset[str]().union(*REFUSED_FUNCTIONS.values())):
        given = drawn.choice(("", "s", "s, 'a'", "'a', 'b', 'c'"))
        if parsed(child, f"{name}()", expression=True).unknown:
            continue  # of a later release
        for place in drawn.sample(PLACES, 2):
            text = place.format(f"{name}({given})")
            assert name in denied(child, text) or "IDENTIFIER" in text, text
    assert "python_worker_logs" in denied(child, "SELECT * FROM python_worker_logs()")


VALUES = ("a", "s", "xs", "d", "at", "x", "'a'", "1", "DATE '2020-01-01'", "array(1, 2)")


def test_all_others_are_permitted(child: ChildProcess) -> None:
    names = sorted(name for name in FUNCTION_NAMES if name.replace("_", "a").isalnum())
    special = {"cast", "between", "case", "extract", "in", "like", "position", "rlike", "when"}
    calls = ", ".join(f"`{name}`(a)" for name in names if name not in special)
    tables = ", ".join(f"{name}(a) AS t{n}" for n, name in enumerate(sorted(TABLE_FUNCTION_NAMES)))
    found = parsed(child, f"SELECT {calls} FROM {tables}")
    assert (found.refused, found.command) == ("", "")
    assert len(found.functions) > len(names) - 20


@pytest.mark.sampled
def test_they_are_called_as_before(child: ChildProcess) -> None:
    """With drawn arguments: Spark may refuse those, and nothing is denied."""
    drawn = random.Random(3)
    names = sorted(name for name in FUNCTION_NAMES if name.replace("_", "a").isalnum())
    passed = 0
    for name in drawn.sample(names, examples(160)):
        for count in (1, 2):
            given = ", ".join(drawn.choices(VALUES, k=count))
            answer = asked(child, f"SELECT {name}({given}) AS v FROM t")
            if isinstance(answer, QueryAnalyzed):
                passed += 1
            else:
                assert answer.code != "AccessDenied", (name, given, answer)
    assert passed > 10


def test_a_name_that_is_computed_of_texts_is_that_name(child: ChildProcess) -> None:
    for text in ("SELECT IDENTIFIER('up' || 'per')(s) AS v FROM IDENTIFIER('t')", "SELECT 1 AS v"):
        assert isinstance(asked(child, text), QueryAnalyzed)
    assert "reflect" in denied(child, f"SELECT IDENTIFIER('ref' || 'lect')({SET_CANARY})")
    assert "IDENTIFIER" in denied(child, f"SELECT IDENTIFIER(lower('REFLECT'))({SET_CANARY})")
    assert "IDENTIFIER" in denied(child, "SELECT * FROM IDENTIFIER(concat('t', ''))")
    missing = asked(child, "SELECT * FROM IDENTIFIER('csv' || '.`/etc/hostname`')")
    assert isinstance(missing, QueryAnalyzed)
    assert missing.missing == "`csv`.`/etc/hostname`"


DENIED = {
    "SELECT p.q.f(1) AS v": "p.q.f",
    "SELECT spark_catalog.default.f(1) AS v": "spark_catalog.default.f",
    "SELECT TRANSFORM(a) USING 'cat' AS (b) FROM t": "ScriptTransformation",
    "SELECT * FROM t TIMESTAMP AS OF '2020-01-01'": "RelationTimeTravel",
    "SELECT * FROM STREAM t": "STREAM",
    "EXECUTE IMMEDIATE 'SELECT 1'": "ExecuteImmediate",
    "SELECT from_xml(s, 'v INT', map('rowValidationXSDPath', '/x')) AS v FROM t": "rowValid",
    "SELECT from_xml(s, schema_of_xml(s, map('ROWVALIDATIONXSDPATH', 'x'))) AS v FROM t": "ROW",
    "SELECT from_xml(s, 'v INT', map_from_arrays(xs, xs)) AS v FROM t": "options of XML",
    "SELECT from_xml(s, 'v INT', map(concat('row', s), 'x')) AS v FROM t": "options of XML",
    # Seen in the analysed plan alone.
    "SELECT from_json(s, 'v INT', map(concat('rowValidation', 'XSDPath'), '')) AS v FROM t": "row",
}


def test_constructs_that_reach_outside_are_refused(child: ChildProcess) -> None:
    for text, name in DENIED.items():
        assert name.lower() in denied(child, text).lower(), text


# -- relations -------------------------------------------------------------------------------------


def test_what_is_none_of_its_tables_is_missing_whether_it_is_there_or_not(
    child: ChildProcess,
) -> None:
    child.ask(QueryFiles(job_id(), "SELECT 1 AS v", ()))
    names = ("csv.`/etc/hostname`", "csv.`/etc/no-such`", "p.app.y", "global_temp.lent", "u")
    for place in ("SELECT * FROM {}", "WITH t AS (SELECT 1) SELECT (SELECT max(a) FROM {}) FROM t"):
        for name in names:
            answer = asked(child, place.format(name))
            assert isinstance(answer, QueryAnalyzed), (name, answer)
            assert answer.missing.replace("`", "") == name.replace("`", "")
    job = AnalyzeStatement(
        job_id(),
        TABLES,
        "SELECT * FROM csv.`/etc/hostname`",
        (("spark.sql.runSQLOnFiles", "true"),),
        restricted=True,
    )
    assert child.ask(job).missing == "`csv`.`/etc/hostname`"


# -- texts and documents ---------------------------------------------------------------------------


def test_nothing_is_replaced_in_a_text(child: ChildProcess) -> None:
    conf = {"spark.sql.variable.substitute": "true", "spark.sql.ansi.enabled": "true"}
    for given in ({}, conf):
        assert value(child, "SELECT '${env:PATH}' AS v", **given) == "${env:PATH}"
    job = AnalyzeStatement(job_id(), TABLES, "SELECT ref${x}lect('a')", tuple(conf.items()))
    assert "PARSE_SYNTAX_ERROR" in child.ask(job).text


def test_a_document_opens_no_address(child: ChildProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        document = f'<!DOCTYPE a SYSTEM "http://127.0.0.1:{server.getsockname()[1]}/x"><a>b</a>'
        text = f"SELECT xpath_string('{document}', '/a') AS v"
        answer = child.ask(QueryFiles(job_id(), text, ()))
        assert isinstance(answer, JobFailed)
        with pytest.raises(BlockingIOError):
            server.accept()
