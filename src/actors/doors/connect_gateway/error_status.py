"""Converts errors of the service to the form that Spark Connect clients expect. Pure.

A client builds its exception from the `ErrorInfo` in the status, with the first class in the list
that it knows. A message of Spark (``[CONDITION] … SQLSTATE: 42P01``) keeps its condition and state.
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
"""Maximum length of a message. Errors travel in a trailer, which clients limit to 8 KiB."""
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
"""Maps exception classes that clients may not know to parent classes that they know."""


class SparkCondition(PenstockError):
    """An error for which Spark has a condition, an SQLSTATE and an exception class."""

    def __init__(self, condition: str, state: str, text: str, java_class: str = _SPARK_SQL) -> None:
        super().__init__(f"[{condition}] {text} SQLSTATE: {state}")
        self.java_class = java_class


def operation_abandoned(operation: str) -> SparkCondition:
    """Return the error for an operation that has ended and is not executed again."""
    return SparkCondition(
        "INVALID_HANDLE.OPERATION_ABANDONED",
        "HY000",
        f"The handle {operation} is invalid. The operation has ended. It may have been executed, "
        "and is not repeated: check its effects.",
    )


def session_missing(session: str) -> SparkCondition:
    """Return the error for a session that was never open. Its client starts the operation again."""
    return SparkCondition(
        "INVALID_HANDLE.SESSION_NOT_FOUND",
        "HY000",
        f"The handle {session} is invalid. Session not found.",
    )


def session_changed(session: str) -> SparkCondition:
    """Return the error for a session of an earlier server, or one that has ended."""
    return SparkCondition(
        "INVALID_HANDLE.SESSION_CHANGED",
        "HY000",
        f"The handle {session} is invalid. The existing Spark server driver instance has "
        "restarted, or the session was ended. The last operation may have been executed, and is "
        "not repeated: create a new session, and check the operation's effects.",
    )


def engine_ended() -> SparkCondition:
    """Return the error for a call during which Spark ended, and with it the client's session."""
    return SparkCondition(
        "INVALID_HANDLE.SESSION_CHANGED",
        "HY000",
        "Spark ended while it served this call, and its sessions were lost. Spark is being "
        "restarted: create a new session.",
    )


def operation_canceled() -> SparkCondition:
    """Return the error for an operation that its client has interrupted."""
    return SparkCondition("OPERATION_CANCELED", "HY008", "Operation has been canceled.")


def position_missing(response: str) -> SparkCondition:
    """Return the error for a response that is no longer available."""
    return SparkCondition(
        "INVALID_CURSOR.POSITION_NOT_AVAILABLE",
        "HY109",
        f"The cursor position id {response} is no longer available.",
    )


def unsupported(text: str) -> SparkCondition:
    """Return the error for a request that Spark might support but the service does not."""
    return SparkCondition("UNSUPPORTED_FEATURE", "0A000", text, _ANALYSIS)


def status_of(error: PenstockError) -> ProtoMessage:
    """Return the gRPC status that reports an error to a client."""
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
    # Without an `errorId`, clients do not ask for more details.
    packed = any_pb2.Any()
    packed.Pack(info)
    # A message without a Spark condition starts with the class that Penstock's own clients see.
    shown = text if named else f"{type(error).__name__}: {text}"
    return status_pb2.Status(
        code=code_of(error), message=shown[:TEXT_CHARACTERS_MAX], details=[packed]
    )


def code_of(error: PenstockError) -> int:
    """Return the gRPC code of an error. Like Spark's own, most are ``INTERNAL``; details tell them
    apart."""
    match error:
        # Clients retry automatically, until another engine has started.
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
    # Errors without a Spark condition still have the SQLSTATE of PostgreSQL's protocol.
    return "", sqlstate_of(error)


def _parameters(condition: str, text: str) -> dict[str, str]:
    """Return the parameters of a condition's message. The Scala client formats the message itself,
    and fails if parameters are missing."""
    match condition:
        case "PARSE_SYNTAX_ERROR":
            return {"error": text, "hint": ""}
        case "TABLE_OR_VIEW_NOT_FOUND" | "TABLE_OR_VIEW_ALREADY_EXISTS":
            named = _IN_QUOTES.search(text)
            relation = named[1] if named is not None else text
            return {"relationName": f"`{relation}`", "searchPath": "[`default`]"}
    return {}


def _classes(error: PenstockError, condition: str, state: str) -> list[str]:
    """Return the class of the exception that Spark would raise, followed by its parents."""
    match error:
        case SparkCondition():
            found = error.java_class
        case SqlSyntaxError():
            found = _PARSE
        case InvalidUsage() if condition.startswith(_PARSE_CONDITIONS):
            found = _PARSE
        case InvalidUsage():
            found = _ANALYSIS
        # PySpark raises its `ArithmeticException` for an overflow or a division by zero.
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
