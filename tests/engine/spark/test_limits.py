"""What bounds a job in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.engine.spark.failures import describe
from actors.engine.spark.jobs import SparkEngine
from actors.engine.spark.session import spark_conf
from actors.engine.spark.steps import nesting_of
from actors.runtime.errors import BadSettings, JobTooLarge
from actors.runtime.settings import Settings


@pytest.mark.parametrize(
    ("memory", "bytes_max"),
    [("1g", 1 << 29), ("512m", 1 << 28), ("2048", 1 << 30), ("3GB", 3 << 29), ("64k", 1 << 15)],
)
def test_an_answer_may_take_half_of_the_heap(tmp_path: Path, memory: str, bytes_max: int) -> None:
    conf = spark_conf(Settings(spark_driver_memory=memory), tmp_path)
    assert int(conf["spark.driver.maxResultSize"]) == bytes_max
    mine = Settings(spark_conf={"spark.driver.maxResultSize": "1m"})
    assert spark_conf(mine, tmp_path)["spark.driver.maxResultSize"] == "1m"


def test_a_heap_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="invalid spark_driver_memory 'much'"):
        spark_conf(Settings(spark_driver_memory="much"), tmp_path)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("select 1", 0),
        ("((a) + (b)) * (c)", 2),
        ("f('(((', \"((\", `((`, ('it\\'s ((', g((1))))", 4),
        ("(" * 3000 + "n" + ")" * 3000, 3000),
    ],
)
def test_brackets_are_counted_where_they_nest(text: str, depth: int) -> None:
    assert nesting_of(text) == depth


def test_a_text_that_is_nested_deeper_than_is_allowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkEngine, "_sessions", lambda _: None)
    engine: Any = SparkEngine.__new__(SparkEngine)
    monkeypatch.setattr("actors.engine.spark.steps.NESTING_MAX", 2)
    engine.settings, engine.out, engine._steps = Settings(), tmp_path, None
    engine._here, engine._parts = True, None
    slot = engine.slot()
    slot.check_size("(a) + (b) + ((c))")
    with pytest.raises(JobTooLarge, match="nested 3 levels deep, more than 2"):
        slot.check_size("(((c)))")


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("An error occurred: java.lang.StackOverflowError\n\tat org", "nested too deeply"),
        ("[FAILED_TO_PARSE_TOO_COMPLEX] The statement was too complex", "nested too deeply"),
        ("Total size 9 is bigger than spark.driver.maxResultSize 8", "too large to be collected"),
    ],
)
def test_what_is_over_a_limit_of_the_engine_is_too_large(text: str, meaning: str) -> None:
    code, told = describe(RuntimeError(text))
    assert code == "JobTooLarge"
    assert meaning in told
