"""A client and a service with a proxy between that breaks the network, by seed; answers checked.

    .venv/bin/python tests/proof/network_campaign.py [--runs 20] [--seed 1] [--seconds 5]

Each run starts a service (engine in memory; every other seed with TLS and tokens), and speaks to
it only through `tests.kit.proxy`: writers insert their own rows, readers peek a table and
a view over it, subscribers follow both and resume by their frontier. Meanwhile the network is
cut, vanishes, is delayed, throttled, half-closed, or one side is no longer read, as the seed says.

Checked: an acknowledged row is there at its time and later; a row whose write surely failed is
not; one that may have happened is there whole or not at all, and stays as it is; the view is its
query over the table at the same time; what a subscriber has put together is the contents at its
frontier; every call ends, within the idle limit and what the network itself was slow; when the
network is whole again, everything goes on. Exit status 1 otherwise.

All of it is one process on a `PatientLoop`, so that its short deadlines are missed because of the
faults alone, however busy the machine is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`
import anyio
import msgspec
import trustme

from actors import Client, Service, Settings
from actors.doors.client.client import concatenate_pieces
from actors.model.plan.schema import DIFF, TIME
from actors.runtime.errors import (
    AuthenticationFailed,
    ConnectionBroken,
    DeadlineExceeded,
    FrameTooLarge,
    IncompatibleVersion,
    MalformedFrame,
    PenstockError,
    RemoteProtocolError,
    ResourceClosed,
    UnknownCommand,
)
from actors.testing.engine import in_memory_engine
from actors.testing.patience import PATIENCE_MS, PATIENCE_S
from actors.testing.patient_loop import PatientLoop
from tests.kit.proxy import Side, TcpProxy

T = TypeVar("T")
IDLE_MS = 400
CALL_S = 60.0
"""Much longer than the idle limit, the deadline of a read and a slow network: this finds a call
that hangs, and no slow disk."""
RECOVERY_S = PATIENCE_S
VIEW = "SELECT g, count(*) AS n, sum(v) AS s FROM t GROUP BY g"
GROUPS = 7
LOST = (ConnectionBroken, ResourceClosed, RemoteProtocolError, DeadlineExceeded)
"""What a client may see of a broken network."""
CORRUPT = (MalformedFrame, FrameTooLarge, UnknownCommand, IncompatibleVersion, AuthenticationFailed)
"""What it may not see."""


class Wrong(Exception):
    """An answer that no order of events explains."""


def secured(folder: Path) -> dict[str, str]:
    """Settings of TLS and tokens."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    both, token = folder / "both.pem", folder / "token"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(both))
    token.write_text("c" * 32)
    for path in (both, token):
        path.chmod(0o600)
    files = {"tls_certificate": str(both), "tls_key": str(both), "token_file": str(token)}
    return files | {"tls_authority": str(folder / "ca.pem")}


def patient(settings: Settings) -> Settings:
    """Settings of a client past the proxy, where no fault is."""
    return msgspec.structs.replace(
        settings, connect_timeout_ms=PATIENCE_MS, peek_deadline_ms=PATIENCE_MS
    )


class Run:
    """One seed."""

    def __init__(self, seed: int, proxy: TcpProxy, service: Service, settings: Settings) -> None:
        self.rng = Random(seed)
        self.proxy = proxy
        self.service = service
        self.settings = settings
        self.patient = patient(settings)
        self.acknowledged: dict[int, int] = {}
        """When a row came, by its key."""
        self.maybe: set[int] = set()
        self.failed: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.followed: dict[str, tuple[Counter[tuple[Any, ...]], int]] = {}
        self.keys = itertools.count(1)
        self.over = False

    # -- calls ---------------------------------------------------------------------------------

    async def connected(self) -> Client:
        """A client through the proxy, however often it takes."""
        while True:
            try:
                with anyio.fail_after(CALL_S):
                    return await Client.connect(self.proxy.address, settings=self.settings)
            except LOST as error:
                self.lost("connect", error)
                await anyio.sleep(0.02)

    async def bounded(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """The call's answer; a call that does not end is wrong."""
        try:
            with anyio.fail_after(CALL_S):
                return await call()
        except TimeoutError:
            raise Wrong(f"{what} did not end in {CALL_S} s") from None
        except LOST as error:
            self.lost(what, error)
            raise

    def lost(self, what: str, error: PenstockError) -> None:
        """A network loses bytes; it changes none, and nobody else's key comes out of it."""
        if isinstance(error, CORRUPT):
            raise Wrong(f"{what}: {type(error).__name__}: {error}") from error
        self.counts[f"{what}: {type(error).__name__}"] += 1

    async def again(self, body: Callable[[Client], Awaitable[None]]) -> None:
        """Runs something with a client, with a new one after each loss."""
        while not self.over:
            client = await self.connected()
            try:
                await body(client)
            except LOST as error:
                self.lost("client", error)
            finally:
                with anyio.move_on_after(CALL_S, shield=True):
                    await client.aclose()

    # -- the load ------------------------------------------------------------------------------

    async def write(self, client: Client) -> None:
        """Inserts rows, a few at a time, all or none."""
        while not self.over:
            keys = [next(self.keys) for _ in range(self.rng.choice((1, 3, 200)))]
            rows = [{"k": key, "g": key % GROUPS, "v": key * 3} for key in keys]
            try:
                when = await self.bounded("write", partial(client.insert, "t", rows))
            except PenstockError as error:
                (self.failed if error.determinate else self.maybe).update(keys)
                raise
            self.acknowledged.update(dict.fromkeys(keys, when))
            self.counts["writes"] += 1

    async def read(self, client: Client) -> None:
        """Peeks at the table and the view, at one time."""
        while not self.over:
            before = max(self.acknowledged.values(), default=None)
            if before is None:
                await anyio.sleep(0.01)
                continue
            table = await self.bounded("peek", partial(client.peek, "t", as_of=before))
            view = await self.bounded("peek", partial(client.peek, "w", as_of=before))
            self.check(table.to_pylist(), view.to_pylist(), before)
            self.counts["reads"] += 1

    async def follow(self, name: str, client: Client) -> None:
        """Follows an object, from where the last connection ended."""
        contents, frontier = self.followed.get(name, (Counter(), None))
        async with aclosing(concatenate_pieces(client.subscribe(name, from_=frontier))) as stream:
            async for change in stream:
                if change.table is not None:
                    for row in change.table.to_pylist():
                        diff = row.pop(DIFF)
                        row.pop(TIME)
                        contents[tuple(row.values())] += diff
                if change.upper is None:
                    raise Wrong(f"{name} has ended")
                self.followed[name] = (contents, change.upper)
                self.counts["changes"] += 1
                if self.over:
                    return

    async def disturb(self, until: float) -> None:
        """Faults, one after the other, with pauses of a network that works."""
        sides: tuple[Side, Side] = ("client", "target")
        proxy, rng = self.proxy, self.rng
        while anyio.current_time() < until:
            kind = rng.choice(("cut", "vanish", "delay", "throttle", "half", "stop", "refuse"))
            self.counts[f"fault {kind}"] += 1
            match kind:
                case "cut":
                    proxy.cut()
                case "vanish":
                    proxy.vanish()
                case "delay":
                    proxy.delay(rng.uniform(1, IDLE_MS * 0.6))
                case "throttle":
                    proxy.throttle(rng.choice((3_000, 50_000, 1_000_000)))
                case "half":
                    proxy.half_close(rng.choice(sides))
                case "stop":
                    proxy.stop_reading(rng.choice(sides))
                case "refuse":
                    proxy.refuse()
            await anyio.sleep(rng.uniform(0.01, IDLE_MS * 2 / 1000))
            proxy.heal()
            await anyio.sleep(rng.uniform(0.05, 0.5))

    async def recovered(self) -> None:
        """When the network is whole again, everything goes on by itself."""
        before = self.counts.copy()
        needed = ("writes", "reads", "changes")
        with anyio.move_on_after(RECOVERY_S):
            while any(self.counts[what] <= before[what] for what in needed):
                await anyio.sleep(0.01)
            return
        raise Wrong(
            f"{', '.join(what for what in needed if self.counts[what] <= before[what])}: none in "
            f"{RECOVERY_S} s after the network was whole again"
        )

    # -- checks --------------------------------------------------------------------------------

    def check(self, rows: list[Any], view: list[Any], at: int) -> None:
        """The table's rows, and the view's, as of that time."""
        keys = Counter(row["k"] for row in rows)
        twice = [key for key, count in keys.items() if count != 1]
        lost = [key for key, when in self.acknowledged.items() if when <= at and key not in keys]
        early = [key for key in keys if self.acknowledged.get(key, 0) > at]
        ghosts = [key for key in keys if key in self.failed]
        for what, found in (("twice", twice), ("lost", lost), ("early", early), ("ghost", ghosts)):
            if found:
                raise Wrong(f"rows {what} at {at}: {found[:10]}")
        if Counter(tuple(row.values()) for row in view) != expected(rows):
            raise Wrong(f"the view at {at} is not its query over the table")

    async def check_all(self) -> None:
        """At the end, past the proxy."""
        async with await Client.connect(self.service.address, settings=self.patient) as client:
            now = await client.write({})
            rows = (await client.peek("t", as_of=now)).to_pylist()
            self.check(rows, (await client.peek("w", as_of=now)).to_pylist(), now)
            for name, (contents, upper) in self.followed.items():
                there = (await client.peek(name, as_of=upper - 1)).to_pylist()
                if +contents != Counter(tuple(row.values()) for row in there) or -contents:
                    raise Wrong(f"the subscriber of {name} is not at its contents at {upper - 1}")


def expected(rows: list[Any]) -> Counter[tuple[Any, ...]]:
    """The view's rows, computed plainly."""
    groups: dict[int, tuple[int, int]] = {}
    for row in rows:
        n, s = groups.get(row["g"], (0, 0))
        groups[row["g"]] = (n + 1, s + row["v"])
    return Counter((g, n, s) for g, (n, s) in groups.items())


async def run(seed: int, seconds: float, folder: Path) -> Counter[str]:
    """One seed. Raises `Wrong`."""
    settings = Settings(
        state_dir=str(folder / "state"),
        listen="127.0.0.1:0",
        connect_timeout_ms=IDLE_MS * 2,
        idle_timeout_ms=IDLE_MS,
        write_timeout_ms=IDLE_MS,
        frame_timeout_ms=IDLE_MS * 4,
        keepalive_ms=20,
        peek_deadline_ms=3000,
    )
    if seed % 2:
        settings = msgspec.structs.replace(settings, **secured(folder))
    async with Service(settings, engine=in_memory_engine()) as service:
        async with await Client.connect(service.address, settings=patient(settings)) as client:
            await client.create_table("t", {"k": "bigint", "g": "bigint", "v": "bigint"}, ["k"])
            await client.create_materialized_view("w", VIEW)
        async with TcpProxy("127.0.0.1:0", service.address) as proxy:
            one = Run(seed, proxy, service, settings)
            async with anyio.create_task_group() as group:
                for body in (one.write, one.write, one.read):
                    group.start_soon(one.again, body)
                for name in ("t", "w"):
                    group.start_soon(one.again, partial(one.follow, name))
                await one.disturb(anyio.current_time() + seconds)
                proxy.heal()
                await one.recovered()
                one.over = True
                with anyio.move_on_after(CALL_S):
                    async with await Client.connect(
                        service.address, settings=one.patient
                    ) as client:
                        for _ in range(3):  # so that the subscribers wake
                            await client.write({})
        await one.check_all()
    return one.counts


def wrong_of(error: BaseException) -> BaseException:
    """What was found, out of its groups. Raises what is no finding."""
    if isinstance(error, BaseExceptionGroup):
        found, _ = error.split(Wrong)
        if found is None:
            raise error
        return wrong_of(found.exceptions[0])
    return error


def main() -> int:
    """Runs the seeds. The exit status: 0 all answers were right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    total: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.runs):
        with tempfile.TemporaryDirectory(prefix="penstock-network-") as folder:
            try:
                total += anyio.run(
                    run,
                    seed,
                    options.seconds,
                    Path(folder),
                    backend_options={"loop_factory": PatientLoop},
                )
            except (Wrong, BaseExceptionGroup) as error:
                print(f"seed {seed}: WRONG: {wrong_of(error)}", flush=True)
                return 1
        print(f"seed {seed}: right", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
