"""Kills the service with SIGKILL during SQL of a PostgreSQL client, and checks what is left.

Run: ``python tests/proof/sql_kills.py [--kills 300] [--seed 1] [--every 6] [--memory]``.

A service process (`penstock serve`) gets statements from psycopg: INSERT, UPDATE, DELETE, MERGE,
COPY, transactions, and CREATE and DROP of tables, views and indexes. Another connection follows a
query that no view was created for. At a random moment, also while it starts, the service is killed
and started again on the same state directory. After each restart:

1. every statement that was acknowledged is there, and the one that was under way is there whole or
   not at all; a transaction whose COMMIT was not sent is not there at all;
2. the rows of each view are the sums of the accounts that are there;
3. no view of the subscribe is left.

``--memory`` replaces Spark by the in-memory engine, so that lives are short. Exit status 1 when
anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import anyio
import psycopg
from crash_campaign import Service, free_port
from sql_model import ACCOUNTS, SUMS, ChangePlanner, ModelState, PlannedChange

from actors import Client
from actors.model.protocol.relations import is_subscribed_view

SERVE_IN_MEMORY = Path(__file__).resolve().parents[1] / "house" / "docs" / "serve_in_memory.py"
FOLLOWED = "SELECT grp, max(amount) AS greatest FROM accounts GROUP BY grp"
READ_SECONDS = 240
"""Time in which a read must be answered after a start, Spark's own start included."""


class SqlService(Service):
    """The service with a door for PostgreSQL's clients, at the same addresses in every life."""

    def __init__(self, state: Path, *, memory: bool) -> None:
        super().__init__(state, free_port())
        self.pg_port = free_port()
        self._memory = memory

    def program(self) -> list[str]:
        return [str(SERVE_IN_MEMORY)] if self._memory else super().program()

    def settings(self) -> dict[str, Any]:
        return {"pg_listen": f"127.0.0.1:{self.pg_port}"}

    async def connect(self) -> psycopg.AsyncConnection[Any]:
        """A connection that commits each statement."""
        # A read waits until Spark has started and its view has caught up.
        return await psycopg.AsyncConnection.connect(
            host="127.0.0.1",
            port=self.pg_port,
            user="killer",
            connect_timeout=60,
            options=f"-c statement_timeout={READ_SECONDS * 1000}",
            autocommit=True,
        )


class SqlCampaign:
    """All lives of one service, and what must be there."""

    def __init__(self, service: SqlService, arguments: argparse.Namespace) -> None:
        self.service = service
        self.rng = Random(arguments.seed)
        self.every = arguments.every
        self.planner = ChangePlanner(self.rng, computed=not arguments.memory)
        self.state = ModelState()
        self.under_way: tuple[PlannedChange, bool] | None = None
        """The change at the kill; False if its last text had not been sent."""
        self.done: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.wrong = 0

    async def prepare(self) -> None:
        """The table and the first view."""
        async with await self.service.connect() as db:
            await db.execute(ACCOUNTS)
            await db.execute(f"CREATE MATERIALIZED VIEW sums AS {SUMS}")

    # -- one life ------------------------------------------------------------------------------

    async def live(self) -> None:
        """Sends statements until the service is killed."""
        self.under_way = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._kill_later)
            group.start_soon(self._follow)
            await self._send()
            group.cancel_scope.cancel()
        if self.service.process is not None and self.service.process.returncode is None:
            await self.service.end()  # an error has ended this life before

    async def _kill_later(self) -> None:
        await anyio.sleep(self.rng.uniform(0.02, self.every))
        with anyio.CancelScope(shield=True):
            await self.service.end()

    async def _follow(self) -> None:
        """Follows a query on a separate connection, as long as the service lives."""
        try:
            async with await self.service.connect() as db, db.cursor() as cursor:
                text = f"COPY (SUBSCRIBE ({FOLLOWED})) TO STDOUT"
                async with cursor.copy(text.encode()) as copy:
                    async for _ in copy:
                        pass
        except psycopg.Error as error:
            if error.sqlstate is not None:
                self.report("subscribe", f"{error.sqlstate}: {error}")

    async def _send(self) -> None:
        try:
            async with await self.service.connect() as db:
                while True:
                    change = self.planner.next(self.state)
                    for place, text in enumerate(change.texts):
                        self.under_way = change, place + 1 == len(change.texts)
                        await self._execute(db, text, change.copy)
                    self.state, self.under_way = change.after, None
                    self.done[change.kind] += 1
        except psycopg.Error as error:
            # Only the end of the connection ends a life: every other error is one too many.
            if error.sqlstate is not None or not isinstance(error, psycopg.OperationalError):
                self.report("statement", f"{error.sqlstate}: {error}")

    async def _execute(self, db: psycopg.AsyncConnection[Any], text: str, rows: str) -> None:
        if not rows:
            await db.execute(text.encode())
            return
        async with db.cursor() as cursor, cursor.copy(text.encode()) as copy:
            await copy.write(rows)

    # -- after it ------------------------------------------------------------------------------

    async def check(self) -> None:
        """Compares what is there with what must be, and goes on from what is there."""
        with anyio.fail_after(READ_SECONDS):
            async with await self.service.connect() as db:
                found = await self._found(db)
                allowed = [self.state]
                if self.under_way is not None:
                    change, all_sent = self.under_way
                    self.killed[change.kind] += 1
                    allowed += [change.after] if all_sent else []
                matching = [
                    state
                    for state in allowed
                    if (state.rows, state.objects) == (found.rows, found.objects)
                ]
                if matching:
                    self.state = matching[-1]
                else:
                    self._differs(found, allowed)
                    self.state = ModelState(found.rows, found.objects, self.state.made + 1)
                await self._check_views(db)
            await self._check_left()

    async def _found(self, db: psycopg.AsyncConnection[Any]) -> ModelState:
        rows = await (await db.execute("SELECT id, grp, amount FROM accounts")).fetchall()
        state = ModelState({key: (group, amount) for key, group, amount in rows})
        async with await Client.connect(self.service.address) as client:
            for each in (await client.status()).objects:
                if each.name not in ("accounts", "sums") and not is_subscribed_view(each.name):
                    state.objects[each.name] = each.kind
        return state

    def _differs(self, found: ModelState, allowed: list[ModelState]) -> None:
        what = self.under_way[0].kind if self.under_way else "nothing"
        for state in allowed:
            rows = state.rows.items() ^ found.rows.items()
            objects = state.objects.items() ^ found.objects.items()
            self.report("state", f"{what} was under way: {sorted(rows)[:6]} {sorted(objects)}")

    async def _check_views(self, db: psycopg.AsyncConnection[Any]) -> None:
        views = [name for name, kind in self.state.objects.items() if kind == "view"]
        for name in ["sums", *views]:
            rows = await (await db.execute(f"SELECT grp, n, total FROM {name}".encode())).fetchall()
            found = {group: (count, int(total)) for group, count, total in rows}
            if found != self.state.sums() or len(rows) != len(found):
                self.report(name, f"{found} in place of {self.state.sums()}")

    async def _check_left(self) -> None:
        async with await Client.connect(self.service.address) as client:
            names = [each.name for each in (await client.status()).objects]
        left = [name for name in names if is_subscribed_view(name)]
        if left:
            self.report("subscribes", f"{left} are left")

    def report(self, what: str, text: str) -> None:
        """Count and print what is wrong."""
        self.wrong += 1
        print(f"WRONG after kill {self.service.kills}: {what}: {text}", flush=True)


async def run(arguments: argparse.Namespace, folder: Path) -> int:
    """The number of differences."""
    service = SqlService(folder / "state", memory=arguments.memory)
    campaign = SqlCampaign(service, arguments)
    try:
        await service.start()
        await campaign.prepare()
        while service.kills < arguments.kills:
            await campaign.live()
            # Sometimes it is killed again while it starts.
            while campaign.rng.random() < 0.2:
                await service.launch()
                await anyio.sleep(campaign.rng.uniform(0, 2.0))
                await service.end()
            await service.start()
            await campaign.check()
            if service.kills % 10 == 0:
                print(f"{service.kills} kills, {campaign.done.total()} done", flush=True)
        status = await service.stop()
        if status != 0:
            campaign.report("end", f"the service ended with status {status}")
    finally:
        if service.process is not None and service.process.returncode is None:
            service.process.kill()
    print(f"acknowledged: {dict(campaign.done)}")
    print(f"under way at a kill: {dict(campaign.killed)}")
    print(f"{service.kills} kills: {campaign.wrong} wrong")
    return campaign.wrong


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=6.0, help="seconds of a life, at most")
    parser.add_argument("--memory", action="store_true", help="without Spark")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 1 if anyio.run(run, arguments, Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
