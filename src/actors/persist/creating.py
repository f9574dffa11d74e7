"""Creates and drops several shards, as changes of their documents: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.errors import StorageError
from actors.persist.appending import is_forgotten
from actors.persist.change import ChangeOutcome, ShardDocuments
from actors.persist.shard import WRITERS_MAX, ShardState, is_applied
from actors.progress import ShardId


def create_all(
    documents: ShardDocuments, states: Mapping[ShardId, ShardState], writer: str, call: int
) -> ChangeOutcome[bool]:
    """Create all of these shards, or none; the answer is False when one exists.

    Raises `StorageError` (indeterminate) when an earlier attempt may have created them and its mark
    is gone.
    """
    held = [documents.shards[shard] for shard in states]
    first = held[0]
    if first is not None and is_applied(first, writer, call):
        return ChangeOutcome(True)
    # A shard that exists may be ours or another's: without the token nobody can tell.
    if documents.uncertain and first is not None and is_forgotten(first, writer):
        raise StorageError(
            f"whether {', '.join(states)} were created cannot be told: more than {WRITERS_MAX}"
            " others have written since",
            determinate=False,
        )
    if any(state is not None for state in held):
        return ChangeOutcome(False)
    return ChangeOutcome(True, states)


def drop_all(
    documents: ShardDocuments, ids: Sequence[ShardId], gone: dict[ShardId, ShardState]
) -> ChangeOutcome[bool]:
    """Delete all of these shards, or none; the answer is False when one does not exist.

    `gone` collects the states that this attempt and earlier ones found.
    """
    held = {shard: documents.shards[shard] for shard in ids}
    # By `born`, not by presence: another process may have created one of that name since.
    if documents.uncertain and all(_is_gone(gone[id_], held[id_]) for id_ in held):
        return ChangeOutcome(True)  # by our attempt whose answer was lost, or by another process
    if any(state is None for state in held.values()):
        return ChangeOutcome(False)
    gone.update({shard: state for shard, state in held.items() if state is not None})
    return ChangeOutcome(True, dict.fromkeys(held))


def _is_gone(before: ShardState, now: ShardState | None) -> bool:
    """Return whether `before` was deleted; another shard may have its name by now."""
    return now is None or now.born != before.born
