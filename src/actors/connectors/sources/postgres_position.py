"""Positions of a PostgreSQL source as texts: a server, a place in its log, and the filled tables.
Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actors.connectors.sources.postgres_catalog import lsn_of, lsn_text
from actors.connectors.sources.postgres_footing import FilledTable, TableFooting
from actors.errors import InvalidUsage


class _Filled(msgspec.Struct, frozen=True, array_like=True):
    """A `FilledTable` as JSON."""

    oid: int
    lsn: str
    columns: list[int]
    number_max: int
    footing: TableFooting = TableFooting()


class _Position(msgspec.Struct, frozen=True):
    system: str
    database: str
    lsn: str
    filled: dict[str, _Filled]


class PostgresPosition(msgspec.Struct, frozen=True):
    """A source's position: everything before `lsn` was given."""

    lsn: int
    filled: dict[str, FilledTable]


def write_position(system: str, database: str, lsn: int, filled: Mapping[str, FilledTable]) -> str:
    """Return a position as its text."""
    tables = {
        name: _Filled(
            each.oid, lsn_text(each.lsn), list(each.columns), each.number_max, each.footing
        )
        for name, each in filled.items()
    }
    return msgspec.json.encode(_Position(system, database, lsn_text(lsn), tables)).decode()


def read_position(text: str, system: str, database: str) -> PostgresPosition:
    """Parse a position's text. Raises `InvalidUsage` for that of another server or database."""
    was = msgspec.json.decode(text, type=_Position)
    if was.system != system or was.database != database:
        raise InvalidUsage(
            f"this is server {system}, database {database}; what is here came from server"
            f" {was.system}, database {was.database}: name that one, or drop the source and create"
            " it again"
        )
    filled = {
        name: FilledTable(
            each.oid, lsn_of(each.lsn), tuple(each.columns), each.number_max, each.footing
        )
        for name, each in was.filled.items()
    }
    return PostgresPosition(lsn_of(was.lsn), filled)


def position_lsn(text: str) -> int:
    """Return the place in the log of a position's text."""
    return lsn_of(msgspec.json.decode(text, type=_Position).lsn)
