"""Cores of the loop's and of the engine's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from actors.engine.spark.cores import CoreAssignment, cores, format_cores
from actors.runtime.errors import BadSettings


@pytest.fixture(autouse=True)
def asked_afresh() -> Iterator[None]:
    cores.cache_clear()
    yield
    cores.cache_clear()


def test_the_loop_has_the_first_and_the_engine_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2, 9})
    assert cores() == CoreAssignment(frozenset({2, 5, 9}), frozenset({2}), frozenset({5, 9}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2})  # pinned meanwhile
    assert format_cores(cores().engine) == "5, 9"


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(BadSettings, match=r"pin_cores.*\[3\]"):
        cores()
