"""Catalyst's trees as JSON, and the functions of a session, asked of the JVM."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from actors.catalyst.function_calls import FunctionNames
from actors.spark.bridge import compiled_java

_PLAN_DUMP: Final = Path(__file__).with_name("PlanDump.java")


@lru_cache(maxsize=1)
def plan_dump(gateway: Any) -> Any:
    """Return what writes Catalyst's trees inside the JVM of a gateway: compiled there, once."""
    return compiled_java(gateway, _PLAN_DUMP)


def function_names(session: SparkSession) -> FunctionNames:
    """Return the functions that a session knows, by the classes of their expressions."""
    dump = plan_dump(session._sc._gateway)
    return FunctionNames(dump.functionNames(session._jsparkSession))
