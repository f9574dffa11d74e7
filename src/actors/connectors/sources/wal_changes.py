"""Decodes a log's bytes into changes of tables, with the place after the last record. Pure.

Theory of operation. Bytes come in order, in pieces of any size; each whole record is one change of
one table. The rows of a piece are given at once, by table, then a mark at the place after the last
record. A table that was added later is *filled*: the log is read from its begin up to the position,
for the new tables alone, and one mark at that position fills them.

Errors:
- a row that its table cannot hold fails that table (`ExportFailed`); the others go on;
- a record that is no change, one of a table that is not declared (unless such are skipped), and a
  log that is broken or not ours have no meaning here, so the source *stops* before them: all
  changes before are given, with a mark; then `stopped` has the reason;
- declared tables that are not wanted are skipped.

Invariant: ``lsn`` is after the last record that was given, and never falls; a mark's position is
one of its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from actors.connectors.sources.json_rows import RowMisfit, RowsOfTable
from actors.connectors.sources.source import (
    POSITION_BYTES_MAX,
    ExportFailed,
    Given,
    PositionMark,
    SourceExport,
    SourceRows,
    SourceUnreachable,
)
from actors.connectors.sources.wal_config import WalConfig
from actors.model.plan.schema import TableSchema
from actors.runtime.errors import CorruptData, InvalidUsage
from actors.wal.framing import FramedPayload, RecordDecoder
from actors.wal.lsn import lsn_text, parse_lsn

ANEW: Final = (
    "the log cannot be changed: create another source whose `tables` can hold it, or drop this "
    "table here"
)
_SHOWN: Final = 200


class _Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record's payload: see `wal.pushing`."""

    table: str
    row: msgspec.Raw
    diff: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 1


class WalPosition(msgspec.Struct, frozen=True):
    """A position: everything before `lsn` was taken, into these tables."""

    lsn: str
    timeline: str
    tables: tuple[str, ...]

    @property
    def at(self) -> int:
        """Return `lsn` as a number."""
        return parse_lsn(self.lsn)

    def text(self) -> str:
        """Return the text that `read_position` parses."""
        return msgspec.json.encode(self).decode()


def read_position(text: str, config: WalConfig) -> WalPosition:
    """Parse a position. Raises `InvalidUsage` for another text, or a position of another log."""
    try:
        found = msgspec.json.decode(text, type=WalPosition)
        parse_lsn(found.lsn)
    except (msgspec.DecodeError, InvalidUsage) as error:
        raise InvalidUsage(f"{text[:100]!r} is no position of a source of a log: {error}") from None
    if found.timeline != config.timeline:
        raise InvalidUsage(
            f"this is timeline {config.timeline}; what is here came from {found.timeline}: name "
            "that one, or drop the source and create it again"
        )
    return found


def _with_further(declared: TableSchema, schema: TableSchema) -> TableSchema:
    """Return the columns that records may have: those declared, and those that the table was given
    since."""
    further = tuple(each for each in schema.columns if each.name not in declared.names)
    return TableSchema((*declared.columns, *further))


_CHANGES: Final = msgspec.json.Decoder(_Change)


class WalChanges:
    """Decodes a log from `lsn` on. `fills`: the tables that the mark at `until_lsn` fills; no other
    mark comes before it. `until_lsn` 0: no end."""

    def __init__(
        self,
        config: WalConfig,
        exports: Sequence[SourceExport],
        lsn: int,
        *,
        tables: Sequence[str],
        fills: Sequence[str] = (),
        until_lsn: int = 0,
    ) -> None:
        """Make a decoder. `tables`: those that positions name. Raises `InvalidUsage` when they are
        too many."""
        self._timeline = config.timeline
        skips = config.undeclared == "skip"
        self._skips = skips
        declared = config.schemas()
        self._declared = frozenset(declared)
        self._rows = {
            export.name: RowsOfTable(
                _with_further(declared[export.name], export.schema), export.schema, skips=skips
            )
            for export in exports
        }
        self._decoder = RecordDecoder(lsn)
        self._tables = tuple(tables)
        self._fills = tuple(fills)
        self._until_lsn = until_lsn
        self._failed: list[ExportFailed] = []
        self.lsn = lsn
        self.stopped: SourceUnreachable | None = None
        """Reason why no more can be given."""
        self.records = 0
        """Records taken since the last mark."""
        if len(self.mark().position) > POSITION_BYTES_MAX:
            raise InvalidUsage(
                f"the names of {len(self._tables)} tables make a position of more than "
                f"{POSITION_BYTES_MAX} bytes: make several sources"
            )

    @property
    def is_filling(self) -> bool:
        """Return whether it reads for tables that were added, up to the position of the others."""
        return self._until_lsn > 0

    @property
    def is_filled(self) -> bool:
        """Return whether it has reached that position."""
        return 0 < self._until_lsn <= self.lsn

    def mark(self, filled: Sequence[str] = ()) -> PositionMark:
        """Return a mark at the current place."""
        position = WalPosition(lsn_text(self.lsn), self._timeline, self._tables)
        names = (*self._fills, *filled)
        return PositionMark(position.text(), messages=self.records, filled=names)

    def take(self, wal: bytes) -> list[Given]:
        """Decode the next bytes of the log; return the changes that are whole now."""
        begin_lsn = self.lsn
        try:
            self._take(self._decoder.payloads(wal))
        except CorruptData as error:
            self._stop(str(error), "is this the timeline that penstock wal push writes?")
        given: list[Given] = []
        for name, rows in list(self._rows.items()):
            if len(rows):
                try:
                    given.append(SourceRows(name, rows.updates(), snapshot=self.is_filling))
                except RowMisfit as error:
                    where = f"records from {lsn_text(begin_lsn)} on"
                    self._fail(name, where, error)
                rows.clear()
        given += self._failed
        self._failed = []
        # While tables are being filled, the only mark is the one at the end.
        if self.lsn > begin_lsn and self.is_filling == self.is_filled:
            given.append(self.mark())
            self.records = 0
        return given

    def give_up(self, error: str, hint: str) -> list[Given]:
        """Return failures of the tables that are being filled, and the mark that ends the
        filling."""
        # The other tables go on from the position.
        self.lsn = self._until_lsn
        failed = [ExportFailed(name, error, hint) for name in self._fills]
        return [*failed, self.mark()]

    def _take(self, payloads: Iterable[FramedPayload]) -> None:
        for framed in payloads:
            if self.stopped is not None or self.is_filled or not self._change(framed):
                return
            self.lsn = framed.end_lsn
            self.records += 1

    def _change(self, framed: FramedPayload) -> bool:
        """Decode a record; return False to stop before it."""
        try:
            change = _CHANGES.decode(framed.payload)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = framed.payload[:_SHOWN].decode(errors="replace")
            return self._stop(
                f"the record at {lsn_text(self.lsn)} is no change: {error}: {shown}",
                "records are written by penstock wal push; to go on behind it, create the source "
                f"again with start_lsn={lsn_text(framed.end_lsn)}",
            )
        rows = self._rows.get(change.table)
        if rows is None:
            if self._skips or change.table in self._declared:
                return True
            return self._stop(
                f"the record at {lsn_text(self.lsn)} is of table {change.table[:_SHOWN]!r}, which "
                f"is not declared: {', '.join(sorted(self._declared))} are",
                "create the source again, with that table in `tables`, or with undeclared=skip",
            )
        if not change.diff:
            return self._stop(
                f"the record at {lsn_text(self.lsn)} is no change: its diff is 0",
                "records are written by penstock wal push",
            )
        try:
            rows.add(change.row, change.diff)
        except RowMisfit as error:
            self._fail(change.table, f"the record at {lsn_text(self.lsn)}", error)
        return True

    def _stop(self, error: str, hint: str) -> bool:
        self.stopped = SourceUnreachable(error, hint)
        return False

    def _fail(self, name: str, where: str, error: RowMisfit) -> None:
        """Fail a table, and skip its records from here on."""
        self._failed.append(ExportFailed(name, f"{where} does not fit the table: {error}", ANEW))
        del self._rows[name]
