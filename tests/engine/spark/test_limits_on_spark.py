"""Numbers of rows by parameters, on Spark as in PostgreSQL."""

from __future__ import annotations

import psycopg
import pytest

from spark_house import SparkHouse  # type: ignore[import-not-found]

ROWS = "SELECT x FROM (VALUES (1), (2), (3)) AS t(x) ORDER BY x"


@pytest.mark.parametrize(
    ("clause", "values", "wanted"),
    [
        ("LIMIT $1", ["2"], [1, 2]),
        ("LIMIT $1 OFFSET $2", ["1", "2"], [3]),
        ("LIMIT $1::int8 OFFSET $2::int2", ["1", "1"], [2]),
        ("LIMIT ($1 + 1)", ["1"], [1, 2]),
        ("LIMIT $1 OFFSET $2", [None, None], [1, 2, 3]),
        ("LIMIT $1", ["9223372036854775807"], [1, 2, 3]),
        ("LIMIT $1", ["-1"], "2201W"),
        ("OFFSET $1", ["-1"], "2201X"),
        ("LIMIT $1", ["x"], "22P02"),
    ],
)
def test_a_parameter_is_a_number_of_rows(
    spark_house: SparkHouse, clause: str, values: list[str | None], wanted: object
) -> None:
    """Of any type of whole numbers, NULL for all; executed again."""
    with psycopg.connect(spark_house.dsn, autocommit=True) as connection:
        for _ in range(2):
            cursor = psycopg.RawCursor(connection)
            found: object
            try:
                found = [x for (x,) in cursor.execute(f"{ROWS} {clause}", values, prepare=True)]
            except psycopg.Error as error:
                found = error.sqlstate
            assert found == wanted
