"""Requests of a client under a role, beside SQL: what `SqlSession` could send, and what not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeAlias

from rights_model import ADMIN, READ, WRITE, ModelObject, Need, RightsModel

from actors.doors.client.client import Client, TableWrite
from actors.model.plan.schema import TableColumn
from actors.model.protocol.api import AlterObject, CreateView

Send: TypeAlias = Callable[[Client], Awaitable[Any]]


async def _all(found: Any) -> list[Any]:
    return [each async for each in found]


async def _view(client: Client, **given: Any) -> Any:
    return await client.submit(CreateView(0, **given))


def drawn_request(
    rng: Random, model: RightsModel, key: int, canary: str
) -> tuple[str, Send, list[Need] | None]:
    """A request: its name, the call that sends it, and the rights that it needs (None: it is judged
    by what is seen and what it changes)."""
    found = list(model.objects.values())
    x = rng.choice(found) if found else ModelObject("none", "table")
    y = rng.choice(found) if found else x
    name = x.name
    reads = model.reads(x) if x.kind != "plain view" else None
    tick = "`" + name.replace("`", "``") + "`"
    row = {"k": key, "open": "w", "secret": canary}
    query = f"SELECT max(secret) AS m FROM {tick}"
    admin: list[Need] = [(ADMIN, None)]
    calls: list[tuple[str, Send, list[Need] | None]] = [
        ("peek", lambda c: c.peek(name), reads),
        ("peek as of", lambda c: c.peek(name, as_of=1), reads),
        ("peek by key", lambda c: c.peek(name, key={"k": key}), None),
        ("peek filtered", lambda c: c.peek(name, columns=["secret"], limit=1), reads),
        ("query", lambda c: _all(c.query(query)), model.reads(x) if x.kind != "index" else None),
        ("query whole", lambda c: _all(c.query(f"SELECT * FROM {tick}")), None),
        ("describe", lambda c: c.describe_query(query), None),
        ("explain query", lambda c: c.explain_query(query), None),
        ("explain", lambda c: c.explain(name), None),
        ("wait", lambda c: c.wait_for(name, 1), reads),
        ("follow", lambda c: _all(c.subscribe(name, as_of=1, up_to=2)), reads),
        ("check", lambda c: c.check_right(READ, name), None),
        ("status", lambda c: c.status(), None),
        ("actors", lambda c: c.actors(), None),
        ("insert", lambda c: c.insert(name, [row]), [(WRITE, x)]),
        ("delete", lambda c: c.delete(name, [{"k": key}]), [(WRITE, x)]),
        ("update", lambda c: c.update(name, [row]), [(WRITE, x)]),
        (
            "write two",
            lambda c: c.write({name: _change(row), y.name: _change(row)}),
            [(WRITE, x), (WRITE, y)],
        ),
        ("drop", lambda c: c.drop(name), [(ADMIN, x)] if x.kind == "index" else None),
        ("copy to", lambda c: c.copy_to(name, "/tmp/penstock-rights"), admin),
        ("replicas", lambda c: c.replicas(), admin),
        ("replica", lambda c: c.replicas(add="127.0.0.1:1"), None),
        ("tracing", lambda c: c.tracing(0.0), admin),
        (
            "add column",
            lambda c: c.submit(AlterObject(0, name, add_columns=(TableColumn(name, "int"),))),
            None,
        ),
        (
            "subscribed view",
            lambda c: _view(
                c,
                name=rng.choice(("__subscribe_1f", "__subscribe_", "__other", "plain")),
                sql=query,
                for_subscribe=True,
                conf=rng.choice(({}, {"spark.sql.catalog.x": "y"})),
                replace=rng.random() < 0.2,
                plain=rng.random() < 0.2,
            ),
            None,
        ),
    ]
    return rng.choice(calls)


def _change(row: dict[str, Any]) -> TableWrite:
    return TableWrite(insert=[row])
