"""A little of the campaign of rights, and what it notices: holes that are planted here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fuzz_rights import RightsBroken, RoundCounts, run_round
from rights_connect import run_connect_round
from rights_model import READ

from actors.access import access_rules
from actors.access.access_rules import AccessRules
from actors.access.role_registry import RoleEntry
from actors.connect_gateway import gateway
from actors.connect_gateway.plan_guard import PlanGuard
from actors.controller import controller
from actors.controller.reads import queries
from actors.errors import AccessDenied

STATEMENTS = 200


@pytest.fixture(autouse=True)
def real_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a round is drawn but by its seed."""
    monkeypatch.delenv("DRAWN_SETTINGS_SEED", raising=False)
    yield


def outcomes(counts: RoundCounts) -> dict[str, int]:
    """Statements by outcome."""
    found: dict[str, int] = {}
    for kind, number in counts.kinds.items():
        outcome = kind.rpartition(": ")[2]
        found[outcome] = found.get(outcome, 0) + number
    return found


async def test_a_round_of_statements() -> None:
    counts = await run_round(11, STATEMENTS, failing_views=False)
    assert counts.statements >= STATEMENTS
    found = outcomes(counts)
    assert found["denied"] > STATEMENTS // 10, found
    assert found["done"] > STATEMENTS // 10, found


async def test_a_round_of_requests_by_spark_connect() -> None:
    counts = await run_connect_round(11, STATEMENTS, failing_views=False)
    assert counts.statements >= STATEMENTS
    found = outcomes(counts)
    assert found["denied"] > STATEMENTS // 10, found
    assert found["done"] > STATEMENTS // 10, found


async def broken(monkeypatch: pytest.MonkeyPatch, run: Any = run_round) -> str:
    """What the first rounds find."""
    with pytest.raises(RightsBroken) as found:
        for seed in range(20, 24):
            await run(seed, failing_views=False)
    return str(found.value).partition("\n")[0]


async def test_a_service_that_lets_everybody_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    may = RoleEntry.allows

    def allows(entry: RoleEntry, right: str, id_: Any) -> bool:
        return right == READ or may(entry, right, id_)

    monkeypatch.setattr(RoleEntry, "allows", allows)
    assert "may not: read on" in await broken(monkeypatch)
