"""The storage half's messages: they cross the wire whole, and say what an update may change."""

from __future__ import annotations

import types
import typing
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol import storage, storage_internal
from actors.model.protocol.compute import AllowWrites, ShardImport
from actors.model.protocol.internal import ProposeCommand, SequencedCommand
from actors.model.protocol.storage import (
    ConnectorConfiguration,
    IngestionDescription,
    IngestionExport,
    RetryDelays,
    SinkDescription,
    UpdateStorageConfiguration,
    ingestion_conflicts,
    sink_conflicts,
)
from actors.model.protocol.storage_internal import DropObjects, ForStorage
from actors.runtime.frames import FrameCodec

SCHEMA = TableSchema((TableColumn("k", "bigint"),))
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**62), 2**62),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of messages."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if kind in PLAIN:
        return PLAIN[kind]
    hints = typing.get_type_hints(kind)
    names = [field.name for field in msgspec.structs.fields(kind)]
    return st.fixed_dictionaries({name: values(hints[name]) for name in names}).map(
        lambda given: kind(**given)
    )


COMMANDS: FrameCodec[storage.Command] = FrameCodec(storage.Command, 1 << 20)
RESPONSES: FrameCodec[storage.Response] = FrameCodec(storage.Response, 1 << 20)


@given(values(storage.Command), values(storage.Response))
def test_what_is_sent_is_what_comes(command: storage.Command, response: storage.Response) -> None:
    assert COMMANDS.decode(bytes(COMMANDS.encode(command))[4:]) == command
    assert RESPONSES.decode(bytes(RESPONSES.encode(response))[4:]) == response


@given(values(storage_internal.InternalCommand), st.integers(0, 9))
def test_ordered_commands_of_both_halves_are_told_apart(
    command: storage_internal.InternalCommand, generation: int
) -> None:
    for kind in (ProposeCommand, SequencedCommand):
        sent = (
            ProposeCommand(generation, ForStorage(command))
            if kind is ProposeCommand
            else SequencedCommand(3, generation, ForStorage(command))
        )
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=kind) == sent
    assert ProposeCommand(1, ForStorage(command)).half == "storage"


def test_a_proposal_without_a_wrapping_is_computes() -> None:
    assert ProposeCommand(1, AllowWrites()).half == "compute"
    assert ProposeCommand(1, ForStorage(UpdateStorageConfiguration())).half == "storage"
    assert ProposeCommand(1, ForStorage(DropObjects(("u1",)))).half == "storage"


E1 = IngestionExport("e1", "public.a", SCHEMA, "s1")
E2 = IngestionExport("e2", "public.b", SCHEMA, "s2")
OLD = IngestionDescription("u1", "pg", ConnectorConfiguration("postgres", b"x"), "r1", (E1,))


def wider(column: TableColumn) -> IngestionExport:
    schema = TableSchema((*SCHEMA.columns, column), SCHEMA.key)
    return msgspec.structs.replace(E1, schema=schema)


SINK = SinkDescription(
    "k1", "out", ShardImport("s1", SCHEMA), ConnectorConfiguration("delta", b"x"), 5
)


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({}, ()),
        ({"name": "other", "retry": RetryDelays(5, 9)}, ()),
        ({"exports": (E1, E2)}, ()),
        ({"exports": ()}, ()),
        ({"exports": (E2,)}, ()),
        ({"exports": (wider(TableColumn("note", "string")),)}, ()),
        (
            {"exports": (wider(TableColumn("n", "int", False)),)},
            ("export e1: columns (`k` bigint) → (`k` bigint, `n` int not null)",),
        ),
        ({"configuration": ConnectorConfiguration("files", b"x")}, ("kind postgres → files",)),
        (
            {"configuration": ConnectorConfiguration("postgres", b"y")},
            ("configuration of kind postgres",),
        ),
        ({"remap_shard": "r2"}, ("remap shard r1 → r2",)),
        (
            {"exports": (E2, msgspec.structs.replace(E1, shard="s3", outside="public.c"))},
            ("export e1: external name public.a → public.c", "export e1: shard s1 → s3"),
        ),
        (
            {"exports": (IngestionExport("e1", "public.a", TableSchema(()), "s1", b"!"),)},
            ("export e1: columns (`k` bigint) → ()", "export e1: data of its kind"),
        ),
    ],
)
def test_what_an_update_of_a_source_may_change(
    changes: dict[str, Any], differences: tuple[str, ...]
) -> None:
    assert ingestion_conflicts(OLD, msgspec.structs.replace(OLD, **changes)) == differences


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"name": "other", "retry": RetryDelays(1), "as_of": 9}, ()),
        ({"configuration": ConnectorConfiguration("parquet", b"x")}, ("kind delta → parquet",)),
        (
            {"configuration": ConnectorConfiguration("delta")},
            ("configuration of kind delta",),
        ),
        ({"input": ShardImport("s2", SCHEMA)}, ("input shard s1 → s2",)),
        ({"input": ShardImport("s1", TableSchema(()))}, ("columns (`k` bigint) → ()",)),
    ],
)
def test_what_may_change_of_a_sink(changes: dict[str, Any], differences: tuple[str, ...]) -> None:
    assert sink_conflicts(SINK, msgspec.structs.replace(SINK, **changes)) == differences
