"""Draws the transitions of a dataflow (`DataflowMachine.TRANSITIONS`) as a Mermaid state diagram.

    python -m tests.kit.transition_diagram docs/internals/dataflow-states.md

writes the diagram into the page, between two marks; without a page it is printed. States that
share a transition are drawn as one *group*, where `NODES` has one. A transition that may stay in
its state is drawn only to the other states.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final, TypeAlias

from actors.replica.dataflow.events import LIVE, REST, DataflowPhase, TransitionTable
from actors.replica.dataflow.machine import DataflowMachine

StateGroup: TypeAlias = frozenset[DataflowPhase]
StateMove: TypeAlias = tuple[DataflowPhase, DataflowPhase]

BEGIN: Final = "<!-- transitions: written by tests.kit.transition_diagram -->"
END: Final = "<!-- end of transitions -->"
NODES: Final[Mapping[StateGroup, str]] = {
    **{frozenset((state,)): state.value for state in DataflowPhase},
    frozenset(REST): " or ".join(state.value for state in REST),
    frozenset(LIVE): "hydrating, at rest, or with a step",
}
"""Names of the single states and of the groups."""


def state_diagram(table: TransitionTable) -> str:
    """Return the diagram of a table of transitions, without fences.

    >>> from actors.replica.dataflow.events import StepComputed, on_event, same_targets
    >>> leads = same_targets([DataflowPhase.RUNNING], DataflowPhase.COMMITTING, stays=True)
    >>> print(state_diagram(on_event(StepComputed, lambda machine, event: [], leads)))
    stateDiagram-v2
        state "running" as s0
        state "committing" as s1
        s0 --> s1: StepComputed
    """
    labels: dict[tuple[StateGroup, StateGroup], list[str]] = {}
    for event in dict.fromkeys(event for _, event in table):
        for arrow in _arrows(table, event):
            labels.setdefault(arrow, []).append(event.__name__)
    drawn = {group for arrow in labels for group in arrow}
    shorts = {group: f"s{n}" for n, group in enumerate(each for each in NODES if each in drawn)}
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{NODES[group]}" as {short}' for group, short in shorts.items()]
    lines += [
        f"    {shorts[start]} --> {shorts[end]}: {', '.join(events)}"
        for (start, end), events in labels.items()
    ]
    return "\n".join(lines)


def _arrows(table: TransitionTable, event: type) -> Iterator[tuple[StateGroup, StateGroup]]:
    """Yield the arrows of one event: groups first, then the remaining states."""
    left = {
        (state, target)
        for (state, kind), transition in table.items()
        if kind is event
        for target in transition.targets
        if target is not state
    }
    whole = frozenset(left)
    largest_first = sorted(NODES, key=len, reverse=True)
    for start, end in product(largest_first, repeat=2):
        covered = _moves_between(start, end)
        if covered <= whole and covered & left:
            left -= covered
            yield start, end


def _moves_between(start: StateGroup, end: StateGroup) -> frozenset[StateMove]:
    """Return the moves from each state of a group to each state of another, except to itself."""
    return frozenset(move for move in product(start, end) if move[0] is not move[1])


def with_diagram(page: str) -> str:
    """Return a page with the diagram between its two marks. Raises `ValueError` if they are
    missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN if not begin else END}")
    drawn = state_diagram(DataflowMachine.TRANSITIONS)
    return f"{before}{BEGIN}\n\n```mermaid\n{drawn}\n```\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    """Write the diagram into a page, or print it; see the module docstring. Return the exit
    status."""
    parser = argparse.ArgumentParser(description="Draws the transitions of a dataflow.")
    parser.add_argument("page", type=Path, nargs="?")
    page: Path | None = parser.parse_args(arguments).page
    if page is None:
        print(state_diagram(DataflowMachine.TRANSITIONS))
    else:
        page.write_text(with_diagram(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
