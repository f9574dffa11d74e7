"""Scan, Filter, Project and UNION ALL are linear: each update is taken, dropped or computed by
itself, and its time and diff stay. They keep nothing.

A scan reads the step's inputs ``d{n}`` (delta) and ``s{n}`` (old state), and is where a search
ends: a lookup by the table's own columns. A projection passes a search on by the columns that
it passes on; when a search has none of them, it is for everything.
"""

from __future__ import annotations

import re

from actors.plan.delta import Input, Node, Select, Union, Where
from actors.plan.relational import Filter, Named, Scan
from actors.plan.relational_text import quote
from actors.plan.schema import Column
from actors.views.lookups import Wanted
from actors.views.operators import (
    Context,
    Ids,
    Operator,
    Origins,
    both,
    is_name,
    narrowed,
    select,
)

NULL = "NULL"
"""The expression of a padded column."""
_NULL = re.compile(r"NULL|CAST\(NULL AS \w+(?:\(\d+(?:, ?\d+)?\))?\)")
NOT_KEYS = ("array<", "map<", "struct<", "void", "variant", "char(", "interval")


class ScanOperator(Operator):
    """An occurrence of a table."""

    def __init__(self, context: Context, plan: Scan) -> None:
        super().__init__(context, tuple(name for name, _ in plan.columns))
        self.source = plan.source
        self._own = dict(plan.columns)
        schema = context.schemas[plan.source]
        self._columns: dict[str, Column] = {column.name: column for column in schema.columns}

    def _read(self, letter: str) -> Node:
        owns = tuple(self._own.values())
        named = [(name, quote(own)) for name, own in self._own.items()]
        return select(Input(f"{letter}{self.source}", owns), named)

    def make_delta(self) -> Node:
        """The table's own updates."""
        return self._read("d")

    def old(self) -> Node:
        """The rows that were looked up."""
        return self._read("s")

    def trace_delta(self, ids: Ids) -> Origins | None:
        """The updates themselves."""
        return ((f"d{self.source}", tuple(self._own.get(id_, "") for id_ in ids)),)

    def old_origins(self, ids: Ids) -> Origins | None:
        """The rows looked up."""
        return ((f"s{self.source}", tuple(self._own.get(id_, "") for id_ in ids)),)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """A lookup by the table's own columns, in their order."""
        at: dict[str, int] = {}
        for position, id_ in enumerate(ids):
            own = self._own[id_]
            if not _plain(self._columns[own].type).startswith(NOT_KEYS):
                at.setdefault(own, position)
        key = tuple(sorted(at))
        _, picked = narrowed(ids, origins, [at[own] for own in key])
        target = f"s{self.source}"
        return self.context.ask(target, key, picked, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Any column that can be compared."""
        return not any(self.kind(id_).startswith(NOT_KEYS) for id_ in ids)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """All of them, by the PRIMARY KEY."""
        whole = any(key <= ids for key in self.unique_ids())
        return ids | frozenset(self.columns) if whole else ids

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """The table's PRIMARY KEY, if it has one and all of it is read."""
        key = self.context.schemas[self.source].key
        ids = {own: name for name, own in self._own.items()}
        return (frozenset(ids[own] for own in key),) if key and set(key) <= set(ids) else ()

    def table_columns(self, ids: Ids, *, some: bool = False) -> tuple[int, Ids] | None:
        """Its own."""
        if not all(id_ in self._own for id_ in ids):
            return None
        return self.source, tuple(self._own[id_] for id_ in ids)

    def kind(self, id_: str) -> str:
        """The table's own type."""
        return _plain(self._columns[self._own[id_]].type)


class PassingOperator(Operator):
    """Pass on rows of another operator, with its columns: what is not said otherwise is the
    input's."""

    def __init__(self, context: Context, below: Operator) -> None:
        super().__init__(context, below.columns)
        self._below = below

    def trace_delta(self, ids: Ids) -> Origins | None:
        """The input's."""
        return self._below.delta_origins(ids)

    def old_origins(self, ids: Ids) -> Origins | None:
        """The input's."""
        return self._below.old_origins(ids)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """The input's."""
        return self._below.seek(ids, origins, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """The input's."""
        return self._below.seekable(ids)

    def kind(self, id_: str) -> str | None:
        """The input's."""
        return self._below.kind(id_)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """The input's."""
        return self._below.determined_by(ids)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """The input's."""
        return self._below.unique_ids()

    def is_one_row(self) -> bool:
        """The input's."""
        return self._below.is_one_row()

    def is_constant(self) -> bool:
        """The input's."""
        return self._below.is_constant()


class FilterOperator(PassingOperator):
    """Updates for whose row the predicate is true."""

    def __init__(self, context: Context, plan: Filter, below: Operator) -> None:
        super().__init__(context, below)
        self._predicate = plan.predicate

    def make_delta(self) -> Node:
        """Those of the input's delta."""
        return Where(self._below.delta(), self._predicate)

    def old(self) -> Node:
        """Those of the input's state."""
        return Where(self._below.old(), self._predicate)

    def table_columns(self, ids: Ids, *, some: bool = False) -> tuple[int, Ids] | None:
        """The input's, some of whose rows are left."""
        return self._below.table_columns(ids, some=True) if some else None


class ProjectOperator(Operator):
    """Computed columns."""

    def __init__(self, context: Context, columns: tuple[Named, ...], below: Operator) -> None:
        super().__init__(context, tuple(column.name for column in columns))
        self._below = below
        self._made = columns
        self._passed: dict[str, str] = {}
        for column in columns:
            if _NULL.fullmatch(column.expression):
                self._passed[column.name] = ""
            elif is_name(column.expression) and column.expression in below.columns:
                self._passed[column.name] = column.expression

    def make_delta(self) -> Node:
        """Computed from the input's delta."""
        return Select(self._below.delta(), self._made)

    def old(self) -> Node:
        """Computed from the input's state."""
        return Select(self._below.old(), self._made)

    def _below_ids(self, ids: Ids) -> Ids | None:
        if not all(not id_ or id_ in self._passed for id_ in ids):
            return None
        return tuple(self._passed[id_] if id_ else "" for id_ in ids)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """The input's, of columns that are passed on."""
        below = self._below_ids(ids)
        return None if below is None else self._below.delta_origins(below)

    def old_origins(self, ids: Ids) -> Origins | None:
        """The input's, of columns that are passed on."""
        below = self._below_ids(ids)
        return None if below is None else self._below.old_origins(below)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """By the columns that are passed on."""
        kept = [i for i, id_ in enumerate(ids) if self._passed.get(id_)]
        picked, narrow = narrowed(ids, origins, kept)
        below = tuple(self._passed[id_] for id_ in picked)
        return self._below.seek(below, narrow, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Columns that are passed on."""
        below = [self._passed.get(id_, "") for id_ in ids]
        return all(below) and self._below.seekable(tuple(below))

    def table_columns(self, ids: Ids, *, some: bool = False) -> tuple[int, Ids] | None:
        """The input's, of columns that are passed on or left out."""
        below = [self._passed.get(id_, "") if id_ in self.columns else id_ for id_ in ids]
        return self._below.table_columns(tuple(below), some=some) if all(below) else None

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """The input's, as far as its columns are passed on."""
        below = frozenset(self._passed[id_] for id_ in ids if self._passed.get(id_))
        found = self._below.determined_by(below)
        return ids | {name for name, id_ in self._passed.items() if not id_ or id_ in found}

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """The input's, as far as their columns are passed on."""
        back = {below: own for own, below in self._passed.items() if below}
        return tuple(
            frozenset(back[id_] for id_ in ids)
            for ids in self._below.unique_ids()
            if ids <= back.keys()
        )

    def is_one_row(self) -> bool:
        """The input's."""
        return self._below.is_one_row()

    def is_constant(self) -> bool:
        """The input's."""
        return self._below.is_constant()

    def kind(self, id_: str) -> str | None:
        """The input's, of a column that is passed on."""
        below = self._passed.get(id_)
        return self._below.kind(below) if below else None


class UnionOperator(Operator):
    """All updates of all inputs."""

    def __init__(self, context: Context, inputs: tuple[Operator, ...]) -> None:
        super().__init__(context, inputs[0].columns)
        self._inputs = inputs

    def make_delta(self) -> Node:
        """Those of all deltas."""
        return Union(tuple(each.delta() for each in self._inputs))

    def old(self) -> Node:
        """Those of all states."""
        return Union(tuple(each.old() for each in self._inputs))

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Those of all inputs."""
        return both(*(each.delta_origins(ids) for each in self._inputs))

    def old_origins(self, ids: Ids) -> Origins | None:
        """Those of all inputs."""
        return both(*(each.old_origins(ids) for each in self._inputs))

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """In every input."""
        asked: frozenset[Wanted] = frozenset()
        for each in self._inputs:
            asked |= each.seek(ids, origins, after, nulls=nulls)
        return asked

    def seekable(self, ids: Ids) -> bool:
        """What all inputs can."""
        return all(each.seekable(ids) for each in self._inputs)

    def is_constant(self) -> bool:
        """Where each input is."""
        return all(each.is_constant() for each in self._inputs)

    def kind(self, id_: str) -> str | None:
        """The inputs' where they agree."""
        kinds = {each.kind(id_) for each in self._inputs}
        return kinds.pop() if len(kinds) == 1 else None


def _plain(kind: str) -> str:
    low = kind.strip().lower()
    return "string" if low.startswith("varchar(") else low
