"""Applies one listener's filter to parts, and audits it.

Some of the skipped parts are read all the same (`filtering.FilterAudit`), before the interval that
they lie in is sealed: a row in one of them that passes raises `UnsoundFilter`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import pyarrow as pa

from actors.errors import CorruptData, StorageError, UnsoundFilter
from actors.kernel import ActorClock
from actors.persist.filtering import FilterAudit, PartFilter, PartVerdict
from actors.persist.shard import BatchPart
from actors.protocol.internal import FilteredParts
from actors.settings import Settings

log = logging.getLogger("penstock.persist")


class PartPruner:
    """The filter and the audit of one source."""

    def __init__(self, wanted: PartFilter, audit: FilterAudit) -> None:
        self._wanted = wanted
        self._audit = audit
        self._parts = self._bytes = self._audited = 0

    def __str__(self) -> str:
        return str(self._wanted)

    def told(self) -> FilteredParts:
        """Return the counts of skipped parts, their bytes, and audits so far."""
        return FilteredParts(self._parts, self._bytes, self._audited)

    def discards(self, part: BatchPart) -> bool:
        """Return whether a part is skipped, and count it."""
        if self._wanted.verdict(part) is PartVerdict.KEEP:
            self._audit.kept(part)
            return False
        self._parts += 1
        self._bytes += part.bytes
        return True

    def chooses(self, part: BatchPart) -> bool:
        """Return whether a skipped part is to be audited."""
        return self._audit.chooses(part)

    async def prove(
        self,
        parts: Iterable[BatchPart],
        fetch: Callable[[BatchPart], Awaitable[pa.Table]],
        clock: ActorClock,
    ) -> None:
        """Audit skipped parts: read them, and filter their rows off the event loop. Raises
        `UnsoundFilter`, `CorruptData`."""
        for part in parts:
            try:
                rows = await fetch(part)
            except CorruptData:
                raise
            except StorageError as error:
                # A store that fails now says nothing about the filter; a corrupt part does matter,
                # as to any reader.
                log.warning("part %s was left out and not audited: %s", part.key, error)
                continue
            self._audited += 1
            passed = await clock.run_blocking(partial(self._wanted.passing, rows))
            if passed.num_rows:
                raise UnsoundFilter(
                    f"part {part.key} holds {passed.num_rows} rows that pass"
                    f" {self._wanted}, although its statistics {part.statistics!r} say that"
                    " none can; report this, and set filter_parts = false meanwhile",
                    determinate=True,
                )


def sieve(wanted: PartFilter, settings: Settings) -> PartPruner:
    """Return a sieve with the settings' audit."""
    return PartPruner(
        wanted, FilterAudit(settings.filter_audit_one_in, settings.filter_audit_bytes_max)
    )
