"""The delta plan: how an output delta is computed from input deltas and touched state.

A small algebra over *updates*: every relation here has its columns plus ``__time`` and
``__diff``. The same plan runs on Spark (`actors.spark`) and in pure Python (`actors.testing`).

Inputs of a stratum are named:

- ``d{n}``  the delta of import n: its updates with ``lo <= time < hi``;
- ``s{n}``  the state of import n: (a superset of) its updates with ``time < lo`` that the
  delta can touch; times below `lo` carry no meaning and may have been advanced;
- ``h``     the hidden state of the aggregate: (a superset of) the touched groups at ``< lo``;
- ``r{k}``  the output of stratum k of the same step.

A step is a function of its interval and these inputs alone, and its output is right at every
time in the interval: join pairs take the greater time, aggregates run over (group, time).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.plan.relational import Named
from actors.plan.schema import Schema


class Input(msgspec.Struct, frozen=True, tag=True):
    """A named input (see the module's text), with the columns it has."""

    name: str
    columns: tuple[str, ...]


class Where(msgspec.Struct, frozen=True, tag=True):
    """Updates for whose row the predicate is true."""

    input: Node
    predicate: str


class Select(msgspec.Struct, frozen=True, tag=True):
    """Computed columns; time and diff pass through."""

    input: Node
    columns: tuple[Named, ...]


class Pair(msgspec.Struct, frozen=True, tag=True):
    """Inner join: every matching pair, at the greater time, with the product of the diffs.

    `equal` holds (left expression, right expression); without any it is a cross product.
    """

    left: Node
    right: Node
    equal: tuple[tuple[str, str], ...]
    residual: str | None = None


class Union(msgspec.Struct, frozen=True, tag=True):
    """All updates of all inputs; columns by name."""

    inputs: tuple[Node, ...]


class Measure(msgspec.Struct, frozen=True):
    """One additive hidden column of an aggregate.

    ``count``: sum of diffs where `argument` is not NULL; ``sum``: sum of argument × diff, with
    NULLs left out. `type` is the hidden column's Spark type, wide enough not to overflow
    where the query's own result does not.
    """

    name: str
    kind: str
    argument: str
    type: str


class Reduce(msgspec.Struct, frozen=True, tag=True):
    """Contributions: per (keys, time) the sum of diffs as ``n``, and each measure.

    Output columns: keys, ``n``, measures, ``__time``, ``__diff`` (always 1).
    """

    input: Node
    keys: tuple[Named, ...]
    measures: tuple[Measure, ...]


class Accumulate(msgspec.Struct, frozen=True, tag=True):
    """Running totals: hidden rows before and after each touched (group, time).

    `contributions` are a `Reduce`'s columns; `hidden` has keys, ``n`` and measures, one row a
    group at ``< lo``. At each touched (group, t) it emits the group's total before t with diff
    -1 and its total at t with diff +1, both at time t; a total with ``n = 0`` is not emitted,
    except for the global aggregate (no keys), whose one row exists also when it is empty, from
    the first hydration on. Groups compare null-safe.
    """

    contributions: Node
    hidden: Node
    keys: tuple[str, ...]
    measures: tuple[str, ...]


class Consolidate(msgspec.Struct, frozen=True, tag=True):
    """Sums the diffs of equal (row, time) and drops zeros; rows compare null-safe."""

    input: Node


Node: TypeAlias = Input | Where | Select | Pair | Union | Reduce | Accumulate | Consolidate


class Lookup(msgspec.Struct, frozen=True):
    """State of import `target` that a step needs: the rows whose key columns match.

    `key` are columns of the target (its own names). `origins` say where key values come from:
    each is (input name, columns): ``d2`` for the delta of import 2, ``s1`` for rows of import 1
    that an earlier lookup of this plan returned, ``r0`` for the output of stratum 0. An empty
    `key` asks for the whole state. A lookup returns at least what Spark would match.
    """

    target: str
    """``s{n}`` or ``h``: the input that it fills."""
    key: tuple[str, ...]
    origins: tuple[tuple[str, tuple[str, ...]], ...]


class Stratum(msgspec.Struct, frozen=True):
    """One Spark run: its lookups, in order, then its node; the output is ``r{index}``."""

    lookups: tuple[Lookup, ...]
    node: Node
    inputs: tuple[str, ...]
    """Names of all inputs the node reads."""


class Hidden(msgspec.Struct, frozen=True):
    """Durable hidden state of the view's aggregate: schema and its key columns."""

    schema: Schema
    keys: tuple[str, ...]


class DeltaPlan(msgspec.Struct, frozen=True):
    """Everything a dataflow needs to maintain one view.

    With ``mode == "incremental"`` the last stratum's output has the view's columns under their
    own names when there is no `hidden`; otherwise the hidden columns named by
    ``hidden.schema`` *and* the view's columns (prefixed ``o_``) and ``__keep`` (boolean: HAVING
    held), from which both deltas are cut by `dataflow`. With ``mode == "opaque"`` there are no
    strata: the view is `sql`, recomputed at each time and subtracted.
    """

    sources: tuple[str, ...]
    """Names of the imports, as `sql` writes them."""
    source_schemas: tuple[Schema, ...]
    output: Schema
    sql: str
    """The view's own text: hydration of opaque views, recomputation, the oracle."""
    mode: str
    reason: str
    """Why it is opaque; empty when incremental."""
    strata: tuple[Stratum, ...] = ()
    hidden: Hidden | None = None
    conf: tuple[tuple[str, str], ...] = ()
    """Spark settings that belong to the view (ANSI mode, time zone)."""
    fingerprint: str = ""
