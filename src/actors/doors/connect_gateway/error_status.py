"""Errors of the service as Spark Connect's clients expect them. Pure.

A client makes its exception of the `ErrorInfo` in the status: by the first class of the list that
it knows. A text of Spark's (``[CONDITION] … SQLSTATE: 42P01``) keeps its condition and state.
"""

from __future__ import annotations

import json
import re
from typing import Final

from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.model.pgwire.sqlstate import sqlstate_of
from actors.runtime.errors import (
    AccessDenied,
    AuthenticationFailed,
    DefiniteError,
    EngineLost,
    InvalidUsage,
    ObjectExists,
    OperationCanceled,
    PenstockError,
    ResourceBusy,
    SqlSyntaxError,
    UnknownObject,
)

DOMAIN: Final = "org.apache.spark"
TEXT_CHARACTERS_MAX: Final = 2048
"""An error travels in a trailer, which clients bound to 8 KiB."""
_ANALYSIS: Final = "org.apache.spark.sql.AnalysisException"
_PARSE: Final = "org.apache.spark.sql.catalyst.parser.ParseException"
_RUNTIME: Final = "org.apache.spark.SparkRuntimeException"
_SPARK: Final = "org.apache.spark.SparkException"
_SPARK_SQL: Final = "org.apache.spark.SparkSQLException"
_ARITHMETIC: Final = "org.apache.spark.SparkArithmeticException"
_NAMED: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\][^\0]*?SQLSTATE: ([0-9A-Z]{5})")
_IN_QUOTES: Final = re.compile(r"'([^']+)'")
_PARSE_CONDITIONS: Final = ("PARSE_", "UNSUPPORTED_DATATYPE", "INVALID_SQL_SYNTAX")
_JAVA_PARENTS: Final = {
    _ARITHMETIC: "java.lang.ArithmeticException",
    _PARSE: _ANALYSIS,
    "org.apache.spark.sql.catalyst.analysis.TempTableAlreadyExistsException": _ANALYSIS,
}
"""Classes that clients know, of exceptions that they do not know."""


class SparkCondition(PenstockError):
    """An error that Spark has a name for: condition, SQLSTATE, and the exception's class."""

    def __init__(self, condition: str, state: str, text: str, java_class: str = _SPARK_SQL) -> None:
        super().__init__(f"[{condition}] {text} SQLSTATE: {state}")
        self.java_class = java_class


def operation_abandoned(operation: str) -> SparkCondition:
    """Return the error of an operation that is over, and is not carried out again."""
    return SparkCondition(
        "INVALID_HANDLE.OPERATION_ABANDONED",
        "HY000",
        f"The handle {operation} is invalid. The operation is over. It may have been carried out, "
        "and is not repeated: read what it was to change.",
    )


def session_missing(session: str) -> SparkCondition:
    """Return the error of a session that was never open: its client begins the operation anew."""
    return SparkCondition(
        "INVALID_HANDLE.SESSION_NOT_FOUND",
        "HY000",
        f"The handle {session} is invalid. Session not found.",
    )


def session_changed(session: str) -> SparkCondition:
    """Return the error of a session of an earlier server, or of one that is over."""
    return SparkCondition(
        "INVALID_HANDLE.SESSION_CHANGED",
        "HY000",
        f"The handle {session} is invalid. The existing Spark server driver instance has "
        "restarted, or the session was ended. What was sent last may have been carried out, and is "
        "not repeated: create a new session, and read what it was to change.",
    )


def engine_ended() -> SparkCondition:
    """Return the error of a call whose Spark has ended: its client's session is gone."""
    return SparkCondition(
        "INVALID_HANDLE.SESSION_CHANGED",
        "HY000",
        "Spark has ended while it served this call, and its sessions with it. Another one is being "
        "started: create a new session.",
    )


def operation_canceled() -> SparkCondition:
    """Return the error of an operation that its client has interrupted."""
    return SparkCondition("OPERATION_CANCELED", "HY008", "Operation has been canceled.")


def position_missing(response: str) -> SparkCondition:
    """Return the error of a response that is not kept any more."""
    return SparkCondition(
        "INVALID_CURSOR.POSITION_NOT_AVAILABLE",
        "HY109",
        f"The cursor position id {response} is no longer available.",
    )


def unsupported(text: str) -> SparkCondition:
    """Return the error of a request that Spark might serve and the service does not."""
    return SparkCondition("UNSUPPORTED_FEATURE", "0A000", text, _ANALYSIS)


def status_of(error: PenstockError) -> ProtoMessage:
    """Return the status that tells a client of an error."""
    text = str(error)
    named = _NAMED.search(text)
    classes = _classes(error, named[1] if named else "", named[2] if named else "")
    info = error_details_pb2.ErrorInfo(reason=classes[0], domain=DOMAIN)
    info.metadata["classes"] = json.dumps(classes)
    condition, state = _condition(error, named)
    info.metadata["sqlState"] = state
    if condition:
        info.metadata["errorClass"] = condition
        info.metadata["messageParameters"] = json.dumps(_parameters(condition, text))
    # Without an `errorId` a client does not ask for more: all that there is to say is here.
    packed = any_pb2.Any()
    packed.Pack(info)
    # A text without Spark's condition is told with the class that the service's own clients see.
    shown = text if named else f"{type(error).__name__}: {text}"
    return status_pb2.Status(
        code=code_of(error), message=shown[:TEXT_CHARACTERS_MAX], details=[packed]
    )


def code_of(error: PenstockError) -> int:
    """Return gRPC's code of an error. Spark's own are ``INTERNAL``, too: the detail says more."""
    match error:
        # A client tries again by itself, until another engine is up.
        case EngineLost():
            return int(code_pb2.UNAVAILABLE)
        case AuthenticationFailed():
            return int(code_pb2.UNAUTHENTICATED)
        case ResourceBusy():
            return int(code_pb2.RESOURCE_EXHAUSTED)
    return int(code_pb2.INTERNAL)


def _condition(error: PenstockError, named: re.Match[str] | None) -> tuple[str, str]:
    if named is not None:
        return named[1], named[2]
    match error:
        case AccessDenied():
            return "INSUFFICIENT_PERMISSIONS", "42501"
        case UnknownObject():
            return "TABLE_OR_VIEW_NOT_FOUND", "42P01"
        case OperationCanceled():
            return "OPERATION_CANCELED", "HY008"
        case ObjectExists():
            return "TABLE_OR_VIEW_ALREADY_EXISTS", "42P07"
        case SqlSyntaxError():
            return "PARSE_SYNTAX_ERROR", "42601"
    # What Spark has no name for has a state all the same, as the other door has it.
    return "", sqlstate_of(error)


def _parameters(condition: str, text: str) -> dict[str, str]:
    """Return what a condition's message has in its gaps: the Scala client writes the message anew,
    and fails if it finds none."""
    match condition:
        case "PARSE_SYNTAX_ERROR":
            return {"error": text, "hint": ""}
        case "TABLE_OR_VIEW_NOT_FOUND" | "TABLE_OR_VIEW_ALREADY_EXISTS":
            named = _IN_QUOTES.search(text)
            relation = named[1] if named is not None else text
            return {"relationName": f"`{relation}`", "searchPath": "[`default`]"}
    return {}


def _classes(error: PenstockError, condition: str, state: str) -> list[str]:
    """Return the classes of the exception that Spark would raise, the nearest first."""
    match error:
        case SparkCondition():
            found = error.java_class
        case SqlSyntaxError():
            found = _PARSE
        case InvalidUsage() if condition.startswith(_PARSE_CONDITIONS):
            found = _PARSE
        case InvalidUsage():
            found = _ANALYSIS
        # An overflow and a division by zero are Python's `ArithmeticException` to a client.
        case DefiniteError() if condition == "DIVIDE_BY_ZERO" or state == "22003":
            found = _ARITHMETIC
        case DefiniteError():
            found = _RUNTIME
        case OperationCanceled():
            found = _SPARK_SQL
        case _:
            found = _SPARK
    parents = [_JAVA_PARENTS[found]] if found in _JAVA_PARENTS else []
    return [found, *parents, "java.lang.Exception", "java.lang.Throwable", "java.lang.Object"]
