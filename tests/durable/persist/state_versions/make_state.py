"""Makes the state directory of this version that later versions must open: ``VERSION.tar.xz``.

Run it once a release, with that release's code: ``python
tests/durable/persist/state_versions/make_state.py [FOLDER]``. Archives of releases are never made
anew; `SHA256SUMS` says what they are.

In it: a table with a column of every type and NULLs, one with a PRIMARY KEY and an index, rows that
were updated and deleted, a column that was added, a batch of many parts that a list describes,
maintained views over one another, a plain view, roles with rights; and
``expected.json``, the rows of everything that can be read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import anyio

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[3]
sys.path[:0] = [str(HERE.parent), str(ROOT / "tests" / "doors" / "clients")]

from sample_rows import KINDS, kinds_row  # noqa: E402

from actors.doors.client.client import Client  # noqa: E402
from actors.model.plan.schema import TableColumn  # noqa: E402
from actors.model.protocol.api import AlterObject  # noqa: E402
from actors.model.protocol.role_messages import ChangeRights, CreateRole, ListRoles, RolesReport  # noqa: E402
from actors.runtime.settings import Settings  # noqa: E402
from actors.service import Service  # noqa: E402
from actors.testing.engine import in_memory_engine  # noqa: E402

KINDS_ROWS: Final = 40
ORDERS_ROWS: Final = 400
VIEWS: Final = {
    "spent": "SELECT customer, count(*) AS n, sum(amount) AS total FROM orders GROUP BY customer",
    "large": "SELECT id, customer, amount FROM orders WHERE amount > 50",
    "often": "SELECT n, count(*) AS customers FROM spent GROUP BY n",
    "joined": "SELECT o.id, k.word FROM orders o JOIN kinds k ON o.id = k.id",
}
READ: Final = ("kinds", "orders", "many", "spent", "large", "often", "joined", "plain")


def version() -> str:
    """Return the version of the program in this tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: str = project["project"]["version"]
    return found


def settings_of(state: Path, **limits: int) -> Settings:
    return Settings(state_dir=str(state), listen="127.0.0.1:0", **limits)  # type: ignore[arg-type]


async def make_objects(client: Client) -> None:
    """Make all objects and their rows."""
    await client.create_table("kinds", KINDS)
    await client.create_table(
        "orders", {"id": "bigint", "customer": "string", "amount": "decimal(12,2)"}, ["id"]
    )
    await client.create_table("many", {"id": "bigint", "text": "string"})
    await client.insert("kinds", [kinds_row(number) for number in range(KINDS_ROWS)])
    for name in ("spent", "large", "often", "joined"):
        await client.create_materialized_view(name, VIEWS[name])
    await client.create_plain_view("plain", "SELECT customer, n FROM spent WHERE n > 1")
    await client.create_index("by_customer", "orders", ["customer"])
    for first in range(0, ORDERS_ROWS, 50):
        rows = [
            {"id": n, "customer": f"customer {n % 7}", "amount": Decimal(n) / 4}
            for n in range(first, first + 50)
        ]
        await client.insert("orders", rows)
    await client.insert("many", [{"id": n, "text": f"text {n * 7919}"} for n in range(5_000)])
    await client.update("orders", [{"id": 3, "customer": "another", "amount": Decimal(1)}])
    await client.delete("orders", [{"id": 4, "customer": "customer 4", "amount": Decimal(1)}])
    await client.submit(AlterObject(0, "orders", add_columns=(TableColumn("note", "string"),)))
    await client.insert(
        "orders", [{"id": 9_999, "customer": "last", "amount": Decimal(7), "note": "added"}]
    )


async def make_roles(client: Client) -> None:
    number = client._exchange.number
    await client._done(CreateRole(number(), "reader"))
    await client._done(ChangeRights(number(), ("reader",), ("read",), "objects", ("spent",)))


async def roles_of(client: Client) -> list[Any]:
    """Return the roles and their rights, as text."""
    report = await client._exchange.ask(ListRoles(client._exchange.number()), RolesReport)
    return [str(role) for role in report.roles]


async def rows_of(client: Client) -> dict[str, list[str]]:
    """Return the rows of all that can be read, as text, sorted."""
    found = {}
    for name in READ:
        batches = client.query(f"SELECT * FROM {name}")
        rows = [row async for batch in batches for row in batch.to_pylist()]
        found[name] = sorted(json.dumps(row, default=str, ensure_ascii=False) for row in rows)
    return found


async def make(folder: Path) -> None:
    """Make the state directory, and what is expected of it."""
    limits = {
        "inline_part_bytes_max": 2_000,
        "part_bytes_target": 20_000,
        "part_list_parts_min": 2,
        "hold_downgrade_ms": 20,
    }
    settings = settings_of(folder / "state", **limits)
    async with (
        Service(settings, engine=in_memory_engine()) as service,
        await Client.connect(service.address) as client,
    ):
        await make_objects(client)
        await make_roles(client)
        time = await client.insert("kinds", [kinds_row(KINDS_ROWS)])
        for name in ("spent", "large", "often", "joined"):
            await client.wait_for(name, time)
        expected = {"rows": await rows_of(client), "roles": await roles_of(client)}
    shutil.rmtree(folder / "state" / "scratch")
    (folder / "state" / "LOCK").unlink()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False))


def bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member without what is of this machine."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def write_archive(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(folder.rglob("*")):
            packed.add(path, str(path.relative_to(folder)), recursive=False, filter=bare)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    print(f"{digest}  {archive.name}")


def main() -> None:
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(make, Path(folder))
        write_archive(Path(folder), into / f"{version()}.tar.xz")


if __name__ == "__main__":
    main()
