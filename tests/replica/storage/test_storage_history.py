"""The storage half's history: reducing changes nothing that a worker could see."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from storage_house import (  # type: ignore[import-not-found]
    Room,
    drop,
    oneshot,
    run,
    sink,
    source,
)

from actors.model.protocol.compute import (
    AllowCompaction,
    AllowWrites,
    Hello,
    InitializationComplete,
)
from actors.model.protocol.storage import (
    CancelOneshotIngestion,
    Command,
    RunIngestion,
    RunOneshotIngestion,
    RunSink,
    UpdateStorageConfiguration,
)
from actors.replica.storage.history import StorageDefinitions, StorageHistory
from actors.runtime.progress import EMPTY, is_empty


def reduced(commands: list[Command]) -> list[Command]:
    return StorageDefinitions(commands).commands()


def applied(commands: list[Command]) -> dict[str, Any]:
    """What a client wants, by an account that shares no code with the history."""
    sources: dict[str, dict[str, Any]] = {}
    sinks: dict[str, Any] = {}
    shots: dict[str, Any] = {}
    allowed: dict[str, int] = {}
    settings: dict[str, int] = {}
    once: dict[str, Command] = {}
    for command in commands:
        match command:
            case RunIngestion(description=d):
                new = {"name": d.name, "exports": {x.id: x for x in d.exports}}
                before = sources.get(d.id, {"exports": {}})["exports"]
                for gone in set(before) - set(new["exports"]):
                    allowed.pop(gone, None)
                sources[d.id] = new
            case RunSink(description=d):
                sinks[d.id] = d
            case RunOneshotIngestion(uuid=uuid):
                if uuid not in shots:
                    shots[uuid] = command
            case CancelOneshotIngestion(uuid=uuid):
                shots.pop(uuid, None)
            case AllowCompaction(id=id, frontier=frontier):
                exporters = [s for s in sources.values() if id in s["exports"]]
                if not (id in sources or id in sinks or exporters):
                    continue
                if not is_empty(frontier):
                    allowed[id] = max(frontier, allowed.get(id, 0))
                    continue
                gone = sources.pop(id, {"exports": {}})["exports"]
                sinks.pop(id, None)
                for each in exporters:
                    del each["exports"][id]
                for each in [id, *gone]:
                    allowed.pop(each, None)
            case UpdateStorageConfiguration():
                for name in command.__struct_fields__:
                    if getattr(command, name) is not None:
                        settings[name] = getattr(command, name)
            case _:
                once[type(command).__name__] = command
    return {
        "sources": sources,
        "sinks": sinks,
        "shots": shots,
        "allowed": allowed,
        "settings": settings,
        "once": once,
    }


def worker(commands: list[Command]) -> dict[str, Any]:
    """What a real worker renders and is willing to tell after the commands."""
    room = Room()
    effects = room.connect("a")
    for command in commands:
        if not isinstance(command, Hello | InitializationComplete):
            effects = room.do(command)
            room.found(effects)
    state = room.state
    return {
        "rendered": {id: r.what for id, r in state.renderings.current.items()},
        "known": set(state.client.known),
        "configuration": state.renderings.configuration,
        "writes": state.writes_allowed,
    }


def plain(rendered: dict[str, Any]) -> dict[str, Any]:
    """A sink's as_of moves on with what is allowed; it is rendered where it first began."""
    return {
        id: msgspec.structs.replace(what, as_of=0) if hasattr(what, "as_of") else what
        for id, what in rendered.items()
    }


ids = st.sampled_from(["u1", "u2", "u1a", "u1b", "u2a", "k1", "k2"])
limits = st.one_of(st.none(), st.integers(1, 9))
commands = st.one_of(
    st.builds(
        lambda id, exports, name: RunIngestion(source(id, exports, name=name)),
        st.sampled_from(["u1", "u2"]),
        st.sampled_from(["", "a", "b", "ab"]),
        st.sampled_from("xy"),
    ),
    st.builds(lambda id, t: RunSink(sink(id, t)), st.sampled_from(["k1", "k2"]), st.integers(0, 9)),
    st.builds(oneshot, st.sampled_from(["o1", "o2"]), st.sampled_from("tv")),
    st.builds(CancelOneshotIngestion, st.sampled_from(["o1", "o2"])),
    st.builds(AllowCompaction, ids, st.one_of(st.integers(0, 20), st.just(EMPTY))),
    st.builds(UpdateStorageConfiguration, limits, limits, limits),
    st.builds(Hello, st.sampled_from("ab")),
    st.just(InitializationComplete()),
    st.just(AllowWrites()),
)


@given(st.lists(commands, max_size=60))
def test_wanting_the_reduced_history_equals_wanting_the_whole(raw: list[Command]) -> None:
    assert applied(reduced(raw)) == applied(raw)
    assert reduced(reduced(raw)) == reduced(raw)


@given(st.lists(commands, max_size=40))
def test_a_worker_cannot_tell_the_reduced_history_from_the_whole(raw: list[Command]) -> None:
    whole, short = worker(raw), worker(reduced(raw))
    assert plain(short.pop("rendered")) == plain(whole.pop("rendered"))
    assert short == whole


@given(st.lists(commands, max_size=200))
def test_pushing_keeps_the_meaning_and_the_length(raw: list[Command]) -> None:
    history = StorageHistory()
    longest = 8
    for command in raw:
        history.push(command)
        # It is reduced at twice the length after the last time; since then less may be left.
        longest = max(longest, len(reduced(history.commands())))
        assert len(history) <= 2 * longest + 1
    assert applied(history.commands()) == applied(raw)


def test_order_of_the_reduced_history() -> None:
    raw: list[Command] = [
        Hello("n"),
        InitializationComplete(),
        AllowWrites(),
        AllowCompaction("stranger", 3),
        oneshot("o1"),
        *run(sink("k1"), source("u1", "ab"), source("u2"), source("u1", "bc", name="later")),
        UpdateStorageConfiguration(7),
        UpdateStorageConfiguration(None, 9),
        AllowCompaction("u1b", 4),
        AllowCompaction("u1b", 2),
        drop("u1c"),
        drop("u2"),
        oneshot("o2"),
        CancelOneshotIngestion("o2"),
    ]
    history = StorageHistory(raw)
    history.reduce()
    assert history.commands() == [
        Hello("n"),
        UpdateStorageConfiguration(7, 9),
        *run(source("u1", "b", name="later"), sink("k1")),
        oneshot("o1"),
        AllowCompaction("u1b", 4),
        InitializationComplete(),
        AllowWrites(),
    ]
    assert history.skipped == 1


def test_what_was_said_before_an_object_was_defined_is_not_about_it() -> None:
    for early in (drop("u1"), AllowCompaction("u1a", 9)):
        assert reduced([early, *run(source("u1", "a"))]) == run(source("u1", "a"))


def test_an_id_stands_for_one_thing() -> None:
    other = msgspec.structs.replace(source("u2"), exports=source("u1", "a").exports)
    wanted = StorageDefinitions(run(source("u1", "ab"), other))
    assert wanted.commands() == run(source("u1", "b"), other)
    assert wanted.source_of == {"u1b": "u1", "u1a": "u2"}
    wanted = StorageDefinitions(
        [*run(source("u1", "a")), RunSink(sink("u1a")), RunSink(sink("u1"))]
    )
    assert wanted.commands() == run(sink("u1a"), sink("u1"))
    assert wanted.source_of == {}


def test_a_long_life_stays_short() -> None:
    history = StorageHistory([Hello("n"), *run(source("u1", "a"))])
    for time in range(10_000):
        history.push(AllowCompaction("u1a", time))
        history.push(oneshot(f"o{time}"))
        history.push(CancelOneshotIngestion(f"o{time}"))
    assert len(history) < 40
