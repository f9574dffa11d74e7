"""Reconciliation's decision table."""

from __future__ import annotations

import msgspec
import pytest

from actors.compute.reconcile import Running, reconcile
from actors.plan.schema import Column, Schema
from actors.protocol.compute import (
    CreateDataflow,
    DataflowDescription,
    IndexExport,
    SourceImport,
    SubscribeExport,
)

SCHEMA = Schema((Column("k", "bigint"),))
OLD = DataflowDescription(
    "i1", "old", (SourceImport("s1", SCHEMA),), IndexExport(("k",), SCHEMA), 10
)
SUBSCRIBE = msgspec.structs.replace(OLD, export=SubscribeExport(SCHEMA))

CASES: list[tuple[str, DataflowDescription, int, DataflowDescription, bool]] = [
    ("unchanged", OLD, 10, OLD, True),
    ("later as_of", OLD, 10, msgspec.structs.replace(OLD, as_of=20), True),
    ("compacted exactly to it", OLD, 20, msgspec.structs.replace(OLD, as_of=20), True),
    ("another name", OLD, 10, msgspec.structs.replace(OLD, name="new"), True),
    ("compacted beyond", OLD, 21, msgspec.structs.replace(OLD, as_of=20), False),
    ("earlier as_of", OLD, 10, msgspec.structs.replace(OLD, as_of=9), False),
    (
        "another import",
        OLD,
        10,
        msgspec.structs.replace(OLD, imports=(SourceImport("s2", SCHEMA),)),
        False,
    ),
    (
        "another export",
        OLD,
        10,
        msgspec.structs.replace(OLD, export=IndexExport((), SCHEMA)),
        False,
    ),
    ("a subscribe", SUBSCRIBE, 10, SUBSCRIBE, False),
]


@pytest.mark.parametrize(("name", "old", "allowed", "new", "kept"), CASES)
def test_keep_or_recreate(
    name: str, old: DataflowDescription, allowed: int, new: DataflowDescription, kept: bool
) -> None:
    plan = reconcile({"i1": Running(old, allowed)}, [CreateDataflow(new)])
    assert (plan.keep == {"i1": new}) is kept
    assert (plan.drop == ("i1",)) is not kept
    assert (plan.create == (new,)) is not kept
    assert ("i1" in plan.reasons) is not kept


def test_unmentioned_is_dropped_and_new_is_created() -> None:
    new = msgspec.structs.replace(OLD, id="i2")
    plan = reconcile({"i1": Running(OLD, 10)}, [CreateDataflow(new)])
    assert (plan.keep, plan.drop, plan.create, plan.reasons) == ({}, ("i1",), (new,), {})
