"""Plays the year of flights at full speed and watches memory and parts.

Run: ``python tests/proof/soak.py [--days 364] [--out FILE]``. Prints a line a minute: resident
memory of the service, its engine process and its JVM, live parts of the fullest shard, and the
state directory's size; at the end the medians of the second and the last quarter. Exit status 1
when memory of any process grew by more than a fifth between them, or a shard has more parts
than the limit on batches allows.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

import anyio
from crash_campaign import Service, create, descendants

from actors.runtime.settings import Settings
from penstock_flights import flights
from penstock_flights.play import VIEWS, changes_of

GROWTH_MAX = 1.2


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MiB, without the pages of files.

    What it has mapped (arrangements' runs, JARs) grows with the data and is the kernel's to take
    back; only its own memory can leak.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def sample(root: int) -> dict[str, float]:
    """Return the resident memory of service, engine and JVM, without the pages of files."""
    found = {"service": resident_mb(root), "engine": 0.0, "jvm": 0.0}
    for pid, command in descendants(root):
        kind = "jvm" if Path(command.split(" ")[0]).name == "java" else "engine"
        try:
            found[kind] = max(found[kind], resident_mb(pid))
        except OSError:
            continue
    return found


async def soak(days: int, folder: Path) -> int:
    """The whole run; the number of limits broken."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = Service(folder / "state", port)
    service.retain_history_ms = 60_000
    await service.start()
    assert service.process is not None
    root = service.process.pid
    samples: list[dict[str, float]] = []
    stream = flights.history(flights.read(), days=days, start=date(2013, 1, 1))
    finished = anyio.Event()

    async def watch() -> None:
        while not finished.is_set():
            samples.append(sample(root))
            with anyio.move_on_after(2):  # expires: it looks every two seconds
                await finished.wait()

    changes = 0
    started = anyio.current_time()
    async with anyio.create_task_group() as group:
        async with service.client() as client:
            await create(client)
            group.start_soon(watch)
            for number, transaction in enumerate(stream):
                time = await client.write(changes_of(transaction))
                changes += transaction.changes
                if number % 200 == 199:
                    # the views keep up: the stream is as fast as they are
                    for view in VIEWS:
                        await client.wait_for(view.name, time, deadline_ms=120_000)
                    now = samples[-1] if samples else {}
                    seconds = anyio.current_time() - started
                    text = " ".join(f"{name}={mb:.0f}MiB" for name, mb in now.items())
                    print(
                        f"{number + 1}/{len(stream)} {changes} changes {seconds:.0f}s {text}",
                        flush=True,
                    )
        finished.set()
    await service.stop()
    return judge(samples, folder / "state")


def judge(samples: list[dict[str, float]], state: Path) -> int:
    """Prints medians of the second and the last quarter; counts the limits broken."""
    quarter = max(1, len(samples) // 4)
    broken = 0
    for name in ("service", "engine", "jvm"):
        early = median(s[name] for s in samples[quarter : 2 * quarter])
        late = median(s[name] for s in samples[-quarter:])
        verdict = "ok" if late <= early * GROWTH_MAX else "GROWS"
        broken += verdict != "ok"
        print(f"{name}: second quarter {early:.0f} MiB, last quarter {late:.0f} MiB {verdict}")
    blobs: dict[str, int] = {}
    for file in (state / "blob").rglob("*"):
        if file.is_file():
            shard = str(file.relative_to(state / "blob").parent)
            blobs[shard] = blobs.get(shard, 0) + 1
    fullest = max(blobs.values(), default=0)
    limit = 2 * Settings().batches_per_shard_max
    verdict = "ok" if fullest <= limit else "TOO MANY"
    broken += verdict != "ok"
    print(f"blobs of the fullest shard: {fullest} (limit {limit}) {verdict}")
    return broken


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--days", type=int, default=364)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 1 if anyio.run(soak, arguments.days, Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
