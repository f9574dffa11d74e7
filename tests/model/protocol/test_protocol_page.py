"""docs/internals/protocol.md and docs/internals/protocol-storage.md name every message, field,
flag, status and error there is, and draw the tables; and the tables say what the rules do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from wire_names import wire_name  # type: ignore[import-not-found]

from actors.channel_adapter import NonceVerdict, StashRules
from actors.model.plan.schema import TableSchema
from actors.model.protocol import compute, message_parts, storage, storage_internal
from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    CancelPeek,
    Command,
    CreateDataflow,
    CreateInstance,
    Frontiers,
    Hello,
    IndexTarget,
    InitializationComplete,
    Peek,
    PeekResponse,
    PeekRows,
    ScheduleDataflow,
    ShardImport,
)
from actors.model.protocol.internal import SequencedCommand, TaggedResponse
from actors.model.protocol.storage_internal import InternalCommand
from actors.replica.cluster.rules import OTHER, STAGES, CommandRules
from actors.replica.compute import events as e
from actors.replica.compute.reconciliation import MEANING
from actors.replica.compute.state import ComputeState
from actors.replica.storage.history import StorageDefinitions
from actors.runtime import errors
from actors.runtime.errors import RemoteProtocolError
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from cluster_house import index  # type: ignore[import-not-found]
from protocol_tables import (  # type: ignore[import-not-found]
    ADAPTER,
    DATAFLOW,
    PEEK,
    STORAGE_TABLES,
    TABLES,
    mermaid,
)


def structs_of(module: Any, other: type, *left_out: type) -> list[Any]:
    """Return the structs of messages that a module defines, and one other."""
    return [
        kind
        for kind in (*vars(module).values(), other)
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ in (module.__name__, message_parts.__name__)
        and kind not in left_out
    ]


class Page(msgspec.Struct, frozen=True):
    """A page of docs/, what it must describe, and what it refers to another page for."""

    file: str
    messages: Any
    structs: list[Any]
    tables: Mapping[str, Any]
    elsewhere: list[Any] = []

    def __str__(self) -> str:
        return self.file


COMPUTE = Page(
    "protocol.md",
    compute,
    structs_of(
        compute,
        message_parts.OrderBy,
        compute.CommandBatch,
    ),
    TABLES,
)
STORAGE = Page(
    "protocol-storage.md",
    storage,
    structs_of(
        storage,
        message_parts.OperatorStatistics,
    ),
    STORAGE_TABLES,
    elsewhere=COMPUTE.structs,
)
PAGES = (COMPUTE, STORAGE)
both_pages = pytest.mark.parametrize("page", PAGES, ids=str)


@pytest.fixture
def texts(root: Path) -> dict[str, str]:
    return {page.file: (root / "docs" / "internals" / page.file).read_text() for page in PAGES}


def section(text: str, title: str) -> str:
    found = re.search(rf"^####? {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    assert found is not None, f"the page has no section {title}"
    return found.group(1)


@pytest.mark.parametrize(
    ("page", "kind"),
    [(page, kind) for page in PAGES for kind in page.structs],
    ids=lambda given: str(given) if isinstance(given, Page) else wire_name(given),
)
def test_every_message_and_field_is_there_and_no_other(
    texts: dict[str, str], page: Page, kind: Any
) -> None:
    named = re.findall(r"^\| `(\w+)` \|", section(texts[page.file], wire_name(kind)), re.M)
    assert named == [field.encode_name for field in msgspec.structs.fields(kind)]


@both_pages
def test_no_message_is_there_that_the_code_does_not_have(texts: dict[str, str], page: Page) -> None:
    titles = re.findall(r"^#### (\w+)$", texts[page.file], re.M)
    assert sorted(titles) == sorted(wire_name(kind) for kind in page.structs)


@both_pages
def test_the_unions_are_on_the_page_in_their_order(texts: dict[str, str], page: Page) -> None:
    for union, title, after in (
        (page.messages.Command, "### Commands", "### Responses"),
        (page.messages.Response, "### Responses", "### Parts of messages"),
    ):
        part = texts[page.file].partition(f"\n{title}\n")[2].partition(f"\n{after}\n")[0]
        named = re.findall(r"^#### (\w+)$", part, re.M)
        own = [kind for kind in get_args(union) if kind not in page.elsewhere]
        assert named == [wire_name(kind) for kind in own]


@pytest.mark.parametrize(
    ("page", "title"), [(page, title) for page in PAGES for title in page.tables], ids=str
)
def test_diagrams_are_drawn_from_the_tables(texts: dict[str, str], page: Page, title: str) -> None:
    drawn = section(texts[page.file], title).strip()
    assert drawn == f"```mermaid\n{mermaid(page.tables[title])}\n```"


def test_every_flag_and_error_is_there(texts: dict[str, str]) -> None:
    page = texts[COMPUTE.file]
    for flag, meaning in MEANING.items():
        assert f"| `{flag.value}` | {meaning} |" in page
    listed = page.partition("## Errors")[2].partition("## State diagrams")[0]
    codes = set(re.findall(r"`([A-Z]\w+)`", listed)) - {"Refused", "PeekError", "CopyFailed"}
    assert "RemoteProtocolError" in codes
    for code in codes:
        assert issubclass(getattr(errors, code), errors.PenstockError)


def test_a_connection_steps_through_its_table() -> None:
    said: dict[str, Command] = {
        "Hello": Hello("a"),
        "CreateInstance": CreateInstance(1),
        "InitializationComplete": InitializationComplete(),
        OTHER: AllowWrites(),
    }
    ways: dict[str, list[Command]] = {"opened": []}
    for (stage, event), following in STAGES.items():
        ways.setdefault(following, [*ways[stage], said[event]])
    for stage, way in ways.items():
        for event, command in said.items():
            rules = CommandRules(CreateInstance(1), Settings())
            for before in way:
                rules.check(before)
            if (stage, event) in STAGES:
                rules.check(command)
            else:
                with pytest.raises(RemoteProtocolError):
                    rules.check(command)


class Room:
    """A worker with a client, and one index."""

    def __init__(self) -> None:
        self.state = ComputeState(0, 1, result_bytes_max=100, peeks_max=9)
        self.do(Hello("a"), InitializationComplete())

    def do(self, *commands: Command) -> list[e.Effect]:
        effects: list[e.Effect] = []
        for command in commands:
            effects += self.state.handle(SequencedCommand(self.state.next_index, 1, command))
            self.state.validate()
        return effects

    def life(self) -> str:
        if self.state.rendered:
            return "running" if self.state.rendered["i1"].scheduled else "suspended"
        return "dropping" if self.state.dropping else "absent"

    def step(self, event: str) -> None:
        create = CreateDataflow(index())
        schedule = [ScheduleDataflow("i1")] if self.life() == "running" else []
        match event:
            case "CreateDataflow":
                self.do(create)
            case "Schedule":
                self.do(ScheduleDataflow("i1"))
            case "AllowCompaction":
                self.do(AllowCompaction("i1", 5))
            case "AllowCompaction (empty)":
                self.do(AllowCompaction("i1", EMPTY))
            case "reconciled: kept":
                self.do(Hello("b"), create, *schedule, InitializationComplete())
            case "reconciled: not kept":
                self.do(Hello("b"), InitializationComplete())
            case "actor and tasks stopped":
                self.state.handle(e.DropCompleted(next(iter(self.state.dropping))))
            case _:
                raise AssertionError(event)


WAYS = {
    "absent": [],
    "suspended": ["CreateDataflow"],
    "running": ["CreateDataflow", "Schedule"],
    "dropping": ["CreateDataflow", "AllowCompaction (empty)"],
}


@pytest.mark.parametrize(("state", "event"), DATAFLOW)
def test_a_dataflow_lives_by_its_table(state: str, event: str) -> None:
    room = Room()
    for before in WAYS[state]:
        room.step(before)
    assert room.life() == state
    room.step(event)
    assert room.life() == DATAFLOW[state, event]


@pytest.mark.parametrize(("state", "event"), PEEK)
def test_a_peek_lives_by_its_table(state: str, event: str) -> None:
    room = Room()
    room.do(CreateDataflow(index()))
    sealed = e.IndexSealed(1, 9)
    peek = Peek("p", IndexTarget("i1"), 5)
    if state == "reading" or (state, event) == ("asked", "time sealed"):
        room.state.handle(sealed)
    effects = room.do(peek) if state != "asked" else []
    assert [x.ticket for x in effects if isinstance(x, e.StartPeek)] == [1] * (state == "reading")
    room.state.validate()
    effects = []
    match event:
        case "time not sealed":
            effects = room.do(peek)
        case "refused":
            effects = room.do(Peek("p", IndexTarget("unknown"), 5))
        case "time sealed":
            effects = room.do(peek) if state == "asked" else room.state.handle(sealed)
        case "CancelPeek":
            effects = room.do(CancelPeek("p"))
        case "index dropped":
            effects = room.do(AllowCompaction("i1", EMPTY))
        case "connection lost":
            effects = room.state.handle(e.ComputeClientLost("a"))
        case "rows or error":
            effects = room.state.handle(e.PeekDone(1, PeekRows(b"", 0)))
        case "snapshot replaced":
            room.state.handle(e.IndexSealed(1, 0))
            effects = room.state.handle(e.PeekDone(1, None))
        case _:
            raise AssertionError(event)
    pending = room.state.reads.pending.get("p")
    responses = [x.response for x in effects if isinstance(x, e.SendComputeResponse)]
    answers = [x for x in responses if isinstance(x, PeekResponse)]
    if answers:
        assert pending is None
        found = "answered"
    elif pending is None:
        found = "forgotten"
    else:
        found = "reading" if pending.started else "waiting"
    assert found == PEEK[state, event]


@pytest.mark.parametrize(("state", "event"), ADAPTER)
def test_the_adapter_judges_by_its_table(state: str, event: str) -> None:
    rules = StashRules(1)
    rules.connect("old")
    rules.connect("now")
    nonce = "new"
    match state:
        case "current nonce, client there":
            nonce = "now"
        case "current nonce, client gone":
            nonce = "now"
            rules.disconnect("now")
        case "served before":
            nonce = "old"
        case "not served yet, no room":
            rules.judge(TaggedResponse("new", Frontiers("v", 1)))
    names = {
        NonceVerdict.FORWARD: "forwarded",
        NonceVerdict.DROP: "dropped",
        NonceVerdict.STASH: "stashed",
        NonceVerdict.HOLD: "held",
    }
    verdict = rules.judge(TaggedResponse(nonce, Frontiers("v", 2)))
    assert (event, names[verdict]) == ("response", ADAPTER[state, event])


# -- the storage half ------------------------------------------------------------------------------


def test_every_status_and_internal_command_is_there(texts: dict[str, str]) -> None:
    page = texts[STORAGE.file]
    health = page.partition("## Health")[2].partition("## Statistics")[0]
    named = re.findall(r"^\| `(\w+)` \|", health, re.M)
    assert named == list(get_args(storage.HealthStatus))
    told = page.partition("## Two kinds of commands")[2].partition("## Rules of commands")[0]
    for kind in get_args(InternalCommand):
        assert f"`{wire_name(kind)}`" in told
        assert kind.__module__ in (storage.__name__, storage_internal.__name__)


def test_the_order_of_the_history_is_as_told(texts: dict[str, str]) -> None:
    page = texts[STORAGE.file]
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
