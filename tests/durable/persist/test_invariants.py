"""What is looked at again, and what was looked at before."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from actors.durable.persist.shard import FORMAT, BatchPart, PartList, ShardBatch, ShardState
from actors.durable.persist.shard_invariants import validate
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import CorruptData

SCHEMA = TableSchema((TableColumn("a", "bigint"),))


def part(number: int, time: int) -> BatchPart:
    return BatchPart(f"s/{number}", 1, 10, 0, None, False, time, time, 1)


def state(*batches: ShardBatch) -> ShardState:
    return ShardState(FORMAT, "s", SCHEMA, 3, 0, batches[-1].upper, batches)


WRONG = part(1, 7)
"""In a batch of [0, 1)."""


def test_a_batch_that_was_there_before_is_not_looked_at_again() -> None:
    old = state(ShardBatch(0, 1, (WRONG,)))
    with pytest.raises(CorruptData, match="time_max < upper"):
        validate(old)
    validate(old, old)
    later = replace(old, batches=(*old.batches, ShardBatch(1, 2, (part(2, 1),))), upper=2)
    validate(later, old)
    with pytest.raises(CorruptData, match="time_max < upper"):
        validate(replace(old, batches=(replace(old.batches[0], upper=2),), upper=2), old)
    with pytest.raises(CorruptData, match="time_max < upper"):
        validate(replace(later, batches=(*old.batches, ShardBatch(1, 2, (WRONG,)))), old)


def test_a_list_that_was_there_before_is_not_looked_at_again() -> None:
    listed = PartList("s/l", 1, 1)
    old = state(ShardBatch(0, 1, (WRONG,), listed))
    validate(replace(old, batches=(ShardBatch(0, 2, (WRONG,), listed),), upper=2), old)
    with pytest.raises(CorruptData, match="time_max < upper"):
        validate(state(ShardBatch(0, 1, (WRONG,), replace(listed, key="s/m"))), old)


def test_a_blob_is_named_once_also_a_list() -> None:
    listed = PartList("s/1", 1, 1)
    with pytest.raises(CorruptData, match="a blob is named once"):
        validate(state(ShardBatch(0, 1, (part(1, 0), part(2, 0)), listed)))
    with pytest.raises(CorruptData, match="a blob is named once"):
        validate(state(ShardBatch(0, 1, (part(1, 0), part(1, 0)))))
