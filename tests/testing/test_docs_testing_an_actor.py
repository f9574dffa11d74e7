"""docs/internals/testing-an-actor.md: its snippets, put together as a project of a stranger, are
run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.testing.patience import PROGRAM_S


def files(page: Path) -> dict[str, str]:
    """What the page says stands in each file: snippets of one file follow each other."""
    found: dict[str, str] = {}
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        first, _, rest = snippet.partition("\n")
        assert first.startswith("# file: "), f"a snippet without its file: {first}"
        name = first.removeprefix("# file: ")
        found[name] = found.get(name, "") + rest + "\n\n"
    return found


@pytest.mark.parametrize("options", [[], ["--messages-encoded", "--stage-orders", "3"]], ids=str)
def test_a_stranger_can_follow_it(root: Path, tmp_path: Path, options: list[str]) -> None:
    given = files(root / "docs" / "internals" / "testing-an-actor.md")
    assert given.keys() == {"conftest.py", "watchman.py", "test_watchman.py"}
    for name, text in given.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    count = given["test_watchman.py"].count("async def test_") * (3 if options else 1)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} passed" in done.stdout
