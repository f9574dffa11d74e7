"""Which touched state a step needs: the lookups of a plan, merged and put in order.

Theory of operation. Every term of a join asks for the rows of some input that match, by key,
rows that are already there: the delta's, or those of an earlier lookup. Requests for one
(target, key) merge into one lookup with several origins. That gives a term more rows than it
asked for, which is sound: all of them are true rows of the state, each counted once however many
lookups return it, and the join decides which match. So an input may always hold a superset.

Order: a lookup comes after those whose rows are its origins. Where they depend on one another in
a circle (a table joined to itself as a hierarchy), the target is asked for whole; then its other
lookups are dropped, since nothing can be missing.

Invariants: after `ordered`, each origin ``s{n}`` is the target of an earlier lookup; each target
has either one lookup with an empty key or only lookups with keys. It does not know costs.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from actors.plan.delta import Lookup

Origin: TypeAlias = tuple[str, tuple[str, ...]]
Wanted: TypeAlias = tuple[str, tuple[str, ...]]
"""(target, key)."""


class _Need(msgspec.Struct):
    origins: dict[Origin, None]
    after: set[Wanted]


class Lookups:
    """Collects what the terms of a plan ask for."""

    def __init__(self) -> None:
        self._needs: dict[Wanted, _Need] = {}

    def ask(
        self,
        target: str,
        key: tuple[str, ...],
        origins: tuple[Origin, ...],
        after: Wanted | None = None,
    ) -> Wanted:
        """Asks for rows of `target` by `key`; `after`: the lookup that fills the origins."""
        wanted = (target, key)
        need = self._needs.setdefault(wanted, _Need({}, set()))
        need.origins |= dict.fromkeys(origins)
        if after is not None:
            need.after.add(after)
        return wanted

    def ordered(self) -> tuple[Lookup, ...]:
        """The lookups, each after those that it needs."""
        whole = {target for target, key in self._needs if not key}
        while True:
            done = self._in_order(whole)
            if isinstance(done, tuple):
                return done
            whole.add(done)

    def _in_order(self, whole: set[str]) -> tuple[Lookup, ...] | str:
        """All lookups in order, or a target that must be asked for whole."""
        needs = {wanted: need for wanted, need in self._needs.items() if wanted[0] not in whole}
        found = [Lookup(target, (), ()) for target in sorted(whole)]
        placed: set[Wanted] = set()
        while len(placed) < len(needs):
            ready = [
                wanted
                for wanted, need in needs.items()
                if wanted not in placed
                and all(other in placed or other[0] in whole for other in need.after)
            ]
            if not ready:
                return min(wanted for wanted in needs if wanted not in placed)[0]
            for target, key in ready:
                placed.add((target, key))
                found.append(Lookup(target, key, tuple(needs[target, key].origins)))
        return tuple(found)
