"""Splits strata so that Spark plans little, and nothing twice.

Rules name the same subtree in many terms (the old rows of a join occur in each term of its delta),
and Spark analyses it as often as it is written: of 900 nodes in a plan 90 may be different. So
`divide_strata` turns what occurs more than once into strata of their own. Strata that run together
are one statement with a WITH clause, and each is analysed once.

`split_statements` determines which strata to run separately, so that their rows replace them in
later plans, no plan has more than `nodes_max` nodes, and no large part is computed twice. Most
steps are a single statement. `statement_sizes` tells in advance whether a plan is too large even
when split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from actors.model.plan.delta import (
    AccumulateTotals,
    ConsolidateRows,
    ExpandRows,
    FilterRows,
    GenerateRows,
    MatchState,
    NamedInput,
    Node,
    PairRows,
    RecomputeGroups,
    RecomputeRows,
    ReduceGroups,
    RowLifetimes,
    SelectColumns,
    TopCandidates,
    TopCovered,
    TopGate,
    TopShortage,
    UnionRows,
    WeighRows,
    columns_of,
    tops,
)
from actors.model.plan.input_names import InputKind, InputName

SHARED_NODES_MIN: Final = 4
"""Smaller subtrees are written again, because naming them would cost as much."""
STRATUM_NODES_MAX: Final = 50
"""Larger subtrees become several strata, so that `split_statements` can always split a plan."""
COLUMNS_OF_A_NODE: Final = 16
"""A node counts once for each this many columns that it computes, because each of Spark's rules
visits each expression of a plan."""

COMPUTED_TWICE_PART: Final = 4
"""A stratum that two statements would compute runs separately if it has at least this fraction (one
in so many) of a statement's nodes."""


class PlanLimits(NamedTuple):
    """Limits on the nodes of a plan."""

    statement_nodes_max: int = 400
    """Nodes of one statement; a larger one is split."""
    plan_nodes_max: int = 8_000
    """Nodes of all statements together when all inputs change."""


Strata: TypeAlias = tuple[Node, ...]
Sizes: TypeAlias = dict[str, int]


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes that a node reads."""
    match node:
        case NamedInput():
            return ()
        case (
            FilterRows()
            | SelectColumns()
            | WeighRows()
            | ExpandRows()
            | GenerateRows()
            | ConsolidateRows()
            | ReduceGroups()
        ):
            return (node.input,)
        case RowLifetimes():
            return node.input, node.interval
        case UnionRows():
            return node.inputs
        case PairRows() | MatchState():
            return node.left, node.right
        case AccumulateTotals():
            return node.contributions, node.hidden
        case RecomputeGroups() | RecomputeRows():
            return node.old, node.changes
        case TopGate() | TopCovered() | TopShortage() | TopCandidates():
            return tops(node)


def with_children(node: Node, made: Sequence[Node]) -> Node:
    """Return the node with other children, in the order of `children`."""
    match node:
        case NamedInput():
            return node
        case (
            FilterRows()
            | SelectColumns()
            | WeighRows()
            | ExpandRows()
            | GenerateRows()
            | ConsolidateRows()
            | ReduceGroups()
        ):
            return msgspec.structs.replace(node, input=made[0])
        case RowLifetimes():
            return msgspec.structs.replace(node, input=made[0], interval=made[1])
        case UnionRows():
            return UnionRows(tuple(made))
        case PairRows() | MatchState():
            return msgspec.structs.replace(node, left=made[0], right=made[1])
        case AccumulateTotals():
            return msgspec.structs.replace(node, contributions=made[0], hidden=made[1])
        case RecomputeGroups() | RecomputeRows():
            return msgspec.structs.replace(node, old=made[0], changes=made[1])
        case TopGate():
            return msgspec.structs.replace(node, input=made[0], switch=made[1])
        case TopCovered():
            return msgspec.structs.replace(node, changes=made[0], edges=made[1])
        case TopShortage():
            return TopShortage(made[0], made[1], made[2], node.keys, node.count)
        case TopCandidates():
            names = ("rows", "changes", "candidates", "edges", "shortage")
            return msgspec.structs.replace(node, **dict(zip(names, made, strict=True)))


def divide_strata(strata: Sequence[Node]) -> tuple[Strata, tuple[int, ...]]:
    """Return strata in which nothing large occurs twice, and the position of each given stratum
    among them."""
    made: list[Node] = []
    places: list[int] = []
    for node in strata:
        _Divider(made, places).add(node)
        places.append(len(made) - 1)
    return tuple(made), tuple(places)


class _Divider:
    """Divides one stratum. The strata before it are in `made`, at `places`."""

    def __init__(self, made: list[Node], places: Sequence[int]) -> None:
        self._made = made
        self._places = places
        self._parents: Counter[Node] = Counter()
        """Number of nodes that read each node."""
        self._done: dict[Node, tuple[Node, int]] = {}
        """The divided form and the size of each node handled so far."""

    def add(self, root: Node) -> None:
        """Add strata for what is shared, then the rest."""
        self._count(root, set())
        self._made.append(self._reduced(root)[0])

    def _count(self, node: Node, seen: set[Node]) -> None:
        for child in children(node):
            self._parents[child] += 1
            if child not in seen:
                seen.add(child)
                self._count(child, seen)

    def _divide(self, node: Node) -> tuple[Node, int]:
        """Return the node with shared subtrees replaced by their names, and its size."""
        found = self._done.get(node)
        if found is not None:
            return found
        if isinstance(node, NamedInput):
            return self._renamed(node), 1
        new, size = self._reduced(node)
        shared = self._parents[node] > 1 and size >= SHARED_NODES_MIN
        # A term with a bare NULL stays in its union, because only the union gives the column a
        # type.
        if (shared or size > STRATUM_NODES_MAX) and not _padding(node):
            new, size = self._named(new), 1
        self._done[node] = new, size
        return new, size

    def _reduced(self, node: Node) -> tuple[Node, int]:
        """Return the node with its children divided, and its size."""
        below = [self._divide(child) for child in children(node)]
        if isinstance(node, UnionRows) and not any(map(_padding, node.inputs)):
            below = self._gathered(below)
        new = with_children(node, [child for child, _ in below])
        return new, weight(node) + sum(count for _, count in below)

    def _gathered(self, below: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        """Return the inputs of a union, grouped into unions of their own while there are too
        many."""
        while sum(size for _, size in below) > STRATUM_NODES_MAX and len(below) > 1:
            groups: list[list[Node]] = []
            room = 0
            for child, size in below:
                if size > room or not groups:
                    groups.append([])
                    room = STRATUM_NODES_MAX
                groups[-1].append(child)
                room -= size
            below = [(self._named(UnionRows(tuple(group))), 1) for group in groups]
        return below

    def _named(self, node: Node) -> NamedInput:
        """Make a stratum of a divided node, and return it as a named input."""
        self._made.append(node)
        return NamedInput(InputKind.RESULT.text(len(self._made) - 1), columns_of(node))

    def _renamed(self, node: NamedInput) -> NamedInput:
        name = selected_column(node.name, self._places)
        return node if name == node.name else NamedInput(name, node.columns)


def selected_column(name: str, places: Sequence[int]) -> str:
    """Return the name of an input after the strata were divided."""
    kind, number = InputName.parse(name)
    return kind.text(places[number]) if kind is InputKind.RESULT else name


def _padding(node: Node) -> bool:
    """Return whether a column gets its type only from the union of which the node is a term."""
    return isinstance(node, SelectColumns) and any(c.expression == "NULL" for c in node.columns)


def split_statements(
    strata: Strata,
    first: int,
    last: int,
    filled: Collection[str],
    nodes_max: int,
    without: Collection[int] = (),
) -> list[tuple[int, ...]]:
    """Return the statements in which strata `first` to `last` run: each lists its strata, of which
    the last is its output.

    `filled` are the inputs that have rows; terms of other inputs are not planned. The strata
    `without` are assumed to make no rows.
    """
    kept: set[int] = set()
    # One more stratum at a time, because a stratum that runs separately changes all sizes above it.
    while True:
        sizes = _sizes(strata, first, last, filled, kept, without)
        large = [
            index for index in (*kept, last) if sizes[InputKind.RESULT.text(index)] > nodes_max
        ]
        found = next((k for t in large if (k := _best(strata, first, t, sizes, kept)) >= 0), -1)
        left = {*kept, *without}
        made = [_statement(strata, first, target, left) for target in (*sorted(kept), last)]
        if found < 0:
            found = _computed_twice(made, sizes, nodes_max)
        if found < 0:
            return made
        kept.add(found)


def _computed_twice(made: Sequence[tuple[int, ...]], sizes: Sizes, nodes_max: int) -> int:
    """Return the largest stratum that several statements would compute; -1 if none is worth its own
    statement."""
    times = Counter(index for statement in made for index in statement[:-1])
    again = [
        (sizes[InputKind.RESULT.text(index)], index) for index, count in times.items() if count > 1
    ]
    size, found = max(again, default=(0, -1))
    return found if size * COMPUTED_TWICE_PART > nodes_max else -1


def statement_sizes(strata: Sequence[Node], inputs: Collection[str], nodes_max: int) -> list[int]:
    """Return the approximate number of planned nodes of each statement if strata that run together
    are split at `nodes_max` and all `inputs` have rows."""
    made, _ = divide_strata(strata)
    found = split_statements(made, 0, len(made) - 1, inputs, nodes_max)
    kept = [piece[-1] for piece in found[:-1]]
    sizes = _sizes(made, 0, len(made) - 1, inputs, kept)
    return [sizes[InputKind.RESULT.text(piece[-1])] for piece in found]


def _sizes(
    strata: Strata,
    first: int,
    last: int,
    filled: Collection[str],
    kept: Collection[int],
    without: Collection[int] = (),
) -> Sizes:
    """Return the number of nodes of each stratum when everything that it names is expanded; the
    strata in `kept` count as one node."""
    # Spark expands every stratum where it is named, so the plan of strata above strata multiplies:
    # a view of 500 characters had 75,000 nodes, which no JVM can plan in its heap.
    sizes = dict.fromkeys(filled, 1)
    own: Sizes = {}
    for index in range(first, last + 1):
        name = InputKind.RESULT.text(index)
        own[name] = 0 if index in without else nodes(strata[index], sizes)
        sizes[name] = min(own[name], 1) if index in kept else own[name]
    return sizes | own


def _best(strata: Strata, first: int, target: int, sizes: Sizes, kept: Collection[int]) -> int:
    """Return the stratum whose rows would reduce the target's plan most; -1 if none would."""
    times: Counter[int] = Counter({target: 1})
    best, most = -1, 0
    # Downwards, because only later strata name a stratum, and these are counted by then.
    for index in range(target, first - 1, -1):
        if not times[index] or (index in kept and index != target):
            continue
        spared = times[index] * (sizes[InputKind.RESULT.text(index)] - 1)
        if index != target and spared > most:
            best, most = index, spared
        for name in _named(strata[index], sizes):
            times[InputName.parse(name).number] += times[index]
    return best


def _named(node: Node, sizes: Sizes) -> list[str]:
    """Return the strata that a node names, as often as it names them, if they make rows."""
    if isinstance(node, NamedInput):
        named = InputName.parse(node.name).kind is InputKind.RESULT
        return [node.name] if named and sizes.get(node.name) else []
    return [name for child in children(node) for name in _named(child, sizes)]


def _statement(strata: Strata, first: int, target: int, left: Collection[int]) -> tuple[int, ...]:
    """Return the strata of which the target consists, without those in `left`."""
    wanted = {target}
    for index in range(target, first - 1, -1):
        if index in wanted:
            below = map(InputName.parse, _inputs(strata[index]))
            results = (number for kind, number in below if kind is InputKind.RESULT)
            wanted |= {other for other in results if other >= first and other not in left}
    return tuple(sorted(wanted))


def _inputs(node: Node) -> set[str]:
    if isinstance(node, NamedInput):
        return {node.name}
    return {name for child in children(node) for name in _inputs(child)}


def emits_without_input(node: Node) -> bool:
    """Return whether a node makes a row from empty inputs: the old state of a group without keys
    exists from the first time on.

    >>> nothing = NamedInput("h0", ("x",))
    >>> one = RecomputeGroups(nothing, nothing, (), (), begins=True)
    >>> emits_without_input(one), emits_without_input(PairRows(NamedInput("d0", ()), one, ()))
    (True, False)
    """
    match node:
        case RecomputeGroups():
            return (node.begins and not node.keys) or emits_without_input(node.changes)
        case RecomputeRows():
            return emits_without_input(node.changes)
        case PairRows():
            return all(map(emits_without_input, children(node)))
        case UnionRows():
            return any(map(emits_without_input, children(node)))
        case MatchState() if node.kind == "full":
            return any(map(emits_without_input, children(node)))
        case NamedInput():
            return False
        case _:
            return emits_without_input(children(node)[0])


def weight(node: Node) -> int:
    """Return the number of nodes for which a node counts, by the columns that it computes itself.

    >>> from actors.model.plan.delta import NamedExpression
    >>> rows = NamedInput("d0", ("x",))
    >>> weight(FilterRows(rows, "x > 1"))
    1
    >>> weight(SelectColumns(rows, tuple(NamedExpression(f"c{n}", "x + 1") for n in range(60))))
    3
    """
    match node:
        case SelectColumns():
            computed = len(node.columns)
        case ReduceGroups():
            computed = len(node.measures)
        case AccumulateTotals():
            computed = 2 * len(node.measures)  # before and after
        case RecomputeGroups() | RecomputeRows():
            computed = len(node.calls)
        case _:
            computed = 0
    return max(1, computed // COLUMNS_OF_A_NODE)


def nodes(node: Node, sizes: Mapping[str, int]) -> int:
    """Return the approximate number of planned nodes of a node whose inputs have these `sizes`.

    Missing inputs are empty, and nodes that need their rows do not count.
    """
    counts = [nodes(child, sizes) for child in children(node)]
    match node:
        case NamedInput():
            return sizes.get(node.name, 0)
        case UnionRows():
            return sum(counts)
        case PairRows() if not all(counts):
            return 0
        case RecomputeGroups() if not node.keys:
            # The single group may have a row without any input rows.
            return sum(counts) + weight(node)
        case RecomputeGroups() | RecomputeRows() if not counts[1]:
            return 0
        case MatchState() if node.kind == "full" and any(counts):
            return sum(counts) + weight(node)
        case _:
            return sum(counts) + weight(node) if counts[0] else 0
