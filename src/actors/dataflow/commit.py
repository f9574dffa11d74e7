"""Making a step durable: parts first, then one compare-and-set for output and hidden state.

A crash before the compare-and-set leaves parts that nothing names (persist collects them); one
after it leaves a step that the next start finds done. An upper mismatch means that another
replica was first; `rivals.Follower` reads what that one has appended.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
import pyarrow as pa

from actors.errors import StorageError
from actors.persist import Append, Cas, Part, PersistClient, UpperMismatch
from actors.plan.updates import error_update
from actors.progress import EMPTY, Frontier, ObjectId, ShardId, Time
from actors.protocol.compute import DataflowDescription, ViewExport
from actors.spans import span
from actors.telemetry import STEP_COMMIT


class ErrorChange(msgspec.Struct, frozen=True):
    """An error update of the output: the text, when, and +1 (it fails) or -1 (no more)."""

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
    *,
    rebuilt: bool = False,
) -> Frontier | None:
    """Appends [lo, hi) to the output's shard and, in the same set, to the hidden states': to those
    [0, hi) where the view is `rebuilt`.

    When the upper was not `lo` nothing was appended: then what it is. Raises `StorageError`.
    """
    with span(STEP_COMMIT, export.shard, *interval, output.num_rows):
        parts: list[Sequence[Part]] = []
        try:
            for shard, delta in zip(shards_of(export), (output, *hidden), strict=True):
                parts.append(await persist.write_parts(shard, delta) if delta.num_rows else ())
            return await commit_parts(persist, export, interval, parts, errors, rebuilt=rebuilt)
        except BaseException:  # those of an append whose outcome is open stay
            with anyio.CancelScope(shield=True):
                await persist.discard_parts([part for each in parts for part in each])
            raise


async def commit_parts(
    persist: PersistClient,
    export: ViewExport,
    interval: tuple[Time, Frontier],
    parts: Sequence[Sequence[Part]],
    errors: Sequence[ErrorChange],
    extra: Sequence[Cas] = (),
    *,
    rebuilt: bool = False,
) -> Frontier | None:
    """As `commit`, of parts that are written: the output's, then each hidden state's. The
    `extra` documents change with it, or nothing does (`Fenced`)."""
    schema = export.plan.output
    written = [list(each) for each in parts]
    for change in errors:
        update = error_update(schema, change.text, change.time, change.diff)
        written[0] += await persist.write_parts(export.shard, update)
    lo, hi = interval
    appends = [
        Append(shard, 0 if rebuilt and shard != export.shard else lo, hi, tuple(each))
        for shard, each in zip(shards_of(export), written, strict=True)
    ]
    outcome = await persist.append(appends, extra=extra)
    if not isinstance(outcome, UpperMismatch):
        return None
    await persist.discard_parts([part for each in written for part in each])
    return await persist.upper(export.shard)


def shards_of(export: ViewExport) -> tuple[ShardId, ...]:
    """What a step appends to: the output's shard, then each hidden state's."""
    return (export.shard, *export.hidden_shards)


def holder(dataflow: ObjectId) -> str:
    """Name of a dataflow's durable holds."""
    return f"dataflow/{dataflow}"


def holds_at(
    description: DataflowDescription, export: ViewExport, lo: Frontier
) -> list[tuple[ShardId, str, Time]]:
    """The holds that a view at `lo` needs: its imports, its hidden state and its own output
    stay readable at ``lo - 1``, from where a restart goes on."""
    since = max(0, min(lo, EMPTY - 1) - 1)
    shards = [source.shard for source in description.imports]
    shards += shards_of(export)
    return [(shard, holder(description.id), since) for shard in dict.fromkeys(shards)]


async def move_holds(
    persist: PersistClient, description: DataflowDescription, export: ViewExport, lo: Frontier
) -> bool:
    """Moves the view's holds; False when the store did not answer (the next move makes good)."""
    try:
        await persist.set_holds(holds_at(description, export, lo))
    except StorageError:
        return False
    return True
