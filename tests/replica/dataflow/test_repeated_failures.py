"""Which failures are a view's error, and after how many attempts."""

from __future__ import annotations

import logging

import pytest

from actors.replica.dataflow import repeated_failures
from actors.replica.dataflow.policy import StepDeclined
from actors.replica.dataflow.repeated_failures import RepeatedFailures
from actors.runtime.errors import (
    DefiniteError,
    EngineError,
    EngineLost,
    EngineUnavailable,
    JobTooLarge,
    QueryRejected,
    StorageError,
)
from actors.runtime.metric_table import STEPS_IN_ERROR


@pytest.mark.parametrize(
    "error", [EngineError("no memory"), QueryRejected("no column"), KeyError("a fault of ours")]
)
def test_the_third_failure_in_the_same_way_is_the_views(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[object, ...]] = []
    monkeypatch.setattr(repeated_failures, "measure", lambda *given: measured.append(given))
    failures = RepeatedFailures("v", "u1")
    for _ in range(2):
        with pytest.raises(type(error)), failures.judged():
            raise error
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            with pytest.raises(DefiniteError, match=str(error.args[0])), failures.judged():
                raise error
    assert len(caplog.records) == 1, "told once"
    assert measured == [(STEPS_IN_ERROR, 1, "u1")]
    with failures.judged():
        pass
    assert failures.note(error) is None, "a step that succeeds begins anew"


def test_numbers_make_no_other_failure_and_words_do() -> None:
    failures = RepeatedFailures("v", "u1")
    for number in range(2):
        assert failures.note(EngineError(f"stage {number}.0 of task 0x{number}f")) is None
        assert failures.note(EngineError(f"{'other ' * number}words")) is None
    assert failures.note(EngineError("stage 7.0 of task 0xabc1")) == "stage 7.0 of task 0xabc1"


@pytest.mark.parametrize(
    "error",
    [
        *(
            EngineLost("x"),
            EngineUnavailable("x"),
            StorageError("x", determinate=True),
            OSError("x"),
        ),
        *(DefiniteError("x"), JobTooLarge("x"), StepDeclined()),
    ],
)
def test_a_loss_and_what_is_judged_already_are_not_counted(error: Exception) -> None:
    failures = RepeatedFailures("v", "u1")
    for _ in range(9):
        with pytest.raises(type(error)) as raised, failures.judged():
            raise error
        assert raised.value is error
