"""Classifies the failure of a job: the `code` and text of its `JobFailed`.

Spark gives its errors a condition and a SQLSTATE, whose class (the first two characters) decides:

- data exceptions (22), cardinality (21), constraint-like (23), errors raised by the query itself
  (P0), external routines (38, 39) and limits that the data exceed (54): the same job would fail
  in the same way again, so the error belongs to the view: ``DefiniteError``;
- a text that analysis rejects: ``QueryRejected``;
- a limit of the engine, its stack or the size of an answer: ``JobTooLarge``;
- the loss of something (a file, a disk, a socket, an executor, a stage): ``EngineLost``,
  recognised by what was lost;
- any other exception of Java was raised by an expression, with or without a condition:
  ``DefiniteError``;
- a lack of memory, or a fault of this process: ``EngineError``. Such a job may succeed when it is
  retried; the view's dataflow counts its failures (`dataflow.repeated_failures`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import AnalysisException, PySparkException

from actors.engine.spark.bucket_reading import UNREADABLE
from actors.engine.spark.spark_releases import retries_exhausted
from actors.model.plan.jobs import JobFailed
from actors.runtime.errors import PenstockError, to_wire

DEFINITE_CLASSES: Final = frozenset({"21", "22", "23", "2F", "38", "39", "54", "P0"})
LOST_CLASSES: Final = frozenset({"08", "57", "58", "HY", "KD"})
"""SQLSTATE classes for the surroundings of the engine: connections, operators, handles, files."""
MEMORY_CLASSES: Final = frozenset({"53", "82"})
_NAMED: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\][^\0]*?SQLSTATE: ([0-9A-Z]{5})")
_PLAN_TREE: Final = re.compile(r"(?:(?P<place>; line \d+ pos \d+);?|;)\s*\n['+]?[A-Z:]")
_LINES_MAX: Final = 6


_NO_ANSWER: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
"""gRPC status codes for a server that does not exist, or does not answer in time."""
_ANOTHER_SERVER: Final = "INVALID_HANDLE.SESSION_CHANGED"
_FORGOTTEN: Final = frozenset({"INVALID_HANDLE.SESSION_CLOSED", "INVALID_HANDLE.SESSION_NOT_FOUND"})
_UNKNOWN_TYPE: Final = "CANNOT_PARSE_DATATYPE"
_NO_FILE: Final = "PATH_NOT_FOUND"
_LIMITS: Final = {
    "java.lang.StackOverflowError": "it is nested too deeply for the stack of the engine's threads",
    "FAILED_TO_PARSE_TOO_COMPLEX": "it is nested too deeply for the engine's parser",
    "spark.driver.maxResultSize": "its answer is too large to be collected",
}
"""Texts that mark a job that exceeds a limit, and what they mean."""


_BUCKET: Final = re.compile(rf"{UNREADABLE}: ([^\n]*)")
_PYTHON: Final = {
    "PYTHON_VERSION_MISMATCH": "it must be of the same minor release as the service's",
    "PACKAGE_NOT_INSTALLED": "it needs pyarrow and obstore",
    "No module named 'pyarrow'": "it needs pyarrow and obstore",
    "Cannot run program": "there is no such program",
}
"""Texts of a Python of Spark's that cannot run the reads of buckets, and what it lacks."""


_LOST: Final = re.compile(
    r"""(?<![\w.$])(?:
      java\.io\.(?:IO|EOF|FileNotFound|InterruptedIO)Exception
    | java\.net\.(?:\w*Connect|\w*Socket\w*|UnknownHost|NoRouteToHost|PortUnreachable)Exception
    | java\.nio\.(?:file|channels)\.\w+
    | java\.lang\.(?:Interrupted|ClassNotFound)Exception
    | java\.lang\.(?:NoClassDefFound|Linkage|UnsatisfiedLink|ExceptionInInitializer)Error
    | java\.util\.concurrent\.(?:Timeout|Cancellation|RejectedExecution)Exception
    | io\.(?:netty|grpc)\.[\w.]+
    | org\.apache\.spark\.(?:shuffle|storage|rpc|network|scheduler)\.[\w.]*(?:Exception|Error)
    | org\.apache\.spark\.(?:TaskKilled|ExecutorDead)Exception
    | org\.apache\.hadoop\.(?:fs|ipc|net|security)\.[\w.$]*Exception
    )(?![\w$])""",
    re.VERBOSE,
)
"""Exceptions of Java that name what was lost, unless an expression has raised them."""
_LOST_WORDS: Final = re.compile(
    r"\bExecutorLostFailure\b|\bFetchFailed\b|\bstopped SparkContext\b"
    r"|\bSparkContext (?:was|has been) (?:shut down|stopped)\b"
    r"|\bFailed to get broadcast_|\bpart of cancellation of\b|\bNo space left on device\b"
)
"""Words with which Spark's scheduler, or the system, reports a loss."""
_ANALYSERS: Final = (
    "org.apache.spark.sql.catalyst.analysis.",
    "org.apache.spark.sql.catalyst.parser.",
    "org.apache.spark.sql.classic.SparkSession.sql(",
)
_FRAME: Final = re.compile(r"\bat (?:[\w.]+/)?(org\.apache\.spark\.[\w.$]+)")
_EXPRESSIONS: Final = (
    "org.apache.spark.sql.catalyst.",
    "org.apache.spark.unsafe.types.",
    "org.apache.spark.util.sketch.",
)
"""Packages that evaluate expressions: an exception from there is not a loss, even if it is an
`IOException`."""
_MEMORY: Final = re.compile(r"\bOutOfMemoryError\b")
_ONE_VALUE: Final = ("exceeds VM limit", "exceeds implementation limit")
"""Texts of an `OutOfMemoryError` for an array that no memory could hold: a value is too large."""
_RAISED: Final = re.compile(
    r"Caused by: |most recent failure: [^\n]*?\): |An error occurred while calling [^\n]*\n: "
)
"""Prefixes of the exception that was raised. After the last of them comes the innermost one."""
_PACKAGE: Final = re.compile(r"^(?:[a-z][\w$]*\.)+(?=[A-Z]\w*)")


class SparkGone(Exception):
    """Raised if Spark did not answer, or runs no more jobs: it has most likely died."""


def make_job_failed(job_id: str, error: BaseException, text_bytes_max: int) -> JobFailed:
    """Return the answer for a job that ended with `error`. Raises `SparkGone` if Spark did not
    answer."""
    code, text = describe(error)
    return JobFailed(job_id, code, _clip(text, text_bytes_max))


def describe(error: BaseException) -> tuple[str, str]:
    """Return an error class of `actors.runtime.errors` and a short text. Raises `SparkGone`."""
    if isinstance(error, PenstockError):
        code, text, _ = to_wire(error)
        return code, text
    # An error raised inside a task arrives wrapped, so the whole chain of causes is searched, and
    # also the texts, in which Spark always writes `[CONDITION] … SQLSTATE: xxxxx`.
    texts = [str(link) for link in _chain(error)]
    # A bucket that does not answer, or a Python that lacks what it needs, is not an error of the
    # data, whatever SQLSTATE Spark gives to errors in Python.
    for text in texts:
        if found := _BUCKET.search(text):
            return "EngineLost", found[1].strip()
    for name, needed in _PYTHON.items():
        if any(name in text for text in texts):
            hint = f"Spark's Python cannot run Penstock's reads of buckets: {needed} (set"
            return (
                "EngineLost",
                f"{hint} spark.pyspark.python in spark_conf); {short_text(texts[0])}",
            )
    for name, meaning in _LIMITS.items():
        if any(name in text for text in texts):
            return "JobTooLarge", f"{meaning} ({name})"
    # Raised by analysis, but the text is not at fault.
    if isinstance(error, AnalysisException) and error.getCondition() == _NO_FILE:
        hint = "all machines of Spark need the part files at the same path"
        return "EngineLost", f"{short_text(str(error))}; {hint}"
    if isinstance(error, AnalysisException) and not _is_evaluated(error):
        return "QueryRejected", short_text(str(error))
    if isinstance(error, PySparkException) and condition_of(error) == _UNKNOWN_TYPE:
        return "QueryRejected", f"a column has a type that PySpark does not support: {texts[0]}"
    named = [(text, *found) for text in texts for found in _NAMED.findall(text)]
    for text, condition, state in named:
        if state[:2] in DEFINITE_CLASSES:
            return "DefiniteError", _from(text, condition)
    whole = short_text(texts[0]) or type(error).__name__
    if is_gone(error):
        raise SparkGone(whole) from error
    told = f"{type(error).__name__}: {whole}"
    if any(state[:2] in LOST_CLASSES for *_, state in named) or _is_loss(error, texts):
        return "EngineLost", told
    if any(state[:2] in MEMORY_CLASSES for *_, state in named) or _is_memory(error, texts):
        return "EngineError", told
    # A condition without a SQLSTATE, or an exception without a condition: an expression has raised
    # it, and will raise it again.
    if any(map(_is_of_java, _chain(error))):
        return "DefiniteError", _from(*named[0][:2]) if named else raised_text(error)
    return "EngineError", told


def _is_evaluated(error: AnalysisException) -> bool:
    """Return whether an expression raised the error for its operands, rather than the parser or the
    analysis: `s LIKE pattern` raises an error that names an invalid pattern in this way."""
    stack = getattr(error, "_stackTrace", None) or ""
    return bool(stack) and not any(name in stack for name in _ANALYSERS)


def _is_loss(error: BaseException, texts: list[str]) -> bool:
    """Return whether an error names something that was lost."""
    if any(isinstance(link, OSError | EOFError) for link in _chain(error)):
        return True
    for text in texts:
        if _LOST_WORDS.search(text):
            return True
        for found in _LOST.finditer(text):
            # Its stack ends where the exception that caused it begins.
            stack = text[found.end() :].partition("Caused by: ")[0]
            frame = _FRAME.search(stack)
            if frame is None or not frame[1].startswith(_EXPRESSIONS):
                return True
    return False


def _is_memory(error: BaseException, texts: list[str]) -> bool:
    """Return whether memory was lacking that may be available at another time."""
    if any(isinstance(link, MemoryError) for link in _chain(error)):
        return True
    return any(
        _MEMORY.search(text) and not any(words in text for words in _ONE_VALUE) for text in texts
    )


def _is_of_java(error: BaseException) -> bool:
    """Return whether it is an exception of Java, as reported by py4j, PySpark or its Connect
    client."""
    if isinstance(error, Py4JJavaError):
        return True
    told = type(error).__module__.rpartition(".")[2] in ("captured", "connect")
    return told and isinstance(error, PySparkException)


def raised_text(error: BaseException) -> str:
    """Return the name and message of the exception that was raised first, without packages, tasks
    and stacks, so that it is the same wherever it was raised."""
    # Once the cause is found, the class of the wrapper adds nothing.
    text, name = str(error), f"{type(error).__name__}: "
    for found in [*_RAISED.finditer(text)][-1:]:
        text, name = text[found.end() :], ""
    return short_text(name + _PACKAGE.sub("", text.split("\n\tat ")[0]))


def short_text(text: str) -> str:
    """Return Spark's own words and the place that they name, without the plan tree and the JVM's
    stack."""
    text = text.split("\n\nJVM stacktrace:")[0]
    tree = _PLAN_TREE.search(text)
    if tree:
        text = text[: tree.start()] + (tree["place"] or "")
    lines = [line.rstrip() for line in text.strip().splitlines()]
    kept = [line for line in lines if line and not line.lstrip().startswith("at ")]
    return "\n".join(kept[:_LINES_MAX])


def _from(text: str, condition: str) -> str:
    """Return the text from the name of the condition on."""
    at = text.find(f"[{condition}]")
    return short_text(text[max(at, 0) :].split("\n\tat ")[0])


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        cause = getattr(link, "_cause", None)
        link = cause if isinstance(cause, BaseException) else link.__cause__


def is_gone(error: BaseException) -> bool:
    """Return whether an error means that Spark does not answer, or that another server answers."""
    if retries_exhausted(error):
        return True
    if isinstance(error, PySparkException):
        status = getattr(getattr(error, "_grpc_status_code", None), "name", "")
        condition = condition_of(error)
        return condition == _ANOTHER_SERVER or (condition is None and status in _NO_ANSWER)
    # It is also a `Py4JError`, but an exception of Java is an answer: the JVM is alive.
    if isinstance(error, Py4JJavaError):
        return False
    return isinstance(error, Py4JNetworkError | Py4JError | ConnectionError)


def is_forgotten(error: BaseException) -> bool:
    """Return whether a Spark Connect server has closed the session, so that a new session would
    work."""
    return isinstance(error, PySparkException) and condition_of(error) in _FORGOTTEN


def condition_of(error: PySparkException) -> str | None:
    """Return the name of Spark's error condition; None if the error has none."""
    return error.getCondition() or None


def _clip(text: str, bytes_max: int) -> str:
    data = text.encode()
    return text if len(data) <= bytes_max else data[:bytes_max].decode(errors="ignore") + "…"
