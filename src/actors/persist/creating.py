"""Creating and dropping several shards, as changes of their documents: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.errors import StorageError
from actors.persist.appending import is_forgotten
from actors.persist.change import Documents, Outcome
from actors.persist.shard import WRITERS_MAX, ShardState, is_done
from actors.progress import ShardId


def create_all(
    documents: Documents, states: Mapping[ShardId, ShardState], writer: str, call: int
) -> Outcome[bool]:
    """All of these, or none: False when there is one already. Raises `StorageError`
    (indeterminate) when an earlier attempt may have made it and its mark is gone."""
    held = [documents.shards[shard] for shard in states]
    first = held[0]
    if first is not None and is_done(first, writer, call):
        return Outcome(True)
    if documents.uncertain and first is not None and is_forgotten(first, writer):
        raise StorageError(
            f"whether {', '.join(states)} were created cannot be told: more than {WRITERS_MAX}"
            " others have written since",
            determinate=False,
        )
    if any(state is not None for state in held):
        return Outcome(False)
    return Outcome(True, states)


def drop_all(
    documents: Documents, ids: Sequence[ShardId], gone: dict[ShardId, ShardState]
) -> Outcome[bool]:
    """None of these any more, or all as they are: False when there is one that is not there.
    `gone` is what an earlier attempt found, and what this one finds."""
    held = {shard: documents.shards[shard] for shard in ids}
    if documents.uncertain and all(_is_gone(gone[id_], held[id_]) for id_ in held):
        return Outcome(True)  # by our attempt whose answer was lost, or by another
    if any(state is None for state in held.values()):
        return Outcome(False)
    gone.update({shard: state for shard, state in held.items() if state is not None})
    return Outcome(True, dict.fromkeys(held))


def _is_gone(before: ShardState, now: ShardState | None) -> bool:
    """Also when there is another one of that name by now."""
    return now is None or now.born != before.born
