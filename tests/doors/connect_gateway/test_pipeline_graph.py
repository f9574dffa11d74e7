"""Definitions of a pipeline: what is taken, what is refused, and their order."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format

from actors.doors.connect_gateway import pipeline_graph
from actors.doors.connect_gateway.pipeline_graph import DataflowGraph, statement_of_dataset
from actors.engine.spark.spark_releases import pipeline_messages
from actors.runtime.errors import InvalidUsage, PenstockError, SqlSyntaxError

pipelines_pb2: Any = pipeline_messages()
if pipelines_pb2 is None:
    pytest.skip("Spark has pipelines since 4.1", allow_module_level=True)
COMMAND = pipelines_pb2.PipelineCommand
KINDS = pipelines_pb2.OutputType


def graph(**given: Any) -> DataflowGraph:
    return DataflowGraph(COMMAND.CreateDataflowGraph(**given))


def texts(made: DataflowGraph, text: str) -> DataflowGraph:
    made.define_texts(COMMAND.DefineSqlGraphElements(sql_text=text, sql_file_path="f.sql"))
    return made


def output(
    made: DataflowGraph, name: str, kind: Any = KINDS.MATERIALIZED_VIEW, **details: Any
) -> Any:
    given = COMMAND.DefineOutput(output_name=name, output_type=kind)
    if details:
        given.table_details.CopyFrom(COMMAND.DefineOutput.TableDetails(**details))
    return made.define_output(given)


def flow(made: DataflowGraph, name: str, relation: str, target: str = "", **given: Any) -> Any:
    told = COMMAND.DefineFlow(flow_name=name, target_dataset_name=target or name, **given)
    text_format.Parse(relation, told.relation_flow_details.relation)
    return made.define_flow(told)


def test_the_order_is_that_of_the_reads() -> None:
    made = texts(
        graph(),
        "CREATE MATERIALIZED VIEW c AS SELECT * FROM default.b JOIN t;"
        "CREATE VIEW b AS SELECT * FROM hidden;"
        "CREATE TEMP VIEW hidden AS SELECT * FROM spark_catalog.default.a;"
        "CREATE OR REFRESH MATERIALIZED VIEW A AS WITH a AS (SELECT 1 AS x) SELECT * FROM a",
    )
    order = made.ordered()
    assert [each.name for each in order] == ["A", "hidden", "b", "c"]
    named = {each.name: each for each in order}
    assert made.reads(named["b"]) == {"a"}
    assert made.reads(named["c"]) == {"b"}
    assert made.query_with(named["c"], order) == "SELECT * FROM default.b JOIN t"
    query = made.query_with(named["b"], order)
    assert "".join(query.split()) == "WITH`hidden`AS(SELECT*FROMa)(SELECT*FROMhidden)"
    whole = made.query_with(named["c"], order, ("view", "temporary view", "materialized view"))
    assert [whole.index(f"`{name}` AS") for name in ("A", "hidden", "b")] == sorted(
        whole.index(f"`{name}` AS") for name in ("A", "hidden", "b")
    )


def test_a_diamond_does_not_double_at_each_level() -> None:
    lines = ["CREATE TEMPORARY VIEW v0 AS SELECT 1 AS a"]
    lines += [
        f"CREATE TEMPORARY VIEW v{n} AS SELECT * FROM v{n - 1} UNION SELECT * FROM v{n - 1}"
        for n in range(1, 40)
    ]
    made = texts(graph(), ";\n".join(lines))
    order = made.ordered()
    assert len(made.query_with(order[-1], order)) < 40 * 100


def test_circles_and_what_is_defined_twice() -> None:
    made = texts(
        graph(),
        "CREATE MATERIALIZED VIEW a AS SELECT * FROM b; CREATE VIEW b AS SELECT * FROM a",
    )
    with pytest.raises(InvalidUsage, match=r"in a cycle: (a -> b -> a|b -> a -> b)"):
        made.ordered()
    with pytest.raises(InvalidUsage, match=r"dataset A is defined twice: f.sql:1, f.sql:1"):
        texts(made, "CREATE MATERIALIZED VIEW A AS SELECT 1")


def test_datasets_of_python() -> None:
    made = graph(sql_conf={"spark.sql.ansi.enabled": "true", "mine": "1"})
    output(made, "default.v", table_properties={"refresh_policy": "full", "target_lag_ms": "9"})
    found = flow(made, "v", 'sql { query: "SELECT 1 AS a" }', sql_conf={"spark.sql.x": "2"})
    assert statement_of_dataset(found, found.query) == (
        "CREATE OR REPLACE MATERIALIZED VIEW `v` REFRESH POLICY FULL TBLPROPERTIES "
        "('spark.sql.ansi.enabled' = 'true', 'target_lag_ms' = '9', 'spark.sql.x' = '2') AS\n"
        "SELECT 1 AS a"
    )
    output(made, "w", KINDS.TEMPORARY_VIEW)
    with pytest.raises(InvalidUsage, match=r"dataset w .* has no query"):
        made.ordered()
    read = flow(made, "w", 'read { named_table { unparsed_identifier: "v" } }')
    assert (read.query, read.lasting) == ("SELECT * FROM v", False)
    assert made.chosen([], all_of_them=True) == {"v", "w"}
    assert made.chosen(["spark_catalog.default.V"], all_of_them=False) == {"v"}
    with pytest.raises(InvalidUsage, match="no dataset w "):
        made.chosen(["w"], all_of_them=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("CREATE STREAMING TABLE s AS SELECT 1", "streaming table s "),
        ("\nCREATE FLOW f AS INSERT INTO v BY NAME SELECT 1", r"flow f .*\(f.sql:2\)"),
        ("CREATE TEMPORARY VIEW v (a) AS SELECT 1", "CREATE TEMPORARY VIEW name AS query"),
        ("INSERT INTO t VALUES (1)", "statement INSERT INTO T"),
        ("SET a = 1", "statement SET A"),
        ("CREATE MATERIALIZED VIEW other.v AS SELECT 1", "all objects are in the schema"),
    ],
)
def test_texts_that_are_refused(text: str, told: str) -> None:
    with pytest.raises(PenstockError, match=told):
        texts(graph(), text)


def test_a_text_that_cannot_be_read_names_file_and_line() -> None:
    with pytest.raises(SqlSyntaxError, match=r"^f.sql: line 3, column 28"):
        texts(
            graph(),
            "CREATE VIEW v AS SELECT 1;\n\n"
            "CREATE MATERIALIZED VIEW a PARTITIONED BY (b) AS SELECT 1",
        )


def test_outputs_that_are_refused() -> None:
    for kind, told in ((KINDS.TABLE, "streaming table x"), (KINDS.SINK, "sink x")):
        with pytest.raises(PenstockError, match=told):
            output(graph(), "x", kind)
    for details in (
        {"partition_cols": ["a"]},
        {"clustering_columns": ["a"]},
        {"format": "parquet"},
        {"schema_string": "a INT"},
    ):
        with pytest.raises(PenstockError, match="materialized view x is not supported"):
            output(graph(), "x", **details)
    with pytest.raises(InvalidUsage, match=r"expected spark_catalog\.default"):
        graph(default_database="elsewhere")


@pytest.mark.parametrize(
    ("relation", "told"),
    [
        ("range { end: 3 step: 1 }", "a DataFrame \\(range\\).*return spark.sql"),
        (
            'sql { query: "SELECT ?" pos_arguments { literal { integer: 1 } } }',
            "its query has parameters",
        ),
        ("with_relations { }", "its query names DataFrames"),
        (
            'read { is_streaming: true named_table { unparsed_identifier: "v" } }',
            "reads a stream",
        ),
    ],
)
def test_queries_that_are_no_texts(relation: str, told: str) -> None:
    made = graph()
    output(made, "x")
    with pytest.raises(PenstockError, match=f"materialized view x .*{told}"):
        flow(made, "x", relation)


def test_further_flows_are_refused() -> None:
    made = graph()
    output(made, "x")
    with pytest.raises(PenstockError, match="append flow more"):
        flow(made, "more", 'sql { query: "SELECT 1" }', "x")
    flow(made, "x", 'sql { query: "SELECT 1 AS a" }')
    with pytest.raises(PenstockError, match="append flow x"):
        flow(made, "x", 'sql { query: "SELECT 1 AS a" }')
    with pytest.raises(InvalidUsage, match="dataset y is not defined"):
        flow(made, "y", 'sql { query: "SELECT 1 AS a" }')
    cdc = COMMAND.DefineFlow(flow_name="c", target_dataset_name="x")
    cdc.auto_cdc_flow_details.source = "t"
    with pytest.raises(PenstockError, match="AUTO CDC flow c"):
        made.define_flow(cdc)


def test_a_pipeline_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_graph, "DATASETS_MAX", 2)
    with pytest.raises(InvalidUsage, match="too many datasets"):
        texts(graph(), ";".join(f"CREATE VIEW v{n} AS SELECT 1" for n in range(3)))
    monkeypatch.setattr(pipeline_graph, "TEXT_CHARACTERS_MAX", 50)
    with pytest.raises(InvalidUsage, match="limit 50 characters"):
        texts(graph(), "CREATE VIEW v AS SELECT " + "1" * 50)
