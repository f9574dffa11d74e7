"""Services for the tests of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_house import ClientHouse, fill_house, open_house

from spark_house import SparkHouse  # type: ignore[import-not-found]


@pytest.fixture(scope="module", params=["spark", "in_memory"])
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClientHouse]:
    """Yield a service with a PostgreSQL listener, on each engine. What a program sees, and what the
    page says, is the same on both."""
    if request.param == "spark":
        yield request.getfixturevalue("client_house_on_spark")
        return
    with open_house(tmp_path_factory.mktemp("clients")) as made:
        yield made


@pytest.fixture(scope="module")
def client_house_on_spark(spark_house: SparkHouse) -> ClientHouse:
    """Return the service on Spark, with both listeners."""
    return fill_house(ClientHouse(spark_house.portal, spark_house.service, spark_house.client))
