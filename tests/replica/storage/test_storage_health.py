"""Health: rounds, what hangs on what, and what is news."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.model.protocol.storage import HealthStatus
from actors.replica.storage.health_board import STARTING, HealthBoard, HealthCondition

ALL = {"u1", "u1a", "u1b", "k1"}
RUNNING = HealthCondition("running")
BROKEN = HealthCondition("stalled", "no such host", "check the address")


def source() -> HealthBoard:
    health = HealthBoard()
    health.begin("u1", {"u1a": "orders", "u1b": "lines"})
    health.changes(ALL)
    return health


def all_running() -> HealthBoard:
    health = source()
    for id in ("u1", "u1a", "u1b"):
        health.observe(id, 1, RUNNING)
    health.changes(ALL)
    return health


def test_an_object_starts_with_every_rendering_and_that_is_told() -> None:
    health = HealthBoard()
    health.begin("k1")
    assert health.changes(ALL) == [("k1", STARTING)]
    assert health.changes(ALL) == []
    health.begin("k1")
    assert health.changes(ALL) == [("k1", STARTING)]


def test_only_changes_are_told_and_only_of_what_is_known() -> None:
    health = HealthBoard()
    health.begin("k1")
    assert health.changes(()) == []
    health.observe("k1", 1, RUNNING)
    assert health.changes(ALL) == [("k1", RUNNING)]
    health.observe("k1", 2, RUNNING)
    assert health.changes(ALL) == []
    health.forget_reported()
    assert health.changes(ALL) == [("k1", RUNNING)]
    health.observe("unknown", 1, BROKEN)
    assert health.shown("unknown") is None


def test_a_round_begins_afresh_and_then_only_gets_worse() -> None:
    health = HealthBoard()
    health.begin("k1")
    for round, seen, shown in (
        (1, BROKEN, BROKEN),
        (1, RUNNING, BROKEN),
        (2, RUNNING, RUNNING),
        (2, BROKEN, BROKEN),
        (2, HealthCondition("ceased", "gone"), HealthCondition("ceased", "gone")),
        (2, BROKEN, HealthCondition("ceased", "gone")),
        (1, RUNNING, HealthCondition("ceased", "gone")),
        (3, RUNNING, RUNNING),
    ):
        health.observe("k1", round, seen)
        assert health.shown("k1") == shown


def test_a_tables_failure_is_its_own_and_the_sources_only_when_no_table_goes_on() -> None:
    health = all_running()
    health.observe("u1a", 1, BROKEN)
    assert health.changes(ALL) == [("u1a", BROKEN)]
    assert health.shown("u1") == health.shown("u1b") == RUNNING
    health.observe("u1b", 1, HealthCondition("stalled", "no column c"))
    assert health.changes(ALL) == [
        ("u1", HealthCondition("stalled", "table orders: no such host", "check the address")),
        ("u1b", HealthCondition("stalled", "no column c")),
    ]
    health.observe("u1a", 2, RUNNING)
    assert health.changes(ALL) == [("u1", RUNNING), ("u1a", RUNNING)]


def test_a_sources_failure_is_its_exports_too() -> None:
    health = all_running()
    health.fail("u1", "no such host", "check the address")
    assert dict(health.changes(ALL)) == {"u1": BROKEN, "u1a": BROKEN, "u1b": BROKEN}
    health.fail("unknown", "x", None)
    health.observe("u1", 2, RUNNING)  # of the round that the failure ended: nothing gets better
    assert health.shown("u1a") == BROKEN


def test_what_is_removed_is_not_told_and_an_update_leaves_exports_out() -> None:
    health = all_running()
    health.begin("u1", {"u1b": "lines", "u1c": "parts"})
    assert health.shown("u1a") is None
    assert dict(health.changes(ALL | {"u1c"})) == dict.fromkeys(("u1", "u1b", "u1c"), STARTING)
    health.validate()
    health.remove("u1")
    health.remove("u1")
    assert health.changes(ALL) == []
    health.validate()


statuses: st.SearchStrategy[HealthStatus] = st.sampled_from(
    ["starting", "running", "paused", "stalled", "ceased"]
)
steps = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(["", "a", "ab"])),
    st.tuples(st.sampled_from(["u1", "u1a", "u1b"]), st.tuples(st.integers(1, 3), statuses)),
)


@given(st.lists(steps, max_size=30))
def test_what_a_client_was_told_last_is_what_is_shown(script: list[tuple[str, object]]) -> None:
    health = HealthBoard()
    told: dict[str, HealthCondition] = {}
    for what, said in script:
        if what == "begin":
            assert isinstance(said, str)
            health.begin("u1", {f"u1{each}": each for each in said})
        else:
            assert isinstance(said, tuple)
            health.observe(what, said[0], HealthCondition(said[1], "why"))
        health.validate()
        told |= dict(health.changes(ALL))
        for id, condition in told.items():
            shown = health.shown(id)
            assert shown is None or shown == condition
        source = health.shown("u1")
        tables = [shown for each in ("u1a", "u1b") if (shown := health.shown(each)) is not None]
        if tables and source is not None:
            assert source.failed == all(shown.failed for shown in tables)
