"""Hands shards over from one dataflow to the next, as a change of their documents: pure.

A view whose plan is replaced while the service runs goes on in the same shard by another dataflow.
The former one may still run: on a replica that has not heard of it yet, or that is cut off. So the
shard names its *owner* from then on, and only the owner appends (`shard.appended`).
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
    """Make a dataflow the owner of shards, and create further ones, all or nothing.

    Args:
        documents: The shards' present states.
        owner: The dataflow, and the name of its holds.
        former: Names of the holds of the dataflows before it. In each shard they become one hold of
            the owner, at the least of them.
        expected: Shards that are handed over, with the uppers that they must have.
        new: States of the shards that are created.
        schemas: Newest schemas that shards among `expected` get.

    The answer is False, and nothing changes, when an upper is another or a new shard is there.
    Raises `UnknownObject`, `IncompatibleSchema`.
    """
    dataflow, holder = owner
    held = {shard: documents.shard(shard) for shard in expected}
    # After an attempt whose answer was lost: ids of dataflows are never used again, so it was ours.
    if documents.uncertain and all(state.owner == dataflow for state in held.values()):
        return ChangeOutcome(True)
    if any(held[shard].upper != upper for shard, upper in expected.items()):
        return ChangeOutcome(False)
    if any(documents.shards[shard] is not None for shard in new):
        return ChangeOutcome(False)
    become: dict[ShardId, ShardState | None] = dict(new)
    # All in one set: a view's output and its hidden states stand at one upper, always.
    for shard, state in held.items():
        then = replace(state, owner=dataflow)
        sinces = [state.holds[name] for name in former if name in state.holds]
        for name in former:
            then = without_hold(then, name)
        if sinces:
            then = with_hold(then, holder, min(sinces))
        if shard in schemas:
            grown = evolved(then, then.schema_id, schemas[shard])
            assert not isinstance(grown, SchemaMismatch), "the number is the newest"
            then = grown
        become[shard] = then
    return ChangeOutcome(True, become)
