"""Chooses the sums that are computed below a join (`views.rule_eager`), by the sizes of the tables.

Summing first costs one additional change of a hidden state for each change of the table. For each
change of the other side it saves as many rows as match one of its rows. So it is chosen if there
are at least a given number of rows for each row of the other side.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from actors.model.plan.delta import EagerSums
from actors.runtime.threshold_probes import EAGER_ROWS


class EagerChoice(msgspec.Struct, frozen=True):
    """Chooses by the sizes that are known when a view is created.

    >>> choice = EagerChoice(rows=(100_000, 10), rows_min=1_000)
    >>> choice.choose(0, ("bid",), 1)
    EagerSums(input_index=0, columns=('bid',), rows_for_each=10000)
    >>> choice.choose(1, ("bid",), 0) is None
    True
    """

    rows: tuple[int, ...] = ()
    """Approximate number of rows of each input; empty if not known."""
    rows_min: int | None = None
    """Minimum number of rows for each row of the other side; None: never sum below joins."""
    made: tuple[EagerSums, ...] | None = None
    """The choice made when the view was compiled before, or None."""

    def is_open(self, *inputs: int) -> bool:
        """Return whether the choice must wait because one of these inputs is empty."""
        # The size of an empty table says nothing about its later size: the next start of the
        # service chooses again.
        return self.made is None and not all(self.rows[n] for n in inputs if self.rows)

    def choose(self, input_index: int, columns: tuple[str, ...], other: int) -> EagerSums | None:
        """Return the sums of an input by `columns`, its join key with the input `other`, if they
        should be computed below that join; else None."""
        # A view that is compiled again keeps its choice, on which its durable states depend.
        if self.made is not None:
            wanted = (input_index, columns)
            same = (each for each in self.made if (each.input_index, each.columns) == wanted)
            return next(same, None)
        if self.rows_min is None:
            return None
        for_each = 0
        if self.rows and self.rows[other]:
            for_each = self.rows[input_index] // self.rows[other]
        if not EAGER_ROWS.crossed(for_each >= self.rows_min):
            return None
        return EagerSums(input_index, columns, for_each)


NEVER_EAGER: Final = EagerChoice()
ChooseEager: TypeAlias = Callable[[Sequence[str]], Awaitable[EagerChoice]]
"""Makes the choice for a view's inputs, which are given by name."""
