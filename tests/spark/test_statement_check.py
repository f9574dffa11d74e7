"""What a restricted statement may reach, as Spark parses and analyses it."""

from __future__ import annotations

import pytest
from engine_child import ChildProcess, job_id  # type: ignore[import-not-found]

from actors.plan.jobs import ParseStatement, StatementParsed

pytestmark = pytest.mark.spark


def parsed(child: ChildProcess, text: str, *, expression: bool = False) -> StatementParsed:
    answer = child.ask(ParseStatement(job_id(), text, expression))
    assert isinstance(answer, StatementParsed), answer
    return answer


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


COMMANDS = {
    "DROP TABLE t": "DropTable",
    "SET spark.sql.variable.substitute = true": "SetCommand",
    "BEGIN SELECT 1; END": "CompoundBody",
    "INSERT INTO IDENTIFIER('t') SELECT 1": "InsertIntoStatement",
    "DECLARE x INT = 5": "CreateVariable",
}


def test_commands_are_told(child: ChildProcess) -> None:
    assert {text: parsed(child, text).command for text in COMMANDS} == COMMANDS
