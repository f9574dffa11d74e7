"""Reads of a table by its PRIMARY KEY, from the arrangement in which the table writer looks up.

So a table needs no index for them, and no worker is asked. The arrangement is built when a key is
first asked for, or written; until it is there, and where it lacks the time, a read goes the long
way (`reads`).
"""

from __future__ import annotations

import msgspec

from actors.control.controller.catalog.catalog import TABLE, CatalogObject
from actors.control.controller.messages import ArrangeTable
from actors.control.controller.state import ControllerState
from actors.control.controller.tables.groups import TableTarget
from actors.control.controller.tables.table_arrangements import TableArrangements
from actors.durable.arrangement.hashing import Hashes
from actors.durable.arrangement.reading import ArrangementSnapshot
from actors.model.protocol.compute import Peek
from actors.replica.compute.peeks import PeekSpec
from actors.runtime.errors import PenstockError
from actors.runtime.progress import Time

LOOP_KEYS_MAX = 256
"""Keys that are looked up on the event loop, in 0.1 ms; of one key a thread makes it 1.4 × as long
(November 2026)."""


class KeyedAnswered(msgspec.Struct, frozen=True, gc=False):
    """A read of many keys has ended in its thread; without rows it must go the long way."""

    number: int
    arrow: bytes | None


class KeyedPeek(msgspec.Struct, frozen=True):
    """A peek by key of contents that are at hand."""

    spec: PeekSpec
    contents: ArrangementSnapshot
    hashes: Hashes
    bytes_max: int

    @property
    def is_short(self) -> bool:
        """Return whether it takes no longer than a thread would."""
        return len(self.hashes) <= LOOP_KEYS_MAX

    def answer(self) -> bytes | None:
        """Return the rows as an Arrow stream; None if they are too large for one answer, or the
        long way must tell an error."""
        try:
            piece = next(self.spec.answer(self.contents, self.hashes, self.bytes_max))
        except PenstockError:
            return None
        fits = piece.last and len(piece.arrow) <= self.bytes_max
        return piece.arrow if fits else None


class KeyedReads:
    """Finds the contents of tables by PRIMARY KEY."""

    def __init__(self, state: ControllerState, contents: TableArrangements) -> None:
        self._state = state
        self._contents = contents

    def contents(self, entry: CatalogObject, time: Time) -> ArrangementSnapshot | None:
        """Return a table's contents by PRIMARY KEY at a time. If they are not at hand, return None,
        and have them at hand for later reads."""
        if entry.kind != TABLE or not entry.schema.key or entry.shard is None:
            return None
        found = self._contents.view(entry.id, time)
        if found is None and self._contents.ask(entry.id, time):
            target = TableTarget(entry.id, entry.name, entry.shard, entry.schema)
            # Its queue takes one such message a table at most.
            self._state.writer.reply(ArrangeTable(target))
        return found

    def begin(self, entry: CatalogObject, peek: Peek) -> KeyedPeek | None:
        """Return the peek, if it asks for keys whose rows are at hand."""
        if entry.kind != TABLE or not entry.schema.key or not (peek.key_columns or peek.filter):
            return None
        try:
            spec = PeekSpec(entry.schema, peek)
        except PenstockError:
            return None
        hashes = spec.narrowed(entry.schema.key)
        contents = None if hashes is None else self.contents(entry, peek.time)
        if hashes is None or contents is None:
            return None
        return KeyedPeek(spec, contents, hashes, self._state.settings.piece_bytes_max)
