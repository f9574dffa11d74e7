"""Hands shards over from one dataflow to another, as a pure change of their documents.

If a view's plan is replaced while the service runs, another dataflow continues in the same shard.
The former one may still be running, on a replica that does not know yet or is cut off. So the shard
now names its *owner*, and only the owner may append (`shard.appended`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from actors.durable.persist.change import ChangeOutcome, ShardDocuments
from actors.durable.persist.schemas import SchemaMismatch, evolved
from actors.durable.persist.shard import ShardState, with_hold, without_hold
from actors.model.plan.schema import TableSchema
from actors.runtime.progress import Frontier, ShardId


def hand_over(
    documents: ShardDocuments,
    owner: tuple[str, str],
    former: Collection[str],
    expected: Mapping[ShardId, Frontier],
    new: Mapping[ShardId, ShardState],
    schemas: Mapping[ShardId, TableSchema],
) -> ChangeOutcome[bool]:
    """Make a dataflow the owner of shards, and create other shards, all or nothing.

    Args:
        documents: The shards' current states.
        owner: The dataflow, and the name of its holds.
        former: Names of the holds of the former dataflows. In each shard they are replaced by one
            hold of the owner, at the lowest of them.
        expected: Shards to hand over, with the uppers that they must have.
        new: States of the shards to create.
        schemas: New schemas for shards in `expected`.

    Return False and change nothing if an upper differs or a new shard exists. Raises
    `UnknownObject` and `IncompatibleSchema`.
    """
    dataflow, holder = owner
    held = {shard: documents.shard(shard) for shard in expected}
    # After an attempt whose answer was lost. Dataflow ids are never reused, so the attempt was
    # ours.
    if documents.uncertain and all(state.owner == dataflow for state in held.values()):
        return ChangeOutcome(True)
    if any(held[shard].upper != upper for shard, upper in expected.items()):
        return ChangeOutcome(False)
    if any(documents.shards[shard] is not None for shard in new):
        return ChangeOutcome(False)
    become: dict[ShardId, ShardState | None] = dict(new)
    # All in one set, because a view's output and its hidden states must always be at the same
    # upper.
    for shard, state in held.items():
        then = replace(state, owner=dataflow)
        sinces = [state.holds[name] for name in former if name in state.holds]
        for name in former:
            then = without_hold(then, name)
        if sinces:
            then = with_hold(then, holder, min(sinces))
        if shard in schemas:
            grown = evolved(then, then.schema_id, schemas[shard])
            assert not isinstance(grown, SchemaMismatch), "the number is that of the newest schema"
            then = grown
        become[shard] = then
    return ChangeOutcome(True, become)
