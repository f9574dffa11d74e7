"""Finding and replacing names in plans: at every place, and as PySpark's client writes plans."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_makers import (  # type: ignore[import-not-found]
    PREFIX,
    READS,
    ROOT,
    every_place,
    is_free,
    marker,
    markers,
    message_of,
    plant,
    read,
    resolve,
    shortest_paths,
    sql,
    write_name,
)
from pyspark.sql.connect import functions as sf
from pyspark.sql.connect import plan as plans
from pyspark.sql.connect.dataframe import DataFrame
from pyspark.sql.connect.proto import base_pb2, catalog_pb2, commands_pb2, relations_pb2

from actors.doors.connect_gateway.plan_rewriting import (
    GENERATED,
    READ_FIELDS,
    TEXT_FIELDS,
    UNBOUND,
    WRITE_FIELDS,
    bind_names,
    find_names,
    plain_text_of,
    relation_of_command,
    statement_of,
    walk_messages,
    written_text_of,
)

PLACES = list(every_place())
CATALOG = {f"{PREFIX}{field.message_type.name}" for field in catalog_pb2.Catalog.DESCRIPTOR.fields}
NOT_BOUND = f"{PREFIX}PipelineCommand.DefineSqlGraphElements"


def bound(message: Any) -> Any:
    return bind_names(message, resolve, marker, lambda key: ("spark_catalog", "default"))


class FakeClient:
    """What PySpark's DataFrames ask of their session to be written as plans."""

    session_id = "s"

    def __init__(self) -> None:
        self._client = self


def frame(plan: Any) -> Any:
    return DataFrame(plan, FakeClient())


def written(made: Any) -> Any:
    return made._plan.plan(None)


# -- every place ---------------------------------------------------------------------------------


def test_there_are_many_places() -> None:
    assert len(PLACES) > 500


@pytest.mark.parametrize("number", range(8))
def test_a_name_is_found_wherever_it_is_planted(number: int) -> None:
    for path, kind in PLACES[number::8]:
        planted = plant(path, kind, "o1")
        assert find_names(planted.plan, resolve).read == {"o1": 1}, (planted.path, kind)
        assert not find_names(plant(path, kind, "other").plan, resolve).read, planted.path


@pytest.mark.parametrize("number", range(8))
def test_a_planted_name_is_replaced_by_its_rows(number: int) -> None:
    for path, kind in PLACES[number::8]:
        planted = plant(path, kind, "o1")
        before = planted.plan.SerializeToString()
        made = bound(planted.plan)
        assert planted.plan.SerializeToString() == before  # the given plan is left alone
        if kind == NOT_BOUND:
            continue
        rows = [*markers(made.message), *made.views]
        assert rows == ["o1"], (planted.path, kind, str(made.message)[:500])


@given(st.data())
def test_names_planted_together_are_all_found(data: st.DataObject) -> None:
    """Several names in one plan, at places that do not exclude each other."""
    plan = base_pb2.Plan()
    names = {}
    for name in ("o1", "o2", "odd name"):
        path, kind = data.draw(st.sampled_from(PLACES))
        message: Any = plan
        for field in path:
            if field.containing_oneof and message.WhichOneof(field.containing_oneof.name) not in (
                None,
                field.name,
            ):
                break
            value = getattr(message, field.name)
            if field.message_type.GetOptions().map_entry:
                message = value[name]
            elif field.is_repeated:
                message = value.add()
            else:
                value.SetInParent()
                message = value
        else:
            if is_free(message):
                quoted = f"`{name}`"
                write_name(message, quoted)
                names[name] = kind
    assert set(find_names(plan, resolve).read) == set(names)
    made = bound(plan)
    if NOT_BOUND not in names.values():
        left = find_names(made.message, resolve).read
        # What is left are aliases in texts, each with its rows beside it.
        assert set(left) <= {n for n, kind in names.items() if kind != READS[0]}


def test_every_field_that_may_name_a_table_is_known() -> None:
    """A release of Spark with another such field fails here."""
    suspicious = re.compile(r"table|identifier|sql|query|view|source$|expression$")
    known = {(kind, field) for fields in (TEXT_FIELDS, READ_FIELDS, WRITE_FIELDS)
             for kind, field in fields.items()}  # fmt: skip
    found = set()
    for name, path in shortest_paths(ROOT).items():
        descriptor = message_of(path[-1]) if path else ROOT
        assert descriptor is not None
        for field in descriptor.fields:
            if field.type == field.TYPE_STRING and suspicious.search(field.name):
                found.add((name, field.name))
    harmless = {(kind, field) for kind, field in found if kind.startswith(f"{PREFIX}Pipeline")}
    # `spark.catalog` is answered by `catalog_answers`; columns and names of what is made are no
    # reads.
    harmless |= {
        (kind, field)
        for kind, field in found
        if field in ("view_name", "query_name", "get_query", "query_id", "ml_relation")
    }
    harmless |= {(kind, field) for kind, field in found if kind in CATALOG}
    harmless |= {
        (f"{PREFIX}Expression.UnresolvedAttribute", "unparsed_identifier"),
        (f"{PREFIX}JvmOrigin", "sql_text"),
        (f"{PREFIX}ResolvedIdentifier", "table_name"),
        (f"{PREFIX}WriteOperation", "source"),
        (f"{PREFIX}CreateExternalTable", "source"),
        (f"{PREFIX}CreateTable", "source"),
    }
    assert found - known - harmless == set()


# -- as clients write them -----------------------------------------------------------------------


def test_a_read_keeps_its_plan_id_and_its_qualifiers() -> None:
    made = bound(read("Default.O1", 7)).message
    assert made.common.plan_id == 7
    assert (made.subquery_alias.alias, list(made.subquery_alias.qualifier)) == (
        "O1",
        ["spark_catalog", "default"],
    )
    assert markers(made) == ["o1"]


def test_frames_of_pyspark() -> None:
    one, two = frame(plans.Read("o1")), frame(plans.Read("`default`.`o2`"))
    joined = one.join(two, sf.col("a") == sf.col("b")).groupBy("a").agg(sf.count("*"))
    either = one.union(two).distinct().crossJoin(one).limit(3)
    assert markers(bound(written(joined)).message) == ["o1", "o2"]
    assert markers(bound(written(either)).message) == ["o1", "o1", "o2"]
    assert find_names(written(either), resolve).read == {"o1": 2, "o2": 1}


def test_a_subquery_of_pyspark_is_replaced_where_it_is_defined() -> None:
    one, two = frame(plans.Read("o1")), frame(plans.Read("o2"))
    made = written(one.where(sf.col("a") > two.select("b").scalar()))
    assert made.WhichOneof("rel_type") == "with_relations"
    told = bound(made).message
    assert markers(told) == ["o1", "o2"]
    ids = [each.common.plan_id for each in made.with_relations.references]
    assert [each.common.plan_id for each in told.with_relations.references] == ids


def test_a_text_gets_its_relations_beside_it() -> None:
    text = "WITH x AS (SELECT * FROM o1) SELECT * FROM x JOIN O2 ON x.a = o2.a -- o1"
    made = bound(written(frame(plans.SQL(text)))).message
    assert made.with_relations.root.sql.query == text
    aliases = [each.subquery_alias.alias for each in made.with_relations.references]
    assert sorted(aliases) == ["o1", "o2"]


def test_a_text_with_relations_of_its_own_gets_more() -> None:
    own = plans.SubqueryAlias(plans.Read("o1"), "mine")
    made = written(frame(plans.SQL("SELECT * FROM mine, o2", views=[own])))
    told = bound(made).message
    references = {
        each.subquery_alias.alias: markers(each) for each in told.with_relations.references
    }
    assert references == {"mine": ["o1"], "o2": ["o2"]}
    assert told.with_relations.root.WhichOneof("rel_type") == "sql"


def test_a_relation_that_the_user_gives_under_a_name_comes_first() -> None:
    own = plans.SubqueryAlias(plans.Range(0, 3, 1), "o1")
    made = bound(written(frame(plans.SQL("SELECT * FROM o1", views=[own])))).message
    assert markers(made) == []


def test_names_with_a_database_are_replaced_in_the_text() -> None:
    text = "SELECT default.o1.a FROM `default`.o1 WHERE 'default.o1' = b"
    made = bound(sql(text)).message
    assert made.with_relations.root.sql.query == "SELECT o1.a FROM o1 WHERE 'default.o1' = b"


def test_a_name_that_needs_quotes_gets_another_one() -> None:
    made = bound(sql("SELECT `odd name`.a FROM `odd name`")).message
    alias = made.with_relations.references[0].subquery_alias.alias
    assert alias.startswith(GENERATED)
    assert made.with_relations.root.sql.query == f"SELECT {alias}.a FROM {alias}"


def test_a_name_that_the_session_has_given_to_a_view_is_not_its_alias() -> None:
    def hidden(parts: tuple[str, ...]) -> str | None:
        return None if parts == ("o1",) else resolve(parts)

    made = bind_names(sql("SELECT * FROM o1, default.o1"), hidden, marker).message
    (reference,) = made.with_relations.references
    assert reference.subquery_alias.alias.startswith(GENERATED)
    query = made.with_relations.root.sql.query
    assert query == f"SELECT * FROM o1, {reference.subquery_alias.alias}"


def test_names_in_strings_and_arguments_of_identifier() -> None:
    assert find_names(sql("SELECT * FROM IDENTIFIER('o1')"), resolve).read == {"o1": 1}
    assert find_names(sql("EXECUTE IMMEDIATE 'SELECT * FROM o1'"), resolve).read == {"o1": 1}
    assert not find_names(sql("SELECT 'o1'"), resolve).read
    named = sql("SELECT * FROM IDENTIFIER(:t)")
    named.sql.named_arguments["t"].literal.string = "o2"
    assert find_names(named, resolve).read == {"o2": 1}


def test_an_expression_as_text_gets_its_relations_as_views() -> None:
    made = bound(written(frame(plans.Read("t")).where("a IN (SELECT a FROM default.o1)")))
    assert list(made.views) == ["o1"]
    text = made.message.filter.condition.expression_string.expression
    assert text == "a IN (SELECT a FROM o1)"


def test_a_command_of_the_older_form_is_written_in_the_newer_one() -> None:
    command = commands_pb2.SqlCommand(sql="SELECT * FROM o1 WHERE a = ?")
    command.pos_args.add(integer=1)
    plan = base_pb2.Plan(command=commands_pb2.Command(sql_command=command))
    made = bound(plan).message.command.sql_command
    assert not made.sql
    root = made.input.with_relations.root
    assert (root.sql.query, root.sql.pos_args[0].integer) == (command.sql, 1)
    assert markers(made) == ["o1"]
    assert relation_of_command(command).sql.query == command.sql


def test_writes_and_changes_are_told_apart() -> None:
    plan = base_pb2.Plan()
    write = plan.command.write_operation
    write.table.table_name = "o1"
    write.input.CopyFrom(read("o2"))
    found = find_names(plan, resolve)
    assert dict(found.read) == {"o2": 1}
    assert found.written == {"o1"}
    changes = relations_pb2.Relation()
    changes.relation_changes.unparsed_identifier = "o1"
    assert find_names(changes, resolve).followed == {"o1"}
    stream = read("o1")
    stream.read.is_streaming = True
    assert "o1" in find_names(stream, resolve).followed
    assert bound(stream).message == stream
    assert set(READ_FIELDS) >= UNBOUND


def test_the_text_that_is_a_statement() -> None:
    plan = base_pb2.Plan()
    plan.command.sql_command.input.sql.query = "DROP TABLE o1"
    assert statement_of(plan) == "DROP TABLE o1"
    plan.command.sql_command.input.sql.pos_arguments.add()
    assert statement_of(plan) is None
    assert written_text_of(plan.command.sql_command.input) == "DROP TABLE o1"
    assert statement_of(base_pb2.Plan(root=sql("SELECT 1"))) is None
    assert plain_text_of(read("o1")) is None


def test_a_deep_plan_is_walked_without_recursion() -> None:
    message: Any = base_pb2.Plan()
    below = message.root
    for _ in range(3_000):
        below = below.limit.input
    below.read.named_table.unparsed_identifier = "o1"
    assert find_names(message, resolve).read == {"o1": 1}
    assert sum(1 for _ in walk_messages(message)) > 6_000


def test_a_column_in_an_expression_is_no_table_of_its_name() -> None:
    plain = relations_pb2.Relation()
    plain.project.expressions.add().expression_string.expression = "CAST(orders AS int) + 1"
    assert find_names(plain, lambda parts: "orders" if parts == ("orders",) else None).read == {}
    inner = relations_pb2.Relation()
    inner.project.expressions.add().expression_string.expression = "(SELECT max(id) FROM orders)"
    assert find_names(inner, lambda parts: "orders" if parts == ("orders",) else None).read
