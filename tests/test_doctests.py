"""Examples in docstrings say what the code does."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
