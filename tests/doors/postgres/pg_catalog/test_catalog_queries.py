"""Rules of catalog queries that no client's query shows by itself."""

from __future__ import annotations

import msgspec
import pytest
from catalog_lab import lab_session, lab_snapshot  # type: ignore[import-not-found]

from actors.doors.postgres.pg_catalog import catalog_database, catalog_snapshot
from actors.doors.postgres.pg_catalog.catalog_errors import CatalogQueryError
from actors.doors.postgres.pg_catalog.catalog_queries import CatalogQueries
from actors.doors.postgres.pg_catalog.catalog_snapshot import (
    CatalogColumnRow,
    CatalogObjectRow,
    CatalogSession,
    OidAssignment,
    PgCatalogSnapshot,
    object_oid,
)
from actors.doors.postgres.pg_catalog.pg_types import ObjectReference, format_catalog_value
from actors.model.pgwire.type_map import pg_type_of_spark
from actors.model.pgwire.type_oids import BOOL, INT4, NAME, OID, REGCLASS, TEXT


def rows_of(queries: CatalogQueries, text: str, *parameters: object) -> list[tuple[object, ...]]:
    return queries.answer_catalog_query(text, parameters, lab_session()).rows


def one(queries: CatalogQueries, text: str, *parameters: object) -> object:
    ((value,),) = rows_of(queries, text, *parameters)
    return value


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM pg_class",
        "SELECT * FROM pg_catalog.pg_class c, information_schema.tables",
        "SELECT version()",
        "select current_user",
        "SELECT USER",
        "SELECT 'orders'::regclass::oid",
        "WITH a AS (SELECT oid FROM pg_type) SELECT * FROM a",
        "SELECT (SELECT count(*) FROM pg_type)",
        "SELECT pg_no_such_function()",
        "SELECT * FROM pg_no_such_table JOIN pg_type ON true",
        "SELECT * FROM pg_catalog.pg_no_such_table",
    ],
)
def test_what_is_a_catalog_query(queries: CatalogQueries, text: str) -> None:
    assert queries.is_catalog_query(text)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "SHOW server_version",
        "SELECT lower('A')",
        "SELECT * FROM orders",
        "SELECT * FROM orders JOIN pg_class ON true",
        "SELECT * FROM public.pg_class",
        "SELECT pg_typo FROM orders",
        "INSERT INTO orders SELECT oid FROM pg_class",
        "DELETE FROM pg_class",
        "SELECT 'a pg_class in a text'",
        "SELECT pg_ (",
        "WITH pg_mine AS (SELECT * FROM orders) SELECT * FROM pg_mine",
        "SELECT version FROM releases",
    ],
)
def test_what_is_none(queries: CatalogQueries, text: str) -> None:
    assert not queries.is_catalog_query(text)


def test_an_object_of_ours_may_be_named_like_one_of_postgresql() -> None:
    queries = CatalogQueries()
    # Whether the session has seen it or not: what the catalog does not have is nobody's else.
    assert not queries.is_catalog_query("SELECT * FROM pg_rents")
    assert not queries.is_catalog_query("SELECT pg_typeof(a) FROM pg_rents")
    assert queries.is_catalog_query("SELECT * FROM pg_class")


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ("SELECT pg_no_such(1)", "42883", "function pg_no_such(integer) does not exist"),
        ("SELECT * FROM pg_none", "42P01", 'relation "pg_none" does not exist'),
        ("SELECT * FROM pg_catalog.none", "42P01", "pg_catalog.none"),
        ("SELECT nothing FROM pg_class", "42703", "nothing"),
        ("SELECT x.oid FROM pg_class", "42P01", "missing FROM-clause entry"),
        ("SELECT oid FROM pg_class a, pg_type b", "42702", "ambiguous"),
        ("SELECT 'none'::regclass", "42P01", 'relation "none" does not exist'),
        ("SELECT 'none'::regtype", "42704", 'type "none" does not exist'),
        ("SELECT 1::nothing FROM pg_class", "42704", 'type "nothing" does not exist'),
        ("SELECT 'x'::int FROM pg_class", "22P02", "invalid input syntax"),
        ("SELECT public.f(1) FROM pg_class", "42883", "public.f"),
        ("SELECT lower(1) FROM pg_class", "42883", "function lower(integer) does not exist"),
        ("SELECT oid FROM pg_class WHERE relname ~ '('", "2201B", "regular expression"),
        ("SELECT current_setting('no.such')", "42704", "no.such"),
        ("SELECT pg_read_file('/etc/passwd')", "0A000", "pg_read_file"),
        ("SELECT rank() OVER w FROM pg_am WINDOW w AS (ORDER BY oid)", "0A000", "windows"),
        (
            "SELECT sum(1) OVER (ROWS UNBOUNDED PRECEDING EXCLUDE TIES) FROM pg_am",
            "0A000",
            "exclude of windowspec",
        ),
        ("SELECT oid FROM pg_am TABLESAMPLE SYSTEM (1)", "0A000", "sample of table"),
        ("SELECT oid FROM pg_am ORDER BY 1 FETCH FIRST ROW WITH TIES", "0A000", "with_ties"),
    ],
)
def test_errors_say_what_and_have_a_state(
    queries: CatalogQueries, text: str, state: str, words: str
) -> None:
    with pytest.raises(CatalogQueryError) as raised:
        queries.answer_catalog_query(text, (), lab_session())
    assert raised.value.sqlstate == state
    assert words in str(raised.value)


def test_columns_have_postgresqls_types(queries: CatalogQueries) -> None:
    description = queries.describe_catalog_query(
        "SELECT oid, relname, relhasindex, oid::regclass, relname || 'x', relnatts + 1, relacl"
        " FROM pg_class WHERE oid = $1 AND relname = $2 AND relhasindex = $3 AND relkind = any($4)"
    )
    assert [column.type for column in description.columns] == [
        OID,
        NAME,
        BOOL,
        REGCLASS,
        TEXT,
        INT4,
        1034,
    ]
    assert description.parameters == (OID, NAME, BOOL, 1002)


def test_a_functions_parameters_have_the_types_that_it_takes(queries: CatalogQueries) -> None:
    # Without blanks, as drivers may write them.
    text = "SELECT pg_get_indexdef($1,$2,$3), format_type($4,14), substring($5 from 2)"
    assert queries.is_catalog_query(text)
    assert queries.describe_catalog_query(text).parameters == (OID, INT4, BOOL, OID, TEXT)
    assert one(queries, "SELECT format_type($1,$2)", "1043", "14") == "character varying(10)"
    assert one(queries, "SELECT $$a$$ || pg_backend_pid()") == "a4242"


def test_a_parameters_type_is_the_clients_if_it_says_one(queries: CatalogQueries) -> None:
    text = "SELECT relname FROM pg_class WHERE oid = $1"
    assert queries.describe_catalog_query(text, [20]).parameters == (20,)
    assert queries.describe_catalog_query(text, [0]).parameters == (OID,)


def test_parameters_are_values_or_texts(queries: CatalogQueries) -> None:
    text = "SELECT relname FROM pg_class WHERE oid = any($1::oid[]) AND relispopulated = $2"
    oid = one(queries, "SELECT 'orders'::regclass::oid")
    assert rows_of(queries, text, [oid], True) == [("orders",)]
    assert rows_of(queries, text, f"{{{oid}}}", "t") == [("orders",)]
    with pytest.raises(CatalogQueryError, match="no parameter"):
        rows_of(queries, text, [oid])


def test_a_reference_has_its_name_and_oid(queries: CatalogQueries) -> None:
    value = one(queries, "SELECT 'orders'::regclass")
    assert isinstance(value, ObjectReference)
    assert (value, value.oid) == ("orders", one(queries, "SELECT 'orders'::regclass::oid"))
    assert one(queries, "SELECT 'pg_class'::regclass::text") == "pg_class"
    assert one(queries, "SELECT '\"Mixed Case\"'::regclass") == '"Mixed Case"'


def test_a_new_version_is_shown_and_the_same_costs_nothing() -> None:
    queries = CatalogQueries()
    text = "SELECT relname FROM pg_class WHERE relnamespace = 2200 ORDER BY 1"
    assert rows_of(queries, text) == []
    first = CatalogObjectRow("u1", "first", "table", (CatalogColumnRow("a", "int"),))
    queries.apply_snapshot(PgCatalogSnapshot(1, (first,)))
    assert rows_of(queries, text) == [("first",)]
    queries.apply_snapshot(PgCatalogSnapshot(1, ()))
    assert rows_of(queries, text) == [("first",)]
    second = CatalogObjectRow("u2", "second", "view", (CatalogColumnRow("a", "int"),))
    queries.apply_snapshot(PgCatalogSnapshot(2, (second,)))
    assert rows_of(queries, text) == [("second",)]


def test_columns_and_keys_have_the_properties_of_their_types() -> None:
    columns = (CatalogColumnRow("a", "boolean"), CatalogColumnRow("b", "array<bigint>"))
    table = CatalogObjectRow("u1", "t", "table", columns, key=("a", "b"))
    queries = CatalogQueries()
    queries.apply_snapshot(PgCatalogSnapshot(1, (table,)))
    text = """
        SELECT attname, attlen, attbyval, attalign, opcname
        FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum > 0
        JOIN pg_opclass o ON o.oid = indclass[attnum - 1]
        WHERE indrelid = 't'::regclass ORDER BY attnum"""
    assert rows_of(queries, text) == [
        ("a", 1, True, "c", "bool_ops"),
        ("b", -1, False, "d", "array_ops"),
    ]


def test_oids_are_stable_and_each_objects_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one_object, other = CatalogObjectRow("u1", "a", "table"), CatalogObjectRow("u2", "b", "table")
    assert OidAssignment([one_object]).oid_of("u1") == object_oid("u1")
    assert 16_384 <= object_oid("u9") < 2**31
    # Two hashes are equal: who comes first does not depend on the order of objects.
    monkeypatch.setattr(catalog_snapshot, "object_oid", lambda identity, role: 20_000)
    for objects in ([one_object, other], [other, one_object]):
        both = OidAssignment(objects)
        assert (both.oid_of("u1"), both.oid_of("u2"), both.oid_of("u1", "type")) == (
            20_000,
            20_001,
            20_002,
        )


def test_settings(queries: CatalogQueries) -> None:
    session = lab_session(application_name="test", search_path="penstock, public")
    text = "SELECT current_setting('application_name'), current_schemas(true)"
    answer = queries.answer_catalog_query(text, (), session)
    assert answer.rows == [("test", ["pg_catalog", "public"])]
    changed = queries.answer_catalog_query("SELECT set_config('jit', 'off', false)", (), session)
    assert (changed.rows, changed.settings) == ([("off",)], (("jit", "off", False),))
    listed = queries.answer_catalog_query(
        "SELECT setting FROM pg_settings WHERE name = 'application_name'", (), session
    )
    assert listed.rows == [("test",)]
    assert rows_of(queries, "SELECT count(*) > 300 FROM pg_settings") == [(True,)]


def test_a_lateral_subquery_sees_what_is_before_it(queries: CatalogQueries) -> None:
    text = """
        SELECT c.relname, l.attname FROM pg_class c
        CROSS JOIN LATERAL (
            SELECT a.attname FROM pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND c.relkind = $1
            ORDER BY a.attnum DESC LIMIT 2
        ) l WHERE c.relname = 'events'"""
    assert rows_of(queries, text, "r") == [("events", "value"), ("events", "kind")]
    assert rows_of(queries, text, "v") == []


def test_sets_of_a_select_list_go_side_by_side(queries: CatalogQueries) -> None:
    text = (
        "SELECT unnest(conkey), generate_subscripts(conkey, 1) FROM pg_constraint"
        " WHERE conname = 'orders_pkey'"
    )
    assert rows_of(queries, text) == [(1, 1), (2, 2)]


def test_spark_types_as_postgresqls() -> None:
    assert pg_type_of_spark("array<struct<a:int>>").oid == 114
    assert pg_type_of_spark("array<binary>").oid == 1001
    assert pg_type_of_spark("array<array<int>>").oid == 114
    assert pg_type_of_spark("varchar(7)") == pg_type_of_spark(" VARCHAR(7) ")
    assert pg_type_of_spark("tinyint").oid == 21


def test_values_as_text() -> None:
    assert format_catalog_value([True, None], 1000) == "{t,NULL}"
    assert format_catalog_value(["a,b", 'c"d', ""], 1009) == '{"a,b","c\\"d",""}'
    assert format_catalog_value(1.5, 701) == "1.5"
    assert format_catalog_value(-1.0, 700) == "-1"


def test_a_snapshot_is_plain_data() -> None:
    snapshot = lab_snapshot()
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=PgCatalogSnapshot) == snapshot


def test_who_is_connected(queries: CatalogQueries) -> None:
    text = "SELECT pid, usename, state, pid = pg_backend_pid() FROM pg_stat_activity ORDER BY 1"
    assert rows_of(queries, text) == [(4242, "bench", "active", True)]
    queries.apply_sessions([CatalogSession(user="reader", process_id=7, state="idle")])
    assert rows_of(queries, text)[0] == (7, "reader", "idle", False)
    assert rows_of(queries, "SELECT ssl FROM pg_stat_ssl WHERE pid = 7") == [(False,)]
    queries.apply_sessions([])


def test_a_query_without_end_is_stopped(
    queries: CatalogQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_database, "STEPS_MAX", 1_000_000)
    with pytest.raises(CatalogQueryError, match="too many steps") as raised:
        rows_of(queries, "SELECT count(*) FROM pg_proc a, pg_proc b WHERE a.oid <> b.oid")
    assert raised.value.sqlstate == "57014"
    assert rows_of(queries, "SELECT count(*) FROM pg_am") == [(7,)]
    with pytest.raises(CatalogQueryError, match="too many numbers"):
        rows_of(queries, "SELECT count(*) FROM generate_series(1, 1000000000), pg_am")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("row_number() OVER (PARTITION BY amtype ORDER BY amname DESC)", 1),
        ("sum(1) OVER (ORDER BY oid ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)", 1),
        ("array_agg(amname) FILTER (WHERE amname = 'heap') OVER ()", ["heap"]),
        ("sum(1.5::float8) OVER ()", 1.5),
        ("percent_rank() OVER (ORDER BY oid)", 0.0),
        ("lag(amname, 1) OVER (ORDER BY oid)", None),
        ("CASE amname WHEN 'heap' THEN 'a' ELSE 'b' END", "a"),
        ("string_agg(amname, '-') OVER ()", "heap"),
        ("json_agg(amname = 'heap') OVER ()", "[true]"),
        ("amname LIKE ANY (ARRAY['h%', 'x'])", True),
        ("amname <> ALL ('{heap}')", False),
        ("amname NOT LIKE ALL (ARRAY['x%', 'h%'])", False),
        ("oid >= ANY (SELECT oid FROM pg_am)", True),
        ("amname OPERATOR(pg_catalog.!~~) 'h%'", False),
        ("amname ~* '^H' AND amname !~ '^H'", True),
        ("amname OPERATOR(pg_catalog.~) '^(heap)$' COLLATE pg_catalog.default", True),
        ("(ARRAY[1,2,3])[2:3]", [2, 3]),
        ("ARRAY[amname::text, 'x'] || 'y'::text", ["heap", "x", "y"]),
        ("ARRAY(SELECT a.amname FROM pg_am a WHERE a.oid = m.oid)", ["heap"]),
        ("string_to_array('a,b', ',') && '{b,c}'", True),
        ("regexp_replace(amname, '(.)e', '[\\1]')", "[h]ap"),
        (
            "json_build_object('a', amname, 'b', true, 'c', ARRAY[1])",
            '{"a" : "heap", "b" : true, "c" : [1]}',
        ),
        ("EXISTS (SELECT 1 FROM pg_class c WHERE c.relam = m.oid)", True),
        ("(oid, amname) = (2, 'heap')", True),
        ("amname IS DISTINCT FROM 'heap'", False),
        ("coalesce(nullif(amname, 'heap'), 'none')", "none"),
        ("substring(amname from 2 for 2) || position('a' in amname)", "ea3"),
        ("pg_catalog.position(amname, 'a')", 3),
        ("trim(both 'h' from amname) || trim(trailing 'p' from amname)", "eaphea"),
        ("(SELECT max(a * 10 + n) FROM unnest(ARRAY[7, 8]) WITH ORDINALITY u(a, n))", 82),
        ("greatest(oid::int, 7, NULL)", 7),
        ("amhandler::regproc::text", "heap_tableam_handler"),
        ("'int4'::regtype::oid = 23 AND format_type(1043, 14) = 'character varying(10)'", True),
        ("extract(year from now())", 2000),
        ("concat(amname, NULL, 1) || ceil(1.5)", "heap12"),
        ("'{pg_am,1247}'::regclass[]::text[]", ["pg_am", "pg_type"]),
        ("pg_typeof(amname)", "name"),
        ("E'a\\nb'", "a\nb"),
        ("'it''s' || U&'\\0021'", "it's!"),
    ],
)
def test_expressions(queries: CatalogQueries, expression: str, value: object) -> None:
    text = f"SELECT {expression} AS v FROM pg_catalog.pg_am m"
    query = f"SELECT v FROM ({text} WHERE amname = 'heap') q"
    assert rows_of(queries, query) == [(value,)]


def test_distinct_on_takes_the_first_of_each(queries: CatalogQueries) -> None:
    text = (
        "SELECT DISTINCT ON (amtype) amtype, amname FROM pg_am ORDER BY amtype, amname DESC LIMIT 5"
    )
    assert rows_of(queries, text) == [("i", "spgist"), ("t", "heap")]
    # By the result's names and places, too.
    text = "SELECT DISTINCT ON (t) amtype AS t, amname FROM pg_am ORDER BY 1 DESC, amname OFFSET 1"
    assert rows_of(queries, text) == [("i", "brin")]


def test_rows_are_ordered_by_places_names_and_values(queries: CatalogQueries) -> None:
    union = "SELECT 1, 1 UNION SELECT 2, oid::int4 FROM pg_am"
    assert rows_of(queries, f"{union} ORDER BY 2 DESC LIMIT ALL OFFSET 6") == [(2, 2), (1, 1)]
    grouped = "SELECT amtype AS k, count(*) FROM pg_am GROUP BY k HAVING count(*) > 1"
    assert rows_of(queries, f"{grouped} ORDER BY upper(amtype), k FETCH FIRST ROW ONLY") == [
        ("i", 6)
    ]
    values = "VALUES (1, pg_backend_pid()), (2, 3) ORDER BY column1 DESC LIMIT 1"
    assert rows_of(queries, values) == [(2, 3)]
    with pytest.raises(CatalogQueryError, match="position 3 is not in select list") as raised:
        rows_of(queries, f"{union} ORDER BY 3")
    assert raised.value.sqlstate == "42P10"


def test_joins_by_using_merge_their_columns(queries: CatalogQueries) -> None:
    text = """
        WITH a(x, y) AS (VALUES (1, 'a'), (2, 'b')), b(x, z) AS (VALUES (2, pg_backend_pid()))
        SELECT * FROM a LEFT JOIN b USING (x) ORDER BY x"""
    answer = queries.answer_catalog_query(text, (), lab_session())
    assert [column.name for column in answer.columns] == ["x", "y", "z"]
    assert answer.rows == [(1, "a", None), (2, "b", 4242)]


def test_a_recursive_query(queries: CatalogQueries) -> None:
    text = """
        WITH RECURSIVE up(oid, depth) AS (
            SELECT 'totals'::regclass::oid, 0
            UNION ALL
            SELECT d.refobjid, depth + 1 FROM up
            JOIN pg_rewrite r ON r.ev_class = up.oid
            JOIN pg_depend d ON d.objid = r.oid AND d.refobjid <> up.oid AND d.deptype = 'n'
        )
        SELECT oid::regclass::text, depth FROM up ORDER BY depth"""
    assert rows_of(queries, text) == [("totals", 0), ("orders", 1)]
