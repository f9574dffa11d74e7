"""A copy from files on its way into its table: the staged parts, and the checks before their
append.

`claim_parts` runs outside the write path: it claims the parts from the task that staged them and,
for a table with a PRIMARY KEY, collects their keys. The write path then needs one append and, for
such a table, one lookup whether any key exists (`check_absent`).

A keyed table holds one row per key: a copy with a duplicate key, or with a key that already exists,
is refused as a whole, and the error names the key. Keys are compared bit by bit, as in other
writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from actors.control.controller.tables.groups import TableTarget, check_distinct
from actors.control.controller.tables.rows import describe_key, identities
from actors.durable.persist import BatchPart, PersistClient
from actors.model.plan.schema import DIFF, TIME
from actors.model.plan.updates import concat, consolidate
from actors.model.protocol.storage import FilesStaged
from actors.runtime.errors import ConnectionBroken, DuplicateKey, InvalidUsage
from actors.runtime.kernel import ActorClock


class StagedCopy(msgspec.Struct, frozen=True):
    """Rows for one table, in parts that this process owns, to be appended at one time or not at
    all."""

    target: TableTarget
    uuid: str
    parts: tuple[BatchPart, ...]
    keys: pa.Table | None = None
    """Keys of all rows, for a table with a PRIMARY KEY; else None."""

    @property
    def rows(self) -> int:
        """Return the number of rows in all parts."""
        return sum(part.rows for part in self.parts)


def parts_of(staged: FilesStaged) -> tuple[BatchPart, ...]:
    """Return the parts that an answer describes."""
    return tuple(msgspec.msgpack.decode(batch.part, type=BatchPart) for batch in staged.batches)


async def claim_parts(
    persist: PersistClient,
    clock: ActorClock,
    target: TableTarget,
    uuid: str,
    parts: tuple[BatchPart, ...],
    keyed_rows_max: int,
) -> StagedCopy:
    """Claim the parts and check their keys. Raises `ConnectionBroken` if they no longer exist,
    `DuplicateKey`, `InvalidUsage` (too many keys), and store errors; the parts are then
    discarded."""
    try:
        if not await persist.claim(target.shard, parts):
            raise ConnectionBroken(
                f"the staged rows for table {target.name} were not claimed in time and are gone; "
                "nothing was copied: copy again"
            )
        copy = StagedCopy(target, uuid, parts)
        if not target.schema.key:
            return copy
        # All keys are compared in memory.
        if copy.rows > keyed_rows_max:
            raise InvalidUsage(
                f"too many rows for one copy into table {target.name}, which has a PRIMARY KEY: "
                f"{copy.rows} (limit {keyed_rows_max}, copy_keyed_rows_max); copy fewer files at a "
                "time"
            )
        names = list(target.schema.key)
        tables = [(await persist.fetch(part, target.schema)).select(names) for part in parts]
        shape = pa.schema([target.schema.arrow().field(name) for name in names])
        keys = concat(tables, shape).cast(shape)
        await clock.run_blocking(lambda: check_distinct(target, keys, "the files contain"))
        return msgspec.structs.replace(copy, keys=keys)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await persist.discard_parts(parts)
        raise


def check_absent(target: TableTarget, keys: pa.Table, found: pa.Table) -> None:
    """Raise `DuplicateKey` if one of the keys exists. `found` has the updates of the rows with
    these keys, and perhaps of others. Blocking."""
    held = consolidate(found.drop_columns([TIME]))
    held = held.filter(pc.greater(held[DIFF], 0))
    if not held.num_rows:
        return
    ours = set(identities(keys, target.schema.key))
    for row, key in enumerate(identities(held, target.schema.key)):
        if key in ours:
            raise DuplicateKey(
                f"table {target.name}: PRIMARY KEY already exists: "
                f"{describe_key(target.schema.key, held, row)}"
            )


async def updates_of(
    persist: PersistClient, copy: StagedCopy, parts: Sequence[BatchPart]
) -> pa.Table:
    """Return all rows as they were appended. Raises store errors."""
    shape = copy.target.schema.arrow_updates()
    return concat([await persist.fetch(part, copy.target.schema) for part in parts], shape)
