"""Hooks of all tests: a machine without a server passes all that need none, and is told what to
install."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from actors.testing.postgres_server import NotInstalled


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test whose server cannot be started."""
    try:
        return (yield)
    except NotInstalled as missing:
        pytest.skip(str(missing))


pytest_runtest_call = pytest_runtest_setup
