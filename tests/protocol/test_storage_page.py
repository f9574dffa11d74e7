"""docs/protocol-storage.md names every message, field and status there is, and draws the tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from wire_names import wire_name  # type: ignore[import-not-found]

from actors.cluster.rules import mermaid
from actors.cluster.storage_rules import TABLES
from actors.plan.schema import TableSchema
from actors.protocol import message_parts, storage, storage_internal
from actors.protocol.compute import ShardImport
from actors.protocol.storage_internal import InternalCommand
from actors.storage.history import StorageDefinitions

STRUCTS = [
    kind
    for kind in (*vars(storage).values(), message_parts.OperatorStatistics)
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__module__ in (storage.__name__, message_parts.__name__)
    and kind not in (storage.StorageTagged, storage.StorageTaggedResponse)
]


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "protocol-storage.md").read_text()


def section(page: str, title: str) -> str:
    found = re.search(rf"^####? {re.escape(title)}\n(.*?)(?=^#|\Z)", page, re.M | re.S)
    assert found is not None, f"the page has no section {title}"
    return found.group(1)


@pytest.mark.parametrize("kind", STRUCTS, ids=wire_name)
def test_every_message_and_field_is_there_and_no_other(page: str, kind: Any) -> None:
    named = re.findall(r"^\| `(\w+)` \|", section(page, wire_name(kind)), re.M)
    assert named == [field.name for field in msgspec.structs.fields(kind)]


def test_no_message_is_there_that_the_code_does_not_have(page: str) -> None:
    titles = re.findall(r"^#### (\w+)$", page, re.M)
    assert sorted(titles) == sorted(wire_name(kind) for kind in STRUCTS)


def test_the_unions_are_on_the_page_in_their_order(page: str) -> None:
    for union, title, after in (
        (storage.Command, "### Commands", "### Responses"),
        (storage.Response, "### Responses", "### Parts of messages"),
    ):
        part = page.partition(f"\n{title}\n")[2].partition(f"\n{after}\n")[0]
        named = re.findall(r"^#### (\w+)$", part, re.M)
        assert named == [wire_name(kind) for kind in get_args(union) if kind in STRUCTS]


def test_every_status_and_internal_command_is_there(page: str) -> None:
    health = page.partition("## Health")[2].partition("## Statistics")[0]
    named = re.findall(r"^\| `(\w+)` \|", health, re.M)
    assert named == list(get_args(storage.HealthStatus))
    told = page.partition("## Two kinds of commands")[2].partition("## Rules of commands")[0]
    for kind in get_args(InternalCommand):
        assert f"`{wire_name(kind)}`" in told
        assert kind.__module__ in (storage.__name__, storage_internal.__name__)


@pytest.mark.parametrize("title", TABLES)
def test_diagrams_are_drawn_from_the_tables(page: str, title: str) -> None:
    assert section(page, title).strip() == f"```mermaid\n{mermaid(TABLES[title])}\n```"


def test_the_order_of_the_history_is_as_told(page: str) -> None:
    told = page.partition("## The history")[2].partition("## Reconciliation")[0]
    named = re.findall(r"[A-Z]\w+[a-z]s?\b", told.partition("reads:")[2].partition(".")[0])
    names = [name.removesuffix("s") if name not in ("AllowWrites",) else name for name in named]
    everything = {wire_name(kind): kind for kind in get_args(storage.Command)}
    order = [everything[name] for name in names]
    wanted = StorageDefinitions()
    examples: dict[Any, Any] = {}
    configuration = storage.ConnectorConfiguration("x")
    source = storage.IngestionDescription("u", "u", configuration, "r")
    sink_input = ShardImport("s", TableSchema(()))
    sink = storage.SinkDescription("k", "k", sink_input, configuration, 0)
    for kind in reversed(order):
        match wire_name(kind):
            case "Hello":
                examples[kind] = kind("n")
            case "UpdateConfiguration":
                examples[kind] = kind(1)
            case "RunIngestion":
                examples[kind] = kind(source)
            case "RunSink":
                examples[kind] = kind(sink)
            case "RunOneshotIngestion":
                examples[kind] = kind("o", "t", "s", TableSchema(()), configuration)
            case "AllowCompaction":
                examples[kind] = kind("u", 1)
            case _:
                examples[kind] = kind()
    for kind in sorted(order, key=lambda kind: wire_name(kind) == "AllowCompaction"):
        wanted.add(examples[kind])
    assert [type(command) for command in wanted.commands()] == order
