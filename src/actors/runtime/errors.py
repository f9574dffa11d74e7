"""All error classes of Penstock, arranged by what the caller can do about them.

Every error that can cross a wire has a stable code, the name of its class. `to_wire` and
`from_wire` carry an error between processes as code, text and determinacy, without pickling. The
text says what is wrong, with the operands, and what to do.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import Final

ERROR_TEXT_BYTES_MAX: Final = 4_096
"""Maximum length of an error's text that is kept or sent, in bytes."""
NO_STEP: Final = "step size cannot equal zero"
"""PostgreSQL's error for a series with step 0. Spark is made to raise it, and its SQLSTATE is found
by this text."""


class PenstockError(Exception):
    """Base class of all errors that Penstock raises."""

    determinate: bool = True
    """True if the operation certainly did not happen; False if it may have happened."""


# -- the request is wrong: change it -----------------------------------------------------------


class InvalidUsage(PenstockError):
    """The request breaks a rule of the interface; the message names the operands."""


class UnknownObject(InvalidUsage):
    """There is no table, view or index with this name."""


class ObjectExists(InvalidUsage):
    """The name is already in use."""


class ObjectInUse(InvalidUsage):
    """Other objects depend on this one; drop them first."""


class TypeMismatch(InvalidUsage):
    """A row does not match the table's columns."""


class NullNotAllowed(TypeMismatch):
    """A column that is NOT NULL was given NULL."""


class ValueOutOfRange(TypeMismatch):
    """A number is out of range for its column's type."""


class ValueTooLong(TypeMismatch):
    """A text is longer than its column's CHAR(n) or VARCHAR(n)."""


class IncompatibleSchema(InvalidUsage):
    """A shard's columns cannot be changed in this way: existing data would change its meaning."""


class DuplicateKey(InvalidUsage):
    """An inserted PRIMARY KEY already exists."""


class AbsentRow(InvalidUsage):
    """A row or key to delete or update does not exist."""


class QueryRejected(InvalidUsage):
    """Spark rejected the statement; the message is Spark's.

    `position` is the offset of the error in the statement as the user wrote it. None if unknown, or
    if the position in the message is right already.
    """

    position: int | None = None


class SqlSyntaxError(InvalidUsage):
    """A statement cannot be parsed; the message names line and column.

    `problem` is the message without the hint. `position` is the offset in the given text, None if
    the error came over a wire. `hint` says what to write instead, "" if there is no suggestion.
    """

    def __init__(self, problem: str, *, position: int | None = None, hint: str = "") -> None:
        super().__init__(f"{problem}; {hint}" if hint else problem)
        self.problem = problem
        self.position = position
        self.hint = hint


class ReadBelowSince(InvalidUsage):
    """The time is older than the retained history."""


class ReadTooFarAhead(InvalidUsage):
    """The time is further ahead of the oracle than the limit."""


class ShardClosed(InvalidUsage):
    """The shard's upper is empty: nothing can be appended any more."""


class BadSettings(InvalidUsage):
    """A setting is unknown, out of range, or contradicts another."""


# -- wait or try again -------------------------------------------------------------------------


class WouldBlock(PenstockError):
    """There is no room at the moment."""


class ResourceBusy(PenstockError):
    """A bounded resource is in use; try again later."""


class SlowSubscriber(PenstockError):
    """The service disconnected a subscriber that read nothing for too long. The client can
    subscribe again from where it stopped."""


class DeadlineExceeded(PenstockError):
    """The deadline passed before the operation was complete."""


class OperationCanceled(PenstockError):
    """The operation was canceled on request."""


# -- the other side is gone: reconnect ---------------------------------------------------------


class ResourceClosed(PenstockError):
    """The resource was closed by its owner, on this side."""


class SessionEnded(PenstockError):
    """The service ended the session, because an administrator requested it or because its role was
    dropped or may no longer log in."""


class ConnectionBroken(PenstockError):
    """The other side is gone."""


class ActorDead(ConnectionBroken):
    """The actor stopped before it answered."""


class AskCycle(PenstockError):
    """Actors ask each other in a cycle, so none of them would ever get an answer."""


class ConnectionDisplaced(ConnectionBroken):
    """A newer connection has displaced this one."""


# -- one side broke the protocol ---------------------------------------------------------------


class ProtocolError(PenstockError):
    """A message broke a rule of the protocol; the error names the rule."""


class LocalProtocolError(ProtocolError):
    """This side tried to break the rule."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rule; its connection is closed."""


class FrameTooLarge(RemoteProtocolError):
    """A frame's header gives a length above the limit; nothing was allocated for it."""


class MalformedFrame(RemoteProtocolError):
    """The bytes are not a frame of this protocol."""


class UnknownCommand(RemoteProtocolError):
    """The frame is valid, but this version does not know its command."""


class IncompatibleVersion(RemoteProtocolError):
    """The peers speak different versions of the protocol."""


class WrongService(RemoteProtocolError):
    """The peer belongs to a service with a different name than expected."""


class WalRefused(RemoteProtocolError):
    """An acceptor or proposer of the WAL cannot continue with its peer because of another term,
    generation or timeline, or a gap. The peer must reconnect, or another proposer leads."""


class WalRemoved(WalRefused):
    """This acceptor no longer keeps the log at this position, because the segment was removed.
    Another acceptor may still have it."""


class PeerRejected(WalRefused):
    """An acceptor rejects this peer because of its token, tenant, timeline, version or system.
    Retrying does not help."""


class AuthenticationFailed(RemoteProtocolError):
    """One side did not prove its identity: its certificate or token was refused."""


# -- storage -----------------------------------------------------------------------------------


class StorageError(PenstockError):
    """A store failed. `determinate` is False if the operation may have happened."""

    def __init__(self, message: str, *, determinate: bool) -> None:
        super().__init__(message)
        self.determinate = determinate


class StoreFull(StorageError):
    """No space left on the device."""


class StoreBusy(StorageError):
    """The store accepts no more requests at the moment."""


class CorruptData(StorageError):
    """Stored bytes are not what was written."""


class LeaseLost(StorageError):
    """The reader's lease has expired and the part was deleted."""


class UnsoundFilter(StorageError):
    """A filter by statistics was wrong: a part that it excluded contains a wanted row."""


class WriterFenced(StorageError):
    """Another process has taken over; this one must stop writing."""


def is_retriable(error: Exception) -> bool:
    """Return whether a read that failed with this error may succeed if repeated.

    After `ConnectionBroken` a client must repeat it on a new connection. For writes, see
    `determinate` instead.

    >>> is_retriable(ConnectionBroken("gone")), is_retriable(ActorDead("stopped"))
    (True, False)
    """
    # Repeating a read is safe even after an indeterminate failure, because it changes nothing.
    if type(error) is ConnectionBroken:
        return True
    final = CorruptData | LeaseLost | UnsoundFilter | WriterFenced
    return isinstance(error, StorageError) and not isinstance(error, final)


class StateDirectoryError(PenstockError):
    """The state directory is in use, was written by a newer version, or is not writable."""


class AddressInUse(PenstockError):
    """The address to listen on is not available."""


# -- the engine --------------------------------------------------------------------------------


class EngineError(PenstockError):
    """Spark failed, or the process that runs it."""


class DefiniteError(EngineError):
    """The data make an expression fail: from some time on, the error is the view's contents.

    `position` is that of `QueryRejected`.
    """

    position: int | None = None


class EngineLost(EngineError):
    """The engine died; it is replaced and the job is sent again."""


class JobTooLarge(EngineError):
    """The job is too large for the engine: its plan, its nesting or its result is over a limit, or
    it killed the engine each time it ran alone."""


class EngineUnavailable(EngineError):
    """The engine cannot be started; the message says why (no Java, for example)."""


class AccessDenied(InvalidUsage):
    """The session's role lacks the right that the request needs; the message names the object, the
    right, and the GRANT that gives it."""


class WriteConflict(InvalidUsage):
    """Another session changed a row first, and nothing was written; repeat the transaction."""


class DefinitionChanged(WriteConflict):
    """The columns of the table, or their defaults, have changed since the writer read them; read
    them again and repeat the write."""


class TransactionAborted(InvalidUsage):
    """The transaction has already failed; roll it back."""


class ServiceExpired(PenstockError):
    """The service has run for its configured time (`expiration_ms`)."""


class ViewInError(PenstockError):
    """The view is in error at the requested time. A view is correct or in error, never wrong."""


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name most similar to a wrong one; "" if none is similar.

    >>> nearest_hint("ssl_mode", ["host", "sslmode"])
    "; did you mean 'sslmode'?"
    >>> nearest_hint("x", ["host", "sslmode"])
    ''
    """
    spelled = {each.casefold(): each for each in known}
    found = difflib.get_close_matches(name.casefold(), spelled, 1)
    return f"; did you mean {spelled[found[0]]!r}?" if found else ""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, for callers that treat the group's tasks as one."""
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
    """Return (code, text, determinate) of an error. Any other exception becomes an indeterminate
    `PenstockError`."""
    if isinstance(error, PenstockError):
        return type(error).__name__, str(error), error.determinate
    # Indeterminate, because an unknown error may come at any point of the operation.
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
"""Codes of the previous release, which its peers and durable documents still use."""


def from_wire(code: str, text: str, determinate: bool) -> PenstockError:
    """Return the error that `to_wire` encoded. An unknown code becomes `PenstockError`."""
    # An unknown code comes from a newer peer. Its text still says what happened.
    kind = _family(PenstockError).get(FORMER_CODES.get(code, code), PenstockError)
    if issubclass(kind, StorageError):
        return kind(text, determinate=determinate)
    error = kind(text)
    error.determinate = determinate
    return error


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def storage_error(what: str, error: OSError, *, determinate: bool = True) -> StorageError:
    """Return the `StorageError` for an `OSError`; `what` is the operation that failed."""
    if error.errno in _FULL:
        return StoreFull(
            f"no space left to {what}: {error.strerror}; free space or raise the quota,"
            " then try again",
            determinate=determinate,
        )
    return StorageError(f"could not {what}: {error}", determinate=determinate)
