"""Which strata of a step run together."""

from __future__ import annotations

import msgspec

from actors.model.plan.delta import DeltaPlan, NamedInput, PlanStratum, StateLookup, UnionRows
from actors.model.plan.jobs import LikelyRun
from actors.model.plan.schema import TableColumn, TableSchema
from actors.replica.dataflow.step import CHANGED_TOGETHER_MAX, last_stratum_of_run, likely_runs

KEY = TableSchema((TableColumn("k", "int"),))


def plan(*strata: tuple[str, str]) -> DeltaPlan:
    """A plan whose strata read inputs (first word) and look up ``target:origin`` (second)."""
    made = []
    for reads, asks in strata:
        lookups = []
        for ask in asks.split():
            target, origin = ask.split(":")
            lookups.append(StateLookup(target, ("k",), ((origin, ("k",)),)))
        names = tuple(reads.split())
        made.append(PlanStratum(tuple(lookups), NamedInput(names[0], ("k",)), names))
    return DeltaPlan(("t",), (KEY,), KEY, "", "incremental", "", tuple(made))


def runs(of: DeltaPlan, *, hidden_whole: bool, optimistic: bool = False) -> list[tuple[int, int]]:
    found = []
    first = 0
    while first < len(of.strata):
        last = last_stratum_of_run(of, first, hidden_whole=hidden_whole, optimistic=optimistic)
        found.append((first, last))
        first = last + 1
    return found


def test_a_lookup_by_an_earlier_output_begins_a_run() -> None:
    of = plan(("d0", ""), ("r0 d0", ""), ("r1", "s0:r1"), ("r2", "h0:r2"))
    assert runs(of, hidden_whole=True) == [(0, 1), (2, 3)]
    assert runs(of, hidden_whole=False) == [(0, 1), (2, 2), (3, 3)]


def test_an_output_that_later_strata_read_ends_a_run() -> None:
    read = plan(("d0", ""), ("r0", ""), ("r1 r0", "s0:r1"))
    asked = plan(("d0", ""), ("r0", ""), ("r1", "s0:r1 s0:r0"))
    for of in (read, asked):
        assert runs(of, hidden_whole=True) == [(0, 0), (1, 1), (2, 2)]
    last = plan(("d0", ""), ("r0", ""), ("r1", "s0:r1"), ("r2 r1", ""))
    assert runs(last, hidden_whole=True) == [(0, 1), (2, 3)]


def test_what_seldom_makes_a_row_runs_with_the_last_as_if_it_made_none() -> None:
    of = plan(("d0", ""), ("d0 r0", "s0:r0"))
    seldom = msgspec.structs.replace(of.strata[0], seldom=True)
    of = msgspec.structs.replace(of, strata=(seldom, of.strata[1]))
    assert runs(of, hidden_whole=False, optimistic=True) == [(0, 1)]
    assert runs(of, hidden_whole=False) == [(0, 0), (1, 1)]


def test_likely_are_runs_with_all_changes_or_one_by_one_where_these_are_many() -> None:
    for count in (2, CHANGED_TOGETHER_MAX + 1):
        names = tuple(f"d{n}" for n in range(count))
        read = UnionRows(tuple(NamedInput(name, ("k",)) for name in names))
        later = PlanStratum(
            (StateLookup("h0", ("k",), (("r0", ("k",)),)),), NamedInput("r0", ("k",)), ("r0",)
        )
        of = DeltaPlan(
            tuple(f"t{n}" for n in range(count)), (KEY,) * count, KEY, "", "incremental", "",
            (PlanStratum((), read, names), later),
        )  # fmt: skip
        wanted: list[tuple[str, ...]] = [(name,) for name in names]
        if count <= CHANGED_TOGETHER_MAX:
            wanted = [names]
        found = likely_runs(of, hidden_whole=False)
        assert [run for run in found if run.first == 0] == [
            LikelyRun(0, 0, each, one_time=False) for each in wanted
        ]
        assert [run for run in found if run.first] == [LikelyRun(1, 1, ("r0",), one_time=False)]
        assert likely_runs(of, hidden_whole=True) == [
            LikelyRun(0, 1, each, one_time=False) for each in wanted
        ]
