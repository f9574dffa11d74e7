"""Tables' contents by key: lookups and views against a model, over groups of writes of any size."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa
import pytest

from actors.control.controller.tables.commit import PlannedWrite, WriteGroupCommit
from actors.control.controller.tables.groups import TableTarget
from actors.control.controller.tables.table_arrangements import TableArrangements
from actors.durable.arrangement import ArrangementLimits
from actors.durable.persist import NewShard, PersistClient
from actors.model.plan.schema import DIFF, TableColumn, TableSchema
from actors.model.plan.updates import to_ipc
from actors.model.protocol.api import TableChange
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.testing.drawn_settings import constants_of

ITEMS = TableTarget(
    "u1",
    "items",
    "u1",
    TableSchema(
        (
            TableColumn("shop", "string", False),
            TableColumn("id", "int", False),
            TableColumn("price", "bigint"),
        ),
        ("shop", "id"),
    ),
)
OTHER = TableTarget("u2", "other", "u2", TableSchema((TableColumn("s", "string"),)))

Rows = dict[tuple[str, int], int]


def _ipc(rows: Rows) -> bytes:
    return to_ipc(
        pa.table(
            {
                "shop": pa.array([shop for shop, _ in rows], pa.string()),
                "id": pa.array([id_ for _, id_ in rows], pa.int32()),
                "price": pa.array(list(rows.values()), pa.int64()),
            }
        )
    )


def _drawn_write(dice: random.Random, model: Rows) -> PlannedWrite:
    """Draw a write, right or wrong, and apply it to the model if it is right."""
    if dice.random() < 0.2:
        change = TableChange("other", insert=to_ipc(pa.table({"s": ["x"]})))
        return PlannedWrite(((OTHER, change),))
    keys = [(dice.choice("ab"), dice.randrange(10)) for _ in range(dice.choice([1, 1, 1, 2, 9]))]
    rows = {key: dice.randrange(100) for key in keys}
    verb = dice.choice(["insert", "update", "delete"])
    change = msgspec.structs.replace(TableChange("items"), **{verb: _ipc(rows)})
    present = [key in model for key in rows]
    if (verb == "insert" and not any(present)) or (verb == "update" and all(present)):
        model.update(rows)
    elif verb == "delete" and all(present) and all(model[key] == rows[key] for key in rows):
        for key in rows:
            del model[key]
    return PlannedWrite(((ITEMS, change),))


def _contents(table: TableArrangements, time: int) -> Rows | None:
    found = table.view(ITEMS.id, time)
    if found is None:
        return None
    rows = [row for batch in found[1].rows() for row in batch.to_pylist()]
    assert all(row[DIFF] == 1 for row in rows)
    return {(row["shop"], row["id"]): row["price"] for row in rows}


@pytest.mark.parametrize("seed", range(12))
async def test_lookups_and_views_agree_with_a_model(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    folder = "control.controller.tables"
    constants = {
        f"{folder}.table_arrangements.UNFED_ROWS_MAX": dice.choice([1, 5, 256]),
        f"{folder}.table_arrangements.LOOP_ROWS_MAX": dice.choice([1, 10, 1_024]),
        f"{folder}.commit.LOOP_BYTES_MAX": dice.choice([1, 16_384]),
        "durable.arrangement.arrangement.DEFAULT_LIMITS": ArrangementLimits(
            memory_runs_max=dice.choice([1, 3, 8]),
            memory_run_bytes_max=dice.choice([1, 2_000, 1 << 20]),
        ),
    }
    history = dice.choice([0, 4, 1_000])
    settings, clock = Settings(), SystemClock()
    with constants_of(constants), anyio.fail_after(200):
        persist = await PersistClient.in_memory(settings, clock)
        await persist.create_shards(
            [
                NewShard(id=t.shard, schema=t.schema, holds={"retain": 0}, tables=True)
                for t in (ITEMS, OTHER)
            ]
        )
        tables = TableArrangements(persist, tmp_path, clock, history)
        commit = WriteGroupCommit(persist, tables, clock, settings)
        model: Rows = {}
        past: list[tuple[int, Rows]] = []
        time = earlier = 0
        for _ in range(100):
            time += dice.choice([1, 1, 3])
            before = dict(model)
            writes = [_drawn_write(dice, model) for _ in range(dice.choice([0, 1, 1, 4]))]
            outcome = await commit.commit(writes, time)
            if all(isinstance(each, PenstockError) for each in outcome.outcomes) and writes:
                assert model == before
                continue
            past.append((time, dict(model)))
            if dice.random() < 0.1:
                await commit.forget(ITEMS.id)
            # Now and then: a read feeds what the lookups of later writes must find by its keys.
            if dice.random() < 0.1:
                await commit.arrange(ITEMS)
                assert _contents(tables, time) == model
            if dice.random() < 0.7:
                continue
            at, rows = dice.choice(past)
            found = _contents(tables, at)
            assert found in (None, rows)
            earlier += found is not None and at < time
        await commit.arrange(ITEMS)
        assert _contents(tables, past[-1][0]) == model
        assert past[-1][1], "the draws fill the table"
        assert earlier or history < 1_000, "some reads are of earlier times"
        await commit.close()
        await persist.close()
