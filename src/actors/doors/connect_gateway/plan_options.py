"""Refuses what a plan says of the service's objects beside their names, if nothing obeys it. Pure.

Spark would take these fields for its own tables. What no field here obeys must not be dropped: a
read with `versionAsOf` that returns the present rows is a wrong answer. A test compares the lists
with the messages of the installed PySpark.
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
"""Fields that are obeyed for objects of the service, by message."""
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
"""Fields that are refused for them."""
_PAST: Final = frozenset({"versionasof", "timestampasof"})


def check_reads(message: ProtoMessage, resolve: ResolveName) -> None:
    """Raise `SparkCondition` if a read of an object has options."""
    for each in walk_messages(message):
        # Options of a stream are looked at in `change_streams`.
        if each.DESCRIPTOR.full_name != f"{PREFIX}Read" or each.is_streaming:
            continue
        table = each.named_table
        parts = parse_identifier(table.unparsed_identifier) if table.options else None
        if parts is not None and resolve(parts) is not None:
            raise unsupported(_read_refusal(sorted(table.options)[0], ".".join(parts)))


def _read_refusal(option: str, name: str) -> str:
    if option.lower() in _PAST:
        return (
            f"Option {option} of a read of {name} of Penstock: a plan reads at the present time. "
            "Read a past one with Client.peek(as_of=…), or with AS OF over PostgreSQL's protocol."
        )
    return f"Option {option} of a read of {name} of Penstock: there are no options of a read."


def check_write(write: ProtoMessage, name: str) -> None:
    """Raise `SparkCondition` if a write into an object of this name, which may be new, has fields
    or options that nothing here obeys."""
    obeyed = OBEYED_FIELDS[write.DESCRIPTOR.full_name]
    for field, value in write.ListFields():
        # A switch that is off is as if it were not there.
        if field.name in obeyed or value is False:
            continue
        options = sorted(value) if field.name == "options" else []
        what = f"option {options[0]}" if options else field.name
        raise unsupported(
            f"A write into {name} of Penstock with {what}: a table here has none. Create it by "
            "CREATE TABLE, and append to it."
        )


def creates(write: ProtoMessage) -> bool:
    """Return whether a write makes a table that is not there."""
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
    """Return whether a write fails where its table is there already."""
    if write.DESCRIPTOR.full_name == f"{PREFIX}WriteOperation":
        return creates(write) and write.mode in (
            commands_pb2.WriteOperation.SAVE_MODE_UNSPECIFIED,
            commands_pb2.WriteOperation.SAVE_MODE_ERROR_IF_EXISTS,
        )
    # The second version's other modes replace what is there, or append to it.
    return bool(write.mode == commands_pb2.WriteOperationV2.MODE_CREATE)
