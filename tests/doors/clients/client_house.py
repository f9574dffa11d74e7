"""Shared by the tests of clients: a service with `sample_rows` in it, and runners of programs.

The service runs in a thread of the test's process, with its listeners on free loopback ports. The
clients run as separate programs; Python ones in the environment of `make clients`, or in the one
that ``CLIENTS_PYTHON`` names.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from compatibility_page import CACHE_KEY, PAGE, ClientSight, differences, read_sight
from sample_rows import (
    KINDS,
    KINDS_ROWS,
    MANY,
    MANY_ROWS,
    ORDERS,
    ORDERS_ROWS,
    SPENT,
    kinds_row,
    orders_row,
)

from actors.doors.client.client import Client
from actors.runtime.settings import Settings
from actors.service import Service
from actors.testing.engine import in_memory_engine
from actors.testing.patience import PROGRAM_S

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
CLIENTS_PYTHON: Final = os.environ.get("CLIENTS_PYTHON") or str(
    ROOT / ".venv" / "clients" / "bin" / "python"
)


class ClientHouse:
    """A service in its own thread."""

    def __init__(self, portal: BlockingPortal, service: Service, client: Client) -> None:
        self._portal = portal
        self._client = client
        self.pg_address = service.pg_address or ""
        """Host and port of the PostgreSQL listener."""
        self.connect_address = service.connect_address or ""
        """Host and port of the Spark Connect listener."""

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """Call a method of the service's own client."""
        return self._portal.call(partial(getattr(self._client, name), *given, **named))


@contextmanager
def open_house(folder: Path) -> Iterator[ClientHouse]:
    """Run a service on the in-memory engine with `sample_rows` in it."""
    settings = Settings(
        state_dir=str(folder / "state"), listen="127.0.0.1:0", pg_listen="127.0.0.1:0"
    )
    with start_blocking_portal("asyncio") as portal:
        service = Service(settings, engine=in_memory_engine())
        with portal.wrap_async_context_manager(service):
            client = portal.call(partial(Client.in_process, service))
            yield fill_house(ClientHouse(portal, service, client))
            portal.call(client.aclose)


def fill_house(house: ClientHouse) -> ClientHouse:
    """Write `sample_rows` into an empty service, and return it."""
    house.call("create_table", "kinds", KINDS)
    shape = house.call("peek", "kinds", limit=0).schema
    rows = [kinds_row(number) for number in range(KINDS_ROWS)]
    for row in rows:
        # A map is a list of pairs to Arrow.
        row["pairs"] = None if row["pairs"] is None else list(row["pairs"].items())
    house.call("insert", "kinds", pa.Table.from_pylist(rows, schema=shape))
    house.call("create_table", "orders", ORDERS, ["id"])
    house.call("create_index", "by_customer", "orders", ["customer"])
    house.call("create_materialized_view", "spent", SPENT)
    shape = house.call("peek", "orders", limit=0).schema
    rows = [orders_row(number) for number in range(ORDERS_ROWS)]
    house.call("insert", "orders", pa.Table.from_pylist(rows, schema=shape))
    house.call("create_table", "many", MANY)
    numbers = range(MANY_ROWS)
    columns = {
        "id": pa.array(numbers, pa.int64()),
        "x": pa.array([number / 2 for number in numbers]),
        "s": pa.array([f"text {number % 1000}" for number in numbers]),
    }
    house.call("insert", "many", pa.table(columns))
    return house


# -- programs --------------------------------------------------------------------------------------


def clients_python(*packages: str) -> str:
    """Return a Python with these packages; skips the test if there is none."""
    if not Path(CLIENTS_PYTHON).exists():
        pytest.skip("no environment of clients: `make clients` makes it")
    asked = "; ".join(f"import {name}" for name in packages)
    found = subprocess.run(
        [CLIENTS_PYTHON, "-c", asked],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    if found.returncode:
        why = found.stderr.strip().splitlines()[-1]
        pytest.skip(f"the environment of clients lacks something ({why}): `make clients`")
    return CLIENTS_PYTHON


def needed(path: str, package: str) -> str:
    """Return the path of a program or file; skips the test if it is missing. `package` is the
    Debian package that provides it."""
    found = shutil.which(path) or next(iter(sorted(map(str, Path("/").glob(path.lstrip("/"))))), "")
    if not found:
        pytest.skip(f"no {path} here: Debian's package {package} has it")
    return found


@functools.cache
def java_compiler() -> tuple[str, str]:
    """Return the paths of `java` and `javac` of one JDK; skips the test if there is none."""
    home = os.environ.get("JAVA_HOME", "")
    javac = shutil.which("javac", path=f"{home}/bin") if home else None
    javac = javac or shutil.which("javac")
    if javac is None:
        pytest.skip("no javac here: Debian's package default-jdk-headless has it")
    return str(Path(javac).resolve().parent / "java"), javac


def run_java(
    name: str, jars: Sequence[str], arguments: Sequence[str], folder: Path, *options: str
) -> ClientSight:
    """Compile a Java program of this folder and run it."""
    java, javac = java_compiler()
    classes = os.pathsep.join([str(folder), *jars])
    source = HERE / f"{name}.java"
    made = subprocess.run(
        [javac, "-encoding", "UTF-8", "-cp", classes, "-d", str(folder), str(source)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return run_program([java, *options, "-cp", classes, name, *arguments])


def run_python(name: str, arguments: Sequence[str], *, python: str = sys.executable) -> ClientSight:
    """Run a Python program of this folder."""
    return run_program([python, str(HERE / f"{name}.py"), *arguments])


def run_program(command: Sequence[str], environ: Mapping[str, str] | None = None) -> ClientSight:
    """Run a client program, and return the results that it printed."""
    # What a user has set for a database of their own must not lead the clients there.
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "SPARK_", "DBT_"))}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={**outside, **(environ or {})},
        check=False,
    )
    # pytest shows it when the test fails.
    sys.stderr.write(done.stderr)
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stderr[-4000:]}"
    return read_sight(done.stdout)


def page_differences(sight: ClientSight, config: pytest.Config) -> list[str]:
    """Store the results for `make compatibility`, and return where the page disagrees with them."""
    if config.cache is not None:
        config.cache.set(f"{CACHE_KEY}/{sight.name.replace(' ', '-')}", sight.as_json())
    found = differences(PAGE.read_text() if PAGE.exists() else "", sight)
    return [*found, f"`make compatibility` rewrites {PAGE.name}"] if found else []
