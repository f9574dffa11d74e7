"""Shards that are handed over from one dataflow to the next."""

from __future__ import annotations

import pyarrow as pa
import pytest

from actors.durable.persist import NewShard, PersistClient, ShardAppend, UpperMismatch
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import WriterFenced
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SCHEMA = TableSchema((TableColumn("a", "bigint"),))
WIDER = TableSchema((*SCHEMA.columns, TableColumn("b", "string")))
OWNER = ("u7", "dataflow/u7")


async def made(*shards: str) -> PersistClient:
    persist = await PersistClient.in_memory(Settings(), SystemClock())
    new = [NewShard(id=each, schema=SCHEMA, holds={"dataflow/u1": 0}) for each in shards]
    assert await persist.create_shards(new)
    return persist


async def append(persist: PersistClient, upper: tuple[int, int], owner: str = "") -> object:
    rows = pa.table({"a": [1], "__time": [upper[0]], "__diff": [1]})
    parts = await persist.write_parts("s", rows)
    return await persist.append([ShardAppend("s", *upper, parts, owner=owner)])


async def test_only_the_owner_appends() -> None:
    persist = await made("s")
    await append(persist, (0, 5))
    assert await persist.hand_over(OWNER, ["dataflow/u1"], {"s": 5})
    for owner in ("", "u1"):
        with pytest.raises(WriterFenced, match="replaced by u7"):
            await append(persist, (5, 9), owner)
        # Also at an upper that would be a mismatch: who was replaced must not follow the owner.
        with pytest.raises(WriterFenced):
            await append(persist, (3, 9), owner)
    assert not isinstance(await append(persist, (5, 9), "u7"), UpperMismatch)
    assert isinstance(await append(persist, (5, 9), "u7"), UpperMismatch)
    assert (await persist.state("s")).holds == {"dataflow/u7": 0}
    await persist.close()


async def test_nothing_is_handed_over_at_another_upper() -> None:
    persist = await made("s", "r")
    await append(persist, (0, 5))
    new = [NewShard(id="n", schema=SCHEMA, holds={"dataflow/u7": 0})]
    assert not await persist.hand_over(OWNER, [], {"s": 5, "r": 1}, new=new)
    assert not await persist.hand_over(OWNER, [], {"s": 4, "r": 0}, new=new)
    assert (await persist.state("s")).owner == ""
    assert await persist.list_shards() == ["r", "s"]
    grown = {"s": WIDER}
    assert await persist.hand_over(OWNER, [], {"s": 5, "r": 0}, new=new, schemas=grown)
    assert (await persist.state("s")).schema == WIDER
    assert (await persist.state("r")).owner == "u7"
    assert sorted(await persist.list_shards()) == ["n", "r", "s"]
    # A shard that is there already is none of the new ones.
    assert not await persist.hand_over(("u8", "dataflow/u8"), [], {"s": 5}, new=new)
    await persist.close()
