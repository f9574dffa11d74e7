"""Lookups of touched state: the requests of a plan's terms, merged and put in order.

Every term of a join asks for the rows of some input that match, by key, rows that it already has:
the delta's, or those of earlier lookups. Requests for one (target, key) that begin at the same
changes merge into one lookup with several origins.

Invariants: in the result of `by_stratum` each origin ``s{n}`` or ``h{k}`` is the target of an
earlier lookup; each target has either one lookup with an empty key or only lookups with keys. Costs
are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from actors.model.plan.delta import StateLookup
from actors.model.plan.input_names import InputKind, InputName
from actors.model.plan.nearby import ComparedRange

Origin: TypeAlias = tuple[str, tuple[str, ...]]
"""(input name, its columns); an empty column name stands for NULL."""
Wanted: TypeAlias = tuple[str, tuple[str, ...], int, frozenset[str]]
"""(target, key, hop, roots). The hop counts how often the target was looked up before from its own
rows (a table joined to itself); the roots are the changes at which the search begins."""


Within: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""(columns of the target, columns of the only origin that they are compared with)."""


class _Need(msgspec.Struct):
    origins: dict[Origin, set[Wanted]]
    """Each origin, with the lookups that fill it."""
    nulls: bool
    within: set[Within | None] = msgspec.field(default_factory=set)
    """Comparisons of each request; None: the request wants all rows."""

    @property
    def after(self) -> set[Wanted]:
        return {wanted for fills in self.origins.values() for wanted in fills}


class LookupCollector:
    """Collects the requests of a plan's terms."""

    def __init__(self) -> None:
        self._needs: dict[Wanted, _Need] = {}
        self.ranges: dict[int, ComparedRange] = {}
        """Rows that a lookup reads, by its number, if not all; complete after `by_stratum`."""

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
        """Ask for rows of `target` by `key`. `after`: the lookups that fill the origins. `within`:
        a lookup without a key reads only the rows that the origin's changes can affect."""
        origins, fills = tuple(origins), set(after)
        before = self._all_before(fills)
        # Roots keep requests apart that begin at other changes. Merged, one term would follow rows
        # that another found: from a changed order to its customer, from there (by a changed
        # nation's term) to all suppliers of the nation, and on to all their orders.
        roots = frozenset(name for name, _ in origins if not InputName.parse(name).is_looked_up)
        roots = roots.union(*(known for *_, known in fills))
        # A lookup cannot come after itself: it is another one, one hop further.
        hop = 0
        while (target, key, hop, roots) in before:
            hop += 1
        wanted = (target, key, hop, roots)
        need = self._needs.setdefault(wanted, _Need({}, nulls))
        need.nulls |= nulls
        need.within.add(within)
        # Merging is sound: an input may hold a superset. All its rows are true rows of the state,
        # each counted once, and the join decides which match.
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
                queue += self._needs[each].after
        return found

    def by_stratum(self, count: int) -> list[tuple[StateLookup, ...]]:
        """Return the lookups of each of `count` strata, each after those that it needs."""
        whole = {
            target
            for (target, key, *_), need in self._needs.items()
            if not key and not need.origins
        }
        strata: list[list[StateLookup]] = [[] for _ in range(count)]
        # Whole reads without origins wait for nothing.
        strata[0] += [StateLookup(target, (), ()) for target in sorted(whole)]
        levels: dict[Wanted, set[int]] = {}
        numbers: dict[Wanted, int] = {}
        filled = self._filled(whole)
        for wanted in self._in_order(whole):
            need = self._needs[wanted]
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
        """Note the range of a lookup if all its requests have the same comparisons."""
        (first, *others) = within
        if first is not None and not others and len(made.origins) == 1:
            self.ranges[made.number] = ComparedRange(made.number, *first)

    def _filled(self, whole: set[str]) -> set[Wanted]:
        """Return the lookups that may find rows: from changes, from whole states, and from their
        rows."""
        filled: set[Wanted] = set()
        while True:
            more = {
                wanted
                for wanted, need in self._needs.items()
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
        """Return whether an origin may have rows: a state has those that its own lookups find."""
        name = origin[0]
        if name in whole or not InputName.parse(name).is_looked_up:
            return True
        return any(fill[0] == name and fill in filled for fill in fills)

    def _in_order(self, whole: set[str]) -> list[Wanted]:
        """Return the lookups by key, each after those that fill its origins."""
        rest = {wanted: need for wanted, need in self._needs.items() if wanted[0] not in whole}
        placed: dict[Wanted, None] = {}
        while len(placed) < len(rest):
            ready = [
                wanted
                for wanted, need in rest.items()
                if wanted not in placed
                and all(other in placed or other[0] in whole for other in need.after)
            ]
            assert ready, f"lookups in a circle: {sorted(rest.keys() - placed.keys())}"
            placed |= dict.fromkeys(ready)
        return list(placed)


def _numbered(name: str, fills: set[Wanted], numbers: dict[Wanted, int]) -> tuple[int, ...]:
    """Return the lookups that fill this input; none if it is read whole, so that all its rows
    count.

    An origin comes after all lookups of its term, also those of other inputs.
    """
    own = [fill for fill in fills if fill[0] == name]
    known = tuple(sorted(numbers[fill] for fill in own if fill in numbers))
    return known if len(known) == len(own) else ()


def _levels(origin: Origin, fills: list[set[int]]) -> set[int]:
    """Return the strata before which an origin has (new) rows."""
    # The output of run k exists from stratum k + 1 on; so lookups from its rows wait, too.
    kind, number = InputName.parse(origin[0])
    if kind is InputKind.RESULT:
        return {number + 1}
    if not fills:
        return {0}
    # First when all fills have rows, then again whenever one of them has new rows.
    first = max(min(levels) for levels in fills)
    return {first} | {level for levels in fills for level in levels if level > first}
