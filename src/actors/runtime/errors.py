"""The whole error family, arranged by what the caller can do about it.

Every error that can cross a wire has a stable ``code`` (its class name). `to_wire` and
`from_wire` carry an error between processes without pickling: code, text and determinacy.
An error says what was wrong, with the operands, and what to do.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import Final

ERROR_TEXT_BYTES_MAX: Final = 4_096
"""Bytes of an error's text that is kept or sent."""
NO_STEP: Final = "step size cannot equal zero"
"""PostgreSQL's error for a series without a step: Spark is made to raise it, and its SQLSTATE is
found by it."""


class PenstockError(Exception):
    """Root of the family."""

    determinate: bool = True
    """True when the operation surely did not happen; False when it may have happened."""


# -- the caller asked for something that cannot be: change the request -------------------------


class InvalidUsage(PenstockError):
    """A rule of the interface was broken; the message names the operands."""


class UnknownObject(InvalidUsage):
    """No table, view or index of that name."""


class ObjectExists(InvalidUsage):
    """The name is taken."""


class ObjectInUse(InvalidUsage):
    """Other objects are built on it; drop them first."""


class TypeMismatch(InvalidUsage):
    """A row does not fit the table's columns."""


class NullNotAllowed(TypeMismatch):
    """NULL is given for a column that is NOT NULL."""


class ValueOutOfRange(TypeMismatch):
    """A number does not fit its column's type."""


class ValueTooLong(TypeMismatch):
    """A text is longer than its column's CHAR(n) or VARCHAR(n)."""


class IncompatibleSchema(InvalidUsage):
    """A shard's columns cannot become these: what was written would mean something else."""


class DuplicateKey(InvalidUsage):
    """An inserted PRIMARY KEY is present already."""


class AbsentRow(InvalidUsage):
    """A row or key to delete or update is not there."""


class QueryRejected(InvalidUsage):
    """Spark rejected the statement; the message is Spark's.

    `position` is the offset of the fault in the statement as it was written, where that is known
    and the message's own place counts in another text.
    """

    position: int | None = None


class SqlSyntaxError(InvalidUsage):
    """A statement cannot be read; the message names line and column.

    `problem` is the message without the hint; `position` the offset in the text that was given,
    None if the error came over a wire; `hint` says what to write instead, "" if nothing is known.
    """

    def __init__(self, problem: str, *, position: int | None = None, hint: str = "") -> None:
        super().__init__(f"{problem}; {hint}" if hint else problem)
        self.problem = problem
        self.position = position
        self.hint = hint


class ReadBelowSince(InvalidUsage):
    """The time is older than the retained history."""


class ReadTooFarAhead(InvalidUsage):
    """The time lies further ahead of the oracle than the limit."""


class ShardClosed(InvalidUsage):
    """The shard's upper is empty: nothing will ever be appended again."""


class BadSettings(InvalidUsage):
    """A setting is unknown, out of range or contradicts another."""


# -- wait, or try again ------------------------------------------------------------------------


class WouldBlock(PenstockError):
    """There is no room just now."""


class ResourceBusy(PenstockError):
    """A bounded resource is taken; try again later."""


class SlowSubscriber(PenstockError):
    """A subscriber took nothing of what waited for it for too long, and was cut off: it may
    subscribe again from where it stopped."""


class DeadlineExceeded(PenstockError):
    """The deadline passed first."""


class OperationCanceled(PenstockError):
    """The operation was canceled on request."""


# -- the other side is gone: reconnect ---------------------------------------------------------


class ResourceClosed(PenstockError):
    """This end was closed by its owner."""


class SessionEnded(PenstockError):
    """The service ended the session: an administrator asked for it, or its role was dropped or may
    not log in any more."""


class ConnectionBroken(PenstockError):
    """The other end is gone."""


class ActorDead(ConnectionBroken):
    """The actor stopped before it answered."""


class AskCycle(PenstockError):
    """Actors ask each other in a circle: none of them would ever be answered."""


class ConnectionDisplaced(ConnectionBroken):
    """A newer connection took this one's place."""


# -- one side broke the protocol ---------------------------------------------------------------


class ProtocolError(PenstockError):
    """A message broke a rule of the protocol; the message names the rule."""


class LocalProtocolError(ProtocolError):
    """Our side tried to break the rule."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rule; its connection is closed."""


class FrameTooLarge(RemoteProtocolError):
    """A frame announced more bytes than the limit; nothing was allocated."""


class MalformedFrame(RemoteProtocolError):
    """The bytes are not a frame of this protocol."""


class UnknownCommand(RemoteProtocolError):
    """A well-formed frame with a command this version does not know."""


class IncompatibleVersion(RemoteProtocolError):
    """The peers speak different protocol versions."""


class WrongService(RemoteProtocolError):
    """The peer is a service of another name than the one that is meant."""


class WalRefused(RemoteProtocolError):
    """An acceptor or proposer of the WAL cannot go on with its peer: another term or generation,
    another timeline, a gap; the peer must connect again, or another leads."""


class WalRemoved(WalRefused):
    """The log at that place is no longer kept by this acceptor: its segment was removed. Another
    may still have it."""


class PeerRejected(WalRefused):
    """An acceptor takes this peer not at all: a wrong token, another tenant, timeline, version or
    system. To wait does not help."""


class AuthenticationFailed(RemoteProtocolError):
    """One side did not prove its identity to the other: a certificate or a token was refused."""


# -- storage -----------------------------------------------------------------------------------


class StorageError(PenstockError):
    """A store failed. `determinate` says whether the operation may have happened."""

    def __init__(self, message: str, *, determinate: bool) -> None:
        super().__init__(message)
        self.determinate = determinate


class StoreFull(StorageError):
    """No space left on the device."""


class StoreBusy(StorageError):
    """The store takes no more requests for now."""


class CorruptData(StorageError):
    """Stored bytes are not what was written."""


class LeaseLost(StorageError):
    """The reader's lease expired and the part is gone."""


class UnsoundFilter(StorageError):
    """Statistics said that a part holds no row that is wanted, and it does."""


class WriterFenced(StorageError):
    """Another process took over; this one must stop writing."""


def is_retriable(error: Exception) -> bool:
    """Return whether a read that failed so may do better when it is repeated: by a client that was
    cut off (`ConnectionBroken`) on a new connection, and else as it was. Of a write it says
    nothing: see `determinate`.

    >>> is_retriable(ConnectionBroken("gone")), is_retriable(ActorDead("stopped"))
    (True, False)
    """
    # Repeating a read is safe even when the failure is indeterminate: a read changes nothing.
    if type(error) is ConnectionBroken:
        return True
    final = CorruptData | LeaseLost | UnsoundFilter | WriterFenced
    return isinstance(error, StorageError) and not isinstance(error, final)


class StateDirectoryError(PenstockError):
    """The state directory cannot be used: in use, of a newer version, or not writable."""


class AddressInUse(PenstockError):
    """The address to listen on is taken."""


# -- the engine --------------------------------------------------------------------------------


class EngineError(PenstockError):
    """Spark failed, or the process that holds it."""


class DefiniteError(EngineError):
    """The data make the expression fail: the error belongs to the view, from a time on.

    `position` as of `QueryRejected`.
    """

    position: int | None = None


class EngineLost(EngineError):
    """The engine died; it is replaced and the job sent again."""


class JobTooLarge(EngineError):
    """The job is more than the engine can do: its plan, its depth or its answer is over a limit, or
    it ended the engine each time that it ran, with nothing beside it."""


class EngineUnavailable(EngineError):
    """The engine cannot be started; the message says why (no Java, for example)."""


class AccessDenied(InvalidUsage):
    """The session's role has not the right that the request needs; the message names the object,
    the right, and the GRANT that gives it."""


class WriteConflict(InvalidUsage):
    """Another session changed a row first, and nothing was written: repeat the transaction."""


class DefinitionChanged(WriteConflict):
    """The writer took the columns of a table, or their defaults, for others than they are: read
    them, and write again."""


class TransactionAborted(InvalidUsage):
    """The transaction has failed before: roll it back."""


class ServiceExpired(PenstockError):
    """The service has run for as long as it was to run (`expiration_ms`)."""


class ViewInError(PenstockError):
    """The view holds an error at the time read: error or correct, never wrong."""


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint with the valid name that a wrong one is nearest to; "" if it is near none.

    >>> nearest_hint("ssl_mode", ["host", "sslmode"])
    "; did you mean 'sslmode'?"
    >>> nearest_hint("x", ["host", "sslmode"])
    ''
    """
    spelled = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), spelled, 1)
    return f"; did you mean {spelled[found[0]]!r}?" if found else ""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one error of a group, for a caller to whom its tasks are one thing that fails once."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _family(root: type[PenstockError]) -> dict[str, type[PenstockError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _family(child)
    return found


def to_wire(error: BaseException) -> tuple[str, str, bool]:
    """Return (code, text, determinate) of an error; errors of other families become
    `PenstockError`."""
    if isinstance(error, PenstockError):
        return type(error).__name__, str(error), error.determinate
    # Indeterminate: an unknown error may have come at any point of the operation.
    return "PenstockError", f"{type(error).__name__}: {error}", False


FORMER_CODES: Final = {
    "Broken": "ConnectionBroken",
    "Busy": "ResourceBusy",
    "Canceled": "OperationCanceled",
    "Closed": "ResourceClosed",
    "Corrupt": "CorruptData",
    "Displaced": "ConnectionDisplaced",
    "Expired": "ServiceExpired",
    "Fenced": "WriterFenced",
    "Refused": "ServerRefused",
    "Unauthenticated": "AuthenticationFailed",
    "Unreachable": "SourceUnreachable",
}
"""Codes of the release before, as its peers and durable documents still say them."""


def from_wire(code: str, text: str, determinate: bool) -> PenstockError:
    """Return the error that `to_wire` named; an unknown code becomes the root class."""
    # An unknown code is of a newer peer: its text still says what happened.
    kind = _family(PenstockError).get(FORMER_CODES.get(code, code), PenstockError)
    if issubclass(kind, StorageError):
        return kind(text, determinate=determinate)
    error = kind(text)
    error.determinate = determinate
    return error


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def storage_error(what: str, error: OSError, *, determinate: bool = True) -> StorageError:
    """Return the family's error for one of the operating system."""
    if error.errno in _FULL:
        return StoreFull(
            f"no space left to {what}: {error.strerror}; free space or raise the quota,"
            " then try again",
            determinate=determinate,
        )
    return StorageError(f"could not {what}: {error}", determinate=determinate)
