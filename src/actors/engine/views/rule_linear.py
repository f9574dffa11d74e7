"""Linear operators: Scan, Filter, Project and UNION ALL.

Each update is kept, dropped or computed by itself, with the same time and diff, and there is no
state. A scan reads the step's inputs ``d{n}`` (delta) and ``s{n}`` (old state), and turns a search
into a lookup by the table's own columns.
"""

from __future__ import annotations

import re

from actors.engine.views.lookups import Wanted
from actors.engine.views.operators import (
    DerivationContext,
    Ids,
    Origins,
    ViewOperator,
    is_name,
    merge_origins,
    narrowed,
    select,
)
from actors.model.plan.delta import FilterRows, NamedInput, Node, SelectColumns, UnionRows
from actors.model.plan.input_names import InputKind
from actors.model.plan.relational import FilterNode, NamedExpression, ScanNode
from actors.model.plan.schema import TableColumn, quote

NULL = "NULL"
"""The expression of a padded column."""
_NULL = re.compile(r"NULL|CAST\(NULL AS \w+(?:\(\d+(?:, ?\d+)?\))?\)")
# Types by which lookups are not made.
NOT_KEYS = ("array<", "map<", "struct<", "void", "variant", "char(", "interval")


class ScanOperator(ViewOperator):
    """One occurrence of a table."""

    def __init__(self, context: DerivationContext, plan: ScanNode) -> None:
        super().__init__(context, tuple(name for name, _ in plan.columns))
        self.input_index = plan.input_index
        self._own = dict(plan.columns)
        schema = context.schemas[plan.input_index]
        self._columns: dict[str, TableColumn] = {column.name: column for column in schema.columns}

    def _read(self, kind: InputKind) -> Node:
        owns = tuple(self._own.values())
        named = [(name, quote(own)) for name, own in self._own.items()]
        return select(NamedInput(kind.text(self.input_index), owns), named)

    def make_delta(self) -> Node:
        """Return the table's own updates."""
        return self._read(InputKind.CHANGES)

    def old(self) -> Node:
        """Return the rows that were looked up."""
        return self._read(InputKind.STATE)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the table's updates."""
        own = tuple(self._own.get(id_, "") for id_ in ids)
        return ((InputKind.CHANGES.text(self.input_index), own),)

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the rows that were looked up."""
        own = tuple(self._own.get(id_, "") for id_ in ids)
        return ((InputKind.STATE.text(self.input_index), own),)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up rows by the table's own columns, in their order."""
        at: dict[str, int] = {}
        for position, id_ in enumerate(ids):
            own = self._own[id_]
            if not _plain(self._columns[own].type).startswith(NOT_KEYS):
                at.setdefault(own, position)
        # Sorted, so that searches by the same columns merge into one lookup.
        key = tuple(sorted(at))
        _, picked = narrowed(ids, origins, [at[own] for own in key])
        target = InputKind.STATE.text(self.input_index)
        return self.context.ask(target, key, picked, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether all columns can be compared."""
        return not any(self.kind(id_).startswith(NOT_KEYS) for id_ in ids)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return all columns if `ids` contain the PRIMARY KEY."""
        whole = any(key <= ids for key in self.unique_ids())
        return ids | frozenset(self.columns) if whole else ids

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return the table's PRIMARY KEY, if it has one and all of it is read."""
        key = self.context.schemas[self.input_index].key
        ids = {own: name for name, own in self._own.items()}
        return (frozenset(ids[own] for own in key),) if key and set(key) <= set(ids) else ()

    def table_columns(self, ids: Ids, *, some: bool = False) -> tuple[int, Ids] | None:
        """Return the table's own names of the columns."""
        if not all(id_ in self._own for id_ in ids):
            return None
        return self.input_index, tuple(self._own[id_] for id_ in ids)

    def kind(self, id_: str) -> str:
        """Return the table's own type."""
        return _plain(self._columns[self._own[id_]].type)


class PassingOperator(ViewOperator):
    """Base of operators that pass on the rows and columns of another operator. Each method that is
    not overridden returns the input's answer."""

    def __init__(self, context: DerivationContext, below: ViewOperator) -> None:
        super().__init__(context, below.columns)
        self._below = below

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the input's origins."""
        return self._below.delta_origins(ids)

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the input's origins."""
        return self._below.old_origins(ids)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the input's rows."""
        return self._below.seek(ids, origins, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether the input can be looked up by these columns."""
        return self._below.seekable(ids)

    def kind(self, id_: str) -> str | None:
        """Return the input's type."""
        return self._below.kind(id_)

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return the input's answer."""
        return self._below.determined_by(ids)

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return the input's keys."""
        return self._below.unique_ids()

    def is_one_row(self) -> bool:
        """Return whether the input has at most one row."""
        return self._below.is_one_row()

    def is_constant(self) -> bool:
        """Return whether the input never changes."""
        return self._below.is_constant()


class FilterOperator(PassingOperator):
    """The updates whose rows satisfy the predicate."""

    def __init__(self, context: DerivationContext, plan: FilterNode, below: ViewOperator) -> None:
        super().__init__(context, below)
        self._predicate = plan.predicate

    def make_delta(self) -> Node:
        """Return the filtered delta of the input."""
        return FilterRows(self._below.delta(), self._predicate)

    def old(self) -> Node:
        """Return the filtered state of the input."""
        return FilterRows(self._below.old(), self._predicate)

    def table_columns(self, ids: Ids, *, some: bool = False) -> tuple[int, Ids] | None:
        """Return the input's columns, if `some` of its rows suffice."""
        return self._below.table_columns(ids, some=True) if some else None


class ProjectOperator(ViewOperator):
    """Computed columns."""

    def __init__(
        self, context: DerivationContext, columns: tuple[NamedExpression, ...], below: ViewOperator
    ) -> None:
        super().__init__(context, tuple(column.name for column in columns))
        self._below = below
        self._made = columns
        self._passed: dict[str, str] = {}
        for column in columns:
            if _NULL.fullmatch(column.expression):
                # The empty id stands for NULL.
                self._passed[column.name] = ""
            elif is_name(column.expression) and column.expression in below.columns:
                self._passed[column.name] = column.expression

    def make_delta(self) -> Node:
        """Return the columns computed from the input's delta."""
        return SelectColumns(self._below.delta(), self._made)

    def old(self) -> Node:
        """Return the columns computed from the input's state."""
        return SelectColumns(self._below.old(), self._made)

    def _below_ids(self, ids: Ids) -> Ids | None:
        if not all(not id_ or id_ in self._passed for id_ in ids):
            return None
        return tuple(self._passed[id_] if id_ else "" for id_ in ids)

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the input's origins; None unless all columns are passed on."""
        below = self._below_ids(ids)
        return None if below is None else self._below.delta_origins(below)

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the input's origins; None unless all columns are passed on."""
        below = self._below_ids(ids)
        return None if below is None else self._below.old_origins(below)

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up the input by the columns that are passed on."""
        kept = [i for i, id_ in enumerate(ids) if self._passed.get(id_)]
        picked, narrow = narrowed(ids, origins, kept)
        below = tuple(self._passed[id_] for id_ in picked)
        # Without any such column this looks up all rows, a superset of the wanted ones.
        return self._below.seek(below, narrow, after, nulls=nulls)

    def seekable(self, ids: Ids) -> bool:
        """Return whether all columns are passed on and the input can be looked up by them."""
        below = [self._passed.get(id_, "") for id_ in ids]
        return all(below) and self._below.seekable(tuple(below))

    def table_columns(self, ids: Ids, *, some: bool = False) -> tuple[int, Ids] | None:
        """Return the input's names of columns that are passed on or dropped."""
        below = [self._passed.get(id_, "") if id_ in self.columns else id_ for id_ in ids]
        return self._below.table_columns(tuple(below), some=some) if all(below) else None

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return the columns that the input determines and this operator passes on."""
        below = frozenset(self._passed[id_] for id_ in ids if self._passed.get(id_))
        found = self._below.determined_by(below)
        return ids | {name for name, id_ in self._passed.items() if not id_ or id_ in found}

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return the input's keys all of whose columns are passed on."""
        back = {below: own for own, below in self._passed.items() if below}
        return tuple(
            frozenset(back[id_] for id_ in ids)
            for ids in self._below.unique_ids()
            if ids <= back.keys()
        )

    def is_one_row(self) -> bool:
        """Return whether the input has at most one row."""
        return self._below.is_one_row()

    def is_constant(self) -> bool:
        """Return whether the input never changes."""
        return self._below.is_constant()

    def kind(self, id_: str) -> str | None:
        """Return the input's type of a column that is passed on; None for a computed one."""
        below = self._passed.get(id_)
        return self._below.kind(below) if below else None


class UnionOperator(ViewOperator):
    """All updates of all inputs."""

    def __init__(self, context: DerivationContext, inputs: tuple[ViewOperator, ...]) -> None:
        super().__init__(context, inputs[0].columns)
        self._inputs = inputs

    def make_delta(self) -> Node:
        """Return the union of all deltas."""
        return UnionRows(tuple(each.delta() for each in self._inputs))

    def old(self) -> Node:
        """Return the union of all states."""
        return UnionRows(tuple(each.old() for each in self._inputs))

    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return the origins in all inputs."""
        return merge_origins(*(each.delta_origins(ids) for each in self._inputs))

    def old_origins(self, ids: Ids) -> Origins | None:
        """Return the origins in all inputs."""
        return merge_origins(*(each.old_origins(ids) for each in self._inputs))

    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Look up rows in every input."""
        asked: frozenset[Wanted] = frozenset()
        for each in self._inputs:
            asked |= each.seek(ids, origins, after, nulls=nulls)
        return asked

    def seekable(self, ids: Ids) -> bool:
        """Return whether all inputs can be looked up by these columns."""
        return all(each.seekable(ids) for each in self._inputs)

    def is_constant(self) -> bool:
        """Return whether no input ever changes."""
        return all(each.is_constant() for each in self._inputs)

    def kind(self, id_: str) -> str | None:
        """Return the inputs' type; None if they differ."""
        kinds = {each.kind(id_) for each in self._inputs}
        return kinds.pop() if len(kinds) == 1 else None


def _plain(kind: str) -> str:
    low = kind.strip().lower()
    return "string" if low.startswith("varchar(") else low
