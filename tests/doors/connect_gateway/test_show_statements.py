"""SHOW TABLES, SHOW TABLE EXTENDED and SHOW VIEWS, and the states of the service's errors."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from google.rpc import error_details_pb2

from actors.control.controller.catalog.catalog import CatalogObject
from actors.doors.connect_gateway.error_status import status_of
from actors.doors.connect_gateway.object_catalog import ObjectNames
from actors.doors.connect_gateway.show_statements import answer_show_statement
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import (
    DuplicateKey,
    ObjectExists,
    PenstockError,
    SqlSyntaxError,
    UnknownObject,
)

SCHEMA = TableSchema((TableColumn("id", "bigint", False), TableColumn("s", "string")), ("id",))
NAMES = ObjectNames.of(
    [
        CatalogObject(id="u1", name="Orders", kind="table", schema=SCHEMA),
        CatalogObject(id="u2", name="sums", kind="view", schema=SCHEMA),
        CatalogObject(id="u3", name="by_id", kind="index", schema=SCHEMA),
    ]
)


def shown(text: str) -> list[str]:
    found = answer_show_statement(text, NAMES)
    assert found is not None
    return [row.get("tableName") or row["viewName"] for row in found.rows.to_pylist()]


def test_objects_stand_in_lists_of_their_database() -> None:
    assert shown("SHOW TABLES") == ["Orders", "sums"]
    assert shown("show tables in DEFAULT like 'o*'") == ["Orders"]
    assert shown("/* by dbt */ SHOW TABLE EXTENDED IN spark_catalog.default LIKE '*|x'") == [
        "Orders",
        "sums",
    ]
    assert shown("SHOW VIEWS FROM default") == ["sums"]
    assert "objects" in shown("SHOW TABLES IN penstock")
    found = answer_show_statement("SHOW TABLES", NAMES)
    assert found is not None
    assert found.added
    assert found.rows.schema.names == ["namespace", "tableName", "isTemporary"]


@pytest.mark.parametrize(
    "text",
    ["SHOW TABLES IN other", "SHOW DATABASES", "SHOW MATERIALIZED VIEWS", "SELECT 1", "SHOW ("],
)
def test_other_lists_are_sparks_alone(text: str) -> None:
    assert answer_show_statement(text, NAMES) is None


def test_an_object_is_told_of_in_sparks_lines() -> None:
    found = answer_show_statement("SHOW TABLE EXTENDED LIKE 'sums'", NAMES)
    assert found is not None
    (row,) = found.rows.to_pylist()
    lines = row["information"].splitlines()
    assert "Type: VIEW" in lines
    assert lines[-2:] == [" |-- id: bigint (nullable = false)", " |-- s: string (nullable = true)"]
    assert isinstance(found.rows, pa.Table)


@pytest.mark.parametrize(
    ("error", "condition", "state"),
    [
        (SqlSyntaxError("line 1, column 1: no"), "PARSE_SYNTAX_ERROR", "42601"),
        (UnknownObject("t"), "TABLE_OR_VIEW_NOT_FOUND", "42P01"),
        (ObjectExists("t"), "TABLE_OR_VIEW_ALREADY_EXISTS", "42P07"),
        (DuplicateKey("t"), "", "23505"),
    ],
)
def test_errors_have_a_state(error: PenstockError, condition: str, state: str) -> None:
    info = error_details_pb2.ErrorInfo()
    status_of(error).details[0].Unpack(info)
    assert info.metadata["sqlState"] == state
    assert info.metadata.get("errorClass", "") == condition
    assert not condition or json.loads(info.metadata["messageParameters"])
