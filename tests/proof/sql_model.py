"""The statements of ``sql_kills.py``, and what each does to tables and objects: an oracle. Pure.

A `PlannedChange` is one statement, or one transaction, with the state after it. A killed service
has made all of it or nothing; of a transaction whose COMMIT was not sent yet, nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

ROWS_MAX = 300
"""Rows above which rows are deleted rather than inserted."""
OBJECTS_MAX = 6
GROUPS = 7
ACCOUNTS = "CREATE TABLE accounts (id BIGINT, grp BIGINT, amount BIGINT, PRIMARY KEY (id))"
SUMS = "SELECT grp, count(*) AS n, sum(amount) AS total FROM accounts GROUP BY grp"
Row = tuple[int, int]
"""(group, amount) of one account."""


@dataclass
class ModelState:
    """The accounts by their ids, and all other objects with their kinds."""

    rows: dict[int, Row] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    made: int = 0
    """Objects that were ever made: no name comes twice."""

    def copy(self) -> ModelState:
        """An equal state that changes by itself."""
        return ModelState(dict(self.rows), dict(self.objects), self.made)

    def sums(self) -> dict[int, tuple[int, int]]:
        """The rows of the view `SUMS`: count and total by group."""
        found: dict[int, tuple[int, int]] = {}
        for group, amount in self.rows.values():
            count, total = found.get(group, (0, 0))
            found[group] = (count + 1, total + amount)
        return found


@dataclass
class PlannedChange:
    """Texts that are sent one after the other, and the state after all of them.

    `copy`: the rows of the one text, which is a COPY.
    """

    kind: str
    texts: list[str]
    after: ModelState
    copy: str = ""


class ChangePlanner:
    """Draws one change after the other."""

    def __init__(self, rng: Random, *, computed: bool) -> None:
        """Begin. `computed`: also statements that need expressions of Spark's."""
        self._rng = rng
        self._next_id = 0
        self._kinds: list[tuple[int, Callable[[ModelState], PlannedChange | None]]] = [
            (4, self._insert),
            (4, self._transaction),
            (3, self._merge),
            (2, self._copy),
            (2, self._update),
            (2, self._delete),
            (2, self._create_table),
            (2, self._create_view),
            (1, self._create_index),
            (4, self._drop),
        ]
        if computed:
            self._kinds.append((2, self._computed))

    def next(self, state: ModelState) -> PlannedChange:
        """A change of this state, which itself stays as it is."""
        weights = [weight for weight, _ in self._kinds]
        while True:
            ((_, make),) = self._rng.choices(self._kinds, weights)
            found = make(state.copy())
            if found is not None:
                return found

    def _new_rows(self, count: int) -> dict[int, Row]:
        found = {}
        for _ in range(count):
            self._next_id += 1
            found[self._next_id] = (self._rng.randrange(GROUPS), self._rng.randrange(-99, 1000))
        return found

    def _some(self, state: ModelState, count: int) -> list[int]:
        return self._rng.sample(sorted(state.rows), min(count, len(state.rows)))

    # -- rows ----------------------------------------------------------------------------------

    def _insert(self, after: ModelState) -> PlannedChange | None:
        if len(after.rows) > ROWS_MAX:
            return None
        rows = self._new_rows(self._rng.randint(1, 40))
        after.rows |= rows
        return PlannedChange("INSERT", [_insert_text(rows)], after)

    def _copy(self, after: ModelState) -> PlannedChange | None:
        if len(after.rows) > ROWS_MAX:
            return None
        rows = self._new_rows(self._rng.randint(1, 60))
        after.rows |= rows
        lines = "".join(f"{key}\t{group}\t{amount}\n" for key, (group, amount) in rows.items())
        return PlannedChange("COPY", ["COPY accounts FROM STDIN"], after, lines)

    def _update(self, after: ModelState) -> PlannedChange | None:
        for key in self._some(after, 1):
            amount = self._rng.randrange(1000)
            after.rows[key] = (after.rows[key][0], amount)
            text = f"UPDATE accounts SET amount = {amount} WHERE id = {key}"
            return PlannedChange("UPDATE", [text], after)
        return None

    def _computed(self, after: ModelState) -> PlannedChange | None:
        group, more = self._rng.randrange(GROUPS), self._rng.randrange(1, 9)
        for key, (own, amount) in after.rows.items():
            if own == group:
                after.rows[key] = (own, amount + more)
        text = f"UPDATE accounts SET amount = amount + {more} WHERE grp = {group}"
        return PlannedChange("UPDATE of a group", [text], after)

    def _delete(self, after: ModelState) -> PlannedChange | None:
        if len(after.rows) > ROWS_MAX // 2:
            least = sorted(after.rows)[len(after.rows) // 2]
            after.rows = {key: row for key, row in after.rows.items() if key >= least}
            return PlannedChange("DELETE", [f"DELETE FROM accounts WHERE id < {least}"], after)
        for key in self._some(after, 1):
            del after.rows[key]
            return PlannedChange("DELETE", [f"DELETE FROM accounts WHERE id = {key}"], after)
        return None

    def _merge(self, after: ModelState) -> PlannedChange | None:
        keys = self._some(after, self._rng.randint(1, 20))
        changed = {key: (after.rows[key][0], self._rng.randrange(1000)) for key in keys}
        changed |= self._new_rows(self._rng.randint(1, 5)) if len(after.rows) < ROWS_MAX else {}
        if not changed:
            return None
        after.rows |= changed
        return PlannedChange("MERGE", [_merge_text(changed)], after)

    def _transaction(self, after: ModelState) -> PlannedChange | None:
        """Several changes that are written at one time; each reads what none before has changed."""
        texts = []
        keys = self._some(after, 6)
        if len(keys) < 6 or len(after.rows) > ROWS_MAX:
            return None
        for key in keys[:5]:
            after.rows[key] = (after.rows[key][0], self._rng.randrange(1000))
        texts.append(_merge_text({key: after.rows[key] for key in keys[:5]}))
        rows = self._new_rows(self._rng.randint(1, 9))
        after.rows |= rows
        texts.append(_insert_text(rows))
        return PlannedChange("a transaction", ["BEGIN", *texts, "COMMIT"], after)

    # -- objects -------------------------------------------------------------------------------

    def _named(self, after: ModelState, kind: str) -> str:
        after.made += 1
        name = f"{kind[0]}{after.made}"
        after.objects[name] = kind
        return name

    def _create_table(self, after: ModelState) -> PlannedChange | None:
        if len(after.objects) >= OBJECTS_MAX:
            return None
        name = self._named(after, "table")
        text = f"CREATE TABLE {name} (a BIGINT, b STRING)"
        return PlannedChange("CREATE TABLE", [text], after)

    def _create_view(self, after: ModelState) -> PlannedChange | None:
        if len(after.objects) >= OBJECTS_MAX:
            return None
        name = self._named(after, "view")
        text = f"CREATE MATERIALIZED VIEW {name} AS {SUMS}"
        return PlannedChange("CREATE MATERIALIZED VIEW", [text], after)

    def _create_index(self, after: ModelState) -> PlannedChange | None:
        if len(after.objects) >= OBJECTS_MAX:
            return None
        name = self._named(after, "index")
        return PlannedChange("CREATE INDEX", [f"CREATE INDEX {name} ON accounts (id)"], after)

    def _drop(self, after: ModelState) -> PlannedChange | None:
        if len(after.objects) < OBJECTS_MAX // 2:
            return None
        name = self._rng.choice(sorted(after.objects))
        kind = after.objects.pop(name).upper()
        words = "MATERIALIZED VIEW" if kind == "VIEW" else kind
        return PlannedChange(f"DROP {kind}", [f"DROP {words} {name}"], after)


def _insert_text(rows: dict[int, Row]) -> str:
    listed = ", ".join(f"({key}, {group}, {amount})" for key, (group, amount) in rows.items())
    return f"INSERT INTO accounts VALUES {listed}"


def _merge_text(rows: dict[int, Row]) -> str:
    listed = ", ".join(f"({key}, {group}, {amount})" for key, (group, amount) in rows.items())
    return (
        f"MERGE INTO accounts AS a USING (SELECT * FROM (VALUES {listed}) AS v (id, grp, amount)) "
        "AS s ON a.id = s.id WHEN MATCHED THEN UPDATE SET amount = s.amount "
        "WHEN NOT MATCHED THEN INSERT (id, grp, amount) VALUES (s.id, s.grp, s.amount)"
    )
