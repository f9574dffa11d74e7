"""Runs the view scripts' queries through both doors, and compares the rows with Spark's own.

Run: ``python tests/proof/door_queries.py [--queries 2000] [--seed 1] [--only NAME]``.

A service of its own has each script's tables, with random rows. Each query of a script, and
variants of it (inside another query, under WITH, joined with itself, by plain views), is asked of
PostgreSQL's door by psycopg, in text and in binary, and of Spark Connect by an unmodified PySpark.
Another session of PySpark has the same rows as temporary views of its own, which hide the tables:
what Spark says over those is the right answer. Rows are compared without an order; a query that
Spark refuses must be refused by both doors. A third session has the rows the other way round: where
Spark itself says something else then (ties, dice, clocks), there is no right answer.

Exit status 1 when any answer differs. Queries whose text PostgreSQL's dialect reads differently
(double quotes, backslashes) are asked of Spark Connect alone.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql.connect.session import SparkSession

from actors.model.plan.schema import arrow_type
from actors.testing.view_scripts import ViewScript, inlined, parse_script, random_value

SCRIPTS: Final = Path(__file__).resolve().parents[1] / "scripts"
ROWS: Final = 60
ANSWER_ROWS_MAX: Final = 20_000
"""Joins of a few tables without a condition have millions of rows."""
VARIANTS: Final = (
    "{query}",
    "SELECT * FROM ({query}) q",
    "WITH w AS ({query}) SELECT * FROM w",
    "SELECT count(*) AS n FROM ({query}) q",
    "({query}) UNION ALL ({query})",
)


class DoorCheck:
    """Asks both doors and Spark, and counts."""

    def __init__(self, pg: psycopg.Connection[Any], spark: Any, oracles: list[Any]) -> None:
        self._pg = pg
        self._spark = spark
        self._oracles = oracles
        self.asked: Counter[str] = Counter()
        self.wrong: list[str] = []

    def load(self, script: ViewScript, dice: random.Random) -> None:
        """Make the script's tables in the service, and as temporary views of Spark's own."""
        for name, schema in script.tables.items():
            columns = ", ".join(
                f"`{c.name}` {c.type}" + ("" if c.nullable else " NOT NULL") for c in schema.columns
            )
            key = f", PRIMARY KEY ({', '.join(f'`{k}`' for k in schema.key)})" if schema.key else ""
            # By Spark's door: PostgreSQL's TIMESTAMP is another type.
            self._spark.sql(f"CREATE TABLE `{name}` ({columns}{key})")
            rows: dict[Any, tuple[Any, ...]] = {}
            for number in range(ROWS):
                row = tuple(
                    None
                    if c.nullable and c.name not in schema.key and dice.random() < 0.15
                    else random_value(c.type, dice)
                    for c in schema.columns
                )
                place = [c.name for c in schema.columns]
                keyed = tuple(row[place.index(k)] for k in schema.key) if schema.key else number
                rows[keyed] = row
            kinds = [arrow_type(c.type) for c in schema.columns]
            arrays = [
                pa.array(list(values), kind)
                for values, kind in zip(zip(*rows.values(), strict=True), kinds, strict=True)
            ]
            table = pa.table(arrays, names=[c.name for c in schema.columns])
            self._insert(name, table, [c.type for c in schema.columns])
            casts = [f"CAST(`{c.name}` AS {c.type}) AS `{c.name}`" for c in schema.columns]
            turned = table.take(pa.array(range(table.num_rows - 1, -1, -1), pa.int64()))
            for oracle, rows_ in zip(self._oracles, (table, turned), strict=True):
                frame = oracle.createDataFrame(rows_).selectExpr(*casts)
                frame.createOrReplaceTempView(name)

    def _insert(self, name: str, table: pa.Table, types: list[str]) -> None:
        # By Spark's own writer: rows of every type go in as they are.
        view = "rows_to_insert"
        frame = self._spark.createDataFrame(table)
        casts = [
            f"CAST(`{n}` AS {t}) AS `{n}`" for n, t in zip(table.column_names, types, strict=True)
        ]
        frame.selectExpr(*casts).createOrReplaceTempView(view)
        self._spark.table(view).write.insertInto(name)

    def clear(self, script: ViewScript) -> None:
        """Drop the script's tables."""
        for name in script.tables:
            self._pg.execute(f"DROP TABLE IF EXISTS `{name}` CASCADE".encode())
            for oracle in self._oracles:
                oracle.catalog.dropTempView(name)

    def check(self, label: str, query: str) -> None:
        """Ask for one query everywhere."""
        wanted = _of_spark(self._oracles[0], query, ANSWER_ROWS_MAX + 1)
        self.asked["queries"] += 1
        if len(wanted) > ANSWER_ROWS_MAX:
            self.asked["too large"] += 1
            return
        self._compare(label, query, "connect", wanted, _of_spark(self._spark, query))
        # PostgreSQL's simple protocol takes several statements.
        if ";" in query or '"' in query or "\\" in query or "$" in query:
            return
        for binary in (False, True):
            door = "pg binary" if binary else "pg text"
            self._compare(label, query, door, wanted, self._of_pg(query, binary=binary))

    def _compare(self, label: str, query: str, door: str, wanted: Any, found: Any) -> None:
        self.asked[door] += 1
        if isinstance(wanted, str) or isinstance(found, str):
            same = isinstance(wanted, str) and isinstance(found, str)
        else:
            same = _same(wanted, found, exact=door == "connect")
        if not same and self._is_open(query, wanted):
            self.asked["without a right answer"] += 1
        elif not same:
            self.wrong.append(
                f"{label} by {door}: {query}\n  Spark: {_shown(wanted)}\n  {door}: {_shown(found)}"
            )
            print(f"DIFFERS {self.wrong[-1]}", flush=True)

    def _is_open(self, query: str, wanted: Any) -> bool:
        """Return whether Spark answers otherwise later, or for rows in another order."""
        if isinstance(wanted, str):
            return False
        again = [_of_spark(oracle, query) for oracle in self._oracles]
        return any(isinstance(each, str) or not _same(wanted, each, exact=False) for each in again)

    def _of_pg(self, query: str, *, binary: bool) -> Any:
        try:
            with self._pg.cursor(binary=binary) as cursor:
                found = cursor.execute(query.encode()).fetchall()
        except psycopg.Error as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
        return [tuple(map(_plain, row)) for row in found]


def _of_spark(spark: Any, query: str, rows_max: int | None = None) -> Any:
    try:
        frame = spark.sql(query)
        found = (frame if rows_max is None else frame.limit(rows_max)).toArrow()
    except PySparkException as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return [tuple(map(_plain, row)) for row in _rows(found)]


def free_port() -> int:
    """Return a port of this machine that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    if not table.num_columns:
        return
    yield from zip(*(column.to_pylist() for column in table.columns), strict=True)


def _plain(value: Any) -> Any:
    """Return a value as both sides have it."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC)
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def _same(wanted: list[Any], found: list[Any], *, exact: bool) -> bool:
    if len(wanted) != len(found):
        return False
    if exact and Counter(map(repr, wanted)) == Counter(map(repr, found)):
        return True
    left, right = sorted(map(_sortable, wanted)), sorted(map(_sortable, found))
    return all(map(_close, left, right))


def _sortable(row: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(_text(value) for value in row)


def _text(value: Any) -> str:
    # What PostgreSQL has no type for is text there: only that it is there is compared.
    if isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(v, tuple | dict | list) for v in value)
    ):
        return "nested"
    if isinstance(value, str) and value[:1] in "{[(":
        return "nested"
    if isinstance(value, list):
        return repr([_text(each) for each in value])
    return f"{value:.9e}" if isinstance(value, float) else repr(value)


def _close(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
    return left == right or all(
        a == b or "nested" in (a, b) or _near(a, b) for a, b in zip(left, right, strict=True)
    )


def _near(left: str, right: str) -> bool:
    """Sums of floats differ by the order of their rows."""
    try:
        return math.isclose(float(left), float(right), rel_tol=1e-7, abs_tol=1e-9)
    except ValueError:
        return False


def _shown(rows: Any) -> str:
    return rows if isinstance(rows, str) else f"{len(rows)} rows {sorted(map(repr, rows))[:3]}"


def scripts(only: str) -> list[ViewScript]:
    """Return the scripts without settings of their own, which doors have for the service alone."""
    found = [parse_script(path.read_text(), path.stem) for path in sorted(SCRIPTS.glob("*.view"))]
    return [each for each in found if not each.conf and only in each.path and _has_rows(each)]


def _has_rows(script: ViewScript) -> bool:
    """Return whether rows can be drawn for all tables: none have columns of nested types."""
    kinds = (column.type for schema in script.tables.values() for column in schema.columns)
    return not any(pa.types.is_nested(arrow_type(kind)) for kind in kinds)


def spend(check: DoorCheck, queries: int, seed: int, only: str) -> None:
    """Ask until so many queries were asked."""
    known = scripts(only)
    turn = 0
    while check.asked["queries"] < queries and turn < len(VARIANTS):
        dice = random.Random(f"{seed}-{turn}")
        dice.shuffle(known)
        for script in known:
            if check.asked["queries"] >= queries:
                return
            try:
                check.load(script, dice)
                for view in script.views:
                    query = VARIANTS[turn].format(query=inlined(script, view).rstrip().rstrip(";"))
                    check.check(f"{script.path}/{view.name}", query)
            finally:
                check.clear(script)
        print(f"turn {turn}: {dict(check.asked)}, {len(check.wrong)} differ", flush=True)
        turn += 1


@contextmanager
def service(folder: Path, pg_port: int, connect_port: int) -> Iterator[None]:
    """Run a service as a user starts it, with both doors."""
    command = [sys.executable, "-m", "actors.doors.commands.cli", "serve"]
    command += ["--state-dir", str(folder / "state"), "--listen", "127.0.0.1:0"]
    command += ["--set", f"pg_listen=127.0.0.1:{pg_port}"]
    command += ["--set", f"connect_listen=127.0.0.1:{connect_port}", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not any(line.startswith("ready") for line in process.stdout):
                raise RuntimeError("the service did not begin")
            yield
        finally:
            process.terminate()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="scripts whose names hold this")
    given = parser.parse_args()
    os.environ["TZ"] = "UTC"
    time.tzset()
    # Each query that Spark refuses would be told with all that Java called.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel("CRITICAL")
    with tempfile.TemporaryDirectory(prefix="penstock-doors-") as folder:
        ports = free_port(), free_port()
        with service(Path(folder), *ports):
            dsn = f"postgresql://tester@127.0.0.1:{ports[0]}/penstock"
            with psycopg.connect(dsn, autocommit=True) as pg:
                address = f"sc://127.0.0.1:{ports[1]}"
                spark, *oracles = (SparkSession(address) for _ in range(3))
                check = DoorCheck(pg, spark, oracles)
                spend(check, given.queries, given.seed, given.only)
                print(f"{dict(check.asked)}: {len(check.wrong)} differ")
                for each in (spark, *oracles):
                    each.stop()
    return 1 if check.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
