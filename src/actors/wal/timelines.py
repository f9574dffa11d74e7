"""All timelines of a node: a folder for each, `<dir>/<tenant>/<timeline>/`.

Theory of operation. At the start every control file below the folder is read, and its log
recovered. A timeline that cannot be read is logged and *blocked*: nobody may make it anew, because
its acceptor has promised things that a new one would not know of. Others are opened once, and made
(in one step, durably) by the first proposer that may. One task saves control files off the path of
appends: it looks every ``wal_save_ms``, and saves where commit, or what is kept elsewhere, leads
the file by a segment, or where positions moved and the file is older than ``wal_control_age_ms``;
then it removes whole segments below the horizon: what consumers, the offload and a majority have
on disk (of what the offload has, consumers can claim the newest ``wal_keep_bytes`` alone: the rest
they read from there). A timeline whose disk has failed is opened anew, from what is on disk: by the
next proposer, or by that task. Another task makes the next segment of a log whose newest is half
full, beside its appends.

Invariants: at most one `Timeline` for a folder writes to it, the others have stopped; a folder is
written by one process (who opens it holds its lock).
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Protocol

import anyio

from actors.errors import (
    InvalidUsage,
    PenstockError,
    StateDirectoryError,
    WalRefused,
    storage_error,
)
from actors.kernel import Clock
from actors.settings import Settings
from actors.wal.archive import Archive
from actors.wal.control import FileControl, create_timeline
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.messages import ProposerGreeting
from actors.wal.startup import checked_id
from actors.wal.storage import FileWal
from actors.wal.stores import ControlState, ControlStore
from actors.wal.timeline import Log, Timeline

log = logging.getLogger("penstock.wal")

REOPEN_DELAY_MS: Final = 5_000
"""Between two tries to open a timeline anew."""


class Disk(Protocol):
    """Where timelines lie. Calls block."""

    def open(self, folder: Path) -> tuple[ControlStore, Log]:
        """Raises `PenstockError` for what cannot be read."""
        ...

    def create(self, folder: Path, state: ControlState) -> None:
        """Durably, or not at all. Raises `StorageError`, `InvalidUsage` where it is."""
        ...


class FileDisk:
    """Timelines as files: a `Disk`."""

    def open(self, folder: Path) -> tuple[ControlStore, Log]:
        """Reads the control file, and recovers the log."""
        control = FileControl.open(folder)
        return control, FileWal.open(folder, control.state)

    def create(self, folder: Path, state: ControlState) -> None:
        """Makes it beside its place, then renames it."""
        create_timeline(folder, state)


class Timelines:
    """See the module; `open` makes it."""

    def __init__(
        self,
        folder: Path,
        node_id: int,
        disk: Disk,
        clock: Clock,
        settings: Settings,
        archive: Archive | None = None,
    ) -> None:
        self.folder = folder
        self.archive = archive
        self._node_id = node_id
        self._disk = disk
        self._clock = clock
        self._settings = settings
        self._open: dict[tuple[str, str], Timeline] = {}
        self._blocked: dict[tuple[str, str], str] = {}
        self._saved_ms: dict[tuple[str, str], float] = {}
        self._retry_ms: dict[tuple[str, str], float] = {}
        """Before then nobody but a proposer opens a timeline anew that has stopped."""
        self._making = anyio.Lock()
        self._half_full = anyio.Event()
        """A segment of some timeline is."""
        self._held: IO[bytes] | None = None

    async def open(self) -> None:
        """Takes the folder, and opens all that is there. Raises `StateDirectoryError` where
        another process has it."""
        await self._clock.run_blocking(self._take)
        for tenant, name in await self._clock.run_blocking(self._found):
            try:
                await self._opened(tenant, name)
            except PenstockError as error:
                self._blocked[tenant, name] = str(error)
                log.error("timeline %s of tenant %s is not served: %s", name, tenant, error)

    def close(self) -> None:
        """Gives the folder back."""
        if self._held is not None:
            self._held.close()

    def _take(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = open(self.folder / "LOCK", "ab")  # noqa: SIM115
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                held.close()
                raise
        except BlockingIOError:
            raise StateDirectoryError(
                f"{self.folder} is in use by another process: stop it, or choose another --dir"
            ) from None
        except OSError as error:
            raise StateDirectoryError(f"cannot use {self.folder}: {error}") from None
        self._held = held

    def _found(self) -> list[tuple[str, str]]:
        found = []
        for tenant in sorted(self.folder.iterdir()):
            for timeline in sorted(tenant.iterdir()) if tenant.is_dir() else ():
                with suppress(WalRefused):  # what is no id is no timeline: leftovers, notes
                    checked_id("tenant", tenant.name)
                    checked_id("timeline", timeline.name)
                    found.append((tenant.name, timeline.name))
        return found

    async def _opened(self, tenant: str, name: str) -> Timeline:
        folder = self.folder / tenant / name

        def opened() -> Timeline:
            control, wal = self._disk.open(folder)
            if (control.state.tenant, control.state.timeline) != (tenant, name):
                raise InvalidUsage(f"the control file in {folder} is another timeline's")
            return Timeline(
                self._node_id,
                control,
                wal,
                self._clock,
                self.archive,
                lambda: self._half_full.set(),
            )

        timeline = await self._clock.run_blocking(opened)
        self._open[tenant, name] = timeline
        self._saved_ms[tenant, name] = self._clock.monotonic_ms()
        return timeline

    async def _reopened(self, key: tuple[str, str], stopped: Timeline) -> Timeline:
        """Instead of one that stopped. What cannot be read now is tried again later."""
        log.warning("timeline %s is opened anew: %s", stopped.name, stopped.acceptor.stopped)
        self._retry_ms[key] = self._clock.monotonic_ms() + REOPEN_DELAY_MS
        await stopped.close()
        return await self._opened(*key)

    @property
    def all(self) -> list[Timeline]:
        """Those that are served."""
        return list(self._open.values())

    def find(self, tenant: str, name: str) -> Timeline | None:
        """One that is served."""
        return self._open.get((tenant, name))

    async def obtain(self, greeting: ProposerGreeting, *, may_create: bool) -> Timeline | None:
        """The timeline of a proposer, made if it is absent and may be; None: absent. Raises
        `WalRefused` for one that is blocked or an id that is none, `StorageError`."""
        tenant = checked_id("tenant", greeting.tenant)
        name = checked_id("timeline", greeting.timeline)
        async with self._making:
            if (tenant, name) in self._blocked:
                raise WalRefused(
                    f"timeline {name} is not served: {self._blocked[tenant, name]}; mend or "
                    "remove its folder, and start again"
                )
            found = self.find(tenant, name)
            if found is not None and found.acceptor.stopped is not None:
                return await self._reopened((tenant, name), found)
            if found is not None or not may_create:
                return found
            state = ControlState(
                tenant,
                name,
                pg_version=greeting.pg_version,
                system_id=greeting.system_id,
                segment_bytes=greeting.segment_bytes,
                created_at_ms=self._clock.now_ms(),
            )
            await self._clock.run_blocking(lambda: self._create(state))
            log.info("made timeline %s of tenant %s", name, tenant)
            return await self._opened(tenant, name)

    def _create(self, state: ControlState) -> None:
        above = self.folder / state.tenant
        try:
            above.mkdir(exist_ok=True)
            opened = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
        except OSError as error:
            raise storage_error(f"make {above}", error, determinate=False) from error
        self._disk.create(above / state.timeline, state)

    # -- upkeep ----------------------------------------------------------------------------------

    async def keep_up(self) -> None:
        """Saves, removes and makes segments ahead of time, until it is cancelled. A timeline that
        fails is logged, and looked at again."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._prepare)
            group.start_soon(self._save)

    async def _prepare(self) -> None:
        while True:
            await self._half_full.wait()
            self._half_full = anyio.Event()
            for timeline in self.all:
                try:
                    await timeline.prepare()
                except PenstockError as error:
                    log.error("timeline %s: %s", timeline.name, error)
                    await anyio.sleep(self._settings.wal_save_ms / 1000)

    async def _save(self) -> None:
        while True:
            await anyio.sleep(self._settings.wal_save_ms / 1000)
            for key, timeline in list(self._open.items()):
                try:
                    if timeline.acceptor.stopped is None:
                        await self._keep(key, timeline)
                    else:
                        await self._mend(key, timeline)
                except PenstockError as error:
                    log.error("upkeep of timeline %s: %s", timeline.name, error)

    async def _mend(self, key: tuple[str, str], stopped: Timeline) -> None:
        async with self._making:
            due = self._clock.monotonic_ms() >= self._retry_ms.get(key, 0.0)
            if due and self._open[key] is stopped:
                await self._reopened(key, stopped)

    async def _keep(self, key: tuple[str, str], timeline: Timeline) -> None:
        now_ms = self._clock.monotonic_ms()
        aged = now_ms - self._saved_ms[key] >= self._settings.wal_control_age_ms
        if must_save(timeline.saved, timeline.acceptor.state, aged=aged):
            await timeline.run(timeline.acceptor.checkpoint)
            self._saved_ms[key] = now_ms
            keep = None if self.archive is None else self._settings.wal_keep_bytes
            await timeline.remove_old(keep)


def must_save(saved: ControlState, now: ControlState, *, aged: bool) -> bool:
    """Whether positions in memory are to be written to the control file."""
    if saved == now:
        return False
    moved = max(now.commit_lsn - saved.commit_lsn, now.backup_lsn - saved.backup_lsn)
    return aged or moved >= (now.segment_bytes or SEGMENT_BYTES)
