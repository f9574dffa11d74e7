"""A log of framed change records as a source: `penstock wal push` writes it, acceptors keep it.

Theory of operation. `wal.following` reads committed records from any acceptor that has them,
`wal_changes` turns them into changes, with a position after the last whole record. The position
becomes durable together with the rows, so each record is in its table exactly once, whenever the
service was killed. Acceptors are told afterwards, and may remove the log before it.

A log has no first contents: a table that was added later is filled by reading the log from its
begin once more, for the new tables alone, up to the position. Meanwhile the others wait.

Lasting errors are reported and retried all the same: all acceptors have removed the log at the
position; a table that was added needs a begin that was removed (that table fails).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import anyio

from actors.connectors.sources.generators import select_exports
from actors.connectors.sources.source import (
    ConnectorContext,
    Given,
    SourceExport,
    SourceIdle,
    SourceLag,
    SourceUnreachable,
)
from actors.connectors.sources.wal_changes import WalChanges, read_position
from actors.connectors.sources.wal_config import WalConfig, check_json
from actors.model.plan.schema import TableColumn
from actors.runtime.errors import ConnectionBroken, InvalidUsage
from actors.wal.dialling import AcceptorAddress, AcceptorConnection, dial
from actors.wal.following import AllRemoved, WalFollower
from actors.wal.lsn import lsn_text

_SAMPLE_MS: Final = 1_000
_SAMPLES_MAX: Final = 600
_REACH: Final = (
    "see that the acceptors run and can be reached from the service: penstock wal status "
    "--connect HOST:PORT; it is tried again"
)
_REMOVED: Final = (
    "what was committed there is gone, unless an acceptor that has it comes back; what is in the "
    "tables stays right up to the position. To go on without the rest, drop the source and create "
    "it again with start_lsn at a place that is kept"
)
_CANNOT_FILL: Final = (
    "a table is filled from the log's begin, which was removed: declare it in a source of its own "
    "with start_lsn at a place that is kept, or drop it here"
)


class WalSource:
    """Ingests one timeline. See `connectors.sources.source.SourceConnector`."""

    def __init__(self, config: WalConfig, around: ConnectorContext) -> None:
        self._config = config
        self._around = around
        self._clock = around.clock
        self._follower: WalFollower | None = None
        self._changes: WalChanges
        self._exports: tuple[SourceExport, ...] = ()
        self._begun = False
        """True if a mark was ever given, also by an earlier source."""
        self._ready: deque[Given] = deque()
        self._idle = False
        self._taken_lsn = 0
        self._taken = anyio.Event()
        self._samples: deque[tuple[int, float]] = deque()
        """(known commit position, time), the oldest first; for the lag in time."""

    async def describe(
        self, wanted: Mapping[str, Sequence[str]] | None
    ) -> tuple[SourceExport, ...]:
        """See `Source.describe`: the tables are those declared; an acceptor must answer."""
        declared = self._config.schemas()
        exports = select_exports(
            [SourceExport(name, schema) for name, schema in declared.items()], wanted
        )
        follower = await self._following(self._config.begin_lsn())
        await follower.look()
        seen = follower.seen.values()
        if all(each.error for each in seen):
            reasons = "; ".join(each.error for each in seen)
            if all(each.is_absent for each in seen):
                raise InvalidUsage(
                    f"timeline {self._config.timeline} of tenant {self._config.tenant} is on no "
                    f"acceptor: {reasons}; check both, or push something first: who writes first "
                    "makes it"
                )
            raise SourceUnreachable(f"no acceptor answers: {reasons}", _REACH)
        return exports

    async def describe_added(
        self, export: SourceExport, columns: Sequence[TableColumn]
    ) -> tuple[TableColumn, ...]:
        """See `Source.describe_added`: no record that was taken can have had them."""
        declared = self._config.schemas()[export.name]
        left_out = [each.name for each in columns if each.name in declared.names]
        if left_out:
            raise InvalidUsage(
                f"{', '.join(left_out)}: declared by the source, and left out of this table: drop"
                " it and add it to the source again, which reads the log from its begin"
            )
        if self._config.undeclared == "skip":
            raise InvalidUsage(
                "the source skips what records have beside the declared columns, so those taken"
                f" may have had {', '.join(each.name for each in columns)}: create another source"
                " whose `tables` declare them, which reads the log from its begin"
            )
        check_json(columns)
        return tuple(columns)

    async def open(self, exports: Sequence[SourceExport], position: str | None) -> None:
        """See `Source.open`."""
        config = self._config
        was = None if position is None else read_position(position, config)
        unknown = [export.name for export in exports if export.name not in config.tables]
        if unknown:
            raise InvalidUsage(f"the source declares no table {', '.join(unknown)}")
        self._exports = tuple(exports)
        self._begun = was is not None
        new = [
            export
            for export in exports
            if was is not None and (export.is_new or export.name not in was.tables)
        ]
        begin_lsn = config.begin_lsn()
        lsn = begin_lsn if was is None else was.at
        self._taken_lsn = lsn
        # A position at the begin has no log before it to fill new tables from.
        if not new or lsn <= begin_lsn:
            await self._go_on(lsn)
            # A mark also when tables were dropped: the position must no longer name them.
            if was is not None and (new or len(was.tables) > len(exports)):
                self._ready.append(self._changes.mark([each.name for each in new]))
            return
        names = [export.name for export in exports]
        self._changes = WalChanges(
            config,
            new,
            begin_lsn,
            tables=names,
            fills=[export.name for export in new],
            until_lsn=lsn,
        )
        self._follower = await self._following(begin_lsn)

    async def _go_on(self, lsn: int) -> None:
        """Read for all tables from this place on."""
        names = [export.name for export in self._exports]
        self._changes = WalChanges(self._config, self._exports, lsn, tables=names)
        self._follower = await self._following(lsn)
        self._consume()

    async def _following(self, lsn: int) -> WalFollower:
        config, settings = self._config, self._around.settings
        token = await self._clock.run_blocking(config.token)
        tls = await self._clock.run_blocking(config.tls)

        async def connect(address: AcceptorAddress) -> AcceptorConnection:
            return await dial(
                address,
                config.tenant,
                config.timeline,
                timeout_ms=settings.connect_timeout_ms,
                token=token,
                tls=tls,
            )

        await self.close()
        return WalFollower(
            config.addresses(),
            lsn,
            connect,
            self._clock,
            silence_ms=config.silence_ms,
            look_ms=config.look_ms,
        )

    # -- read ------------------------------------------------------------------------------------

    async def next(self) -> Given:
        """See `Source.next`."""
        while not self._ready:
            changes = self._changes
            if changes.stopped is not None:
                # Raising ends the source, and drops rows that are staged and not durable yet.
                await self._all_taken(changes.lsn)
                raise changes.stopped
            if changes.is_filled:
                await self._go_on(changes.lsn)
                continue
            wal = await self._read(changes)
            if wal:
                self._ready += await self._clock.run_blocking(lambda: changes.take(wal))  # noqa: B023 (awaited here)
            elif not self._begun:
                self._begun = True
                return changes.mark()
            elif not self._idle and not self._ready:
                self._idle = True
                return SourceIdle()
        self._idle = False
        self._begun = True
        return self._ready.popleft()

    async def _read(self, changes: WalChanges) -> bytes:
        """Return more of the log; empty: nothing new just now."""
        follower = self._follower
        assert follower is not None, "open"
        try:
            wal = await follower.next()
        except AllRemoved as error:
            if changes.is_filling:
                self._ready += changes.give_up(str(error), _CANNOT_FILL)
                return b""
            raise SourceUnreachable(str(error), _REMOVED) from None
        except ConnectionBroken as error:
            raise SourceUnreachable(str(error), _REACH) from None
        self._sample(follower)
        return wal

    async def _all_taken(self, lsn: int) -> None:
        """Wait until the rows given are durable."""
        while self._taken_lsn < lsn:
            self._taken = anyio.Event()
            await self._taken.wait()

    async def taken(self, position: str) -> None:
        """See `Source.taken`."""
        self._taken_lsn = read_position(position, self._config).at
        self._taken.set()
        self._consume()

    def _consume(self) -> None:
        if self._config.feedback and self._follower is not None:
            self._follower.report_consumed(self._taken_lsn)

    # -- lag, close ------------------------------------------------------------------------------

    def _sample(self, follower: WalFollower) -> None:
        now, samples = self._clock.monotonic_ms(), self._samples
        while samples and samples[0][0] <= self._changes.lsn:
            samples.popleft()
        if len(samples) >= _SAMPLES_MAX or follower.known_lsn <= self._changes.lsn:
            return
        if not samples or now >= samples[-1][1] + _SAMPLE_MS:
            samples.append((follower.known_lsn, now))

    def lag(self) -> SourceLag:
        """See `Source.lag`. In time: the age of the oldest known commit that was not given."""
        follower = self._follower
        if follower is None:
            return SourceLag()
        lsn = self._changes.lsn
        behind = max(0, follower.known_lsn - lsn)
        waits = [seen_ms for known, seen_ms in self._samples if known > lsn]
        since = min(waits, default=None)
        ms = 0 if not behind else 0 if since is None else self._clock.monotonic_ms() - since
        return SourceLag(
            known=lsn_text(max(follower.known_lsn, lsn)),
            bytes_behind=behind,
            ms_behind=int(ms),
            notes=self._notes(follower),
        )

    def _notes(self, follower: WalFollower) -> tuple[str, ...]:
        notes = []
        errors = [seen.error for seen in follower.seen.values() if seen.error]
        if errors:
            count = len(self._config.addresses())
            notes.append(f"{len(errors)} of {count} acceptors fail: {'; '.join(errors)}")
        commits = [seen.commit_lsn for seen in follower.seen.values() if not seen.error]
        if commits and max(commits) < follower.next_lsn:
            notes.append(
                f"acceptors know of commits up to {lsn_text(max(commits))} only, and everything "
                f"before {lsn_text(follower.next_lsn)} is here: they were restarted, and learn the "
                "rest from the next writer"
            )
        return tuple(notes)

    async def close(self) -> None:
        """See `Source.close`."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()

    async def forget(self) -> None:
        """See `Source.forget`: there are no external resources."""
