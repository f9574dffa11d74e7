"""Views that another version of the program compiled, when the service starts on them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pyarrow as pa
import pytest

from actors.control.controller.catalog import ddl, upgrades
from actors.control.controller.catalog.boot import load
from actors.control.controller.catalog.catalog import CATALOG_KEY
from actors.doors.client.client import Client
from actors.durable.persist import CompareAndSet, PersistClient
from actors.engine.views.compile import compile_view
from actors.model.plan.delta import DeltaPlan
from actors.model.plan.schema import TableColumn, TableSchema
from actors.model.protocol.api import AlterObject
from actors.runtime.errors import EngineUnavailable, InvalidUsage, ObjectInUse, StorageError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import in_memory_engine

VIEWS = {
    "sums": "select k, count(*) as n, sum(v) as s from t group by k",
    "pairs": "select a.v, b.v as w from t a join t b on a.k = b.v",
    "above": "select n, count(*) as m from sums group by n",
}


def settings_of(tmp_path: Path) -> Settings:
    given = {
        "state_dir": str(tmp_path / "state"),
        "sink_dir": str(tmp_path),
        "listen": "127.0.0.1:0",
    }
    return draw_for_test(Settings(**given), given)  # type: ignore[arg-type]


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Client]:
    with anyio.fail_after(200):
        service = Service(settings_of(tmp_path), engine=in_memory_engine())
        async with service, await Client.in_process(service) as client:
            yield client


class Life:
    """What the table and the views hold, by the times at which they did."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.at: dict[int, list[tuple[int, int]]] = {}

    async def write(self, client: Client, *rows: tuple[int, int]) -> int:
        self.rows += rows
        written = await client.insert("t", pa.table({"k": [k for k, _ in rows],
                                                     "v": [v for _, v in rows]}))  # fmt: skip
        self.at[written] = list(self.rows)
        return written

    async def check(self, client: Client) -> None:
        """Each view at each time."""
        for time, rows in self.at.items():
            for view in VIEWS:
                await client.wait_for(view, time)
                found = await client.peek(view, as_of=time)
                names = [name for name in found.column_names if not name.startswith("__")]
                counts = found["__diff"].to_pylist() if "__diff" in found.column_names else None
                made: Counter[tuple[Any, ...]] = Counter()
                for number, row in enumerate(found.select(names).to_pylist()):
                    made[tuple(row.values())] += counts[number] if counts else 1
                assert made == expected(view, rows), (view, time)


def expected(view: str, rows: list[tuple[int, int]]) -> Counter[tuple[Any, ...]]:
    sums: dict[int, tuple[int, int]] = {}
    for k, v in rows:
        n, s = sums.get(k, (0, 0))
        sums[k] = n + 1, s + v
    match view:
        case "sums":
            return Counter((k, n, s) for k, (n, s) in sums.items())
        case "pairs":
            return Counter((v, w) for k, v in rows for _, w in rows if k == w)
    counts = Counter(n for n, _ in sums.values())
    return Counter(counts.items())


async def made(tmp_path: Path) -> Life:
    """A state directory with the views, written to twice."""
    life = Life()
    async with running(tmp_path) as client:
        await client.create_table("t", {"k": "bigint", "v": "bigint"})
        await life.write(client, (1, 1), (1, 2), (2, 1))
        for name, sql in VIEWS.items():
            await client.create_materialized_view(name, sql)
        await life.write(client, (2, 2), (3, 3))
        life.at.pop(min(life.at))  # before the views
        await life.check(client)
    return life


def other_rules(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (upgrades, ddl):
        monkeypatch.setattr(module, "rules_digest", lambda: name)


def other_plan(monkeypatch: pytest.MonkeyPatch, words: str, **changes: Any) -> None:
    """Views whose texts hold these words have another plan."""

    async def compiled(sql: str, *given: Any) -> DeltaPlan:
        plan = await compile_view(sql, *given)
        return msgspec.structs.replace(plan, **changes) if words in sql else plan

    monkeypatch.setattr(upgrades, "compile_view", compiled)
    monkeypatch.setattr(upgrades, "with_policy", lambda plan, policy: plan)


async def stored(tmp_path: Path) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """The hidden shards of the views, and all shards that there are."""
    async with opened(tmp_path) as persist:
        catalog = (await load(persist)).catalog
        hidden = {name: catalog.find(name).hidden_shards for name in VIEWS}
        return hidden, set(await persist.list_shards())


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[PersistClient]:
    settings = settings_of(tmp_path)
    persist = await PersistClient.open(Path(settings.state_dir), settings, SystemClock())
    try:
        yield persist
    finally:
        await persist.close()


async def test_the_same_plan_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life = await made(tmp_path)
    before = await stored(tmp_path)
    other_rules(monkeypatch, "other")
    caplog.set_level(logging.INFO, "penstock.controller")
    async with running(tmp_path) as client:
        await life.write(client, (1, 5))
        await life.check(client)
    assert await stored(tmp_path) == before
    assert caplog.text.count("the plan is unchanged") == len(VIEWS)
    caplog.clear()
    async with running(tmp_path) as client:
        await life.check(client)
    assert "recompiled" not in caplog.text


async def test_another_plan_rebuilds_its_view_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life = await made(tmp_path)
    before, _ = await stored(tmp_path)
    other_rules(monkeypatch, "other")
    other_plan(monkeypatch, "sum(v)", fingerprint="f" * 64)
    caplog.set_level(logging.INFO, "penstock.controller")
    async with running(tmp_path) as client:
        await life.write(client, (1, 5))
        await life.write(client, (4, 4))
        await life.check(client)
    assert "view sums: the plan changed, so the view is rebuilt" in caplog.text
    after, shards = await stored(tmp_path)
    assert after == before | {"sums": ("u2-hidden0-ffffffffffff",)}
    assert not shards & set(before["sums"])
    async with running(tmp_path) as client:
        await life.write(client, (1, 6))
        await life.check(client)


async def test_what_empty_tables_did_not_tell_is_chosen_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums below a join, where a table has many rows for each of another's: once, and not while
    clients wait for one that has taken over."""
    caplog.set_level(logging.INFO, "penstock.controller")
    sql = "select b.g, count(*) as n, sum(a.v) as s from a join b on a.k = b.k group by b.g"

    async def told(client: Client) -> tuple[bool, Counter[Any]]:
        rows = (await client.peek("v")).to_pylist()
        return "summed before" in await client.explain("v"), Counter(
            tuple(r.values()) for r in rows
        )

    async with running(tmp_path) as client:
        await client.create_table("a", {"k": "int", "v": "bigint"})
        await client.create_table("b", {"k": "int", "g": "int"}, primary_key=["k"])
        await client.create_materialized_view("v", sql)
        await client.insert("b", pa.table({"k": pa.array([1], pa.int32()), "g": [7]}))
        assert await told(client) == (False, Counter())
    async with running(tmp_path) as client:
        keys = pa.array([1] * 2_000, pa.int32())
        await client.insert("a", pa.table({"k": keys, "v": range(2_000)}))
        assert await told(client) == (False, Counter({(7, 2_000, 1_999_000): 1}))
    with monkeypatch.context() as patched:
        patched.setattr(PersistClient, "took_over", True)
        async with running(tmp_path) as client:
            assert await told(client) == (False, Counter({(7, 2_000, 1_999_000): 1}))
    for number in range(2):
        async with running(tmp_path) as client:
            assert await told(client) == (True, Counter({(7 + number, 2_000, 1_999_000): 1}))
            changed = pa.table({"k": pa.array([1], pa.int32()), "g": [8]})
            await client.update("b", changed)
            assert (await told(client))[1] == Counter({(8, 2_000, 1_999_000): 1})
    assert caplog.text.count("the plan changed, so the view is rebuilt") == 1
    assert caplog.text.count("recompiled") == 1


async def test_a_plan_that_cannot_be_read_is_made_anew(tmp_path: Path) -> None:
    life = await made(tmp_path)
    async with opened(tmp_path) as persist:
        head = await persist.head(CATALOG_KEY)
        assert head is not None
        document = msgspec.msgpack.decode(head.data)
        for entry in document["objects"]:
            if entry["kind"] == "view":
                entry["plan"] = {"strata": [{"node": {"type": "Unheard"}}], "policy": "full"}
        changed = CompareAndSet(CATALOG_KEY, head.seqno, msgspec.msgpack.encode(document))
        assert await persist.compare_and_set([changed])
    async with running(tmp_path) as client:
        await life.write(client, (2, 7))
        await life.check(client)
        kept = {o.name: o.mode for o in (await client.status()).objects}
    assert {kept[name] for name in VIEWS} == {"opaque"}, "the policy is still full"


async def test_a_crash_behind_the_change_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = await made(tmp_path)
    other_rules(monkeypatch, "other")
    other_plan(monkeypatch, "sum(v)", fingerprint="f" * 64)

    async def failing(*_: object, **__: object) -> bool:
        raise StorageError("no answer", determinate=True)

    with monkeypatch.context() as patched:
        patched.setattr(PersistClient, "drop_shards", failing)
        with pytest.raises(StorageError):
            async with running(tmp_path):
                pass
    _, shards = await stored(tmp_path)
    assert {"u2-hidden0", "u2-hidden0-ffffffffffff"} <= shards
    async with running(tmp_path) as client:
        await life.write(client, (1, 5))
        await life.check(client)
    _, shards = await stored(tmp_path)
    assert "u2-hidden0" not in shards


async def test_a_view_that_means_something_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = await made(tmp_path)
    with monkeypatch.context() as patched:
        other_rules(patched, "other")
        output = TableSchema(
            (TableColumn("k", "string"), TableColumn("n", "bigint"), TableColumn("s", "bigint"))
        )
        other_plan(patched, "sum(v)", output=output)
        async with running(tmp_path) as client:
            time = await life.write(client, (7, 7))
            await client.wait_for("pairs", time)
            found = {each.name: each for each in (await client.status()).objects}
            assert found["sums"].state == "quarantined"
            assert (
                "this version cannot compile it, or compiles it differently" in found["sums"].text
            )
            assert "its columns or their types would change" in found["sums"].text
            assert found["above"].text == "waits for view sums, which is quarantined"
            assert found["sums"].lag_ms > 0
            assert found["pairs"].state == "gathering"
            errors = (await client.peek("penstock.errors")).to_pylist()
            assert [(row["object"], row["state"]) for row in errors] == [("sums", "quarantined")]
            for refused in (
                lambda: client.peek("sums"),
                lambda: client.explain("sums"),
                lambda: client.submit(AlterObject(0, "sums", rename="other")),
                lambda: client.create_index("sums_n", "sums", ["n"]),
                lambda: client.create_materialized_view("more", "select k from sums"),
                lambda: anext(client.query("select k from sums group by k")),
            ):
                with pytest.raises(
                    InvalidUsage, match="view sums is quarantined: this version cannot compile it"
                ):
                    await refused()
            with pytest.raises(ObjectInUse, match="view above"):
                await client.drop("sums")
    # It is as it was for a release that understands it.
    async with running(tmp_path) as client:
        await life.check(client)


async def test_a_view_in_quarantine_is_replaced_or_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = await made(tmp_path)
    other_rules(monkeypatch, "other")

    async def faulty(sql: str, *given: Any) -> DeltaPlan:
        if "join" in sql or "sum(v)" in sql:
            raise RecursionError("a fault of the new release")
        return await compile_view(sql, *given)

    monkeypatch.setattr(upgrades, "compile_view", faulty)
    async with running(tmp_path) as client:
        found = {each.name: each.text for each in (await client.status()).objects}
        assert "internal fault: RecursionError: a fault of the new release" in found["sums"]
        await client.drop("sums", cascade=True)
        await client.create_materialized_view("pairs", VIEWS["pairs"], replace=True)
        for name in ("sums", "above"):
            await client.create_materialized_view(name, VIEWS[name])
        life.at.clear()
        await life.write(client, (2, 7))
        await life.check(client)
        assert (await client.peek("penstock.errors")).num_rows == 0


async def test_objects_that_cannot_be_read_keep_nobody_from_starting(tmp_path: Path) -> None:
    life = await made(tmp_path)
    async with running(tmp_path) as client:
        await client.create_table("other", {"id": "bigint"}, ["id"])
        await client.insert("other", [{"id": 1}])
        await client.create_index("other_id", "other", ["id"])
        await client.create_plain_view("plain", "select id from other")
        await client.create_source("clicks", {"kind": "counter"})
        await client.create_sink(
            "out", "other", "delta", {"folder": str(tmp_path / "lake"), "mode": "current"}
        )
    broken = {"sums": "conf", "other": "schema", "out": "configuration", "clicks": "configuration"}

    async def put(change: Callable[[dict[str, Any]], None]) -> None:
        async with opened(tmp_path) as persist:
            head = await persist.head(CATALOG_KEY)
            assert head is not None
            document = msgspec.msgpack.decode(head.data)
            change(document)
            changed = CompareAndSet(CATALOG_KEY, head.seqno, msgspec.msgpack.encode(document))
            assert await persist.compare_and_set([changed])

    def damage(document: dict[str, Any]) -> None:
        for entry in document["objects"]:
            if entry["name"] in broken and entry["kind"] != "source table":
                kept.append((entry["name"], broken[entry["name"]], entry[broken[entry["name"]]]))
                entry[broken[entry["name"]]] = [["unheard"]]

    def repair(document: dict[str, Any]) -> None:
        for entry in document["objects"]:
            for name, field, value in kept:
                if entry["name"] == name and entry["kind"] != "source table":
                    entry[field] = value

    kept: list[tuple[str, str, Any]] = []
    await put(damage)
    assert {name for name, *_ in kept} == set(broken)
    async with running(tmp_path) as client:
        time = await life.write(client, (2, 7))
        await client.wait_for("pairs", time)
        found = (await client.status()).objects
        states = {each.name: each.state for each in found if each.kind != "source table"}
        aside = {name for name, state in states.items() if state == "quarantined"}
        assert aside == {*broken, "above", "other_id", "plain"}
        assert "$.conf" in next(each.text for each in found if each.name == "sums")
        assert {each.health.status for each in await client.sources()} == {"quarantined"}
        assert {each.health.status for each in await client.sinks()} == {"quarantined"}
        with pytest.raises(InvalidUsage, match="table other is quarantined"):
            await client.insert("other", [{"id": 2}])
        await client.drop_sink("out")
        await client.drop("other", cascade=True)
    await put(repair)
    async with running(tmp_path) as client:
        await life.write(client, (3, 3))
        await life.check(client)
        assert (await client.peek("penstock.errors")).num_rows == 0
        assert {each.health.status for each in await client.sources()} <= {"starting", "running"}


async def test_an_engine_that_is_not_there_is_no_fault_of_a_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = await made(tmp_path)

    async def unavailable(*_: object) -> DeltaPlan:
        raise EngineUnavailable("no Java was found")

    with monkeypatch.context() as patched:
        other_rules(patched, "other")
        patched.setattr(upgrades, "compile_view", unavailable)
        with pytest.raises(EngineUnavailable):
            async with running(tmp_path):
                pass
    async with running(tmp_path) as client:
        await life.check(client)
