"""The fingerprint of a plan: what must be equal for durable state to be continued."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from actors.plan.delta import DeltaPlan

_ROOT = Path(__file__).resolve().parent.parent
_RULES = ("catalyst/*.py", "plan/*.py", "views/*.py", "spark/*.java")
"""Lists the files that make a plan of a text."""
_LATER = ("covered", "eager", "eager_open")
"""Fields that plans had not always: where they say nothing a plan has the fingerprint that it had,
and its view goes on."""


@lru_cache(maxsize=1)
def spark_version() -> str:
    """Version of the Spark package that this environment runs; empty without one."""
    try:
        return version("pyspark")
    except PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def rules_digest() -> str:
    """Return a sha256 over all that makes plans: the rules, and the version of Spark."""
    digest = hashlib.sha256(spark_version().encode())
    for pattern in _RULES:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(plan: DeltaPlan, engine: str | None = None) -> str:
    """sha256 over the plan with its schemas and settings, and the engine's version."""
    # What was chosen shows in the strata.
    told = {"fingerprint": "", "policy": "", "tree": "", "eager": (), "eager_open": False}
    plain = msgspec.structs.replace(plan, **told)
    fields = msgspec.to_builtins(plain)
    for name in _LATER:
        if not fields[name]:
            del fields[name]
    digest = hashlib.sha256(msgspec.msgpack.encode(fields))
    digest.update((spark_version() if engine is None else engine).encode())
    return digest.hexdigest()
