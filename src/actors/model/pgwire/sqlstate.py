"""SQLSTATEs: the one that a client gets for each error, and errors that carry their own.

Source: PostgreSQL's documentation, "PostgreSQL Error Codes".
"""

from __future__ import annotations

import re
from typing import Final

from actors.model.pgwire.messages import ErrorReport
from actors.model.plan.schema import UNBOUNDED_NUMERIC
from actors.runtime import errors
from actors.runtime.errors import (
    NO_STEP,
    DefiniteError,
    InvalidUsage,
    PenstockError,
    QueryRejected,
    SqlSyntaxError,
)

INVALID_TEXT: Final = "22P02"
INVALID_PARAMETER: Final = "22023"
INVALID_BINARY: Final = "22P03"
BAD_COPY_FORMAT: Final = "22P04"
NUMBER_OUT_OF_RANGE: Final = "22003"
TIME_OUT_OF_RANGE: Final = "22008"
INVALID_TIME: Final = "22007"
NOT_IN_ENCODING: Final = "22021"
NULL_NOT_ALLOWED: Final = "23502"
LIMIT_EXCEEDED: Final = "54000"
NOT_SUPPORTED: Final = "0A000"
UNKNOWN_SAVEPOINT: Final = "3B001"
NO_TRANSACTION: Final = "25P01"
OUTCOME_UNKNOWN: Final = "40003"
OUT_OF_MEMORY: Final = "53200"
INTERNAL_ERROR: Final = "XX000"


class RefusedStatement(InvalidUsage):
    """A statement breaks a rule for which PostgreSQL has a specific SQLSTATE."""

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


def unknown_statement(name: str) -> RefusedStatement:
    """Return the error for an unknown prepared statement."""
    return RefusedStatement(f'prepared statement "{name}" does not exist', "26000")


def statement_exists(name: str) -> RefusedStatement:
    """Return the error for the name of an existing prepared statement."""
    return RefusedStatement(f'prepared statement "{name}" already exists', "42P05")


def unknown_cursor(name: str, what: str = "cursor") -> RefusedStatement:
    """Return the error for an unknown cursor or portal."""
    return RefusedStatement(f'{what} "{name}" does not exist', "34000")


def cursor_exists(name: str) -> RefusedStatement:
    """Return the error for the name of an existing cursor."""
    return RefusedStatement(f'cursor "{name}" already exists', "42P03")


class InvalidClientData(RefusedStatement):
    """A text, a parameter, or a row of a COPY is not a valid value of its type."""

    def __init__(self, message: str, sqlstate: str = INVALID_TEXT) -> None:
        super().__init__(message, sqlstate)


SQLSTATES: Final[dict[type[PenstockError], str]] = {
    errors.PenstockError: INTERNAL_ERROR,
    # change the request
    errors.InvalidUsage: "22023",
    errors.UnknownObject: "42P01",
    errors.ObjectExists: "42P07",
    errors.ObjectInUse: "2BP01",
    errors.TypeMismatch: "42804",
    errors.NullNotAllowed: NULL_NOT_ALLOWED,
    errors.ValueOutOfRange: NUMBER_OUT_OF_RANGE,
    errors.ValueTooLong: "22001",
    errors.IncompatibleSchema: "42804",
    errors.DuplicateKey: "23505",
    errors.AbsentRow: "P0002",
    errors.QueryRejected: "42000",
    errors.SqlSyntaxError: "42601",
    errors.AccessDenied: "42501",
    errors.DefinitionChanged: "40001",
    errors.WriteConflict: "40001",
    errors.TransactionAborted: "25P02",
    errors.ReadBelowSince: "72000",
    errors.ReadTooFarAhead: "22023",
    errors.ShardClosed: "55000",
    errors.BadSettings: "22023",
    InvalidClientData: INVALID_TEXT,
    # wait or try again
    errors.WouldBlock: "53000",
    errors.ResourceBusy: "53000",
    errors.SlowSubscriber: "57014",
    errors.DeadlineExceeded: "57014",
    errors.OperationCanceled: "57014",
    # the other side is gone
    errors.ResourceClosed: "57P01",
    errors.SessionEnded: "57P01",
    errors.ConnectionBroken: "08006",
    errors.ActorDead: "57P02",
    errors.AskCycle: INTERNAL_ERROR,
    errors.ConnectionDisplaced: "08006",
    # broken protocol
    errors.ProtocolError: "08P01",
    errors.LocalProtocolError: "08P01",
    errors.RemoteProtocolError: "08P01",
    errors.FrameTooLarge: "08P01",
    errors.MalformedFrame: "08P01",
    errors.UnknownCommand: "08P01",
    errors.IncompatibleVersion: NOT_SUPPORTED,
    errors.WrongService: "08004",
    errors.WalRefused: "08004",
    errors.WalRemoved: "58P01",
    errors.PeerRejected: "08004",
    errors.AuthenticationFailed: "28P01",
    # storage
    errors.StorageError: "58030",
    errors.StoreFull: "53100",
    errors.StoreBusy: "53000",
    errors.CorruptData: "XX001",
    errors.LeaseLost: "72000",
    errors.UnsoundFilter: INTERNAL_ERROR,
    errors.WriterFenced: "57P01",
    errors.StateDirectoryError: "58000",
    errors.AddressInUse: "58000",
    # the engine
    errors.EngineError: INTERNAL_ERROR,
    errors.DefiniteError: "22000",
    errors.EngineLost: "57P02",
    errors.JobTooLarge: LIMIT_EXCEEDED,
    errors.EngineUnavailable: "57P03",
    errors.ServiceExpired: "57P01",
    errors.ViewInError: "55000",
}
"""SQLSTATE of each error class. A class that is not listed has that of its parent."""

NOTICE_STATES: Final = {
    "there is already a transaction in progress": "25001",
    "there is no transaction in progress": NO_TRANSACTION,
    "SET LOCAL can only be used in transaction blocks": NO_TRANSACTION,
    "SET TRANSACTION can only be used in transaction blocks": NO_TRANSACTION,
}
"""SQLSTATE of each notice that PostgreSQL sends as a warning."""
UNFIT: Final = " does not fit "
"""Text between a number that does not fit a decimal, and the decimal's type."""
INEXACT: Final = f"{UNFIT}{UNBOUNDED_NUMERIC} exactly"
"""End of the error for a number that a ``numeric`` column without precision would round."""
_SPARK_STATE: Final = re.compile(r"SQLSTATE: ([0-9A-Z]{5})")
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]")
_TIME_TYPES: Final = re.compile(r'cannot be cast to "(?:DATE|TIMESTAMP\w*|TIME\b)')
_SPARK_PLACE: Final = re.compile(
    r"\bline (\d{1,9}),? pos(ition)? (\d{1,9})\b(\) ==(?:\n([^\n]*)\n( *)\^)?)?"
)
"""Matches a position. Runtime errors show the query below it, with carets under the position."""


def sqlstate_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error: its own, Spark's, or that of its class.

    >>> sqlstate_of(errors.UnknownObject("t"))
    '42P01'
    """
    if isinstance(error, MemoryError):
        return OUT_OF_MEMORY
    if not isinstance(error, PenstockError):
        return INTERNAL_ERROR
    own = getattr(error, "sqlstate", "")
    if isinstance(own, str) and own:
        return own
    # What may have happened must not look like what did not, or a client could do it twice.
    if not error.determinate:
        return OUTCOME_UNKNOWN
    if isinstance(error, QueryRejected | DefiniteError) and (
        found := _SPARK_STATE.search(str(error))
    ):
        return _as_postgresql(str(error), found[1])
    return next(SQLSTATES[kind] for kind in type(error).__mro__ if kind in SQLSTATES)


def _as_postgresql(message: str, state: str) -> str:
    """Return the SQLSTATE that PostgreSQL has for an error of Spark. Drivers choose the class of
    their exception by it.

    >>> _as_postgresql("[AMBIGUOUS_REFERENCE] …", "42704")
    '42702'
    """
    found = _CONDITION.search(message)
    match "" if found is None else found[1].partition(".")[0]:
        case "AMBIGUOUS_REFERENCE":
            return "42702"
        case "CAST_INVALID_INPUT" if f"{UNFIT}decimal(" in message:
            return NUMBER_OUT_OF_RANGE
        case "USER_RAISED_EXCEPTION" if NO_STEP in message:
            return INVALID_PARAMETER
        case "CAST_INVALID_INPUT" | "INVALID_TYPED_LITERAL":
            return INVALID_TIME if _TIME_TYPES.search(message) else INVALID_TEXT
        case "INVALID_INLINE_TABLE" if "FAILED_SQL_EXPRESSION_EVALUATION" in message:
            return "22000"  # a value in VALUES, with a reason that Spark does not give
        case "CANNOT_PARSE_TIMESTAMP" | "CANNOT_PARSE_TIME":
            return INVALID_TIME
    return state


def names_place(message: str) -> bool:
    """Return whether a message of Spark contains a position."""
    return _SPARK_PLACE.search(message) is not None


def spark_position(message: str, query: str) -> int:
    """Return the position in a query that a message of Spark contains, in characters from 1; 0 if
    there is none.

    >>> spark_position("no such column (line 2, pos 7)", "SELECT\\n  a, b")
    15
    """
    found = _SPARK_PLACE.search(message)
    if found is None:
        return 0
    # Spark counts only line feeds; `splitlines` would split at other characters too.
    lines = [f"{line}\n" for line in query.split("\n")]
    # Columns count from 0 in parse errors and from 1 in errors of expressions.
    line, column = int(found[1]), int(found[3]) - (found[2] is not None)
    if not 1 <= line <= len(lines) or column > len(lines[line - 1]):
        return 0
    # The error may be about another query, such as that of a view that this one reads.
    offset = sum(map(len, lines[: line - 1])) + column
    if found[4] and not _is_shown(query, offset, found[5], found[6]):
        return 0
    return offset + 1


def _is_shown(query: str, offset: int, shown: str | None, blanks: str | None) -> bool:
    """Return whether a line of a message, from its carets on, shows the query at an offset."""
    if shown is None or blanks is None:
        return False
    # Spark cuts long lines at both ends.
    wanted = shown[len(blanks) :].removesuffix("...").rstrip()
    if query.startswith(wanted, offset):
        return True
    # It uses the offset in characters as if it were one in UTF-16 code units.
    units = query.encode("utf-16-le", "surrogatepass")[2 * offset :]
    return units.decode("utf-16-le", "replace").startswith(wanted)


def error_report(error: BaseException, severity: str = "ERROR") -> ErrorReport:
    """Return what to report to a client about an error, with its position in the text if known."""
    position, hint = 0, ""
    text = str(error) or type(error).__name__
    if isinstance(error, QueryRejected | DefiniteError | SqlSyntaxError):
        position = 0 if error.position is None else error.position + 1
    if isinstance(error, SqlSyntaxError):
        text, hint = error.problem, error.hint
    return ErrorReport(sqlstate_of(error), text, severity, hint=hint, position=position)
