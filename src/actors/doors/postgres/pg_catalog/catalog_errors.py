"""The error of a catalog query, with PostgreSQL's SQLSTATEs."""

from __future__ import annotations

from typing import Final

from actors.runtime.errors import InvalidUsage

SYNTAX_ERROR: Final = "42601"
UNDEFINED_COLUMN: Final = "42703"
UNDEFINED_FUNCTION: Final = "42883"
UNDEFINED_TABLE: Final = "42P01"
UNDEFINED_OBJECT: Final = "42704"
UNDEFINED_PARAMETER: Final = "42P02"
AMBIGUOUS_COLUMN: Final = "42702"
INVALID_COLUMN_REFERENCE: Final = "42P10"
INVALID_TEXT: Final = "22P02"
INVALID_SCHEMA: Final = "3F000"
INSUFFICIENT_PRIVILEGE: Final = "42501"
NOT_SUPPORTED: Final = "0A000"
INVALID_ARGUMENT: Final = "22023"
QUERY_CANCELED: Final = "57014"
PROGRAM_LIMIT: Final = "54000"
INTERNAL_ERROR: Final = "XX000"


class CatalogQueryError(InvalidUsage):
    """A catalog query is invalid, or uses what this catalog does not support."""

    def __init__(self, message: str, sqlstate: str = INTERNAL_ERROR) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
