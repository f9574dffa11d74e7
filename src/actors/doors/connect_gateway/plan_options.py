"""Refuses fields and options in plans that have no effect for the service's objects. Pure.

Spark supports these fields for its own tables. Here they must be refused instead of ignored: a read
with `versionAsOf` that returns the current rows would be wrong. A test compares the lists with the
messages of the installed PySpark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql.connect.proto import commands_pb2

from actors.doors.connect_gateway.error_status import unsupported
from actors.doors.connect_gateway.plan_rewriting import (
    NAMED_TABLE,
    PREFIX,
    ProtoMessage,
    walk_messages,
)
from actors.doors.connect_gateway.sql_names import ResolveName, parse_identifier


def _listed(names: str) -> frozenset[str]:
    return frozenset(names.split())


OBEYED_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    NAMED_TABLE: frozenset({"unparsed_identifier"}),
    f"{PREFIX}WriteOperation": frozenset({"input", "table", "mode"}),
    f"{PREFIX}WriteOperation.SaveTable": frozenset({"table_name", "save_method"}),
    f"{PREFIX}WriteOperationV2": frozenset({"input", "table_name", "mode"}),
}
"""Fields that are supported for objects of the service, by message."""
REFUSED_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    NAMED_TABLE: frozenset({"options"}),
    f"{PREFIX}WriteOperation": frozenset(
        [
            "source",
            "path",
            "sort_column_names",
            "partitioning_columns",
            "bucket_by",
            "options",
            "clustering_columns",
            "with_schema_evolution",
        ]
    ),
    f"{PREFIX}WriteOperation.SaveTable": frozenset(),
    f"{PREFIX}WriteOperationV2": frozenset(
        [
            "provider",
            "partitioning_columns",
            "options",
            "table_properties",
            "overwrite_condition",
            "clustering_columns",
            "with_schema_evolution",
        ]
    ),
}
"""Fields that are refused for objects of the service, by message."""
_PAST: Final = frozenset({"versionasof", "timestampasof"})


def check_reads(message: ProtoMessage, resolve: ResolveName) -> None:
    """Raise `SparkCondition` if a read of an object has options."""
    for each in walk_messages(message):
        # `change_streams` checks the options of streams.
        if each.DESCRIPTOR.full_name != f"{PREFIX}Read" or each.is_streaming:
            continue
        table = each.named_table
        parts = parse_identifier(table.unparsed_identifier) if table.options else None
        if parts is not None and resolve(parts) is not None:
            raise unsupported(_read_refusal(sorted(table.options)[0], ".".join(parts)))


def _read_refusal(option: str, name: str) -> str:
    if option.lower() in _PAST:
        return (
            f"Option {option} is not supported for the Penstock object {name}: plans read the "
            "latest contents. For past contents use Client.peek(as_of=…), or AS OF over "
            "PostgreSQL's protocol."
        )
    return f"Option {option} is not supported for the Penstock object {name}: omit it."


def check_write(write: ProtoMessage, name: str) -> None:
    """Raise `SparkCondition` if a write into an existing or new object has fields or options that
    are not supported."""
    obeyed = OBEYED_FIELDS[write.DESCRIPTOR.full_name]
    for field, value in write.ListFields():
        # A flag that is off has no effect.
        if field.name in obeyed or value is False:
            continue
        options = sorted(value) if field.name == "options" else []
        what = f"option {options[0]}" if options else field.name
        raise unsupported(
            f"Writing into the Penstock table {name} does not support {what}. Create the table "
            "with CREATE TABLE, and append to it."
        )


def creates(write: ProtoMessage) -> bool:
    """Return whether a write creates its table if it does not exist."""
    if write.DESCRIPTOR.full_name == f"{PREFIX}WriteOperation":
        return bool(
            write.table.save_method
            == commands_pb2.WriteOperation.SaveTable.TABLE_SAVE_METHOD_SAVE_AS_TABLE
        )
    return write.mode in (
        commands_pb2.WriteOperationV2.MODE_CREATE,
        commands_pb2.WriteOperationV2.MODE_CREATE_OR_REPLACE,
    )


def wants_absence(write: ProtoMessage) -> bool:
    """Return whether a write fails if its table exists."""
    if write.DESCRIPTOR.full_name == f"{PREFIX}WriteOperation":
        return creates(write) and write.mode in (
            commands_pb2.WriteOperation.SAVE_MODE_UNSPECIFIED,
            commands_pb2.WriteOperation.SAVE_MODE_ERROR_IF_EXISTS,
        )
    # The other modes of version 2 replace the table or append to it.
    return bool(write.mode == commands_pb2.WriteOperationV2.MODE_CREATE)
