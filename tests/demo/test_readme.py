"""README's client example, run as it stands against a service of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from actors import Service, Settings

PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
DEFAULT = Settings().listen


@pytest.mark.spark
async def test_the_client_example_prints_what_it_says(root: Path, tmp_path: Path) -> None:
    (example,) = PYTHON_BLOCK.findall((root / "README.md").read_text())
    assert DEFAULT in example
    settings = Settings(state_dir=str(tmp_path / "state"), listen="127.0.0.1:0")
    async with Service(settings) as service:
        script = tmp_path / "example.py"
        script.write_text(example.replace(DEFAULT, service.address))
        with anyio.fail_after(100):
            done = await anyio.run_process(
                [sys.executable, str(script)], stderr=subprocess.STDOUT, check=False
            )
    printed = done.stdout.decode().splitlines()
    assert done.returncode == 0, printed
    promised = [line.partition("# ")[2].strip() for line in example.splitlines() if "# [" in line]
    assert printed[:2] == promised


def test_commands_named_in_the_readme_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE))
    text = (root / "README.md").read_text()
    assert set(re.findall(r"make ([a-z]+) ", text)) <= targets
    for link in re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", text):
        assert (root / link).exists(), link
