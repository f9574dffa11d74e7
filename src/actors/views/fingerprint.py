"""The fingerprint of a plan: what must be equal for durable state to be continued."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import msgspec

from actors.plan.delta import DeltaPlan


@lru_cache(maxsize=1)
def spark_version() -> str:
    """Version of the Spark package that this environment runs; empty without one."""
    try:
        return version("pyspark")
    except PackageNotFoundError:
        return ""


def fingerprint(plan: DeltaPlan, engine: str | None = None) -> str:
    """sha256 over the plan with its schemas and settings, and the engine's version."""
    plain = msgspec.structs.replace(plan, fingerprint="", policy="", tree="")
    digest = hashlib.sha256(msgspec.msgpack.encode(plain))
    digest.update((spark_version() if engine is None else engine).encode())
    return digest.hexdigest()
