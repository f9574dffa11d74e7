"""Chooses between a step and a recomputation, by the cheaper of two estimates learned from
measurements.

Theory of operation. Both ways of advancing a view have a fixed cost and a cost that grows with
rows. For a step these rows are the changes, and the pairs they form with the rows they meet (one
change of a key with a hundred thousand rows counts a hundred thousand). For a recomputation they
are the full contents. `CostLine` fits this model to the measurements by least squares; older ones
count less. AUTO chooses a recomputation when its estimate is lower by the margin `SWITCH`, and goes
back to steps when theirs is lower by as much. A recomputation is exact at one time, so a step that
covers several times is compared with as many recomputations.

The alternative that is not chosen is not measured, and the first measurements are of cold plans. So
the alternative is probed now and then where the estimates are close: often while only cold
measurements exist, later rarely (`PROBE_COLD`, `PROBE_WARM`).

AUTO steps until a recomputation has been measured; hydration is one. Under another policy a healthy
view with delta rules is never recomputed (under policy FULL a view has none). Either way only the
difference is appended. Between two consecutive choices that differ (probes aside) the estimates
differ by at least `SWITCH`. Memory is not considered.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.model.plan.delta import AUTO

SWITCH: Final = 1.25
PROBE_COLD: Final = {False: 4, True: 1}
"""Number of equal choices, for steps (False) and for recomputations (True), after which the
alternative is probed while it was measured fewer than `MEASURED_COLD` times."""
MEASURED_COLD: Final = {False: 2, True: 3}
PROBE_WARM: Final = {False: 200, True: 10}
"""The same number later on."""
NEAR: Final = 3.0
"""A recomputation that is estimated to be slower than a step by up to this factor is still
probed."""
COLD: Final = {False: 4.0, True: 10.0}
"""The same factor while only cold measurements exist."""
AT_EACH: Final = 3.0
"""Factor by which a step of several times must be slower than recomputations at each of them.

The measurement of a late step includes waiting for others, so it overstates the cost.
"""
ALIKE: Final = 4
"""Sizes within this factor of each other say nothing about the slope."""
LEAP_MAX: Final = 1_000
"""Largest step, as a multiple of the largest measured one, that may cost no more than that one."""
SLOW_ROW_MS: Final = 0.05
"""Time in ms that a row of an even larger step may take: Spark processes at least 20,000 per
second."""
DECAY: Final = 0.9
"""Factor by which the weight of a measurement decreases with each later one."""


class CostLine:
    """A line ``ms = fixed + slope × rows`` fitted to decaying measurements. Neither term is
    negative."""

    def __init__(self) -> None:
        self._weight = 0.0
        """Decaying sums over the measurements: of weights, rows, ms, rows², and rows × ms."""
        self._rows = 0.0
        self._ms = 0.0
        self._rows_rows = 0.0
        self._rows_ms = 0.0
        self._smallest = self._largest = 0
        """Smallest and largest number of rows that were measured."""

    def measured(self, rows: int, ms: float) -> None:
        """Add one measurement."""
        for name in ("_weight", "_rows", "_ms", "_rows_rows", "_rows_ms"):
            setattr(self, name, getattr(self, name) * DECAY)
        self._smallest = min(self._smallest, rows) if self._weight else rows
        self._largest = max(self._largest, rows)
        self._weight += 1
        self._rows += rows
        self._ms += ms
        self._rows_rows += rows * rows
        self._rows_ms += rows * ms

    def estimate(self, rows: int) -> float | None:
        """Return the expected ms, or None before the first measurement."""
        if not self._weight:
            return None
        mean_rows, mean_ms = self._rows / self._weight, self._ms / self._weight
        spread = self._rows_rows / self._weight - mean_rows * mean_rows
        together = self._rows_ms / self._weight - mean_rows * mean_ms
        if spread > 1e-9 * max(1.0, mean_rows * mean_rows):
            slope = max(0.0, together / spread)
        else:
            # Only one size was measured. Assume that a larger one costs in proportion, and a
            # smaller one as much.
            slope = mean_ms / mean_rows if mean_rows and rows > mean_rows else 0.0
        fixed = mean_ms - slope * mean_rows
        if fixed < 0:
            slope, fixed = mean_ms / mean_rows, 0.0
        return fixed + slope * rows

    def reaches(self, rows: int) -> bool:
        """Return whether a step of at most `rows` rows was measured."""
        return self._weight > 0 and rows >= self._smallest

    def least(self, rows: int) -> float | None:
        """Return the least ms that `rows` may take, or None if `estimate` is reliable.

        The estimate is unreliable if `rows` is further outside the measured sizes than these are
        apart: steps of 200 to 1,500 rows differ by chance, and their slope says nothing about
        100,000 rows.
        """
        # Steps of the clock may have no rows at all.
        if not self._weight or self._smallest <= rows <= self._largest:
            return None
        known = max(ALIKE, self._largest / max(1, self._smallest))
        if known * rows <= self._smallest:
            # Much smaller: the cost may be proportional.
            return self._ms / self._rows * rows
        if rows < known * self._largest:
            return None
        mean_ms = self._ms / self._weight
        # Much larger: the cost may be the same. In proportion to a cold step of a few rows, tens of
        # thousands would be estimated at hours, and be recomputed at hundreds of times instead.
        return mean_ms if rows <= LEAP_MAX * self._largest else mean_ms + rows * SLOW_ROW_MS


class StepDeclined(Exception):
    """Raised if the view should be recomputed in full instead of stepped."""


class StepChoice(msgspec.Struct, frozen=True):
    """Choice for one step, and the estimates in ms (None: not known yet)."""

    full: bool
    step_ms: float | None
    full_ms: float | None

    def text(self) -> str:
        """Return the rejected alternative as readable text."""
        other, ms = ("step", self.step_ms) if self.full else ("recomputation", self.full_ms)
        return f"{other}: not measured yet" if ms is None else f"{other}: about {ms:.0f} ms"


class StepChooser:
    """Makes the choices for one view."""

    def __init__(self, policy: str, *, keeps_state: bool = True) -> None:
        """Create the chooser. A view without state (`keeps_state`) always steps."""
        self.policy = policy
        self._keeps_state = keeps_state
        self._step = CostLine()
        """Measured cost of steps."""
        self._full = CostLine()
        """Measured cost of recomputations."""
        self._chose_full = False
        """The last choice: True for a recomputation."""
        self._full_ms = 0.0
        """Estimated cost of a recomputation at the last choice."""
        self._in_a_row = 0
        """Number of choices since the last change or probe."""
        self._steps = self._recomputations = 0
        """Number of measured steps, and of measured recomputations."""

    def favors_full(self, work: int, state_rows: int, times: int) -> bool:
        """Return whether a step with at least this work is expected to cost more than a
        recomputation.

        This does not change the state.
        """
        step_ms, full_ms = self._estimates(work, state_rows, times)
        return self._step.reaches(work) and self._is_dearer(step_ms, full_ms, times)

    def _estimates(
        self, work: int, state_rows: int, times: int
    ) -> tuple[float | None, float | None]:
        step_ms = self._step.estimate(work)
        full_ms = self._full.estimate(state_rows)
        return step_ms, None if full_ms is None else full_ms * max(1, times)

    def _is_dearer(self, step_ms: float | None, full_ms: float | None, times: int) -> bool:
        """Return whether, under AUTO, a step costs more than a recomputation by at least the
        margin."""
        if not self._keeps_state or self.policy != AUTO or step_ms is None or full_ms is None:
            return False
        # Hysteresis keeps the choice from flapping near the break-even point.
        margin = 1 / SWITCH if self._chose_full else SWITCH
        return step_ms > full_ms * (margin if times < 2 else AT_EACH)

    def choose(self, work: int, state_rows: int, times: int) -> StepChoice:
        """Return the choice for a step.

        Args:
            work: Changes and pairs of the step.
            state_rows: Rows of the inputs.
            times: Number of times that the step covers.
        """
        step_ms, full_ms = self._estimates(work, state_rows, times)
        compared = self._keeps_state and self.policy == AUTO
        if compared and step_ms is not None and full_ms is not None:
            chosen = self._is_dearer(step_ms, full_ms, times)
            self._in_a_row = self._in_a_row + 1 if chosen == self._chose_full else 0
            self._chose_full = chosen
            self._full_ms = full_ms
            least = self._step.least(work)
            if chosen and least is not None and least < full_ms:
                # Nothing is known about steps of this size. Take this one to learn, because it
                # could be cheaper.
                self._chose_full = False
                return StepChoice(False, step_ms, full_ms)
            # An extrapolated estimate of the step is no reason to probe the alternative.
            known_ms = step_ms if least is None else least
            if (times < 2 or self._chose_full) and self._probes(known_ms, full_ms):
                self._in_a_row = 0
                return StepChoice(not chosen, step_ms, full_ms)
        return StepChoice(self._chose_full, step_ms, full_ms)

    def _probes(self, step_ms: float, full_ms: float) -> bool:
        """Return whether to try the alternative that was not chosen for a long time."""
        full = self._chose_full
        chosen, other = (full_ms, step_ms) if full else (step_ms, full_ms)
        measured = self._steps if full else self._recomputations
        cold = measured < MEASURED_COLD[full]
        if cold and self._in_a_row >= PROBE_COLD[full] and other < COLD[full] * chosen:
            return True
        return self._in_a_row >= PROBE_WARM[full] and (full or other < NEAR * chosen)

    def stepped(self, work: int, ms: float) -> None:
        """Add the measurement of a step."""
        if self._chose_full and ms * SWITCH < self._full_ms:
            # A probe showed that steps are cheaper, so the earlier measurements were cold.
            self._step = CostLine()
        self._steps += 1
        self._step.measured(work, ms)

    def recomputed(self, state_rows: int, ms: float) -> None:
        """Add the measurement of a recomputation over `state_rows` rows."""
        if self._recomputations == 1:
            # The first measurement is the hydration, on cold plans. Forget it.
            self._full = CostLine()
        self._recomputations += 1
        self._full.measured(state_rows, ms)
