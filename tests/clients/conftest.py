"""Services for the tests of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_house import ClientHouse, open_house


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientHouse]:
    """A service on the in-memory engine, with a door for PostgreSQL's clients."""
    with open_house(tmp_path_factory.mktemp("clients")) as made:
        yield made


@pytest.fixture(scope="session")
def spark_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientHouse]:
    """A service on Spark, with both doors."""
    with open_house(tmp_path_factory.mktemp("clients"), on_spark=True) as made:
        yield made
