"""Print what dbt-spark can do: ``dbt_program.py PROJECT`` (see `client_probe`).

`SPARK_REMOTE` names the service. All commands run in this process, through dbt's own runner.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

from client_probe import ClientProbe, check
from dbt.cli.main import dbtRunner
from pyspark.sql import SparkSession

OTHERS = ("tag:plain_view", "tag:incremental")
"""Models that are run separately, so that a failing kind does not fail the others."""


class DbtProject:
    """Runs dbt's commands on one project."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def run(self, *arguments: str) -> None:
        """Run a command. Raises `RuntimeError` with its first failure."""
        places = ["--project-dir", self._folder, "--profiles-dir", self._folder]
        done = dbtRunner().invoke([*arguments, *places, "--no-use-colors"])
        if done.exception is not None:
            raise RuntimeError(str(done.exception))
        failed = [
            " ".join(str(each.message).split()).rpartition(".sql) Runtime Error ")[2]
            for each in getattr(done.result, "results", ())
            if str(each.status) in ("error", "fail", "runtime error")
        ]
        if failed or not done.success:
            raise RuntimeError(failed[0] if failed else f"dbt {arguments[0]} failed")


def main(folder: str) -> None:
    probe = ClientProbe("dbt-spark", importlib.metadata.version("dbt-spark"))
    dbt = DbtProject(folder)
    with probe.tries("connect"):
        dbt.run("debug")
    with probe.tries("seed"):
        dbt.run("seed")
        dbt.run("seed")
        check(value("SELECT count(*) FROM regions WHERE discount < 2"), 3)
    plain = ("--exclude", *OTHERS)
    for capability in ("source", "table", "materialized_view"):
        with probe.tries(capability):
            TRIED[capability](dbt, plain)
    with probe.tries("again"):
        before = value("SELECT id FROM penstock.objects WHERE name = 'spent_classes'")
        dbt.run("run", *plain)
        check(value("SELECT id FROM penstock.objects WHERE name = 'spent_classes'"), before)
    with probe.tries("fresh"):
        session().sql("INSERT INTO orders VALUES (100000, 'a new customer', 1)")
        check(value("SELECT n FROM by_customer_spent WHERE customer = 'a new customer'"), 1)
        check(value("SELECT customers FROM spent_classes WHERE class = 'few'"), 1)
    with probe.tries("test"):
        dbt.run("test", *plain)
    with probe.tries("refresh"):
        dbt.run("run", "--full-refresh", *plain)
        check(value("SELECT sum(customers) FROM spent_classes"), 11)
    with probe.tries("docs"):
        dbt.run("docs", "generate")
    with probe.tries("view"):
        dbt.run("run", "--select", "tag:plain_view")
        check(value("SELECT count(*) FROM large_orders"), 599)
        dbt.run("run", "--select", "tag:plain_view")
    with probe.tries("incremental"):
        dbt.run("run", "--select", "tag:incremental")
        session().sql("INSERT INTO orders VALUES (100001, 'customer 1', 1)")
        dbt.run("run", "--select", "tag:incremental")
        check(value("SELECT count(*) FROM order_log"), 1_002)


def source(dbt: DbtProject, _: tuple[str, ...]) -> None:
    dbt.run("test", "--select", "source:service.orders")


def table(dbt: DbtProject, _: tuple[str, ...]) -> None:
    dbt.run("run", "--select", "regional_orders")
    check(value("SELECT count(*) FROM regional_orders"), 400)


def materialized_view(dbt: DbtProject, plain: tuple[str, ...]) -> None:
    dbt.run("run", *plain)
    check(value("SELECT n FROM by_customer_spent WHERE customer = 'customer 3'"), 100)
    check(value("SELECT customers FROM spent_classes WHERE class = 'many'"), 10)
    check(value("SELECT kind FROM penstock.objects WHERE name = 'spent_classes'"), "view")


def session() -> Any:
    """Return the session, which dbt's adapter uses too."""
    return SparkSession.builder.getOrCreate()


def value(text: str) -> Any:
    return session().sql(text).collect()[0][0]


TRIED = {"source": source, "table": table, "materialized_view": materialized_view}

if __name__ == "__main__":
    main(sys.argv[1])
