"""Every test of the suite asserts something in its own body, where a reader looks for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
CALLS = {"pytest.raises", "pytest.fail", "pytest.warns"}


def asserts(node: ast.AST) -> bool:
    """Return whether a node is an assertion that can fail: `assert True` is none."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS


def without_assertion(source: str, name: str) -> Iterator[str]:
    """Yield ``file:line function`` of each test in a source that asserts nothing in its body."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("test_") and not any(map(asserts, ast.walk(node))):
            yield f"{name}:{node.lineno} {node.name}"


def test_every_test_asserts_something_in_its_body() -> None:
    paths = sorted(TESTS.rglob("test_*.py"))
    assert Path(__file__) in paths
    found = [
        each
        for path in paths
        for each in without_assertion(path.read_text(), str(path.relative_to(TESTS.parent)))
    ]
    assert found == []


SAMPLE = """
import pytest

def check(x): assert x

def test_by_a_helper(): check(1)

async def test_by_a_constant():
    assert True

def test_by_an_error():
    with pytest.raises(ValueError): int("x")

class TestMore:
    def test_within(self):
        def inner(x): assert x > 1
        inner(2)

    def test_nothing(self): pass
"""


def test_a_test_without_an_assertion_is_found() -> None:
    assert list(without_assertion(SAMPLE, "tests/test_x.py")) == [
        "tests/test_x.py:6 test_by_a_helper",
        "tests/test_x.py:8 test_by_a_constant",
        "tests/test_x.py:19 test_nothing",
    ]
