"""Strata cut up into plans of bearable size.

Strata that run together are one statement, in which what an earlier one makes stands as often as
later ones name it, and is named again by those after them: Spark's plan of a view nested five
deep has ten thousand nodes, and its planning takes minutes and more memory than there is. So a
run whose plan would be larger than a limit is done in pieces: the output of one is given to the
next as rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from actors.plan.delta import (
    Accumulate,
    Consolidate,
    Input,
    Match,
    Node,
    Pair,
    Recompute,
    Reduce,
    Select,
    Stratum,
    Union,
    Weigh,
    Where,
    missed_later,
)


def pieces(
    strata: Sequence[Stratum], first: int, last: int, filled: Collection[str], nodes_max: int
) -> list[tuple[int, int]]:
    """The runs (first, last) that strata `first` to `last` are done in; one, as a rule.

    `filled` are the inputs that have rows: terms of the others are not planned.
    """
    here = strata[: last + 1]
    found: list[tuple[int, int]] = []
    known = set(filled)
    while first <= last:
        end = _end(here, first, known, nodes_max)
        while missed_later(here, first, end):
            end -= 1
        found.append((first, end))
        known.add(f"r{end}")
        first = end + 1
    return found


def _end(strata: Sequence[Stratum], first: int, filled: Collection[str], nodes_max: int) -> int:
    """The last stratum that one plan may hold."""
    sizes: dict[str, int] = dict.fromkeys(filled, 1)
    for index in range(first, len(strata)):
        size = sizes[f"r{index}"] = nodes(strata[index].node, sizes)
        if size > nodes_max and index > first:
            return index - 1
    return len(strata) - 1


def nodes(node: Node, sizes: Mapping[str, int]) -> int:
    """About how many nodes are planned for a node, with inputs of these `sizes`; those left out
    are empty, and what hangs on them is nothing."""
    match node:
        case Input():
            return sizes.get(node.name, 0)
        case Where() | Select() | Weigh() | Consolidate() | Reduce():
            below = nodes(node.input, sizes)
            return below and below + 1
        case Union():
            return sum(nodes(child, sizes) for child in node.inputs)
        case Pair():
            left, right = nodes(node.left, sizes), nodes(node.right, sizes)
            return left + right + 1 if left and right else 0
        case Match():
            left, right = nodes(node.left, sizes), nodes(node.right, sizes)
            return left + right + 1 if left or node.kind == "full" else 0
        case Accumulate():
            below = nodes(node.contributions, sizes)
            return below and below + nodes(node.hidden, sizes) + 1
        case Recompute():
            below = nodes(node.changes, sizes)
            return below and below + nodes(node.old, sizes) + 1
