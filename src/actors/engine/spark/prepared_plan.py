"""A delta plan as the engine knows it: with the types of its nodes, which only Spark knows.

The types are determined once, on empty inputs, and cached.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

from actors.engine.spark.analysis import check_stored, check_types, output_schema
from actors.engine.spark.bridge import SessionBridge
from actors.engine.spark.rows import schema_of
from actors.engine.spark.translate import PlanTranslator, SessionRelation, leaves
from actors.model.plan.delta import INTERVAL, DeltaPlan, Node
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.jobs import PlanPrepared, PreparePlan
from actors.model.plan.plan_splitting import divide_strata, selected_column, split_statements
from actors.model.plan.schema import DIFF, TIME, TableSchema
from actors.runtime.errors import InvalidUsage, QueryRejected

PIECES_KNOWN_MAX: Final = 256
_SERIALS: Final = itertools.count()


class PreparedPlan:
    """A plan and the types of its nodes. Threads can share it, because facts are only ever
    added."""

    def __init__(self, plan: DeltaPlan) -> None:
        self.plan = plan
        self.strata, self._places = divide_strata([stratum.node for stratum in plan.strata])
        """The plan's strata, and the strata that these share
        (`actors.model.plan.plan_splitting`)."""
        seldom = zip(self._places, plan.strata, strict=True)
        self._seldom = frozenset(place for place, stratum in seldom if stratum.seldom)
        # Unique, so that what is cached for one plan is never used for its successor.
        self.serial = next(_SERIALS)
        # The schemas of nodes that were asked for so far.
        self._types: dict[Node, TableSchema] = {}
        # Cache of `pieces`, by its arguments.
        self._pieces: dict[Any, list[tuple[int, ...]]] = {}
        self.forget: weakref.finalize[Any, PreparedPlan] | None = None
        """Finalizer that drops, when this object is freed, everything that is cached for its
        steps."""

    def schema(self, bridge: SessionBridge, node: Node) -> TableSchema:
        """Return the columns and types that a node makes, without time and diff."""
        known = self._types.get(node)
        if known is None:
            made = schema_of(bridge.sql(self._empty(bridge).text(node)).schema)
            known = TableSchema(tuple(c for c in made.columns if c.name not in (TIME, DIFF)))
            self._types[node] = known
        return known

    def stratum(self, bridge: SessionBridge, index: int) -> TableSchema:
        """Return the schema of the stratum at `index` in `strata`, whose rows leave Spark. Raises
        `QueryRejected` for a type that cannot be stored; inside a stratum such types are
        allowed."""
        return check_stored(self.schema(bridge, self.strata[index]))

    def types(self, bridge: SessionBridge, node: Node) -> Mapping[str, str]:
        """Return Spark's type text of each column of a node."""
        return {column.name: column.type for column in self.schema(bridge, node).columns}

    def input_schema(self, bridge: SessionBridge, name: str) -> TableSchema:
        """Return the schema of a named input according to the plan. Raises `InvalidUsage`."""
        plan = self.plan
        known = plan.input_schema(name)
        if known is not None:
            return known
        match InputName.find(name):
            case InputName(InputKind.RESULT, number) if number < len(self.strata):
                return self.stratum(bridge, number)
        raise InvalidUsage(f"the plan has no input {name!r}")

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Return the range in `strata` of the plan's strata `first` to `last`."""
        return self._places[first - 1] + 1 if first else 0, self._places[last]

    def named(self, name: str) -> str:
        """Return the name that an input of the plan has in `strata`."""
        return selected_column(name, self._places)

    def pieces(
        self,
        first: int,
        last: int,
        filled: frozenset[str],
        nodes_max: int,
        *,
        fresh: bool,
        optimistic: bool,
    ) -> list[tuple[int, ...]]:
        """Return the strata of each statement, given the deltas and outputs of earlier strata that
        have rows. `fresh`: the view has no state. `optimistic`: strata that rarely produce rows are
        assumed to make none."""
        changed = frozenset(name for name in filled if InputName.parse(name).holds_changes)
        key = (first, last, changed, fresh, optimistic)
        found = self._pieces.get(key)
        if found is None:
            states: set[str] = set()
            if not fresh:
                # State counts as filled: whether it happens to be empty must not decide which plans
                # there are.
                names = self.plan.input_names()
                states = {name for name in names if InputName.parse(name).holds_state}
            without = self._seldom if optimistic else frozenset()
            inputs = changed | states | {INTERVAL}
            # The last stratum makes the answer and is never assumed to be empty.
            found = split_statements(self.strata, first, last, inputs, nodes_max, without - {last})
            if len(self._pieces) >= PIECES_KNOWN_MAX:
                self._pieces.clear()
            self._pieces[key] = found
        return found

    def _empty(self, bridge: SessionBridge) -> PlanTranslator:
        """Return a translator that renders any node of the plan over inputs without rows."""
        names = {name for node in self.strata for name in leaves(node)}
        return PlanTranslator(
            _Empties(self, bridge, names),
            lambda node: self.types(bridge, node),
            interval=(1, 2),
            small=True,
        )


class _Empties(Mapping[str, SessionRelation]):
    """Relations without rows, whose schemas are determined on demand."""

    def __init__(self, prepared: PreparedPlan, bridge: SessionBridge, names: set[str]) -> None:
        self._prepared = prepared
        self._bridge = bridge
        self._names = names

    def __getitem__(self, name: str) -> SessionRelation:
        return SessionRelation(self._prepared.input_schema(self._bridge, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def prepare(bridge: SessionBridge, prepared: PreparedPlan, job: PreparePlan) -> PlanPrepared:
    """Build the plan on empty inputs and check what it makes.

    Raises `QueryRejected`, `InvalidUsage`, or Spark's own error.
    """
    plan = job.plan
    if not plan.strata:
        empties = {
            name: bridge.empty(schema)
            for name, schema in zip(plan.inputs, plan.input_schemas, strict=True)
        }
        with bridge.views(empties):
            made = output_schema(bridge.query(plan.sql).schema)
        check_types(made, plan.output, "the query", names=False)
        return PlanPrepared(job.job_id)
    for index in range(len(prepared.strata)):
        made = prepared.stratum(bridge, index)
    if plan.hidden:
        _check_hidden(made, plan)
    else:
        check_types(made, plan.output, "the last stratum", names=True)
    return PlanPrepared(job.job_id)


def _check_hidden(made: TableSchema, plan: DeltaPlan) -> None:
    """Check that the last stratum makes all columns, with their prefixes, and ``__to`` (see
    `DeltaPlan`)."""
    wanted = plan.made_columns
    by_name = {column.name: column for column in made.columns}
    missing = [column.name for column in wanted if column.name not in by_name]
    if missing:
        raise QueryRejected(f"the last stratum lacks column {missing[0]!r}; it makes {made.names}")
    found = TableSchema(tuple(by_name[column.name] for column in wanted))
    check_types(found, TableSchema(wanted), "the last stratum", names=True)
