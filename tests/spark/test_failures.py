"""What errors mean, and how little of Spark's text is kept."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JNetworkError

from actors.errors import InvalidUsage
from actors.spark.failures import SparkGone, describe, make_job_failed, short_text

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


@pytest.mark.parametrize(
    "text",
    [
        "[UNABLE_TO_ACQUIRE_MEMORY] Unable to acquire 10 bytes. SQLSTATE: 53200",
        "[FAILED_READ_FILE.NO_HINT] Encountered error. SQLSTATE: KD001",
        "java.lang.OutOfMemoryError: Java heap space",
    ],
)
def test_what_may_go_away_is_tried_again(text: str) -> None:
    assert describe(RuntimeError(text))[0] == "EngineLost"


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
