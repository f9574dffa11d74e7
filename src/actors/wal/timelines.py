"""All timelines of a node, in one folder each: `<dir>/<tenant>/<timeline>/`.

At the start every control file below the folder is read, and its log is recovered. A timeline that
cannot be read is logged and *blocked*; every other is opened. The first proposer that is allowed to
creates an absent timeline, in one durable step. `run_maintenance` saves control files off the path
of appends, removes segments below the horizon, prepares the next segments, and reopens timelines
whose disk has failed.

Invariants: at most one `WalTimeline` writes to a folder, and any others have stopped; one process
writes to a folder (it holds the folder's lock).
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Protocol

import anyio

from actors.durable.object_store.file_modes import PRIVATE_FOLDER, private_opener, warn_if_open
from actors.runtime.errors import (
    InvalidUsage,
    PenstockError,
    StateDirectoryError,
    WalRefused,
    storage_error,
)
from actors.runtime.kernel import ActorClock
from actors.runtime.settings import Settings
from actors.wal.acceptor_stores import ControlState, ControlStore
from actors.wal.archive import WalArchive
from actors.wal.control import FileControl, create_timeline
from actors.wal.lsn import SEGMENT_BYTES
from actors.wal.messages import ProposerGreeting
from actors.wal.startup import checked_id
from actors.wal.storage import FileWal
from actors.wal.timeline import TimelineLog, WalTimeline

log = logging.getLogger("penstock.wal")

REOPEN_DELAY_MS: Final = 5_000
"""Delay in ms between two attempts to reopen a timeline."""


class TimelineStore(Protocol):
    """The store of timelines. Calls block."""

    def open(self, folder: Path) -> tuple[ControlStore, TimelineLog]:
        """Open the control file and the log. Raises `PenstockError` if they cannot be read."""
        ...

    def create(self, folder: Path, state: ControlState) -> None:
        """Create a timeline durably, or not at all.

        Raises `StorageError`, and `InvalidUsage` if it exists.
        """
        ...


class FileTimelineStore:
    """Timelines as files: a `TimelineStore`."""

    def open(self, folder: Path) -> tuple[ControlStore, TimelineLog]:
        """Read the control file, and recover the log."""
        control = FileControl.open(folder)
        return control, FileWal.open(folder, control.state)

    def create(self, folder: Path, state: ControlState) -> None:
        """Create the folder under a temporary name, then rename it."""
        create_timeline(folder, state)


class TimelineRegistry:
    """The timelines of one folder. Call `open` first."""

    def __init__(
        self,
        folder: Path,
        node_id: int,
        disk: TimelineStore,
        clock: ActorClock,
        settings: Settings,
        archive: WalArchive | None = None,
    ) -> None:
        self.folder = folder
        self.archive = archive
        self._node_id = node_id
        self._disk = disk
        self._clock = clock
        self._settings = settings
        self._open: dict[tuple[str, str], WalTimeline] = {}
        """Served timelines, by tenant and name."""
        self._blocked: dict[tuple[str, str], str] = {}
        """Error text of each timeline that is not served."""
        self._saved_ms: dict[tuple[str, str], float] = {}
        """Monotonic time at which each control file was last saved."""
        self._retry_ms: dict[tuple[str, str], float] = {}
        """Time before which only a proposer reopens a stopped timeline."""
        self._making = anyio.Lock()
        """Held while a timeline is created or reopened."""
        self._half_full = anyio.Event()
        """Set when a segment of some timeline is half full."""
        self._held: IO[bytes] | None = None
        """The locked file of the folder."""

    async def open(self) -> None:
        """Lock the folder, and open all of its timelines.

        Raise `StateDirectoryError` if another process holds the lock.
        """
        await self._clock.run_blocking(self._lock_folder)
        for tenant, name in await self._clock.run_blocking(self._found):
            try:
                await self._opened(tenant, name)
            except PenstockError as error:
                # Never create it again: its acceptor has given votes of which a new one would not
                # know.
                self._blocked[tenant, name] = str(error)
                log.error("timeline %s of tenant %s is not served: %s", name, tenant, error)

    def close(self) -> None:
        """Unlock the folder."""
        if self._held is not None:
            self._held.close()

    def _lock_folder(self) -> None:
        try:
            self.folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            warn_if_open(self.folder)
            held = open(self.folder / "LOCK", "ab", opener=private_opener)  # noqa: SIM115
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
                with suppress(WalRefused):  # names that are not ids: leftovers, notes
                    checked_id("tenant", tenant.name)
                    checked_id("timeline", timeline.name)
                    found.append((tenant.name, timeline.name))
        return found

    async def _opened(self, tenant: str, name: str) -> WalTimeline:
        folder = self.folder / tenant / name

        def opened() -> WalTimeline:
            control, wal = self._disk.open(folder)
            if (control.state.tenant, control.state.timeline) != (tenant, name):
                raise InvalidUsage(f"the control file in {folder} belongs to another timeline")
            return WalTimeline(
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

    async def _reopened(self, key: tuple[str, str], stopped: WalTimeline) -> WalTimeline:
        """Reopen a stopped timeline. If that fails, it is tried again later."""
        log.warning("reopening timeline %s: %s", stopped.name, stopped.acceptor.stopped)
        self._retry_ms[key] = self._clock.monotonic_ms() + REOPEN_DELAY_MS
        # Close it first: two `WalTimeline`s must not have the same log open.
        await stopped.close()
        return await self._opened(*key)

    @property
    def all(self) -> list[WalTimeline]:
        """Return the timelines that are served."""
        return list(self._open.values())

    def find(self, tenant: str, name: str) -> WalTimeline | None:
        """Return a timeline if it is served, else None."""
        return self._open.get((tenant, name))

    async def get_or_create(
        self, greeting: ProposerGreeting, *, may_create: bool
    ) -> WalTimeline | None:
        """Return a proposer's timeline, creating it if it is absent and may be created; None: it is
        absent.

        Raise `WalRefused` for a blocked timeline or a malformed id, and `StorageError`.
        """
        tenant = checked_id("tenant", greeting.tenant)
        name = checked_id("timeline", greeting.timeline)
        # One at a time: two `WalTimeline`s must never write to one folder.
        async with self._making:
            if (tenant, name) in self._blocked:
                raise WalRefused(
                    f"timeline {name} is not served: {self._blocked[tenant, name]}; repair or "
                    "remove its folder, and restart the acceptor"
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
            log.info("created timeline %s of tenant %s", name, tenant)
            return await self._opened(tenant, name)

    def _create(self, state: ControlState) -> None:
        above = self.folder / state.tenant
        try:
            above.mkdir(PRIVATE_FOLDER, exist_ok=True)
            # The tenant's folder must be durable before a timeline in it is.
            opened = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
        except OSError as error:
            raise storage_error(f"create {above}", error, determinate=False) from error
        self._disk.create(above / state.timeline, state)

    # -- upkeep ----------------------------------------------------------------------------------

    async def run_maintenance(self) -> None:
        """Save control files, remove old segments and prepare new ones, until cancelled.

        A failure of a timeline is logged, and retried.
        """
        async with anyio.create_task_group() as group:
            group.start_soon(self._prepare)
            group.start_soon(self._save)

    async def _prepare(self) -> None:
        while True:
            await self._half_full.wait()
            # Replace it before the work, so that a call during the work is not lost.
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
                        await self._save_and_remove(key, timeline)
                    else:
                        await self._reopen_due(key, timeline)
                except PenstockError as error:
                    log.error("maintenance of timeline %s failed: %s", timeline.name, error)

    async def _reopen_due(self, key: tuple[str, str], stopped: WalTimeline) -> None:
        async with self._making:
            due = self._clock.monotonic_ms() >= self._retry_ms.get(key, 0.0)
            # A proposer may have reopened it while this task waited for the lock.
            if due and self._open[key] is stopped:
                await self._reopened(key, stopped)

    async def _save_and_remove(self, key: tuple[str, str], timeline: WalTimeline) -> None:
        now_ms = self._clock.monotonic_ms()
        aged = now_ms - self._saved_ms[key] >= self._settings.wal_control_age_ms
        if must_save(timeline.saved, timeline.acceptor.state, aged=aged):
            await timeline.run(timeline.acceptor.checkpoint)
            self._saved_ms[key] = now_ms
            # With an archive, consumers hold back only the newest `wal_keep_bytes`, because they
            # read older bytes from there. Remove segments after the checkpoint, because the horizon
            # is the saved one.
            keep = None if self.archive is None else self._settings.wal_keep_bytes
            await timeline.remove_old(keep)


def must_save(saved: ControlState, now: ControlState, *, aged: bool) -> bool:
    """Return whether positions in memory should be written to the control file now."""
    if saved == now:
        return False
    # Once the saved positions advance by a segment, another segment may be removed.
    moved = max(now.commit_lsn - saved.commit_lsn, now.backup_lsn - saved.backup_lsn)
    return aged or moved >= (now.segment_bytes or SEGMENT_BYTES)
