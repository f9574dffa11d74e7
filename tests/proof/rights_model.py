"""What each role may see and do, in a hundred lines: the oracle of ``fuzz_rights.py``. Pure.

All objects have the columns ``k``, ``open`` and ``secret``. A text of `CANARY` is in one row of one
table, until a statement copies it: so whoever sees it has seen that row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

READ, WRITE, CREATE, ADMIN = "read", "write", "create", "admin"
CONNECT, CODE, OWN = "connect", "execute code", "own"
SERVICE_RIGHTS = (READ, WRITE, CREATE, ADMIN, CONNECT, CODE)
OBJECT_RIGHTS = (READ, WRITE, ADMIN)
CANARY = re.compile(r"CNR[0-9a-f]{10}")
Row: TypeAlias = tuple[int, str | None, str | None]


@dataclass(eq=False)
class ModelObject:
    """A table, a materialized view (``view``), a plain view or an index."""

    name: str
    kind: str
    rows: dict[int, Row] = field(default_factory=dict)
    """A table's, by ``k``."""
    sources: tuple[ModelObject, ...] = ()
    """The objects that a view reads or an index is on; of two the second has the secrets."""
    above: int = -1
    """A view has the rows with a greater ``k``."""
    shows_secret: bool = True
    fails: bool = False
    """True for a view that is in error as soon as it has a row."""
    ever: set[str] = field(default_factory=set)
    """The canaries that the contents have had."""
    comment: str = ""

    def contents(self) -> dict[int, Row]:
        """The rows, by ``k``."""
        if self.kind == "table":
            return self.rows
        first, last = self.sources[0].contents(), self.sources[-1].contents()
        return {
            k: (k, open_, last[k][2] if self.shows_secret else "hidden")
            for k, open_, _ in first.values()
            if k > self.above and k in last
        }

    def stored(self) -> Iterator[ModelObject]:
        """The objects whose contents are read by this name."""
        if self.kind in ("table", "view"):
            yield self
        else:
            for source in self.sources:
                yield from source.stored()


@dataclass(eq=False)
class ModelRole:
    """A role, with its rights on everything and on single objects."""

    name: str
    password: str = ""
    login: bool = True
    rights: set[str] = field(default_factory=set)
    objects: dict[ModelObject, set[str]] = field(default_factory=dict)
    tokens: int = 0

    def may(self, right: str, on: ModelObject | None = None) -> bool:
        """Whether it has a right on an object, or (None) on everything."""
        if ADMIN in self.rights or right in self.rights:
            return True
        return on is not None and bool({right, ADMIN, OWN} & self.objects.get(on, set()))


Need: TypeAlias = tuple[str, ModelObject | None]


class RightsModel:
    """All objects and roles, by their names in lower case."""

    def __init__(self) -> None:
        self.objects: dict[str, ModelObject] = {}
        self.roles: dict[str, ModelRole] = {}

    def allows(self, role: str, needs: Iterable[Need]) -> bool:
        """Whether a role has all of these rights. One that was dropped may do nothing."""
        found = self.roles.get(role)
        return found is not None and all(found.may(right, on) for right, on in needs)

    def reads(self, *objects: ModelObject) -> list[Need]:
        """The rights that reading these objects needs: a plain view is inlined."""
        return [(READ, stored) for each in objects for stored in each.stored()]

    def visible(self, role: str) -> set[str]:
        """The canaries that a role may see: of all rows that a readable object has ever had."""
        stored = (each for each in self.objects.values() if each.kind in ("table", "view"))
        return set().union(*(each.ever for each in stored if self.allows(role, [(READ, each)])))

    def changed(self) -> None:
        """Note the canaries that are in objects now."""
        for each in self.objects.values():
            if each.kind in ("table", "view"):
                each.ever |= set(CANARY.findall(str(list(each.contents().values()))))

    def add(self, role: str, made: ModelObject) -> None:
        """Add an object, which a role owns."""
        self.objects[made.name.lower()] = made
        self.roles[role].objects.setdefault(made, set()).add(OWN)
        self.changed()

    def dependents(self, of: ModelObject) -> list[ModelObject]:
        """What cannot be without an object."""
        direct = [each for each in self.objects.values() if of in each.sources]
        found = dict.fromkeys(direct)
        for each in direct:
            found |= dict.fromkeys(self.dependents(each))
        return list(found)

    def drop(self, *objects: ModelObject) -> None:
        """Drop objects, and the rights on them."""
        for each in objects:
            self.objects.pop(each.name.lower(), None)
            for role in self.roles.values():
                role.objects.pop(each, None)

    def change_rights(
        self,
        roles: Iterable[str],
        rights: set[str],
        on: Iterable[ModelObject] | None,
        *,
        revoke: bool = False,
    ) -> None:
        """Grant rights, or revoke them; `on` None: on everything. With CONNECT its tokens go."""
        for role in (self.roles[name] for name in roles):
            held = [role.rights] if on is None else [role.objects.setdefault(x, set()) for x in on]
            for each in held:
                each.difference_update(rights) if revoke else each.update(rights)
            role.tokens = role.tokens if role.may(CONNECT) else 0
