"""REFRESH POLICY: the ways in which a view may be brought up to date.

``auto``: by steps, or recomputed if that is measured to be cheaper; ``incremental``: by steps if
rules know how; ``incremental strict``: the same, but a view that would be opaque is refused;
``full``: always recomputed. Under each policy only the difference is emitted.
"""

from __future__ import annotations

from typing import Final

import msgspec

from actors.errors import InvalidUsage, QueryRejected
from actors.plan.delta import AUTO, DeltaPlan
from actors.views.fingerprint import fingerprint

FULL: Final = "full"
STRICT: Final = "incremental strict"
POLICIES: Final = (AUTO, "incremental", STRICT, FULL)


def with_policy(plan: DeltaPlan, policy: str) -> DeltaPlan:
    """Return the plan under a policy. Raises `InvalidUsage` (no such policy) and
    `QueryRejected`."""
    if policy not in POLICIES:
        raise InvalidUsage(f"no refresh policy {policy!r}; there are {', '.join(POLICIES)}")
    if policy == STRICT and plan.mode == "opaque":
        raise QueryRejected(
            f"the view would not be incremental, as its refresh policy demands: {plan.reason}"
        )
    if policy == FULL and plan.temporal:
        raise QueryRejected(
            "a view that compares rows with the clock is kept by steps: its contents change at "
            "every moment, and recomputed it would be right at some only; leave its policy out"
        )
    made = msgspec.structs.replace(plan, policy=policy)
    if policy == FULL:
        reason = "its refresh policy is full"
        made = msgspec.structs.replace(made, mode="opaque", reason=reason, strata=(), hidden=())
    return msgspec.structs.replace(made, fingerprint=fingerprint(made))
