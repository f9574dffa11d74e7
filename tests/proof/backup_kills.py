"""Kills `penstock backup` with SIGKILL, and the service beside it, and restores what is left.

Run: ``python tests/proof/backup_kills.py [--kills 60] [--seed 1]``.

A service process with the in-memory engine is written to without a pause, and its parts are
compacted often. Beside it backups are taken, half of the campaign to a folder and half to a bucket
of an S3 server. At a random moment, or once some blobs have come into the target, the backup is
killed, or the service, or both. Then

1. a backup beside which the service alone was killed has ended well, and one that was killed is
   whole or absent;
2. the next backup ends well, and copies each blob that the target lacks once, and no other;
3. the newest whole backup is restored, and a service on it has exactly the rows, and the view over
   them, that the model has after one write; that write was neither acknowledged after the backup's
   end nor before the backup was begun.

Exit status 1 when anything differs, or when no backup was killed while it copied.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import anyio
import anyio.abc
from crash_campaign import Service, free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import s3_server  # type: ignore[import-not-found]
from actors import Client, TableWrite
from actors.durable.persist.backup_format import BackupTarget
from actors.runtime.errors import PenstockError
from actors.runtime.kernel import SystemClock
from actors.runtime.settings import Settings

SERVE_IN_MEMORY: Final = (
    Path(__file__).resolve().parents[1] / "house" / "docs" / "serve_in_memory.py"
)
SHARED: Final = {"reader_lease_ms": 4_000}  # expires: of backups that were killed
"""Leases of a killed backup end soon."""
SETTINGS: Final = {
    # Small parts and few batches: much is written, and each compaction replaces many parts.
    "inline_part_bytes_max": 1,
    "part_bytes_target": 16_384,
    "batches_per_shard_max": 6,
    "maintenance_ms": 20,
    "hold_downgrade_ms": 50,
    "retain_history_ms": 1_000,
    **SHARED,
}
COLUMNS: Final = {"id": "bigint", "grp": "bigint", "amount": "bigint", "pad": "string"}
SUMS: Final = "SELECT grp, count(*) AS n, sum(amount) AS total FROM t GROUP BY grp"
NUMBER_ID: Final = 0
"""Id of the row whose amount is the number of the last write."""
GROUPS: Final = 7
ROWS_MAX: Final = 400
PAD_BYTES: Final = 300
WRITE_EVERY_S: Final = 0.02
KEPT: Final = 3
COMMAND_SECONDS: Final = 120
Rows = dict[int, tuple[int, int]]
"""Group and amount by id."""
VICTIMS: Final = ("backup", "backup", "backup", "service", "both")


class WrittenService(Service):
    """The service, with small parts and without Spark."""

    def program(self) -> list[str]:
        return [str(SERVE_IN_MEMORY)]

    def settings(self) -> dict[str, Any]:
        return dict(SETTINGS)


class TableModel:
    """The table after each write, and the write that is under way."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._next_id = NUMBER_ID + 1
        self.done = self.begun = 1
        """Numbers of the last write that is known to have happened, and of the last one sent."""
        self.after: dict[int, Rows] = {1: {NUMBER_ID: (-1, 1)}}

    def next(self) -> TableWrite:
        """Draw a write, the next of the numbers."""
        rng, rows = self._rng, dict(self.after[self.done])
        self.begun += 1
        others = sorted(rows.keys() - {NUMBER_ID})
        count = rng.randint(1, 12)
        gone = rng.sample(others, min(count, len(others))) if len(others) > ROWS_MAX else []
        new: Rows = {}
        for _ in range(count):
            new[self._next_id] = (rng.randrange(GROUPS), rng.randrange(1_000))
            self._next_id += 1
        for each in gone:
            del rows[each]
        self.after[self.begun] = {**rows, **new, NUMBER_ID: (-1, self.begun)}
        return TableWrite(
            insert=[self._row(key, value) for key, value in new.items()],
            update=[{"id": NUMBER_ID, "amount": self.begun}],
            delete=[{"id": each} for each in gone] or None,
        )

    def _row(self, key: int, value: tuple[int, int]) -> dict[str, Any]:
        pad = self._rng.randbytes(PAD_BYTES // 2).hex()
        return {"id": key, "grp": value[0], "amount": value[1], "pad": pad}

    def forget_before(self, number: int) -> None:
        """Drop what no backup that is looked at may hold."""
        self.after = {each: rows for each, rows in self.after.items() if each >= number}


def sums_of(rows: Rows) -> dict[int, tuple[int, int]]:
    """The rows of the view: count and total by group."""
    found: dict[int, tuple[int, int]] = {}
    for group, amount in rows.values():
        count, total = found.get(group, (0, 0))
        found[group] = (count + 1, total + amount)
    return found


async def rows_of(client: Client) -> Rows:
    """The table as a service has it."""
    table = await client.peek("t", columns=["id", "grp", "amount"])
    return {row["id"]: (row["grp"], row["amount"]) for row in table.to_pylist()}


class KnownTarget(NamedTuple):
    """A place for backups, and how it is looked at."""

    url: str
    arrived: Callable[[], int]
    """How many blobs have come there so far; it may only grow."""


class TakenBackup(NamedTuple):
    """A run of the command."""

    status: int
    text: str
    lower: int
    upper: int
    """Numbers of writes between which it lies."""


class BackupCampaign:
    """One service, one target, and what must be in it."""

    def __init__(self, folder: Path, target: KnownTarget, arguments: argparse.Namespace) -> None:
        self.folder = folder
        self.target = target
        self.rng = Random(f"{arguments.seed} {target.url.partition(':')[0]}")
        self.service = WrittenService(folder / "state", free_port())
        self.model = TableModel(self.rng)
        self.bounds: dict[str, tuple[int, int]] = {}
        """Of each whole backup, by name."""
        self.seconds = 3.0
        """What the last backup took."""
        self.kills: Counter[str] = Counter()
        self.restored = 0
        self.wrong = 0

    def report(self, what: str, text: str) -> None:
        """Count and print what is wrong."""
        self.wrong += 1
        print(f"WRONG after {self.kills.total()} kills: {what}: {text}", flush=True)

    # -- writes --------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """The table with its first row, and the view."""
        async with self.service.client() as client:
            await client.create_table("t", COLUMNS, ["id"])
            await client.create_materialized_view("sums", SUMS)
            row = {"id": NUMBER_ID, "grp": -1, "amount": 1, "pad": ""}
            await client.insert("t", [row])

    async def write(self) -> None:
        """Writes until cancelled, over all lives of the service."""
        while True:
            life = self.service.up
            try:
                async with self.service.client() as client:
                    await self._settle(client)
                    while True:
                        await client.write({"t": self.model.next()})
                        self.model.done = self.model.begun
                        await anyio.sleep(WRITE_EVERY_S)
            except (PenstockError, OSError):
                # Nobody has killed it: without writes the rest would show nothing.
                if self.service.up is life:
                    raise

    async def _settle(self, client: Client) -> None:
        """Learns whether the write happened that was under way, and looks at all others."""
        found = await rows_of(client)
        number = found[NUMBER_ID][1]
        if number not in (self.model.done, self.model.begun):
            self.report("service", f"write {number} is the last in place of {self.model.done}")
        elif found != self.model.after[number]:
            self.report("service", f"its rows are not those after write {number}")
        self.model.done = self.model.begun = max(number, self.model.done)

    # -- backups -------------------------------------------------------------------------------

    async def take(self, *options: str, killed: str = "") -> TakenBackup:
        """Runs the command, and kills it or the service meanwhile."""
        lower = self.model.done
        log = self.folder / "backup.json"
        command = [
            sys.executable,
            "-m",
            "actors.doors.commands.cli",
            "backup",
            self.target.url,
            "--json",
        ]
        command += ["--state-dir", str(self.folder / "state"), *options]
        for name, value in {**SHARED, "backup_blobs_in_flight_max": 1}.items():
            command += ["--set", f"{name}={value}"]
        started, before = anyio.current_time(), self.target.arrived()
        with log.open("w") as out:
            process = await anyio.open_process(
                command, stdin=None, stdout=out, stderr=subprocess.STDOUT
            )
        with anyio.fail_after(COMMAND_SECONDS):
            if killed:
                await self._kill(process, killed, before)
            await process.wait()
        assert process.returncode is not None
        if process.returncode == 0:
            self.seconds = anyio.current_time() - started
        taken = TakenBackup(process.returncode, log.read_text(), lower, self.model.begun)
        await self._note(taken)
        return taken

    async def _kill(self, process: anyio.abc.Process, killed: str, before: int) -> None:
        """Waits for the moment, and kills."""
        if self.rng.random() < 0.5:
            await self._until_ended(process, self.rng.uniform(0.0, self.seconds))
        else:
            wanted = before + self.rng.randint(1, 12)
            while process.returncode is None and self.target.arrived() < wanted:
                await anyio.sleep(0.001)
        if killed != "backup":
            await self.service.end()
            self.kills["service"] += 1
        if killed != "service" and process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            copied = self.target.arrived() > before
            self.kills["backup while it copied" if copied else "backup before"] += 1

    async def _until_ended(self, process: anyio.abc.Process, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await process.wait()

    async def _note(self, taken: TakenBackup) -> None:
        """Notes which backups are whole now; a command makes one at most."""
        opened = await BackupTarget.open(self.target.url, Settings(), SystemClock())
        names = [manifest.name for manifest in await opened.manifests()]
        new = [name for name in names if name not in self.bounds]
        if len(new) > 1 or (taken.status == 0 and len(new) != 1):
            self.report("backup", f"it ended with {taken.status} and made {new}")
        self.bounds = {name: self.bounds.get(name, (taken.lower, taken.upper)) for name in names}

    async def _keys(self) -> set[str]:
        opened = await BackupTarget.open(self.target.url, Settings(), SystemClock())
        return {info.key for info in await opened.parts.list_keys()}

    async def round(self) -> None:
        """One kill, one backup after it, and what both have left."""
        victim = self.rng.choice(VICTIMS)
        # A backup that removes older ones is killed within that, too.
        keep = ("--keep", str(KEPT)) if self.rng.random() < 0.5 else ()
        known = self.bounds.keys()
        taken = await self.take(*keep, killed=victim)
        if taken.status not in (0, -signal.SIGKILL) or (victim == "service" and taken.status):
            self.report("backup", f"killed was: {victim}; it ended with {taken.status}")
            print(taken.text, flush=True)
        if taken.status != 0 and self.bounds.keys() - known:
            # Before another backup may bring what it lacks.
            await self._check_restored()
        if victim != "backup":
            # Sometimes the next backup is taken of stores that nobody owns.
            if self.rng.random() < 0.5:
                await self.check_next()
            await self.service.start()
        await self.check_next()

    async def check_next(self) -> None:
        """A backup that nothing disturbs, and a restore of the newest one."""
        before = await self._keys()
        taken = await self.take()
        if taken.status != 0:
            self.report("next backup", f"it ended with {taken.status}")
            print(taken.text, flush=True)
            return
        copied, new = json.loads(taken.text)["copied_blobs"], await self._keys() - before
        if copied != len(new):
            self.report("next backup", f"{copied} blobs were copied, and {len(new)} are new")
        await self._check_restored()

    async def _check_restored(self) -> None:
        place = self.folder / f"restored-{self.restored}" / "state"
        place.parent.mkdir()
        command = [sys.executable, "-m", "actors.doors.commands.cli", "restore", self.target.url]
        command += ["--json", "--state-dir", str(place)]
        done = await anyio.run_process(command, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            self.report("restore", done.stdout.decode())
            return
        name = json.loads(done.stdout)["manifest"]["name"]
        if name != (newest := list(self.bounds)[-1]):
            self.report("restore", f"it took {name} in place of {newest}")
        self.restored += 1
        service = WrittenService(place, free_port())
        await service.start()
        try:
            async with service.client() as client:
                found = await rows_of(client)
                sums = (await client.peek("sums")).to_pylist()
        finally:
            await service.end()
        shutil.rmtree(place.parent)
        self._compare(name, found, {row["grp"]: (row["n"], row["total"]) for row in sums})

    def _compare(self, name: str, found: Rows, sums: dict[int, tuple[int, int]]) -> None:
        (lower, upper), number = self.bounds[name], found[NUMBER_ID][1]
        if not lower <= number <= upper:
            self.report(name, f"it is of write {number}, not of one from {lower} to {upper}")
        elif found != self.model.after.get(number):
            self.report(name, f"its rows are not those after write {number}")
        if sums != sums_of(found):
            self.report(name, f"its view holds {sums} in place of {sums_of(found)}")
        self.model.forget_before(min(self.bounds.values())[0])

    async def run(self, kills: int) -> None:
        """So many rounds with a kill."""
        await self.service.start()
        try:
            await self.prepare()
            async with anyio.create_task_group() as group:
                group.start_soon(self.write)
                await self.check_next()
                while self.kills.total() < kills:
                    await self.round()
                group.cancel_scope.cancel()
        finally:
            process = self.service.process
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        print(
            f"{self.target.url.partition(':')[0]}: killed {dict(self.kills)}, {self.restored}"
            f" restored, {self.model.done} writes: {self.wrong} wrong",
            flush=True,
        )


def in_folder(folder: Path) -> KnownTarget:
    """A folder of its own."""
    parts, seen = folder / "parts", set[Path]()

    def arrived() -> int:
        seen.update(path for path in parts.rglob("*") if path.is_file())
        return len(seen)

    return KnownTarget(f"file:{folder}", arrived)


def in_bucket(served: Any) -> KnownTarget:
    """A bucket of its own; its requests are counted."""
    bucket = served.new_bucket()
    begin = f"PUT /{bucket}/kept/parts/"
    return KnownTarget(
        f"s3://{bucket}/kept", lambda: sum(line.startswith(begin) for line in served.calls)
    )


async def run(arguments: argparse.Namespace, folder: Path) -> bool:
    """Whether all is as it must be."""
    with s3_server.serving() as served:
        os.environ.update(s3_server.variables(served))
        kills = Counter[str]()
        wrong = 0
        for name, target in (("a", in_folder(folder / "kept")), ("b", in_bucket(served))):
            (folder / name).mkdir()
            campaign = BackupCampaign(folder / name, target, arguments)
            await campaign.run(arguments.kills // 2)
            kills += campaign.kills
            wrong += campaign.wrong
    print(f"{kills.total()} kills: {wrong} wrong")
    if not kills["backup while it copied"]:
        print("no backup was killed while it copied: this has shown nothing")
    return wrong == 0 and kills["backup while it copied"] > 0


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if anyio.run(run, arguments, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
