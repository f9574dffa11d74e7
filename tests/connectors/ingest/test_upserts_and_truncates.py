"""Changes told without old rows: whatever is staged, spilled, in flight or durable, and however
often the task dies, the shard holds what the changes come to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from made_up_source import MadeUp, Transaction  # type: ignore[import-not-found]

from actors.connectors.ingest.meters import OF_SOURCE
from actors.connectors.ingest.shards import REMAP, ExportShard, IngestShards
from actors.connectors.ingest_task import IngestEnded, IngestProgressed, IngestTask
from actors.connectors.sources.source import (
    KEPT,
    OP,
    ExportTruncated,
    Given,
    PositionMark,
    SourceExport,
    SourceRows,
    SourceUpserts,
    UpsertOp,
)
from actors.durable.persist import NewShard, PersistClient
from actors.model.plan.schema import DIFF, TIME, TableColumn, TableSchema
from actors.runtime.settings import Settings
from actors.testing.isolation import ActorIsolation

SCHEMA = TableSchema(
    (TableColumn("id", "bigint", False), TableColumn("n", "bigint"), TableColumn("text", "string")),
    ("id",),
)
EXPORT = SourceExport("k", SCHEMA)
SHAPE = pa.schema([*SCHEMA.arrow(), pa.field(DIFF, pa.int64())])
CHANGES = pa.schema(
    [*SCHEMA.arrow(), pa.field(OP, pa.int8()), pa.field(KEPT, pa.list_(pa.int16()))]
)

Contents = dict[int, tuple[int, str]]


class Step(msgspec.Struct, frozen=True):
    """put, delete, keep (the text stays), move (from `id` to `n`, the text stays), truncate, or
    insert (told as plain rows)."""

    kind: str
    id: int = 0
    n: int = 0
    text: str = ""


def draw(seed: int, count: int) -> list[list[Step]]:
    chance = random.Random(seed)
    there: set[int] = set()
    made = []
    for _ in range(count):
        steps: list[Step] = []
        for _ in range(chance.choice((1, 3, 8))):
            kind = chance.choice(("put", "put", "delete", "keep", "move", "insert", "truncate"))
            id_ = chance.randrange(12)
            text = "y" * chance.randrange(40)
            if kind in ("delete", "keep", "move") and id_ not in there:
                kind = "put"
            if kind == "insert" and id_ in there:
                kind = "keep"
            if kind == "truncate" and chance.random() < 0.6:
                kind = "put"
            target = chance.randrange(100, 1_000_000)
            steps.append(Step(kind, id_, target, text))
            if kind == "truncate":
                there.clear()
            elif kind in ("delete", "move"):
                there.discard(id_)
                there |= {target} if kind == "move" else set()
            else:
                there.add(id_)
        made.append(steps)
    return made


def contents(transactions: Sequence[Sequence[Step]]) -> Contents:
    held: Contents = {}
    for step in (step for steps in transactions for step in steps):
        match step.kind:
            case "put" | "insert":
                held[step.id] = (step.n, step.text)
            case "keep":
                held[step.id] = (step.n, held[step.id][1])
            case "delete":
                held.pop(step.id)
            case "move":
                held[step.n] = (step.n, held.pop(step.id)[1])
            case "truncate":
                held.clear()
    return held


def upsert(step: Step, there: bool) -> list[dict[str, Any]]:
    row = {"id": step.id, "n": step.n, "text": step.text, OP: UpsertOp.UPDATED, KEPT: None}
    match step.kind:
        case "put":
            return [row | {OP: UpsertOp.UPDATED if there else UpsertOp.INSERTED}]
        case "keep":
            return [row | {"text": None, KEPT: [2]}]
        case "delete":
            return [row | {"n": None, "text": None, OP: UpsertOp.DELETED}]
    gone = row | {"n": None, "text": None, OP: UpsertOp.DELETED}
    return [gone, row | {"id": step.n, "text": None, OP: UpsertOp.MOVED, KEPT: [2]}]


class Keyed(MadeUp):  # type: ignore[misc]
    """Gives steps as upserts, truncates and rows, in pieces."""

    at: int
    queue: list[Given]
    chance: random.Random

    def __init__(self, transactions: Sequence[Sequence[Step]], seed: int) -> None:
        super().__init__([Transaction(()) for _ in transactions], seed)
        self.steps = transactions

    def _refill(self) -> None:
        last = min(len(self.steps), self.at + self.chance.choice((1, 1, 4)))
        piece: list[dict[str, Any]] = []
        given: list[Given] = []

        def flush() -> None:
            if piece:
                given.append(SourceUpserts("k", pa.Table.from_pylist(piece, CHANGES)))
                piece.clear()

        done: list[Step] = []
        for step in (step for steps in self.steps[self.at : last] for step in steps):
            now = contents([*self.steps[: self.at], done])
            if step.kind == "truncate":
                flush()
                given.append(ExportTruncated("k"))
            elif step.kind == "insert":
                flush()
                row = {"id": step.id, "n": step.n, "text": step.text, DIFF: 1}
                given.append(SourceRows("k", pa.Table.from_pylist([row], SHAPE)))
            else:
                piece += upsert(step, step.id in now)
                if self.chance.random() < 0.3:
                    flush()
            done.append(step)
        flush()
        if self.at == last:
            return
        self.queue += [*given, PositionMark(str(last), None, last - self.at, ("k",))]
        self.at = last


async def durable(persist: PersistClient) -> tuple[int, Contents]:
    """The position, and what the shard holds at its last time."""
    found: dict[tuple[int, int, str], int] = {}
    positions: dict[str, int] = {}
    for shard, schema in (("s-k", SCHEMA), ("s", REMAP)):
        for batch in (await persist.state(shard)).batches:
            for part in batch.parts:
                for row in (await persist.fetch(part, schema)).to_pylist():
                    assert row[TIME] >= 0
                    if shard == "s":
                        key = row["position"]
                        positions[key] = positions.get(key, 0) + row[DIFF]
                    else:
                        whole = (row["id"], row["n"], row["text"])
                        found[whole] = found.get(whole, 0) + row[DIFF]
    rows = {row: count for row, count in found.items() if count}
    assert set(rows.values()) <= {1}, rows
    held = {id_: (n, text) for id_, n, text in rows}
    assert len(held) == len(rows)
    at = [int(position) for position, count in positions.items() if count]
    return (at[0] if at else 0), held


def check_operators(told: list[IngestProgressed]) -> int:
    """What a task tells of its operators: counts only rise; what it keeps is told as memory, of
    which it returns the most."""
    most = 0
    before: dict[str, int] = {}
    for each in told:
        did = {operator.operator: operator for operator in each.operators}
        assert list(did) == list(OF_SOURCE)
        rows = {name: operator.rows for name, operator in did.items()}
        assert all(rows[name] >= before.get(name, 0) for name in rows if name != "Stage")
        before = rows
        assert rows["Append"] == each.counts.rows_inserted + each.counts.rows_deleted
        held = sum(kept.bytes_memory + kept.bytes_mapped for _, kept in each.held)
        assert did["Resolve"].bytes_memory + did["Resolve"].bytes_mapped == held
        most = max(most, held)
    return most


@pytest.mark.parametrize("seed", range(8))
async def test_the_shard_holds_what_the_changes_come_to(
    stage: ActorIsolation, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    transactions = draw(seed, chance.choice((5, 40)))
    settings = Settings(
        source_inflight_bytes_max=chance.choice((120, 2_000, 1 << 20)),
        source_tick_ms=chance.choice((20, 1_000)),
    )
    persist = await PersistClient.in_memory(settings, stage.clock)
    assert await persist.create_shards([NewShard("s", REMAP), NewShard("s-k", SCHEMA)])
    owner = stage.probe("owner")
    kept = 0
    for turn in range(300):
        source = Keyed(transactions, seed * 1_000 + turn)
        shards = IngestShards(persist, "s", {"k": ExportShard("s-k", SCHEMA)})
        subject = stage.start(
            lambda: IngestTask(
                "u1",
                turn,  # noqa: B023 (it starts now)
                [EXPORT],
                shards,  # noqa: B023
                lambda: source,  # noqa: B023
                owner.address,
                settings,
                tmp_path / str(turn),  # noqa: B023
            ),
            f"ingest-{turn}",
        )
        for _ in range(chance.choice((0, 1, 3, 30))):
            await stage.advance(chance.choice((0, 1, 100)))
        if subject.running:
            await subject.stop()
        ended = [each for each in owner.received if isinstance(each, IngestEnded)]
        assert ended == []
        kept = max(
            kept,
            check_operators(
                [each for each in owner.received if isinstance(each, IngestProgressed)]
            ),
        )
        owner.received.clear()
        assert not (tmp_path / str(turn)).exists()
        position, held = await durable(persist)
        assert held == contents(transactions[:position]), position
        if position == len(transactions):
            assert kept > 0
            return
    pytest.fail(f"at {position} of {len(transactions)}")
