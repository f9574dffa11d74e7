"""docs/internals/dataflow-states.md shows the transitions of a dataflow as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.replica.dataflow.events import DataflowPhase
from actors.replica.dataflow.machine import DataflowMachine
from tests.kit import transition_diagram
from tests.kit.transition_diagram import state_diagram, with_diagram


def test_the_page_is_drawn_from_the_table(root: Path) -> None:
    page = (root / "docs" / "internals" / "dataflow-states.md").read_text()
    assert with_diagram(page) == page, "python -m tests.kit.transition_diagram draws it anew"


def test_every_move_is_drawn_once() -> None:
    """The arrows, taken apart, are the table's moves to another state."""
    drawn = [
        (move, event)
        for event in dict.fromkeys(event for _, event in DataflowMachine.TRANSITIONS)
        for start, end in transition_diagram._arrows(DataflowMachine.TRANSITIONS, event)
        for move in transition_diagram._moves_between(start, end)
    ]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {
        ((state, target), event)
        for (state, event), transition in DataflowMachine.TRANSITIONS.items()
        for target in transition.targets
        if target is not state
    }
    assert {state for move, _ in drawn for state in move} == set(DataflowPhase)


def test_it_is_printed_or_written_into_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert transition_diagram.main([]) == 0
    assert capsys.readouterr().out == state_diagram(DataflowMachine.TRANSITIONS) + "\n"
    page = tmp_path / "page.md"
    page.write_text(f"a\n{transition_diagram.BEGIN}\nold\n{transition_diagram.END}\nb\n")
    assert transition_diagram.main([str(page)]) == 0
    assert state_diagram(DataflowMachine.TRANSITIONS) in page.read_text()
    assert "old" not in page.read_text()
    with pytest.raises(ValueError, match="lacks"):
        with_diagram("no marks")
