"""Merges and orders the lookups of state that the terms of a plan request.

Every term of a join asks for the rows of some input that match, by key, rows that it already has:
those of the delta, or of earlier lookups. Requests for the same (target, key) that start at the
same changes merge into one lookup with several origins.

Invariants of `by_stratum`'s result: each origin ``s{n}`` or ``h{k}`` is the target of an earlier
lookup, and each target has either one lookup with an empty key or only lookups with keys. Costs are
not considered here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from actors.model.plan.delta import StateLookup
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.nearby import ComparedRange

Origin: TypeAlias = tuple[str, tuple[str, ...]]
"""(name of an input, its columns); an empty column name stands for NULL."""
Wanted: TypeAlias = tuple[str, tuple[str, ...], int, frozenset[str]]
"""(target, key, hop, roots). The hop counts how often the target was looked up before from its own
rows (a table joined with itself). The roots are the changes at which the search starts."""


Within: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""(columns of the target, columns of the only origin that they are compared with)."""


class _PendingLookup(msgspec.Struct):
    origins: dict[Origin, set[Wanted]]
    """Each origin, with the lookups that fill it."""
    # True if a NULL in a key finds the rows with NULL.
    nulls: bool
    within: set[Within | None] = msgspec.field(default_factory=set)
    """The comparisons of each request; None for a request of all rows."""

    @property
    def after(self) -> set[Wanted]:
        return {wanted for fills in self.origins.values() for wanted in fills}


class LookupCollector:
    """Collects the lookups that the terms of a plan request."""

    def __init__(self) -> None:
        # The requests so far, merged.
        self._pending: dict[Wanted, _PendingLookup] = {}
        self.ranges: dict[int, ComparedRange] = {}
        """The range of rows that a lookup reads, by the lookup's number, if it does not read all
        rows. Complete after `by_stratum`."""

    def ask(
        self,
        target: str,
        key: tuple[str, ...],
        origins: Iterable[Origin],
        after: Iterable[Wanted] = (),
        *,
        nulls: bool,
        within: Within | None = None,
    ) -> Wanted:
        """Request the rows of `target` by `key`. `after`: the lookups that fill the origins.
        `within`: a lookup without a key reads only the rows that the origin's changes can
        affect."""
        origins, fills = tuple(origins), set(after)
        before = self._all_before(fills)
        # Requests with different roots stay separate. Merged, one term would follow rows that
        # another one found: from a changed order to its customer, from there (by the term of a
        # changed nation) to all suppliers of the nation, and on to all their orders.
        roots = frozenset(name for name, _ in origins if not InputName.parse(name).is_looked_up)
        roots = roots.union(*(known for *_, known in fills))
        # A lookup cannot come after itself: it is a separate one, a hop further.
        hop = 0
        while (target, key, hop, roots) in before:
            hop += 1
        wanted = (target, key, hop, roots)
        need = self._pending.setdefault(wanted, _PendingLookup({}, nulls))
        need.nulls |= nulls
        need.within.add(within)
        # Merging is sound because an input may hold a superset: all its rows are true rows of the
        # state, each counted once, and the join decides which of them match.
        for origin in origins:
            known = need.origins.setdefault(origin, set())
            if InputName.parse(origin[0]).follows_lookups:
                known |= fills
        return wanted

    def _all_before(self, wanted: set[Wanted]) -> set[Wanted]:
        """Return these lookups and all that come before them."""
        found: set[Wanted] = set()
        queue = list(wanted)
        while queue:
            each = queue.pop()
            if each not in found:
                found.add(each)
                queue += self._pending[each].after
        return found

    def by_stratum(self, count: int) -> list[tuple[StateLookup, ...]]:
        """Return the lookups of each of `count` strata, in an order in which each follows those
        that it needs."""
        whole = {
            target
            for (target, key, *_), need in self._pending.items()
            if not key and not need.origins
        }
        strata: list[list[StateLookup]] = [[] for _ in range(count)]
        # Full reads without origins need not wait for anything.
        strata[0] += [StateLookup(target, (), ()) for target in sorted(whole)]
        levels: dict[Wanted, set[int]] = {}
        numbers: dict[Wanted, int] = {}
        filled = self._filled(whole)
        for wanted in self._in_order(whole):
            need = self._pending[wanted]
            number = numbers[wanted] = len(numbers)
            by_level: dict[int, list[Origin]] = {}
            for origin, fills in need.origins.items():
                if not self._has_rows(origin, fills, filled, whole):
                    # No lookup ever fills this origin: its side is joined to constant rows.
                    continue
                for level in _levels(origin, [levels[f] for f in fills if f in levels]):
                    by_level.setdefault(level, []).append(origin)
            levels[wanted] = set(by_level)
            for level, origins in by_level.items():
                fills_of = tuple(
                    _numbered(origin[0], need.origins[origin], numbers) for origin in origins
                )
                made = StateLookup(*wanted[:2], tuple(origins), need.nulls, number, fills_of)
                strata[level].append(made)
                self._note_range(made, need.within)
        return [tuple(lookups) for lookups in strata]

    def _note_range(self, made: StateLookup, within: set[Within | None]) -> None:
        """Record the range of a lookup if all its requests have the same comparisons."""
        (first, *others) = within
        if first is not None and not others and len(made.origins) == 1:
            self.ranges[made.number] = ComparedRange(made.number, *first)

    def _filled(self, whole: set[str]) -> set[Wanted]:
        """Return the lookups that may find rows: from changes, from states read in full, or from
        rows that these find."""
        filled: set[Wanted] = set()
        while True:
            more = {
                wanted
                for wanted, need in self._pending.items()
                if wanted[0] in whole
                or any(
                    self._has_rows(each, need.origins[each], filled, whole) for each in need.origins
                )
            }
            if more <= filled:
                return filled
            filled |= more

    @staticmethod
    def _has_rows(origin: Origin, fills: set[Wanted], filled: set[Wanted], whole: set[str]) -> bool:
        """Return whether an origin may have rows; a looked-up state has only those that its own
        lookups find."""
        name = origin[0]
        if name in whole or not InputName.parse(name).is_looked_up:
            return True
        return any(fill[0] == name and fill in filled for fill in fills)

    def _in_order(self, whole: set[str]) -> list[Wanted]:
        """Return the lookups by key, each after those that fill its origins."""
        rest = {wanted: need for wanted, need in self._pending.items() if wanted[0] not in whole}
        placed: dict[Wanted, None] = {}
        while len(placed) < len(rest):
            ready = [
                wanted
                for wanted, need in rest.items()
                if wanted not in placed
                and all(other in placed or other[0] in whole for other in need.after)
            ]
            assert ready, f"cyclic lookups: {sorted(rest.keys() - placed.keys())}"
            placed |= dict.fromkeys(ready)
        return list(placed)


def _numbered(name: str, fills: set[Wanted], numbers: dict[Wanted, int]) -> tuple[int, ...]:
    """Return the numbers of the lookups that fill this input; () if it is read in full, so that all
    its rows count.

    An origin comes after all lookups of its term, including those of other inputs.
    """
    own = [fill for fill in fills if fill[0] == name]
    known = tuple(sorted(numbers[fill] for fill in own if fill in numbers))
    return known if len(known) == len(own) else ()


def _levels(origin: Origin, fills: list[set[int]]) -> set[int]:
    """Return the strata before which an origin has (new) rows."""
    # The output of run k exists from stratum k + 1 on, so lookups from its rows have to wait too.
    kind, number = InputName.parse(origin[0])
    if kind is InputKind.RESULT:
        return {number + 1}
    if not fills:
        return {0}
    # First when all fills have rows, then again whenever one of them has new rows.
    first = max(min(levels) for levels in fills)
    return {first} | {level for levels in fills for level in levels if level > first}
