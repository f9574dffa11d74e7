"""Two processes on one shard, killed again and again, and a checker of all that they saw.

Run: ``python tests/proof/persist_two.py [--operations 1000000] [--kills 200] [--seed 1]
[--stores s3|files|sqlite] [--seconds N] [--keep FOLDER]``.

Both (`persist_worker.py`) append, read, listen, compact and collect on one shard: documents in
PostgreSQL and blobs in moto's S3 server, or files, or documents in SQLite and files. A seeded dice
says when which of them is killed with SIGKILL; it is started again at once. Each records what it
did (`persist_history.py`). It ends after so many operations (or seconds), then

1. nothing in the whole history contradicts an order of all appends and reads;
2. what is read in the end is what was acknowledged, and what of open outcome came to be;
3. after compaction and collection the blobs are exactly those that the state names.

Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
from msgspec.structs import replace
from persist_history import History, check
from persist_worker import SETTINGS, SHARD, contents

from actors.durable.persist import PersistClient
from actors.durable.persist.store_urls import open_blob, open_consensus
from actors.runtime.kernel import SystemClock

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("persist_worker.py")
PROCESSES = 2
POLL_S = 0.05
"""Between looks at how far they are."""


@contextmanager
def stores(kind: str, folder: Path) -> Iterator[tuple[str, str, dict[str, str], Any]]:
    """URLs of blobs and documents, an environment, and the S3 server if there is one."""
    with ExitStack() as stack:
        if kind == "sqlite":
            yield f"file:{folder}/blobs", f"sqlite:{folder}/documents.db", {}, None
            return
        from actors.testing.postgres_server import postgres_server

        server = stack.enter_context(postgres_server(fsync="off"))
        documents = f"postgresql://bench@127.0.0.1:{server.port}/postgres?schema=two"
        if kind == "files":
            yield f"file:{folder}/blobs", documents, {}, None
            return
        sys.path.insert(0, str(ROOT))
        import s3_server  # type: ignore[import-not-found]

        served = stack.enter_context(s3_server.serving())
        environment = {
            "AWS_ACCESS_KEY_ID": s3_server.KEY_ID,
            "AWS_SECRET_ACCESS_KEY": s3_server.SECRET,
            "AWS_ENDPOINT_URL": served.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }
        yield f"s3://{served.new_bucket()}/two", documents, environment, served


class Pair:
    """The two processes, in one life after the other."""

    def __init__(self, urls: tuple[str, str], environment: dict[str, str], folder: Path) -> None:
        self._urls = urls
        self._environment = os.environ | environment
        self._folder = folder
        self._lives = 0
        self._running: list[subprocess.Popen[str]] = []
        self._running_lives: list[int] = []
        self._killed: list[int] = []
        """Lives whose histories were not looked at since."""

    def start(self) -> None:
        """Both."""
        self._running = [self._life() for _ in range(PROCESSES)]
        self._running_lives = list(range(1, PROCESSES + 1))

    def _life(self) -> subprocess.Popen[str]:
        self._lives += 1
        command = [sys.executable, str(SCRIPT), str(self._lives), *self._urls, str(self._folder)]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, text=True)

    def kill(self, which: int) -> bool:
        """Kills one and starts it again. False when it had ended by itself, which it must not."""
        process = self._running[which]
        ended = process.poll()
        process.kill()
        process.communicate()
        self._killed.append(self._running_lives[which])
        self._running[which] = self._life()
        self._running_lives[which] = self._lives
        return ended is None

    def ready(self, which: int) -> None:
        """Once it works on the shard."""
        told = self._running[which].stdout
        assert told is not None
        told.readline()

    def stop(self) -> list[int]:
        """Tells them to end; their exit statuses."""
        (self._folder / "stop").touch()
        for process in self._running:
            process.communicate(timeout=600)
        return [process.returncode for process in self._running]

    def abandon(self) -> None:
        """Kills whatever runs."""
        for process in self._running:
            process.kill()
            process.communicate()

    def files(self) -> list[Path]:
        """The histories."""
        return sorted(self._folder.glob("life-*.jsonl"))

    def growing(self) -> list[Path]:
        """Histories that may have grown since the last call: of those that run, and of those that
        were killed since."""
        lives, self._killed = [*self._killed, *self._running_lives], []
        paths = [self._folder / f"life-{life:05d}.jsonl" for life in lives]
        return [path for path in paths if path.exists()]


class Counted:
    """How many operations the histories hold, read as they grow."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}
        self.count = 0

    def look(self, paths: list[Path]) -> int:
        for path in paths:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            self._read[path] = self._read.get(path, 0) + len(data)
            data = b"\n" + data  # each line is one write: none is read in halves
            begun = data.count(b'\n["i"') + data.count(b'\n["e"')
            self.count += data.count(b"\n") - 1 - begun
        return self.count


class Ahead(SystemClock):
    """The auditor's: what is to be waited for is over at once."""

    later_ms = 0

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.later_ms


async def audited(urls: tuple[str, str], history: History) -> list[str]:
    """What is wrong in the end, with the histories and with what is in the stores."""
    limits, clock = replace(SETTINGS, reader_lease_ms=1), Ahead()  # expires: its processes are dead
    dice = random.Random(0)
    blob = await open_blob(urls[0], limits, clock, exclusive=False)
    consensus = await open_consensus(urls[1], limits, clock, dice)
    client = PersistClient(blob, consensus, limits, clock, exclusive=False, random=dice)
    try:
        upper = await client.recent_upper(SHARD)
        if upper:
            reader = await client.open_reader(SHARD, "audit")
            began = time.monotonic_ns()
            count, total = await contents(client, reader, upper - 1)
            history.reads.append((began, time.monotonic_ns(), upper - 1, count, total))
            await reader.close()
        wrong = check(history, upper)
        for _ in range(20):  # leases of the dead run out, retired blobs go
            await anyio.sleep(0.01)
            await client.set_hold(SHARD, "audit", upper)
            await client.drop_hold(SHARD, "audit")
            await client.maintain(SHARD)
            await client.collect_orphans()
            clock.later_ms += limits.blob_orphan_grace_ms
        state = await client.state(SHARD)
        found = {info.key for info in await blob.list_keys()}
        if found != state.blob_keys():
            wrong.append(
                f"blobs without a name: {sorted(found - state.blob_keys())[:5]}; named and not"
                f" there: {sorted(state.blob_keys() - found)[:5]}"
            )
        if state.retired:
            wrong.append(f"{len(state.retired)} retired blobs are kept: {state.retired[:3]}")
        print(f"the shard: upper {upper}, {len(state.batches)} batches, {len(found)} blobs")
        return wrong
    finally:
        await client.close()


def run(options: argparse.Namespace, folder: Path) -> int:
    """The exit status."""
    dice = random.Random(options.seed)
    with stores(options.stores, folder) as (blobs, documents, environment, served):
        os.environ.update(environment)
        pair = Pair((blobs, documents), environment, folder)
        counted, kills, began = Counted(), 0, time.monotonic()
        problems: list[str] = []
        try:
            pair.start()
            for which in range(PROCESSES):
                pair.ready(which)
            # Kills are spread over the operations; each life is long enough to work.
            marks = sorted(dice.randrange(options.operations) for _ in range(options.kills))
            shown = 0
            while True:
                select.select([], [], [], POLL_S)
                done = counted.look(pair.growing())
                if served is not None:
                    served.calls.clear()
                over = time.monotonic() - began > options.seconds
                if marks and not over and done >= marks[0]:
                    marks.pop(0)
                    which = dice.randrange(PROCESSES)
                    if not pair.kill(which):
                        problems.append(f"a process ended by itself before kill {kills}")
                    pair.ready(which)
                    kills += 1
                if done - shown >= 20_000:
                    shown = done
                    rate = done / (time.monotonic() - began)
                    print(f"{done} operations, {kills} kills, {rate:.0f}/s", flush=True)
                if (done >= options.operations and not marks) or over:
                    break
            took = time.monotonic() - began
            statuses = pair.stop()
            if any(statuses):
                problems.append(f"processes ended with {statuses}")
        finally:
            pair.abandon()
        history = History()
        history.load(pair.files())
        problems += anyio.run(audited, (blobs, documents), history)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(history.kinds.items()))
    print(f"{history.operations} operations in {took:.0f} s ({history.operations / took:.0f}/s)")
    print(f"{kinds}; {kills} kills")
    for text, count in history.errors.most_common(10):
        print(f"  told {count} times: {text}")
    for problem in problems[:20]:
        print(f"WRONG: {problem}")
    print("wrong" if problems else "all of it can have happened in one order; nothing leaks")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=6 * 3600)
    parser.add_argument("--stores", choices=("s3", "files", "sqlite"), default="s3")
    parser.add_argument("--keep", type=Path, help="a folder for the histories")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        return run(options, options.keep.resolve())
    with tempfile.TemporaryDirectory(prefix="penstock-two-") as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    raise SystemExit(main())
