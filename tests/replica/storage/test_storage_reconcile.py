"""Reconciliation of the storage half: decisions, and their properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from storage_house import (  # type: ignore[import-not-found]
    drop,
    run,
    sink,
    source,
)
from test_storage_history import commands  # type: ignore[import-not-found]

from actors.model.protocol.compute import AllowCompaction
from actors.model.protocol.storage import (
    Command,
    ConnectorConfiguration,
    IngestionDescription,
    SinkDescription,
)
from actors.replica.storage.history import StorageDefinitions
from actors.replica.storage.reconciliation import (
    DefinitionRefusal,
    StorageReconciliation,
    reconcile,
)

RUNNING: dict[str, IngestionDescription | SinkDescription] = {
    "u1": source("u1", "ab"),
    "u2": source("u2", "a"),
    "k1": sink("k1", 5),
}


def plan(*commands: Command) -> StorageReconciliation:
    return reconcile(RUNNING, StorageDefinitions(commands))


def test_what_is_as_it_was_is_kept_and_the_rest_dropped() -> None:
    assert plan(*run(RUNNING["u1"], sink("k1", 50))) == StorageReconciliation(
        ("u1", "k1"), (), ("u2",), ()
    )
    assert plan().drop == ("u1", "u2", "k1")


def test_the_newest_definition_counts_and_only_if_it_differs() -> None:
    first, last = source("u1", "a"), source("u1", "abc")
    assert plan(*run(first, last, RUNNING["u2"], sink("k1"))).run == (last,)
    assert plan(*run(first, RUNNING["u1"])).run == ()
    again = plan(*run(RUNNING["u1"]), drop("u1"), *run(first))
    assert (again.run, again.drop) == ((first,), ("u2", "k1"))


def test_an_export_may_be_dropped_alone_and_a_source_takes_its_exports_with_it() -> None:
    assert plan(*run(RUNNING["u1"]), drop("u1b")).run == (source("u1", "a"),)
    assert "u1" in plan(*run(RUNNING["u1"]), drop("u1")).drop


def test_what_may_not_be_is_refused_by_name_and_harms_no_other() -> None:
    found = plan(*run(source("u1", "ab", remap="r9"), source("u2", "ab"), sink("k1", kind="csv")))
    assert found.refused == (
        DefinitionRefusal("u1", ("remap shard ru1 → r9",)),
        DefinitionRefusal("k1", ("kind delta → csv",)),
    )
    assert (found.run, found.keep, found.drop) == ((source("u2", "ab"),), (), ())
    assert found.refused[0].text() == (
        "cannot alter u1, which is already running: remap shard ru1 → r9. "
        "Drop it and create it again"
    )
    assert plan(*run(sink("u1"))).refused == (
        DefinitionRefusal("u1", ("a source cannot become a sink, nor a sink a source",)),
    )


def test_compactions_of_unknown_objects_are_skipped_and_counted() -> None:
    wanted = StorageDefinitions(
        [AllowCompaction("x", 3), *run(RUNNING["u1"]), drop("y"), drop("u2")]
    )
    assert wanted.skipped == 3
    assert reconcile(RUNNING, wanted).keep == ("u1",)


@given(st.lists(commands, max_size=40), st.lists(commands, max_size=40))
def test_every_object_has_one_fate(before: list[Command], now: list[Command]) -> None:
    old = StorageDefinitions(before)
    running: dict[str, IngestionDescription | SinkDescription] = {**old.ingestions}
    running |= old.sinks
    wanted = StorageDefinitions(now)
    found = reconcile(running, wanted)
    fates = [
        *found.keep,
        *(what.id for what in found.run),
        *found.drop,
        *(refused.id for refused in found.refused),
    ]
    assert len(set(fates)) == len(fates)
    assert set(fates) == running.keys() | wanted.ingestions.keys() | wanted.sinks.keys()
    assert reconcile(running, StorageDefinitions(wanted.commands())) == found
    assert found.refused == ()  # the shapes of these never change
    after = {id: running[id] for id in found.keep}
    after |= {what.id: what for what in found.run}
    assert reconcile(after, wanted).run == ()  # done twice is done once


def test_a_configuration_of_the_same_kind_may_not_change() -> None:
    changed = IngestionDescription("u2", "u2", ConnectorConfiguration("counter", b"y"), "ru2")
    assert plan(*run(changed)).refused == (
        DefinitionRefusal("u2", ("configuration of kind counter",)),
    )
