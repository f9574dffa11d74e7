"""Fixtures for pytest: ``pytest_plugins = ["actors.testing.fixtures"]`` in a conftest.

`stage` is an `ActorIsolation` on a loop of virtual time. A test that uses it runs on such a loop
(pytest-asyncio gives every test the loop that `pytest_asyncio_loop_factories` names); other tests
keep their loop. A conftest with a hook of that name overrides this one for its folder and must then
provide the loop of virtual time itself.

`patient_loop` runs a test on a loop whose time stops while the loop is late, for tests of sockets
and their deadlines; see `actors.testing.patient_loop`.

Options. ``--messages-encoded``: encode and decode every message between actors, in all tests.
``--stage-orders N``: run each test that uses a stage N times, each time with another order of
simultaneously ready callbacks, drawn from a seed that the test's name shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Final

import pytest
import pytest_asyncio

from actors.testing.encoding import encode_all
from actors.testing.isolation import ActorIsolation
from actors.testing.patient_loop import PatientLoop
from actors.testing.virtual_time import VirtualTimeLoop

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

FIXTURES: Final = ("stage",)
"""Fixtures that run a test on a loop of virtual time."""
PATIENT: Final = "patient_loop"
"""Fixture that runs a test on a loop whose time stops while the loop is late."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("actors")
    group.addoption(
        "--messages-encoded",
        action="store_true",
        help="encode and decode every message between actors",
    )
    group.addoption(
        "--stage-orders",
        type=int,
        default=0,
        metavar="N",
        help="run tests on a stage N times, each with another order of ready callbacks",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Install mailboxes that encode messages, if requested."""
    if config.getoption("messages_encoded"):
        encode_all(True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore plain mailboxes."""
    if config.getoption("messages_encoded"):
        encode_all(False)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """Return the loops on which a test runs, once on each."""
    names = set(getattr(item, "fixturenames", ()))
    if not names.intersection(FIXTURES):
        return {"patient": PatientLoop} if PATIENT in names else {"asyncio": asyncio.new_event_loop}
    orders: int = config.getoption("stage_orders")
    if orders < 1:
        return {"virtual": VirtualTimeLoop}
    return {f"order-{seed}": partial(VirtualTimeLoop, seed) for seed in range(orders)}


@pytest_asyncio.fixture
async def stage() -> AsyncIterator[ActorIsolation]:
    """Yield an empty stage; see `actors.testing.isolation`."""
    async with ActorIsolation() as made:
        yield made


@pytest.fixture
def patient_loop() -> None:
    """Run the test on a `PatientLoop`; see `pytest_asyncio_loop_factories`."""


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return a line for the report if messages are encoded."""
    return "messages between actors are encoded" if config.getoption("messages_encoded") else None
