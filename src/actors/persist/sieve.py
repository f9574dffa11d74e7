"""The filter of one listener at work: which described parts it leaves out, and the proof.

The verdict is `filtering.PartFilter`'s. Of the parts that are left out some are read all the
same (`filtering.Audit`), before anything is told of the interval that they lie in: one that does
hold a row that passes is `UnsoundFilter`, and the interval is never sealed. A store that cannot
give the part now says nothing about the filter: that audit does not count. A part that is damaged
is, as it would be for one who reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import pyarrow as pa

from actors.errors import Corrupt, StorageError, UnsoundFilter
from actors.kernel import Clock
from actors.persist.filtering import Audit, PartFilter, Verdict
from actors.persist.shard import Part
from actors.protocol.internal import Filtered
from actors.settings import Settings

log = logging.getLogger("penstock.persist")


class Sieve:
    """The filter and the audit of one source."""

    def __init__(self, wanted: PartFilter, audit: Audit) -> None:
        self._wanted = wanted
        self._audit = audit
        self._parts = self._bytes = self._audited = 0

    def __str__(self) -> str:
        return str(self._wanted)

    def told(self) -> Filtered:
        """What it has done so far."""
        return Filtered(self._parts, self._bytes, self._audited)

    def discards(self, part: Part) -> bool:
        """Whether a part is left out. Counts it."""
        if self._wanted.verdict(part) is Verdict.KEEP:
            self._audit.kept(part)
            return False
        self._parts += 1
        self._bytes += part.bytes
        return True

    def chooses(self, part: Part) -> bool:
        """Whether a part that was left out is to be proved."""
        return self._audit.chooses(part)

    async def prove(
        self, parts: Iterable[Part], fetch: Callable[[Part], Awaitable[pa.Table]], clock: Clock
    ) -> None:
        """Reads parts that were left out, and looks at their rows beside the loop. Raises
        `UnsoundFilter`, `Corrupt`."""
        for part in parts:
            try:
                rows = await fetch(part)
            except Corrupt:
                raise
            except StorageError as error:
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


def sieve(wanted: PartFilter, settings: Settings) -> Sieve:
    """With the settings' audit."""
    return Sieve(wanted, Audit(settings.filter_audit_one_in, settings.filter_audit_bytes_max))
