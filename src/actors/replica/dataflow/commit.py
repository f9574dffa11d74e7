"""Commits a step: parts first, then one compare-and-set for the output and the hidden states.

An upper mismatch means that another replica was first; `ReplicaFollower` then reads its append.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
import pyarrow as pa

from actors.durable.persist import (
    BatchPart,
    CompareAndSet,
    PersistClient,
    ShardAppend,
    UpperMismatch,
)
from actors.model.plan.updates import error_update
from actors.model.protocol.compute import DataflowDescription, ViewExport
from actors.runtime.errors import StorageError
from actors.runtime.progress import EMPTY, Frontier, ObjectId, ShardId, Time
from actors.runtime.spans import span
from actors.runtime.telemetry import STEP_COMMIT


class ErrorChange(msgspec.Struct, frozen=True):
    """One error update of the output: its text, its time, and +1 (inserted) or -1 (retracted)."""

    text: str
    time: Time
    diff: int


async def commit(
    persist: PersistClient,
    export: ViewExport,
    interval: tuple[Time, Frontier],
    output: pa.Table,
    hidden: Sequence[pa.Table],
    errors: Sequence[ErrorChange],
    written: Sequence[Sequence[BatchPart]] = (),
    *,
    rebuilt: bool = False,
) -> Frontier | None:
    """Append `[lo, hi)` to the output's shard and, in the same compare-and-set, to the hidden
    states.

    `written` contains parts that already exist, for each of the shards; they include the rows of
    `hidden`. If the view is `rebuilt`, the hidden states are appended to as `[0, hi)`. Return None,
    or the output's upper if it was not `lo` and nothing was appended. Raise `StorageError`.
    """
    with span(STEP_COMMIT, export.shard, *interval, output.num_rows):
        parts = list(written)
        try:
            tables = () if written else (output, *hidden)
            for shard, delta in zip(shards_of(export), tables, strict=not written):
                # A crash before the append leaves orphaned parts, which are collected later. After
                # a crash following the append, the next incarnation finds the step committed.
                parts.append(await persist.write_parts(shard, delta) if delta.num_rows else ())
            return await commit_parts(persist, export, interval, parts, errors, rebuilt=rebuilt)
        except BaseException:
            # The stores keep the parts of an append whose outcome is indeterminate.
            with anyio.CancelScope(shield=True):
                await persist.discard_parts([part for each in parts for part in each])
            raise


async def commit_parts(
    persist: PersistClient,
    export: ViewExport,
    interval: tuple[Time, Frontier],
    parts: Sequence[Sequence[BatchPart]],
    errors: Sequence[ErrorChange],
    extra: Sequence[CompareAndSet] = (),
    *,
    rebuilt: bool = False,
) -> Frontier | None:
    """Append parts that were already written: the output's, then each hidden state's.

    The `extra` documents change in the same compare-and-set; if they cannot, nothing changes and
    `WriterFenced` is raised. Everything else is as in `commit`.
    """
    schema = export.plan.output
    written = [list(each) for each in parts]
    for change in errors:
        update = error_update(schema, change.text, change.time, change.diff)
        written[0] += await persist.write_parts(export.shard, update)
    lo, hi = interval
    appends = [
        ShardAppend(
            shard,
            0 if rebuilt and shard != export.shard else lo,
            hi,
            tuple(each),
            owner=export.owner,
        )
        for shard, each in zip(shards_of(export), written, strict=True)
    ]
    outcome = await persist.append(appends, extra=extra)
    if not isinstance(outcome, UpperMismatch):
        return None
    await persist.discard_parts([part for each in written for part in each])
    return await persist.upper(export.shard)


def shards_of(export: ViewExport) -> tuple[ShardId, ...]:
    """Return the shards to which a step appends: the output's, then each hidden state's."""
    return (export.shard, *export.hidden_shards)


def hold_name(dataflow: ObjectId) -> str:
    """Return the name of a dataflow's durable holds."""
    return f"dataflow/{dataflow}"


def holds_at(
    description: DataflowDescription, export: ViewExport, lo: Frontier
) -> list[tuple[ShardId, str, Time]]:
    """Return the holds of a view at `lo`: on its imports, its output and its hidden states."""
    # A restart reads everything at the time before `lo`.
    since = max(0, min(lo, EMPTY - 1) - 1)
    shards = [imported.shard for imported in description.imports]
    shards += shards_of(export)
    return [(shard, hold_name(description.id), since) for shard in dict.fromkeys(shards)]


async def move_holds(
    persist: PersistClient, description: DataflowDescription, export: ViewExport, lo: Frontier
) -> bool:
    """Advance the view's holds. Return False if the store did not answer."""
    try:
        await persist.set_holds(holds_at(description, export, lo))
    except StorageError:
        # Outdated holds only delay compaction, and the next call advances them.
        return False
    return True
