"""Reconciliation's decision table."""

from __future__ import annotations

import msgspec
import pytest

from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.compute import (
    CopyToExport,
    CreateDataflow,
    DataflowDescription,
    IndexExport,
    ShardImport,
    SubscribeExport,
)
from actors.replica.compute.reconciliation import (
    MEANING,
    ReconcileObstacle,
    ReplacedDataflow,
    RunningDataflow,
    reconcile,
)

SCHEMA = TableSchema((TableColumn("k", "bigint"),))
OLD = DataflowDescription(
    "i1", "old", (ShardImport("s1", SCHEMA),), IndexExport(("k",), SCHEMA), 10
)
SUBSCRIBE = msgspec.structs.replace(OLD, export=SubscribeExport(SCHEMA))

COPY = msgspec.structs.replace(OLD, export=CopyToExport(SCHEMA, "x", "csv", 9))
EARLY = msgspec.structs.replace(OLD, as_of=9, imports=(ShardImport("s2", SCHEMA),))

CASES: list[
    tuple[str, DataflowDescription, int, DataflowDescription, tuple[ReconcileObstacle, ...]]
] = [
    ("unchanged", OLD, 10, OLD, ()),
    ("later as_of", OLD, 10, msgspec.structs.replace(OLD, as_of=20), ()),
    ("compacted exactly to it", OLD, 20, msgspec.structs.replace(OLD, as_of=20), ()),
    ("another name", OLD, 10, msgspec.structs.replace(OLD, name="new"), ()),
    (
        "compacted beyond",
        OLD,
        21,
        msgspec.structs.replace(OLD, as_of=20),
        (ReconcileObstacle.COMPACTED,),
    ),
    (
        "earlier as_of",
        OLD,
        10,
        msgspec.structs.replace(OLD, as_of=9),
        (ReconcileObstacle.AS_OF, ReconcileObstacle.COMPACTED),
    ),
    (
        "another import",
        OLD,
        10,
        msgspec.structs.replace(OLD, imports=(ShardImport("s2", SCHEMA),)),
        (ReconcileObstacle.IMPORTS,),
    ),
    (
        "another export",
        OLD,
        10,
        msgspec.structs.replace(OLD, export=IndexExport((), SCHEMA)),
        (ReconcileObstacle.EXPORT,),
    ),
    ("a subscribe", SUBSCRIBE, 10, SUBSCRIBE, (ReconcileObstacle.SUBSCRIBE,)),
    ("a copy", COPY, 10, COPY, (ReconcileObstacle.COPY,)),
    (
        "a copy after a subscribe",
        SUBSCRIBE,
        10,
        COPY,
        (ReconcileObstacle.SUBSCRIBE, ReconcileObstacle.COPY, ReconcileObstacle.EXPORT),
    ),
    (
        "several at once",
        OLD,
        11,
        EARLY,
        (ReconcileObstacle.IMPORTS, ReconcileObstacle.AS_OF, ReconcileObstacle.COMPACTED),
    ),
]


@pytest.mark.parametrize(("name", "old", "allowed", "new", "against"), CASES)
def test_keep_or_recreate(
    name: str,
    old: DataflowDescription,
    allowed: int,
    new: DataflowDescription,
    against: tuple[ReconcileObstacle, ...],
) -> None:
    running, kept = RunningDataflow(old, allowed), not against
    plan = reconcile({"i1": running}, [CreateDataflow(new)])
    assert (plan.keep == {"i1": new}) is kept
    assert (plan.drop == ("i1",)) is not kept
    assert (plan.create == (new,)) is not kept
    assert plan.replaced == (() if kept else (ReplacedDataflow(running, new, against),))


def test_unmentioned_is_dropped_and_new_is_created() -> None:
    new = msgspec.structs.replace(OLD, id="i2")
    plan = reconcile({"i1": RunningDataflow(OLD, 10)}, [CreateDataflow(new)])
    assert (plan.keep, plan.drop, plan.create, plan.replaced) == ({}, ("i1",), (new,), ())


def test_every_flag_occurs_and_has_a_meaning() -> None:
    assert (
        {flag for *_, against in CASES for flag in against}
        == set(ReconcileObstacle)
        == MEANING.keys()
    )


def test_the_log_tells_all_reasons_and_both_plans_cut_to_size() -> None:
    text = ReplacedDataflow(
        RunningDataflow(OLD, 11), EARLY, (ReconcileObstacle.IMPORTS, ReconcileObstacle.AS_OF)
    ).text(4096)
    assert "its imports changed; it started after" in text
    assert '"s1"' in text
    assert '"s2"' in text
    assert (
        len(
            ReplacedDataflow(RunningDataflow(OLD, 11), EARLY, (ReconcileObstacle.IMPORTS,)).text(10)
        )
        < 120
    )
