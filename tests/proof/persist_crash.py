"""Kills a process that writes, compacts and collects, with SIGKILL, and looks what is left.

Run: ``python tests/proof/persist_crash.py [--kills 200] [--seed 1] [--stores sqlite|postgres]``.

The process (`persist_crash_writer.py`) opens the stores as a service does: a state directory, or
one with documents in PostgreSQL, which it takes over. It appends to two shards and the tables'
upper at once, leaves parts that nobody names, compacts, reads under leases, and collects. A seeded
dice says after how many appends, and how much later, it is killed. After each kill the stores are
opened here:

1. the uppers are what was acknowledged, or one append more; those of both shards are the same;
2. both shards hold exactly what was appended (looked at after every `LOOK`th kill and the last);
3. in the end, after compaction and collection, the blobs are exactly those that the states name,
   and no temporary file is left (where others may write: none that is a day old).

Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import random
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from msgspec.structs import replace
from persist_crash_writer import SCHEMA, SETTINGS, SHARDS, rows_at

from actors.durable.persist import PersistClient
from actors.durable.persist.blob_file import TEMPORARY
from actors.model.plan.schema import DIFF
from actors.runtime.kernel import SystemClock

SCRIPT = Path(__file__).with_name("persist_crash_writer.py")
APPENDS_MAX = 12
"""Of a life."""
PAUSE_S = 0.05
"""At most, from its last line to the kill: it may be anywhere then."""
LOOK = 10


class Wrong(Exception):
    """Something was lost, or is left."""


@contextmanager
def documents(kind: str) -> Iterator[str]:
    """`consensus_url`; empty: in the state directory."""
    if kind == "sqlite":
        yield ""
        return
    from actors.testing.postgres_server import postgres_server

    with postgres_server() as server:
        yield f"postgresql://bench@127.0.0.1:{server.port}/postgres?schema=crash"


def life(state: Path, url: str, seed: int, dice: random.Random) -> int:
    """Runs the process until it is killed; the last upper that it printed."""
    command = [sys.executable, str(SCRIPT), str(state), url, str(seed)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = 0
    for _ in range(dice.randrange(1, APPENDS_MAX)):
        line = writer.stdout.readline()
        if not line:
            raise Wrong(f"it ended by itself, with status {writer.wait()}")
        acknowledged = int(line)
    select.select([], [], [], dice.random() * PAUSE_S)
    writer.kill()
    lines = writer.communicate()[0].split("\n")
    return max([acknowledged, *(int(line) for line in lines[:-1])])


async def looked(state: Path, url: str, acknowledged: int, whole: bool) -> int:
    """The upper, which must be right; so must all contents, if they are looked at."""
    client = await PersistClient.open(state, replace(SETTINGS, consensus_url=url), SystemClock())
    try:
        upper = await client.upper("s")
        if not acknowledged <= upper <= acknowledged + 1:
            raise Wrong(f"acknowledged was {acknowledged}, the upper is {upper}")
        others = [await client.upper("t"), await client.tables_upper()]
        if others != [upper, upper]:
            raise Wrong(f"one append moved one upper to {upper}, and others to {others}")
        if whole:
            for shard in SHARDS:
                await check_contents(client, shard, upper)
        return upper
    finally:
        await client.close()


async def check_contents(client: PersistClient, shard: str, upper: int) -> None:
    reader = await client.open_reader(shard, "check")
    found: Counter[int] = Counter()
    for part in (await reader.snapshot(upper - 1))[0]:
        table = await client.fetch(part, SCHEMA)
        for a, diff in zip(table["a"].to_pylist(), table[DIFF].to_pylist(), strict=True):
            found[a] += diff
    await reader.close()
    right = {time: rows_at(time) for time in range(upper)}
    if found != right:
        wrong = {time for time in found.keys() | right.keys() if found[time] != right.get(time)}
        raise Wrong(f"shard {shard}: at {sorted(wrong)[:5]} are not the rows that were appended")


async def check_leaks(state: Path, url: str) -> int:
    """How many blobs there are in the end."""
    # expires: the processes that had leases are dead
    limits = replace(SETTINGS, consensus_url=url, blob_orphan_grace_ms=1, reader_lease_ms=1)
    client = await PersistClient.open(state, limits, SystemClock())
    try:
        for _ in range(6):
            await anyio.sleep(0.01)
            for shard in SHARDS:
                await client.set_hold(shard, "check", (await client.state(shard)).since)
                await client.drop_hold(shard, "check")
                await client.maintain(shard)
            await client.collect_orphans()
        named: set[str] = set()
        for shard in SHARDS:
            found = await client.state(shard)
            if found.retired:
                raise Wrong(f"shard {shard} keeps {len(found.retired)} retired blobs")
            named |= found.blob_keys()
    finally:
        await client.close()
    files = {
        f"{path.parent.name}/{path.name}"
        for path in (state / "blob").rglob("*")
        if path.is_file() and not (url and path.parent.name == TEMPORARY)
    }
    if files != named:
        raise Wrong(f"unnamed: {sorted(files - named)[:5]}, missing: {sorted(named - files)[:5]}")
    return len(files)


def run(kind: str, kills: int, seed: int) -> None:
    """Raises `Wrong`."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="penstock-crash-") as folder, documents(kind) as url:
        state, upper = Path(folder) / "state", 0
        for kill in range(1, kills + 1):
            acknowledged = max(upper, life(state, url, seed * 10_000 + kill, dice))
            whole = kill % LOOK == 0 or kill == kills
            upper = anyio.run(looked, state, url, acknowledged, whole)
            if kill % LOOK == 0:
                print(f"{kind}: {kill} kills, {upper} appends", flush=True)
        count = anyio.run(check_leaks, state, url)
    print(f"{kind}: {kills} kills, {upper} appends to each of {len(SHARDS)} shards, all there;")
    print(f"{kind}: {count} blobs are left, all of them named")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stores", choices=("sqlite", "postgres"), action="append")
    options = parser.parse_args()
    try:
        for kind in options.stores or ("sqlite", "postgres"):
            run(kind, options.kills, options.seed)
    except Wrong as wrong:
        print(f"WRONG: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
