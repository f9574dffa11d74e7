"""Checks what statements of roles without administrators' rights would access, before they are run.

A statement is checked once it is parsed, before any name is looked up and anything is computed, and
again once it is analysed (`StatementInspector.java`). This needs a session whose plans are visible;
for a server behind Spark Connect, `actors.engine.spark.remote_analysis` asks the engine's own JVM.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import DataFrame

from actors.engine.catalyst.permitted_functions import (
    FUNCTIONS,
    NODES,
    REFUSED_OPTIONS,
    TABLE_FUNCTIONS,
    refusal_of,
)
from actors.engine.spark.fragments import view_name
from actors.model.plan.jobs import ParseText, StatementParsed
from actors.runtime.errors import AccessDenied, QueryRejected

if TYPE_CHECKING:
    from actors.engine.spark.bridge import ClassicBridge


class _Inspected(msgspec.Struct):
    """The inspector's answer (see `StatementParsed`)."""

    relations: tuple[tuple[str, ...], ...]
    functions: tuple[str, ...]
    unknown: tuple[str, ...]
    command: str
    kind: str
    refused: str


@lru_cache(maxsize=8)
def _permitting(inspector: Any) -> Any:
    """Return the inspector, after telling it what is permitted."""
    # Once per JVM, since the lists have about twenty kilobytes.
    inspector.permit(*map(" ".join, (FUNCTIONS, TABLE_FUNCTIONS, NODES, REFUSED_OPTIONS)))
    return inspector


def parse_statement(bridge: ClassicBridge, job: ParseText) -> StatementParsed:
    """Return what a text names. Raises Spark's own error if it cannot be parsed."""
    inspector = _permitting(bridge.java("StatementInspector"))
    ask = inspector.expression if job.expression else inspector.statement
    found = msgspec.json.decode(ask(bridge.engine, job.sql), type=_Inspected)
    return StatementParsed(job.job_id, **msgspec.structs.asdict(found))


def check_parsed(found: StatementParsed, sql: str, tables: Collection[str]) -> str:
    """Check what a query names, if it may use only what everyone may use, over tables with these
    names.

    Returns:
        The first name of a relation that is not one of the tables, as Spark writes it; "" if there
        is none.

    Raises:
        AccessDenied: It uses something that is reserved for administrators.
        QueryRejected: It is a command.
    """
    if found.command:
        raise QueryRejected(command_refusal(found.command, sql))
    if found.refused:
        raise AccessDenied(refusal_of(found.kind, found.refused))
    # In a session that compares names exactly, Spark itself does not find a name in another case.
    known = {name.lower() for name in tables}
    for parts in found.relations:
        if len(parts) > 1 or parts[0].lower() not in known:
            return ".".join(map(view_name, parts))
    return ""


def check_analysed(bridge: ClassicBridge, found: DataFrame) -> None:
    """Raise `AccessDenied` for an analysed query that uses more than everyone may use."""
    inspector = _permitting(bridge.java("StatementInspector"))
    plan = found._jdf.queryExecution().analyzed()
    answer = msgspec.json.decode(inspector.plan(plan), type=_Inspected)
    if answer.refused:
        raise AccessDenied(refusal_of(answer.kind, answer.refused))


def command_refusal(command: str, sql: str) -> str:
    """Return the error text for a command where a query is expected."""
    return f"expected a query, found a command ({command}): {sql.strip()[:200]}"
