"""Test Spark's JDBC driver for Connect against the service and docs/reference/compatibility.md."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest
from client_house import ClientHouse, page_differences, run_java

JARS = Path(pyspark.__file__).parent / "jars"
# Arrow and Spark look into classes that a JVM closes since Java 16.
OPTIONS = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/sun.util.calendar=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
)


@pytest.mark.spark
@pytest.mark.second
def test_what_the_connect_driver_can_do(
    client_house_on_spark: ClientHouse, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    # The driver and the client that it needs lie beside Spark's other jars in its distribution.
    own = sorted((JARS / "connect-repl").glob("spark-connect-client-*.jar"))
    jars = [*map(str, own), str(JARS / "*")]
    sight = run_java(
        "ConnectJdbcProgram", jars, [client_house_on_spark.connect_address], tmp_path, *OPTIONS
    )
    assert page_differences(sight, pytestconfig) == []
