"""What errors mean, and how little of Spark's text is kept."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JJavaError, Py4JNetworkError

from actors.engine.spark.failures import SparkGone, describe, make_job_failed, short_text
from actors.runtime.errors import InvalidUsage

TASK = (
    "Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times: "
    "org.apache.spark.SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero. "
    "SQLSTATE: 22012\n== SQL (line 1, position 8) ==\nselect 1/x\n"
    "\tat org.apache.spark.A(B.scala)\n"
)


def test_an_error_of_the_data_is_found_in_the_chain_of_causes() -> None:
    outer = RuntimeError("Exception thrown in awaitResult")
    outer.__cause__ = RuntimeError(TASK)
    code, text = describe(outer)
    assert code == "DefiniteError"
    assert text.startswith("[DIVIDE_BY_ZERO] Division by zero.")
    assert "\tat " not in text


class RaisedInJava(Py4JJavaError):  # type: ignore[misc]
    """An exception as py4j tells it, without a JVM to ask for its text."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self.text = text

    def __str__(self) -> str:
        return f"An error occurred while calling o1.collect.\n: {self.text}"


ABORTED = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 7.0 failed "
    "1 times, most recent failure: Lost task 0.0 in stage 7.0 (TID 12) (host executor driver): "
)
IN_EXPRESSION = (
    "\n\tat java.base/java.io.InputStream.readFully(InputStream.java:1)"
    "\n\tat org.apache.spark.sql.catalyst.expressions.GeneratedClass$It.processNext(x.java:9)"
    "\n\tat org.apache.spark.sql.execution.WholeStageCodegenExec.doExecute(x.scala:1)\n"
)
IN_SHUFFLE = (
    "\n\tat org.apache.spark.storage.DiskBlockObjectWriter.write(x.scala:1)"
    "\n\tat org.apache.spark.sql.catalyst.expressions.GeneratedClass$It.processNext(x.java:9)\n"
)


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (
            "java.lang.IllegalArgumentException: requirement failed: from 1 to 4 by 0",
            "IllegalArgumentException: requirement failed: from 1 to 4 by 0",
        ),
        (
            "java.util.regex.PatternSyntaxException: Unclosed group near index 1\n(",
            "PatternSyntaxException: Unclosed group near index 1\n(",
        ),
        ("scala.MatchError: 7 (of class Integer)", "MatchError: 7 (of class Integer)"),
        (
            "java.lang.OutOfMemoryError: Requested array size exceeds VM limit",
            "OutOfMemoryError: Requested array size exceeds VM limit",
        ),
        ("java.io.IOException: Unexpected version (1)", "IOException: Unexpected version (1)"),
        (
            "org.apache.spark.SparkException: [NO_STATE_OF_ITS_OWN] is without. SQLSTATE: 0A000",
            "[NO_STATE_OF_ITS_OWN] is without. SQLSTATE: 0A000",
        ),
    ],
)
@pytest.mark.parametrize("where", ["", ABORTED])
def test_whatever_an_expression_raises_is_definite(where: str, raised: str, text: str) -> None:
    driver = f"\nDriver stacktrace:\n\tat org.apache.spark.A(B.scala)\nCaused by: {raised}"
    aborted = f"{where}{raised}{IN_EXPRESSION}{(driver + IN_EXPRESSION) * bool(where)}"
    assert describe(RaisedInJava(aborted)) == ("DefiniteError", text)


@pytest.mark.parametrize(
    "text",
    [
        "[FAILED_READ_FILE.NO_HINT] Encountered error. SQLSTATE: KD001",
        f"java.io.IOException: No space left on device{IN_EXPRESSION}",
        f"java.io.FileNotFoundException: /tmp/blockmgr-1/0c/shuffle_0{IN_SHUFFLE}",
        "org.apache.spark.shuffle.FetchFailedException: Connection refused",
        "org.apache.spark.SparkException: ExecutorLostFailure (executor 3 exited)",
        "org.apache.spark.SparkException: Job 5 cancelled because SparkContext was shut down",
        "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.",
        "java.util.concurrent.TimeoutException: Futures timed out after [300 seconds]",
        "java.net.SocketTimeoutException: connect timed out",
        "java.nio.channels.ClosedByInterruptException",
    ],
)
@pytest.mark.parametrize("where", ["", ABORTED])
def test_a_loss_is_known_by_what_was_lost(where: str, text: str) -> None:
    assert describe(RaisedInJava(where + text))[0] == "EngineLost"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[UNABLE_TO_ACQUIRE_MEMORY] Unable to acquire 10 bytes. SQLSTATE: 53200"),
        RaisedInJava("java.lang.OutOfMemoryError: Java heap space"),
        MemoryError(),
        KeyError("a fault of this process"),
    ],
)
def test_what_may_do_better_at_another_time_is_neither(error: Exception) -> None:
    assert describe(error)[0] == "EngineError"


def test_a_disk_of_this_machine_is_lost() -> None:
    assert describe(OSError(28, "No space left on device"))[0] == "EngineLost"


def test_our_own_errors_keep_their_name() -> None:
    assert describe(InvalidUsage("no such column")) == ("InvalidUsage", "no such column")


def test_a_jvm_that_does_not_answer() -> None:
    with pytest.raises(SparkGone):
        describe(Py4JNetworkError("Answer from Java side is empty"))


def test_texts_are_short() -> None:
    text = "[X] cannot be resolved. SQLSTATE: 42703; line 1 pos 7;\n'Project ['nope]\n+- Relation"
    assert short_text(text) == "[X] cannot be resolved. SQLSTATE: 42703; line 1 pos 7"
    assert short_text("[X] of a plan;\n'Project ['nope]") == "[X] of a plan"
    answer = make_job_failed("j", InvalidUsage("é" * 5000), 100)
    assert len(answer.text.encode()) <= 103
