"""Which touched state a step needs: the lookups of a plan, merged and put in order.

Theory of operation. Every term of a join asks for the rows of some input that match, by key,
rows that are already there: the delta's, or those of earlier lookups. Requests for one (target,
key) that begin at the same changes merge into one lookup with several origins. That gives a term
more rows than it asked for, which is sound: all of them are true rows of the state, each counted
once however many lookups return it, and the join decides which match. So an input may always hold
a superset. But what other terms found must not lead a term further: from a changed order to its
customer, from there (by the term of a changed nation) to all suppliers of the nation, and on to
all that they ever sold. So requests that begin at other changes are other lookups, and an
origin is the rows of the very lookups that were asked before.

Order: a lookup comes after those that fill its origins. One that would come after itself (a table
joined to itself as a hierarchy) is another lookup, one hop further: there are no circles. A
target that is asked for whole needs no other lookup.

Strata: an origin ``r{k}``, and what is looked up from rows that it brought, waits for that run:
the lookup occurs once for each stratum before which its origins have new rows.

Invariants: in the answer of `by_stratum` each origin ``s{n}`` or ``h{k}`` is the target of an
earlier lookup; each target has either one lookup with an empty key or only lookups with keys. It
does not know costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from actors.plan.compared_range import ComparedRange
from actors.plan.delta import Lookup

Origin: TypeAlias = tuple[str, tuple[str, ...]]
"""(input name, its columns); an empty column name stands for NULL."""
Wanted: TypeAlias = tuple[str, tuple[str, ...], int, frozenset[str]]
"""(target, key, hop, roots): a table joined to itself is looked up again from rows that it gave;
the roots are the changes at which it all begins."""


Within: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""(columns of the target, columns of the only origin that they are compared with)."""


class _Need(msgspec.Struct):
    origins: dict[Origin, set[Wanted]]
    """Each with the lookups that fill it."""
    nulls: bool
    within: set[Within | None] = msgspec.field(default_factory=set)
    """Holds what each who asks compares; None: he wants all rows."""

    @property
    def after(self) -> set[Wanted]:
        return {wanted for fills in self.origins.values() for wanted in fills}


class Lookups:
    """Collects what the terms of a plan ask for."""

    def __init__(self) -> None:
        self._needs: dict[Wanted, _Need] = {}
        self.ranges: dict[int, ComparedRange] = {}
        """Says which rows lookups read, by number, if not all; known after `by_stratum`."""

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
        """Asks for rows of `target` by `key`; `after`: the lookups that fill the origins; `within`:
        of a lookup without a key only the rows that the origin's changes decide anew."""
        origins, fills = tuple(origins), set(after)
        before = self._all_before(fills)
        roots = frozenset(name for name, _ in origins if name[0] not in "sh")
        roots = roots.union(*(known for *_, known in fills))
        hop = 0
        while (target, key, hop, roots) in before:
            hop += 1
        wanted = (target, key, hop, roots)
        need = self._needs.setdefault(wanted, _Need({}, nulls))
        need.nulls |= nulls
        need.within.add(within)
        for origin in origins:
            known = need.origins.setdefault(origin, set())
            if origin[0][0] in "shk":
                known |= fills
        return wanted

    def _all_before(self, wanted: set[Wanted]) -> set[Wanted]:
        """These lookups and all that come before them."""
        found: set[Wanted] = set()
        queue = list(wanted)
        while queue:
            each = queue.pop()
            if each not in found:
                found.add(each)
                queue += self._needs[each].after
        return found

    def by_stratum(self, count: int) -> list[tuple[Lookup, ...]]:
        """The lookups of each of `count` strata, each after those that it needs."""
        whole = {
            target
            for (target, key, *_), need in self._needs.items()
            if not key and not need.origins
        }
        strata: list[list[Lookup]] = [[] for _ in range(count)]
        strata[0] += [Lookup(target, (), ()) for target in sorted(whole)]
        levels: dict[Wanted, set[int]] = {}
        numbers: dict[Wanted, int] = {}
        filled = self._filled(whole)
        for wanted in self._in_order(whole):
            need = self._needs[wanted]
            number = numbers[wanted] = len(numbers)
            by_level: dict[int, list[Origin]] = {}
            for origin, fills in need.origins.items():
                if not self._has_rows(origin, fills, filled, whole):
                    # What is beside it never changes; where others look leads this one nowhere.
                    continue
                for level in _levels(origin, [levels[f] for f in fills if f in levels]):
                    by_level.setdefault(level, []).append(origin)
            levels[wanted] = set(by_level)
            for level, origins in by_level.items():
                fills_of = tuple(
                    _numbered(origin[0], need.origins[origin], numbers) for origin in origins
                )
                made = Lookup(*wanted[:2], tuple(origins), need.nulls, number, fills_of)
                strata[level].append(made)
                self._note_range(made, need.within)
        return [tuple(lookups) for lookups in strata]

    def _note_range(self, made: Lookup, within: set[Within | None]) -> None:
        """Note what a lookup need not read, where all who ask for it say so alike."""
        (first, *others) = within
        if first is not None and not others and len(made.origins) == 1:
            self.ranges[made.number] = ComparedRange(made.number, *first)

    def _filled(self, whole: set[str]) -> set[Wanted]:
        """The lookups that may find rows: from changes, from whole states, and from what these
        lead to."""
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
        if name[0] not in "sh" or name in whole:
            return True
        return any(fill[0] == name and fill in filled for fill in fills)

    def _in_order(self, whole: set[str]) -> list[Wanted]:
        """The lookups by key, each after those that fill its origins."""
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
    """The lookups that fill this input; none where it is asked for whole: all its rows are meant.

    An origin comes after all that its term has asked for, of other inputs too.
    """
    own = [fill for fill in fills if fill[0] == name]
    known = tuple(sorted(numbers[fill] for fill in own if fill in numbers))
    return known if len(known) == len(own) else ()


def _levels(origin: Origin, fills: list[set[int]]) -> set[int]:
    """The strata before which an origin has (new) rows."""
    if origin[0][0] == "r":
        return {int(origin[0][1:]) + 1}
    if not fills:
        return {0}
    first = max(min(levels) for levels in fills)
    return {first} | {level for levels in fills for level in levels if level > first}
