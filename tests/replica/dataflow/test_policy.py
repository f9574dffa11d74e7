"""AUTO's choice between a step and a recomputation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.model.plan.delta import AUTO
from actors.replica.dataflow.policy import PROBE_COLD, PROBE_WARM, SWITCH, CostLine, StepChooser


def test_a_line_learns_fixed_and_proportional_cost() -> None:
    line = CostLine()
    assert line.estimate(100) is None
    for rows in (100, 1_000, 10_000, 50_000):
        line.measured(rows, 40 + rows * 0.01)
    assert line.estimate(20_000) == pytest.approx(240)
    assert line.estimate(0) == pytest.approx(40)


def test_one_size_says_nothing_of_smaller_ones() -> None:
    line = CostLine()
    line.measured(1_000, 50)
    assert line.estimate(10) == pytest.approx(50)
    assert line.estimate(2_000) == pytest.approx(100)


@given(st.lists(st.tuples(st.integers(0, 10**7), st.floats(0, 10**6)), min_size=1))
def test_no_estimate_is_negative(measures: list[tuple[int, float]]) -> None:
    line = CostLine()
    for rows, ms in measures:
        line.measured(rows, ms)
    for rows in (0, 1, 1_000, 10**8):
        estimate = line.estimate(rows)
        assert estimate is not None
        assert estimate >= -1e-6


@given(st.lists(st.integers(0, 20), min_size=1), st.integers(0, 20))
def test_a_size_within_the_measured_ones_is_known(sizes: list[int], rows: int) -> None:
    """The steps of a view that follows the clock may have no rows at all, all of them."""
    line = CostLine()
    for each in sizes:
        line.measured(each, 4.0)
    least = line.least(rows)
    assert (least is None) >= (min(sizes) <= rows <= max(sizes))
    assert least is None or least >= 0


def taught(policy: str) -> StepChooser:
    """A step costs 40 ms and 10 µs a row, a recomputation of 1M rows 300 ms."""
    chooser = StepChooser(policy)
    chooser.recomputed(1_000_000, 300)
    for rows in (10, 1_000, 5_000):
        chooser.stepped(rows, 40 + rows * 0.01)
    return chooser


def test_auto_steps_for_few_changes_and_recomputes_for_many() -> None:
    chooser = taught(AUTO)
    assert not chooser.choose(100, 1_000_000, 1).full
    choice = chooser.choose(500_000, 1_000_000, 1)
    assert choice.full
    assert choice.text().startswith("step: about 5040")
    assert not chooser.choose(100, 1_000_000, 1).full


def test_a_step_over_many_times_is_weighed_against_as_many_recomputations() -> None:
    assert not taught(AUTO).choose(500_000, 1_000_000, 1_000).full


def test_what_keeps_no_state_never_recomputes() -> None:
    chooser = StepChooser(AUTO, keeps_state=False)
    chooser.recomputed(1_000_000, 300)
    chooser.stepped(10, 90_000)
    assert not any(chooser.choose(500_000, 1_000_000, 1).full for _ in range(20))


def test_several_times_are_recomputed_only_where_steps_are_far_slower() -> None:
    chooser = taught(AUTO)
    assert not chooser.choose(80_000, 1_000_000, 2).full, "840 ms against two of 300"
    assert chooser.choose(200_000, 1_000_000, 2).full


def test_hysteresis() -> None:
    chooser = taught(AUTO)
    near = 28_000  # 320 ms against 300: within the margin
    assert not chooser.choose(near, 1_000_000, 1).full
    assert chooser.choose(500_000, 1_000_000, 1).full
    assert chooser.choose(near, 1_000_000, 1).full
    below = int((300 / SWITCH - 40) / 0.01) - 100
    assert not chooser.choose(below, 1_000_000, 1).full


def test_nothing_is_recomputed_before_that_was_measured() -> None:
    chooser = StepChooser(AUTO)
    chooser.stepped(10, 10_000)
    choice = chooser.choose(10**9, 10, 1)
    assert not choice.full
    assert "not measured" in choice.text()


@pytest.mark.parametrize("policy", ["incremental", "incremental strict"])
def test_incremental_never_recomputes(policy: str) -> None:
    assert not taught(policy).choose(10**9, 10, 1).full


def tries(chooser: StepChooser, rows: int, choices: int, *, full: bool) -> list[int]:
    """The numbers of those choices that are the other way than `full`."""
    made = [chooser.choose(rows, 1_000_000, 1).full for _ in range(choices)]
    return [number for number, chosen in enumerate(made) if chosen != full]


def test_a_step_is_tried_now_and_then() -> None:
    chooser = taught(AUTO)
    found = tries(chooser, 500_000, 3 * PROBE_WARM[True], full=True)
    assert found == [PROBE_WARM[True], 2 * PROBE_WARM[True]]
    for _ in range(40):
        chooser.stepped(500_000, 50)
    assert not chooser.choose(500_000, 1_000_000, 1).full


def test_a_step_is_tried_soon_while_all_were_cold() -> None:
    chooser = StepChooser(AUTO)
    chooser.recomputed(1_000_000, 700)
    chooser.stepped(100, 6_000)
    assert tries(chooser, 100, 4, full=True) == [1, 2, 3]
    far = StepChooser(AUTO)
    far.recomputed(1_000_000, 700)
    far.stepped(100, 8_000)
    assert tries(far, 100, PROBE_WARM[True] + 1, full=True) == [PROBE_WARM[True]]


def test_a_recomputation_is_tried_seldom_and_only_if_it_is_near() -> None:
    far, near = taught(AUTO), taught(AUTO)
    for chooser in (far, near):
        chooser.recomputed(1_000_000, 300)
    assert not tries(far, 10, 3 * PROBE_WARM[False], full=False)
    assert tries(near, 15_000, PROBE_WARM[False] + 2, full=False) == [PROBE_WARM[False] - 1]


def test_the_first_recomputation_is_cold_and_forgotten() -> None:
    """Hydration waits for its plan, fills states, and reads what nobody has read."""
    chooser = StepChooser(AUTO)
    chooser.recomputed(1_000_000, 3_000)
    chooser.stepped(100, 900)
    for _ in range(PROBE_COLD[False] - 1):
        assert not chooser.choose(100, 1_000_000, 1).full
        chooser.stepped(100, 900)
    assert chooser.choose(100, 1_000_000, 1).full, "a try: 3 s may be cold"
    chooser.recomputed(1_000_000, 500)
    choice = chooser.choose(100, 1_000_000, 1)
    assert (choice.full, choice.full_ms) == (True, 500)


def test_cold_steps_are_forgotten_once_one_was_quick() -> None:
    """The first wait for their plans; a mean that fades would take dozens of tries."""
    chooser = StepChooser(AUTO)
    chooser.recomputed(1_000_000, 700)
    chooser.stepped(100, 6_000)
    assert chooser.choose(100, 1_000_000, 1).full
    assert not chooser.choose(100, 1_000_000, 1).full, "the try"
    chooser.stepped(100, 40)
    choice = chooser.choose(100, 1_000_000, 1)
    assert (choice.full, choice.step_ms) == (False, 40)


def test_a_slow_step_that_was_tried_forgets_nothing() -> None:
    chooser = StepChooser(AUTO)
    chooser.recomputed(1_000_000, 700)
    chooser.stepped(100, 9_000)
    assert chooser.choose(100, 1_000_000, 1).full
    for ms in (2_000, 650):
        chooser.stepped(100, ms)
    assert all(chooser.choose(100, 1_000_000, 1).full for _ in range(PROBE_WARM[True] - 1))


def test_steps_of_one_size_say_nothing_of_much_larger_ones() -> None:
    """In proportion the larger would be far slower than a recomputation; it is not."""
    chooser = StepChooser(AUTO)
    chooser.recomputed(1_000_000, 350)
    for rows, ms in ((90, 50), (100, 60), (84, 45)):
        chooser.stepped(rows, ms)
    assert not chooser.choose(8_000, 1_000_000, 1).full
    chooser.stepped(8_000, 120)
    choice = chooser.choose(8_000, 1_000_000, 1)
    assert not choice.full
    assert choice.step_ms == pytest.approx(120, rel=0.1)
    assert chooser.choose(100_000, 1_000_000, 1).full, "several sizes tell a slope"


def test_small_steps_of_several_sizes_say_nothing_of_much_larger_ones() -> None:
    """A line through them, a thousand rows long, once had a hundred thousand rows recomputed for
    good: no step of that size was ever measured."""
    chooser = StepChooser(AUTO)
    chooser.recomputed(10_000_000, 4_000)
    for rows, ms in ((200, 30), (600, 100), (1_500, 130), (200, 31)):
        chooser.stepped(rows, ms)
    chooser.stepped(100_000, 600)
    assert not chooser.choose(100_000, 10_000_000, 1).full
    assert chooser.choose(5_000_000, 10_000_000, 1).full, "sizes so far apart tell a slope"


def test_a_recomputation_is_not_tried_for_what_small_steps_say_of_a_large_one() -> None:
    chooser = StepChooser(AUTO)
    chooser.recomputed(10_000_000, 20_000)
    for rows, ms in ((200, 30), (600, 100), (1_500, 130), (200, 31)):
        chooser.stepped(rows, ms)
    for _ in range(PROBE_COLD[False] + 1):
        assert not chooser.choose(200, 10_000_000, 1).full
    assert not chooser.choose(100_000, 10_000_000, 1).full


def test_a_larger_step_is_not_taken_to_learn_where_it_cannot_be_cheaper() -> None:
    for ms, rows in ((400, 8_000), (50, 200_000)):
        chooser = StepChooser(AUTO)
        chooser.recomputed(1_000_000, 350)
        chooser.stepped(100, ms)
        assert chooser.choose(rows, 1_000_000, 1).full


def test_a_cold_step_of_few_rows_does_not_recompute_hundreds_of_times() -> None:
    """As in a demo that plays ten days at once: the first step built its plan, the second had all
    the rest."""
    chooser = StepChooser(AUTO)
    chooser.recomputed(26_000, 300)
    chooser.stepped(20, 8_700)
    assert not chooser.choose(40_000, 26_000, 240).full
    assert chooser.choose(40_000, 26_000, 2).full


def test_a_much_smaller_step_is_taken_to_learn() -> None:
    """Steps that met very many rows say little of one that meets none."""
    chooser = StepChooser(AUTO)
    chooser.recomputed(1_000_000, 200)
    for _ in range(3):
        chooser.stepped(100_000, 400)
    assert chooser.choose(100_000, 1_000_000, 1).full
    assert chooser.choose(80_000, 1_000_000, 1).full
    assert not chooser.choose(120, 1_000_000, 1).full
    chooser.stepped(120, 30)
    assert not chooser.choose(120, 1_000_000, 1).full
    assert chooser.choose(100_000, 1_000_000, 1).full


def test_before_its_lookups_a_step_is_declined_only_where_as_much_was_measured() -> None:
    chooser = StepChooser(AUTO)
    chooser.recomputed(1_000_000, 200)
    assert not chooser.favors_full(1_000_000, 1_000_000, 1)
    chooser.stepped(100_000, 400)
    assert chooser.favors_full(100_000, 1_000_000, 1)
    assert not chooser.favors_full(2, 1_000_000, 1), "what the two meet is not known"
    assert not StepChooser("incremental").favors_full(100_000, 1_000_000, 1)
