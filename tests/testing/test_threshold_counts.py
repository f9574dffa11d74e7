"""Thresholds are counted over all processes of a run, and a full run fails without a side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.runtime.settings import Settings
from actors.runtime.threshold_probes import (
    COUNTS_VARIABLE,
    INLINE_PART,
    THRESHOLDS,
    TOUCHED_ROWS,
    SettingThreshold,
    counts,
)
from tests.kit.threshold_counts import (
    BEGIN,
    END,
    REQUIRED_VARIABLE,
    ThresholdCounting,
    is_full,
    kind_of,
    main,
    read_counts,
    sides_never_taken,
    with_table,
)

CROSS = """
from actors.runtime.threshold_probes import TOUCHED_ROWS, INLINE_PART
INLINE_PART.crossed(True)
TOUCHED_ROWS.crossed(False)
TOUCHED_ROWS.crossed(True)
print("crossed", flush=True)
input()
"""


def test_a_decision_is_counted_and_returned() -> None:
    before = counts()
    assert INLINE_PART.crossed(True)
    assert not INLINE_PART.crossed(False)
    assert not INLINE_PART.crossed(False)
    after = counts()
    place = INLINE_PART.place
    assert [b - a for a, b in zip(before, after, strict=True)][place : place + 2] == [2, 1]


def test_names_are_unique_and_settings_are_there() -> None:
    names = [each.name for each in THRESHOLDS]
    assert len(set(names)) == len(names)
    for each in THRESHOLDS:
        assert each.within != each.beyond, each.name
        if isinstance(each, SettingThreshold):
            assert each.setting in Settings.__struct_fields__
    assert len(THRESHOLDS) > 30


def test_what_a_killed_process_has_counted_is_there(tmp_path: Path) -> None:
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", CROSS],
            env=os.environ | {COUNTS_VARIABLE: str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"crossed\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = read_counts(tmp_path)
    assert found[INLINE_PART.name] == [0, 2]
    assert found[TOUCHED_ROWS.name] == [2, 2]
    missing = sides_never_taken(found)
    assert f"{INLINE_PART.name}: never within: {INLINE_PART.within}" in missing
    assert not any(line.startswith(f"{TOUCHED_ROWS.name}: ") for line in missing)
    assert len(missing) == 2 * len(THRESHOLDS) - 3


def test_the_table_is_written_into_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nformer\n{END}\nafter\n")
    assert main([str(page), "--from", str(tmp_path)]) == 1  # nothing was counted
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(THRESHOLDS)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "former" not in text
    assert text.count("\n| ") == len(THRESHOLDS) + 1
    with pytest.raises(ValueError, match="lacks"):
        with_table("no marks", {})


def test_the_page_lists_every_threshold(root: Path) -> None:
    page = (root / "docs" / "internals" / "testing.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for each in THRESHOLDS:
        start = f"| {kind_of(each)} | {each.within} | "
        assert any(row.startswith(start) and f" | {each.beyond} | " in row for row in rows), (
            f"{each.name}: write the page anew with `make thresholds`"
        )


PLAIN = dict.fromkeys(
    [
        "keyword",
        "markexpr",
        "deselect",
        "collectonly",
        "lf",
        "stepwise",
        "ignore",
        "ignore_glob",
    ]
) | {"whole": True}
"""The options of a full run."""


def run_of(config: pytest.Config, source: object, **chosen: object) -> Any:
    """The configuration of a run with these options."""
    option = SimpleNamespace(**(PLAIN | chosen))
    cache = SimpleNamespace(set=lambda key, value: None)
    return SimpleNamespace(
        args_source=source, ArgsSource=config.ArgsSource, option=option, cache=cache
    )


def test_only_a_run_of_the_whole_suite_is_full(pytestconfig: pytest.Config) -> None:
    sources = pytestconfig.ArgsSource

    def full(source: object, **chosen: object) -> bool:
        return is_full(run_of(pytestconfig, source, **chosen))

    assert full(sources.TESTPATHS)
    assert not full(sources.TESTPATHS, whole=False)
    assert not full(sources.ARGS)
    assert not full(sources.TESTPATHS, markexpr="not spark")
    assert not full(sources.TESTPATHS, keyword="some")


@pytest.mark.parametrize(
    ("required", "keyword", "status"), [(None, "", 0), ("1", "", 1), ("0", "", 0), ("1", "k", 0)]
)
def test_a_full_run_fails_that_leaves_a_side_out(
    required: str | None,
    keyword: str,
    status: int,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(COUNTS_VARIABLE, str(tmp_path))  # nothing was counted there
    monkeypatch.delenv(REQUIRED_VARIABLE, raising=False)
    if required is not None:
        monkeypatch.setenv(REQUIRED_VARIABLE, required)
    config = run_of(pytestconfig, pytestconfig.ArgsSource.TESTPATHS, keyword=keyword)
    session: Any = SimpleNamespace(exitstatus=0)
    ThresholdCounting(config).pytest_sessionfinish(session)
    assert session.exitstatus == status
