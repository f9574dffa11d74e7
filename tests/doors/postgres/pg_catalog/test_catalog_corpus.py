"""What real clients ask, and the rules of the dialect, answered as a real PostgreSQL 15 answers it
over the same objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from catalog_lab import (  # type: ignore[import-not-found]
    DATABASE,
    RELATIONS,
    CorpusQuery,
    lab_session,
    lab_snapshot,
    read_corpus,
)
from shared_rows import (  # type: ignore[import-not-found]
    alter_catalog,
    alter_live,
    keep_shared_rows,
    queries_over,
)

from actors.doors.postgres.pg_catalog.catalog_data import load_system_catalog
from actors.doors.postgres.pg_catalog.catalog_queries import CatalogAnswer, CatalogQueries
from actors.doors.postgres.pg_catalog.pg_types import format_catalog_value
from actors.runtime.errors import PenstockError

CORPUS = read_corpus()
QUERIES_MIN = 100
EQUAL_MIN = 0.95
UNEQUAL: dict[str, str] = {
    "adbc: connect (2)": "PostgreSQL keeps long texts in tables of their own, whose columns count",
    "psql: \\dt *.*": "the same tables are listed",
}
"""Queries whose answers differ from PostgreSQL's in names, types or number of rows, and why."""
OTHER_VALUES = frozenset(
    {
        # Transactions that wrote a row, files, pages, bytes: of PostgreSQL's storage.
        "con_state_id",
        "column_state_number",
        "state_number",
        "table_state_number",
        "datfrozenxid",
        "relfrozenxid",
        "relfilenode",
        "reltoastrelid",
        "pages",
        "index_rel_size",
        "rel_size",
        "total_rel_size",
        "Size",
        # A view's text is the user's, in Spark's SQL.
        "pg_get_viewdef",
        "pg_get_viewdef_1",
        "source_text",
        "is_updatable",
        # Whose server it is, and how it isolates.
        "version",
        "transaction_isolation",
        # Comments on functions and operators are left out, as are trees of expressions.
        "Description",
        "Source code",
        "remarks",
        "typdefaultbin",
    }
)
"""Columns whose values are other than PostgreSQL's."""
NAMED_OIDS = """
    SELECT oid::int8, 'relation ' || relname FROM pg_class WHERE oid >= 10000
    UNION ALL SELECT oid::int8, 'type ' || typname FROM pg_type WHERE oid >= 10000
    UNION ALL SELECT oid::int8, 'constraint ' || conname FROM pg_constraint WHERE oid >= 10000
    UNION ALL SELECT r.oid::int8, 'rule ' || relname FROM pg_rewrite r
        JOIN pg_class c ON c.oid = ev_class WHERE r.oid >= 16384
    UNION ALL SELECT oid::int8, 'role ' || rolname FROM pg_roles WHERE oid >= 16384
    UNION ALL SELECT oid::int8, 'database ' || datname FROM pg_database WHERE oid >= 16384
    UNION ALL SELECT oid::int8, 'schema ' || nspname FROM pg_namespace WHERE oid >= 10000
    UNION ALL SELECT oid::int8, 'function ' || proname FROM pg_proc WHERE oid >= 10000
    UNION ALL SELECT oid::int8, 'class ' || opcname FROM pg_opclass WHERE oid >= 10000
    UNION ALL SELECT oid::int8, 'language ' || lanname FROM pg_language WHERE oid >= 10000
    UNION ALL SELECT oid::int8, 'extension ' || extname FROM pg_extension WHERE oid >= 10000
"""
"""What each object's OID is the OID of: the numbers differ. Those from 10,000 on were assigned when
the server's cluster was made, by an order that another minor release may change, and so does the
number of locales of its machine."""

VERSIONS = (
    "SELECT name, setting FROM pg_settings WHERE name IN ('server_version', 'server_version_num')"
)
DATABASE_OID = "5"

Real = psycopg.Connection[Any]


MINORS = ("as installed", "of other minors")


@pytest.fixture(scope="module")
def queries(request: pytest.FixtureRequest, real: Real) -> Iterator[CatalogQueries]:
    """Our answers over the rows that we share with the server, which has only these meanwhile."""
    catalog = load_system_catalog()
    with real.transaction(force_rollback=True), pytest.MonkeyPatch.context() as patch:
        if getattr(request, "param", MINORS[0]) != MINORS[0]:
            alter_live(real)
            catalog = alter_catalog(catalog)
        made = queries_over(keep_shared_rows(real, catalog), patch)
        made.apply_snapshot(lab_snapshot())
        yield made


def real_oids(real: Real) -> dict[str, int]:
    """The OIDs of the relations there."""
    rows = real.execute(
        "SELECT n, n::regclass::oid::int8 FROM unnest(%s::text[]) n", (list(RELATIONS),)
    )
    return {name.strip('"'): oid for name, oid in rows}


def our_oids(queries: CatalogQueries) -> dict[str, int]:
    """The OIDs of the same relations here."""
    found = {}
    for name in RELATIONS:
        answer = queries.answer_catalog_query("SELECT $1::regclass::oid", (name,), lab_session())
        found[name.strip('"')] = answer.rows[0][0]
    return found


def ask_real(real: Real, query: CorpusQuery) -> tuple[list[tuple[str, int]], list[tuple[Any, ...]]]:
    """PostgreSQL's columns and rows, as texts."""
    text, parameters = query.for_oids(real_oids(real))
    result = real.pgconn.exec_params(
        text.encode(), [_as_text(each) for each in parameters], query.parameter_types
    )
    if result.status not in (psycopg.pq.ExecStatus.TUPLES_OK,):
        raise AssertionError(f"{query.label}: {result.error_message.decode()}")
    columns = [
        ((result.fname(at) or b"").decode(), result.ftype(at)) for at in range(result.nfields)
    ]
    rows = [
        tuple(
            None if (value := result.get_value(row, at)) is None else value.decode()
            for at in range(result.nfields)
        )
        for row in range(result.ntuples)
    ]
    return columns, rows


def _as_text(value: Any) -> bytes:
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, list):
        return ("{" + ",".join(str(each) for each in value) + "}").encode()
    return str(value).encode()


def ask_us(queries: CatalogQueries, query: CorpusQuery) -> CatalogAnswer:
    """Our answer."""
    text, parameters = query.for_oids(our_oids(queries))
    types = query.parameter_types
    return queries.answer_catalog_query(text, parameters, lab_session(), types)


def difference(real: Real, queries: CatalogQueries, query: CorpusQuery) -> str:
    """How the two answers differ in names, types or number of rows; empty: they do not."""
    columns, rows = ask_real(real, query)
    try:
        answer = ask_us(queries, query)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    ours = [(column.name, column.type) for column in answer.columns]
    if columns != ours:
        return f"columns {ours} instead of {columns}"
    if len(rows) != len(answer.rows):
        return f"{len(answer.rows)} rows instead of {len(rows)}"
    return ""


def value_difference(
    query: CorpusQuery,
    real: tuple[list[tuple[str, int]], list[tuple[Any, ...]]],
    answer: CatalogAnswer,
    names: tuple[dict[str, str], dict[str, str]],
) -> str:
    """The first column whose values differ, with two of them; rows may be in another order."""
    columns, rows = real
    texts = [
        tuple(
            format_catalog_value(value, column.type)
            for value, column in zip(row, answer.columns, strict=True)
        )
        for row in answer.rows
    ]
    for at, (name, _) in enumerate(columns):
        if name in OTHER_VALUES:
            continue
        theirs = sorted(
            str(row[at])
            if row[at] == DATABASE_OID and name not in ("id", "oid")
            else names[0].get(row[at], str(row[at]))
            for row in rows
        )
        ours = sorted(names[1].get(row[at] or "", str(row[at])) for row in texts)
        for one, other in zip(theirs, ours, strict=True):
            if one != other:
                return f"{query.label}: {name} is {other!r} instead of {one!r}"
    return ""


def test_the_corpus_is_large() -> None:
    labels = [query.label for query in CORPUS]
    assert len(labels) == len(set(labels)) >= QUERIES_MIN


def test_every_query_of_the_corpus_is_taken_for_one(queries: CatalogQueries) -> None:
    oids = our_oids(queries)
    assert [q.label for q in CORPUS if not queries.is_catalog_query(q.for_oids(oids)[0])] == []


@pytest.mark.parametrize("queries", MINORS, indirect=True)
def test_answers_are_as_postgresql_gives_them(real: Real, queries: CatalogQueries) -> None:
    found = {query.label: difference(real, queries, query) for query in CORPUS}
    wrong = {label: text for label, text in found.items() if text}
    print(f"{len(CORPUS) - len(wrong)} of {len(CORPUS)} answers are equal")
    assert {label: text for label, text in wrong.items() if label not in UNEQUAL} == {}
    assert wrong.keys() == UNEQUAL.keys()
    assert len(wrong) <= (1 - EQUAL_MIN) * len(CORPUS)


@pytest.mark.parametrize("queries", MINORS, indirect=True)
def test_values_are_as_postgresql_gives_them(real: Real, queries: CatalogQueries) -> None:
    theirs = {str(oid): name for oid, name in real.execute(NAMED_OIDS)}
    # PostgreSQL's own database has an OID as small as a column's number.
    theirs[DATABASE_OID] = f"database {DATABASE}"
    # Each side's own version is the same answer to a client.
    theirs |= {value: name for name, value in real.execute(VERSIONS)}
    ours = {
        str(oid): name
        for oid, name in queries.answer_catalog_query(NAMED_OIDS, (), lab_session()).rows
    }
    ours |= {
        value: name
        for name, value in queries.answer_catalog_query(VERSIONS, (), lab_session()).rows
    }
    found = [
        value_difference(query, ask_real(real, query), ask_us(queries, query), (theirs, ours))
        for query in CORPUS
        if query.label not in UNEQUAL
    ]
    wrong = [text for text in found if text]
    print("\n".join(wrong))
    assert wrong == []


def test_every_system_relation_can_be_read(real: Real, queries: CatalogQueries) -> None:
    wrong = []
    for shape in load_system_catalog().relations:
        text = f"SELECT * FROM {shape.schema}.{shape.name}"
        result = real.pgconn.exec_(f"{text} LIMIT 0".encode())
        names = [(result.fname(at) or b"").decode() for at in range(result.nfields)]
        wanted = list(zip(names, (result.ftype(at) for at in range(result.nfields)), strict=True))
        answer = queries.answer_catalog_query(text, (), lab_session())
        ours = [(column.name, column.type) for column in answer.columns]
        if wanted != ours:
            wrong.append((shape.name, list(zip(wanted, ours, strict=True))))
    assert wrong == []


def test_parameters_have_the_types_that_postgresql_gives_them(
    real: Real, queries: CatalogQueries
) -> None:
    theirs, ours, wrong = real_oids(real), our_oids(queries), []
    for query in CORPUS:
        if query.parameters:
            real.pgconn.prepare(b"", query.for_oids(theirs)[0].encode(), query.parameter_types)
            described = real.pgconn.describe_prepared(b"")
            wanted = tuple(described.param_type(at) for at in range(described.nparams))
            description = queries.describe_catalog_query(
                query.for_oids(ours)[0], query.parameter_types
            )
            if wanted != description.parameters:
                wrong.append((query.label, wanted, description.parameters))
    print("\n".join(map(str, wrong)))
    assert wrong == []
