"""The relational plan of a view: the query, once names are resolved and before delta rules.

Columns are renamed to unique ids at the scans (``i0_carrier``: import 0, column ``carrier``),
so that no join is ambiguous. Expressions are Spark SQL text over the input's column ids.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.plan.schema import Schema


class Named(msgspec.Struct, frozen=True):
    """An expression and the column it makes."""

    name: str
    expression: str


class Scan(msgspec.Struct, frozen=True, tag=True):
    """Reads import number `source`; column ``c`` becomes ``i{source}_c``."""

    source: int
    columns: tuple[str, ...]


class Filter(msgspec.Struct, frozen=True, tag=True):
    """Rows for which the predicate is true."""

    input: Plan
    predicate: str


class Project(msgspec.Struct, frozen=True, tag=True):
    """Computed columns."""

    input: Plan
    columns: tuple[Named, ...]


class Join(msgspec.Struct, frozen=True, tag=True):
    """Inner join of any number of inputs: equal pairs of column ids, and a residual predicate."""

    inputs: tuple[Plan, ...]
    equal: tuple[tuple[str, str], ...]
    residual: str | None = None


class AggregateCall(msgspec.Struct, frozen=True):
    """One aggregate: ``count``, ``sum`` or ``avg`` of an expression (None: ``count(*)``)."""

    name: str
    function: str
    argument: str | None
    type: str
    """Spark type of the result."""
    argument_type: str = "bigint"


class Aggregate(msgspec.Struct, frozen=True, tag=True):
    """GROUP BY `keys` (none: one row, always)."""

    input: Plan
    keys: tuple[Named, ...]
    calls: tuple[AggregateCall, ...]


class Opaque(msgspec.Struct, frozen=True, tag=True):
    """What no rule knows: the query text, recomputed at each time and subtracted."""

    sql: str
    reason: str


Plan: TypeAlias = Scan | Filter | Project | Join | Aggregate | Opaque


class ViewPlan(msgspec.Struct, frozen=True):
    """A view's query, resolved."""

    sources: tuple[str, ...]
    """Names of the imported objects, as the query writes them; Scan.source indexes this."""
    root: Plan
    output: Schema
