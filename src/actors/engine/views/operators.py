"""Operators of a plan: each knows its changes, its state, and the origins of its keys.

An operator has contents at every time. Its *delta* consists of the updates with ``lo <= time <
hi``; its *old* state of the contents below `lo` (rows of positive weight, whose times have no
meaning); its *new* state of both. All three are nodes over the inputs of the step.

The old state is complete only for the key values that `seek` looked up. Other rows may be missing
or, above outer joins and groupings, wrong. The caller of `seek` joins by these key values, which
drops all other rows.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Final, TypeAlias

from actors.engine.views.eager_choice import NEVER_EAGER, EagerChoice
from actors.engine.views.lookups import LookupCollector, Origin, Wanted, Within
from actors.model.plan.delta import (
    ConsolidateRows,
    EagerSums,
    HiddenState,
    NamedInput,
    Node,
    PlanStratum,
    SelectColumns,
    TopCandidates,
    TopGate,
    UnionRows,
)
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.nearby import CoveredChanges, NearbyRows
from actors.model.plan.plan_splitting import children, with_children
from actors.model.plan.relational import NamedExpression
from actors.model.plan.schema import TableSchema

SHARED_NODES_MAX = 50
"""Size in nodes above which a shared part becomes a separate stratum, instead of being written
twice."""

# -- types of keys ---------------------------------------------------------------------------------

_INTEGER_DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
_DECIMAL_DIGITS_MAX: Final = 38
_OTHER_NAMES: Final = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
    "dec": "decimal",
    "numeric": "decimal",
}


def is_key_comparable(given: str, held: str) -> bool:
    """Return whether a lookup by values of one Spark type finds all equal values of another type.

    Spark widens both sides of ``=`` to a common type. If that rounds (bigint = double), parses text
    (string = int), needs a time zone (date = timestamp) or overflows (decimals that together have
    more than 38 digits), many stored values equal one given value, and no lookup finds them all.
    Arrangements draw the same line: for other types they read everything.
    """
    one, other = _plain(given), _plain(held)
    # NULL equals nothing, so a lookup by it misses nothing.
    if one == other or "void" in (one, other):
        return True
    if {one, other} == {"float", "double"}:
        return True
    digits = [_digits(one), _digits(other)]
    if one in _INTEGER_DIGITS and other in _INTEGER_DIGITS:
        return True
    # Exact numbers stay exact as long as their common decimal type has at most 38 digits.
    (before, after), (before2, after2) = digits
    return min(before, before2) >= 0 and (
        max(before, before2) + max(after, after2) <= _DECIMAL_DIGITS_MAX
    )


def _plain(kind: str) -> str:
    low = kind.strip().lower()
    name, bracket, rest = low.partition("(")
    if name in ("varchar", "char"):
        return "string"
    return _OTHER_NAMES.get(name, name) + bracket + rest


def _digits(kind: str) -> tuple[int, int]:
    """Return the digits before and after the decimal point; negative numbers if the type is not an
    exact number."""
    if kind in _INTEGER_DIGITS:
        return _INTEGER_DIGITS[kind], 0
    if not re.fullmatch(r"decimal(\(.*\))?", kind):
        return -1, 0
    found = [int(part) for part in re.findall(r"\d+", kind)] or [10]
    precision, scale = found[0], found[1] if len(found) > 1 else 0
    return precision - scale, scale


# -- operators -------------------------------------------------------------------------------------


class UnsupportedConstruct(Exception):
    """No rule supports this construct, which the text names. It makes the view, or the node,
    opaque."""


Origins: TypeAlias = tuple[Origin, ...]
Ids: TypeAlias = tuple[str, ...]
"""Column ids; an empty one stands for NULL."""


_WORD: Final = re.compile(r"[A-Za-z_]\w*")


class DerivationContext:
    """State of a view's derivation: its lookups, cuts and hidden states so far."""

    def __init__(
        self,
        schemas: tuple[TableSchema, ...],
        shared: Set[int] = frozenset(),
        choice: EagerChoice = NEVER_EAGER,
    ) -> None:
        """`shared`: the identities of plans that share one operator (`common_subplans`). `choice`:
        chooses the sums that are computed below joins."""
        self.schemas = schemas
        self.shared = shared
        self.choice = choice
        self.eager: list[EagerSums] = []
        """The sums that are computed below a join."""
        self.eager_open = False
        """True if a choice of such sums could not be made yet."""
        self.operators: dict[int, ViewOperator] = {}
        """Operators of shared plans, by the identities of the plans."""
        self.lookups = LookupCollector()
        # Nodes that are computed by separate runs, in the order of these runs.
        self.cuts: list[Node] = []
        self.hidden: list[tuple[HiddenState, Node | None]] = []
        """Each hidden state with its changes; None if the state before it also makes them."""
        # Reads of rows near changes, in the order of their numbers.
        self.nearby: list[NearbyRows] = []
        # Changes up to edges, in the order of their numbers.
        self.covered: list[CoveredChanges] = []
        self.keyed: list[str] = []
        """Why each recomputed grouping or window is not additive."""
        self.seldom: dict[str, Node] = {}
        """Runs that rarely produce rows, with their nodes: reading whole states for their rows
        costs little."""
        self.one_row: set[str] = set()
        """Runs with the changes of a single row: when it changes, the inputs joined with it are
        read in full."""
        self.bounded: set[str] = set()
        """Hidden states with few rows, whatever the tables contain: reading them in full costs
        little."""
        # The open records of requested lookups, the innermost last.
        self._asked: list[set[Wanted]] = []
        # Number of prefixes given out.
        self._names = 0

    def ask(
        self,
        target: str,
        key: tuple[str, ...],
        origins: Origins,
        after: Iterable[Wanted],
        *,
        nulls: bool,
        within: Within | None = None,
    ) -> frozenset[Wanted]:
        """Request state by those columns whose equal values a lookup can find. All open records
        note the lookup.

        Without columns the lookup reads everything: whenever an origin has a row, or always if
        there are no origins. `within` is as in `LookupCollector.ask`.
        """
        kept = [
            i
            for i, own in enumerate(key)
            if all(self._finds(target, own, name, columns[i]) for name, columns in origins)
        ]
        if len(kept) < len(key):
            key, origins = narrowed(key, origins, kept)
        wanted = self.lookups.ask(target, key, origins, after, nulls=nulls, within=within)
        for record in self._asked:
            record.add(wanted)
        return frozenset([wanted])

    def _finds(self, target: str, own: str, origin: str, column: str) -> bool:
        """Return whether a lookup by a column's values finds all equal ones; True if a type is not
        known."""
        given = self._kind(origin, column) if column else None
        held = self._kind(target, own)
        return given is None or held is None or is_key_comparable(given, held)

    def _kind(self, name: str, column: str) -> str | None:
        parsed = InputName.parse(name)
        kind, number = parsed
        if kind is InputKind.RESULT:
            return None
        if kind is InputKind.COVERED:
            number = self.covered[number].input_index
        of_hidden = parsed.is_of_hidden_state
        schema = self.hidden[number][0].schema if of_hidden else self.schemas[number]
        return next((each.type for each in schema.columns if each.name == column), None)

    def begin(self) -> None:
        """Start to record the lookups that are requested."""
        self._asked.append(set())

    def end(self) -> frozenset[Wanted]:
        """Return the lookups that were requested since the matching `begin`."""
        return frozenset(self._asked.pop())

    def repeat(self, asked: Iterable[Wanted]) -> None:
        """Add lookups that were requested earlier to all open records."""
        for record in self._asked:
            record.update(asked)

    def cut(self, node: Node, columns: Ids) -> NamedInput:
        """Have the node computed by a separate run, and return the run's output."""
        self.cuts.append(node)
        return NamedInput(InputKind.RESULT.text(len(self.cuts) - 1), columns)

    def near(self, wanted: NearbyRows) -> str:
        """Return the name of the input that holds the rows near changes."""
        if wanted not in self.nearby:
            self.nearby.append(wanted)
        return InputKind.NEARBY.text(self.nearby.index(wanted))

    def cover(self, wanted: CoveredChanges) -> str:
        """Return the name of the input that holds the changes up to edges."""
        self.covered.append(wanted)
        return InputKind.COVERED.text(len(self.covered) - 1)

    def prefix(self) -> str:
        """Return a new prefix for column ids."""
        self._names += 1
        return f"q{self._names}_"

    def strata(self, last: Node) -> tuple[PlanStratum, ...]:
        """Return the cuts and then the last node, each with its lookups."""
        nodes = [*self.cuts, last]
        lookups = self.lookups.by_stratum(len(nodes))
        ranges = self.lookups.ranges
        return tuple(
            PlanStratum(
                own,
                node,
                inputs_of(node),
                inputs_of(node, without=self.seldom) if self.seldom else (),
                InputKind.RESULT.text(index) in self.seldom,
                tuple(ranges[each.number] for each in own if each.number in ranges),
            )
            for index, (own, node) in enumerate(zip(lookups, nodes, strict=True))
        )


class ViewOperator(ABC):
    """An operator of a view."""

    def __init__(self, context: DerivationContext, columns: Ids) -> None:
        self.context = context
        self.columns = columns
        # The delta once it is made, the lookups that it asked for, and the run that makes it if it
        # is cut.
        self._delta: Node | None = None
        self._delta_asked: frozenset[Wanted] = frozenset()
        self._cut: str | None = None
        # Cache of `delta_origins`.
        self._traced: dict[tuple[Ids, int, int], Origins | None] = {}

    # -- overridden by rules ----------------------------------------------------------------------

    @abstractmethod
    def make_delta(self) -> Node:
        """Return the updates in ``[lo, hi)``, and request the state that they touch."""

    @abstractmethod
    def old(self) -> Node:
        """Return the state below `lo`, as far as it was looked up."""

    @abstractmethod
    def trace_delta(self, ids: Ids) -> Origins | None:
        """Return inputs that contain every tuple of `ids` in the delta; None if they are not known
        before the delta is made.

        Called after `delta`.
        """

    @abstractmethod
    def old_origins(self, ids: Ids) -> Origins | None:
        """Return inputs that contain every tuple of `ids` in the old state, as far as it was looked
        up."""

    @abstractmethod
    def seek(
        self, ids: Ids, origins: Origins, after: frozenset[Wanted], *, nulls: bool
    ) -> frozenset[Wanted]:
        """Make the old state complete for rows whose `ids` occur in `origins`; without ids, for all
        rows.

        `nulls`: true if a NULL in the origins matches rows with NULL. Returns the lookups after
        which the state is complete.
        """

    def kind(self, id_: str) -> str | None:
        """Return the Spark type of a column, if it is known."""
        return None

    @abstractmethod
    def seekable(self, ids: Ids) -> bool:
        """Return whether a search by these columns, including for NULLs, reads only matching
        rows."""

    def table_columns(self, ids: Ids, *, some: bool = False) -> tuple[int, Ids] | None:
        """Return an input and its own names for `ids` if the operator passes on that input's rows
        one by one; None if it does not, or if some of the columns are computed. With `some`, the
        operator may drop rows; without, it must pass on all of them. It may drop columns in either
        case."""
        return None

    def determined_by(self, ids: frozenset[str]) -> frozenset[str]:
        """Return the columns whose values are determined by these columns, through primary keys and
        equalities."""
        return ids

    def unique_ids(self) -> tuple[frozenset[str], ...]:
        """Return sets of columns that are the PRIMARY KEY of the table they come from."""
        return ()

    def is_one_row(self) -> bool:
        """Return whether there is never more than one row."""
        return False

    def is_constant(self) -> bool:
        """Return whether its rows never change after the first contents."""
        return False

    # -- derived from these -----------------------------------------------------------------------

    def delta(self, *, shared: bool = False) -> Node:
        """Return the updates in ``[lo, hi)``. `shared`: the node will be used more than once."""
        context = self.context
        if self._delta is None:
            context.begin()
            self._delta = self.make_delta()
            self._delta_asked = context.end()
        else:
            # The delta in progress also depends on these lookups, although another one requested
            # them.
            context.repeat(self._delta_asked)
        # A large delta that is needed in several places is computed by a separate run.
        if shared and self._cut is None and size_of(self._delta) > SHARED_NODES_MAX:
            self.cut()
        return self._delta

    def cut(self) -> None:
        """Have the delta computed by a separate run from now on."""
        if self._cut is None:
            made = self.context.cut(self.delta(), self.columns)
            self._cut, self._delta = made.name, made
            # The output of a run does not wait for lookups.
            self._delta_asked = frozenset()

    def cut_changes(self) -> str:
        """Have the delta computed by a separate run, without no-op updates, and return the run's
        name."""
        if self._cut is None:
            # With no-op updates removed, a lookup that reads much for each row of this run is rare.
            self._delta = ConsolidateRows(self.delta())
            self.cut()
        assert self._cut is not None, "a cut has a name"
        return self._cut

    def new(self) -> Node:
        """Return the state below `hi`."""
        return UnionRows((self.old(), self.delta(shared=True)))

    def delta_origins(self, ids: Ids) -> Origins | None:
        """Return the answer of `trace_delta`; for a delta that was cut, the run's own rows."""
        if self._cut is not None:
            return ((self._cut, ids),)
        # Each join asks both its inputs several times: without a cache, n joins make 2^n calls.
        known = (ids, len(self.context.cuts), len(self.context.hidden))
        if known not in self._traced:
            self._traced[known] = self.trace_delta(ids)
        return self._traced[known]

    def delta_lookups(self) -> frozenset[Wanted]:
        """Return the lookups that fill the inputs named by the origins of the delta."""
        return self._delta_asked

    def keys_of_delta(self, ids: Ids) -> Origins:
        """Return the origins of `ids` in the delta. If they are not known otherwise, the delta is
        cut."""
        self.delta()
        found = self.delta_origins(ids)
        if found is None:
            # For a computed column, a separate run makes the delta, and its output is the origin.
            self.cut()
            found = self.delta_origins(ids)
        assert found is not None, "a cut knows its columns"
        return found


def merge_origins(*found: Origins | None) -> Origins | None:
    """Return all origins together; None if any of them is not known."""
    whole: dict[Origin, None] = {}
    for origins in found:
        if origins is None:
            return None
        whole |= dict.fromkeys(origins)
    return tuple(whole)


def narrowed(ids: Ids, origins: Origins, kept: Sequence[int]) -> tuple[Ids, Origins]:
    """Return the ids at some positions, with the origins' columns for them."""
    picked = tuple(ids[i] for i in kept)
    return picked, tuple(
        dict.fromkeys((name, tuple(columns[i] for i in kept)) for name, columns in origins)
    )


def select(node: Node, columns: Iterable[tuple[str, str]]) -> SelectColumns:
    """Return renamed or computed columns of a node, given as (name, expression)."""
    return SelectColumns(
        node, tuple(NamedExpression(name, expression) for name, expression in columns)
    )


def is_name(expression: str) -> bool:
    """Return whether an expression is a bare column id."""
    return _WORD.fullmatch(expression) is not None


def children_of(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below a node."""
    found: list[Node] = []
    for field in node.__struct_fields__:
        value = getattr(node, field)
        items = value if isinstance(value, tuple) else (value,)
        found += [item for item in items if isinstance(item, Node)]
    return tuple(found)


def size_of(node: Node) -> int:
    """Return the number of nodes of a tree."""
    return 1 + sum(size_of(child) for child in children_of(node))


def inputs_of(node: Node, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the inputs that a node reads, without repetition. With `without`, return
    only those that it reads when these inputs have no rows."""
    found: dict[str, None] = {}

    def walk(below: Node) -> None:
        if isinstance(below, NamedInput) and below.name not in without:
            found[below.name] = None
        children = children_of(below)
        if isinstance(below, TopGate | TopCandidates):
            switch = below.switch if isinstance(below, TopGate) else below.shortage
            if isinstance(switch, NamedInput) and switch.name in without:
                children = _usual(below)
        for child in children:
            walk(child)

    walk(node)
    return tuple(found)


def replace_input(node: Node, name: str, other: str) -> Node:
    """Return the node with the input `other` in place of the input `name`."""
    if isinstance(node, NamedInput):
        return NamedInput(other, node.columns) if node.name == name else node
    return with_children(node, [replace_input(each, name, other) for each in children(node)])


def _usual(node: TopGate | TopCandidates) -> tuple[Node, ...]:
    """Return the inputs that a node reads when there is no shortage."""
    if isinstance(node, TopCandidates):
        return node.changes, node.candidates, node.edges
    return (node.input,) if node.closes else ()
