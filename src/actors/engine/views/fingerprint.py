"""The fingerprint of a plan, and its refresh policy. Durable state is reused only under an equal
fingerprint."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from actors.model.plan.delta import AUTO, DeltaPlan
from actors.runtime.errors import InvalidUsage, QueryRejected

_ROOT = Path(__file__).resolve().parents[2]
_RULES = (
    "engine/catalyst/*.py",
    "model/plan/*.py",
    "engine/views/*.py",
    "engine/spark/*.java",
    "engine/spark/spark_releases.py",
)
"""Patterns of the files whose code turns a text into a plan."""
_LATER = ("covered", "eager", "eager_open")
"""Fields that were added later. Empty ones are left out of the digest, so that the fingerprints of
older views stay valid."""


@lru_cache(maxsize=1)
def spark_version() -> str:
    """Return the version of the installed Spark package; "" if there is none."""
    try:
        return version("pyspark")
    except PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def rules_digest() -> str:
    """Return a SHA-256 digest of the rules' files and the version of Spark."""
    digest = hashlib.sha256(spark_version().encode())
    for pattern in _RULES:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(plan: DeltaPlan, engine: str | None = None) -> str:
    """Return a SHA-256 digest of the plan with its schemas and settings, and of the engine's
    version."""
    # Choices (policy, eager sums) are left out: they show in the strata, which are part of the
    # digest. So is the reason: it is only for display, and a new wording must not rebuild a view.
    neutral = {
        "fingerprint": "",
        "policy": "",
        "tree": "",
        "eager": (),
        "eager_open": False,
        "reason": "",
    }
    plain = msgspec.structs.replace(plan, **neutral)
    fields = msgspec.to_builtins(plain)
    for name in _LATER:
        if not fields[name]:
            del fields[name]
    digest = hashlib.sha256(msgspec.msgpack.encode(fields))
    # Another version of Spark may compute different bits from the same plan.
    digest.update((spark_version() if engine is None else engine).encode())
    return digest.hexdigest()


# -- REFRESH POLICY --------------------------------------------------------------------------------

FULL: Final = "full"
STRICT: Final = "incremental strict"
POLICIES: Final = (AUTO, "incremental", STRICT, FULL)
"""How a view may be brought up to date. ``auto``: in steps, or recomputed if that is measured to be
cheaper. ``incremental``: in steps if the rules support the view. ``incremental strict``: likewise,
but a view that would be opaque is refused. ``full``: always recomputed. Every policy emits only the
difference."""


def with_policy(plan: DeltaPlan, policy: str) -> DeltaPlan:
    """Return the plan under a policy. Raises `InvalidUsage` for an unknown policy, and
    `QueryRejected` if the plan does not support it."""
    if policy not in POLICIES:
        raise InvalidUsage(f"unknown refresh policy {policy!r}: expected {', '.join(POLICIES)}")
    if policy == STRICT and plan.mode == "opaque":
        raise QueryRejected(
            f"the view cannot be incremental, which its refresh policy requires: {plan.reason}"
        )
    if policy == FULL and plan.temporal:
        raise QueryRejected(
            "refresh policy full is not supported for a view that compares rows with the clock:"
            " its contents change as time passes, so they would only be correct at the times at"
            " which the view is recomputed; remove the policy"
        )
    made = msgspec.structs.replace(plan, policy=policy)
    if policy == FULL:
        reason = "its refresh policy is full"
        made = msgspec.structs.replace(made, mode="opaque", reason=reason, strata=(), hidden=())
    return msgspec.structs.replace(made, fingerprint=fingerprint(made))
