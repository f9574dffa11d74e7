"""The functions that a session knows, asked of the JVM in one call."""

from __future__ import annotations

from typing import Any

from actors.catalyst.function_calls import FunctionNames
from actors.spark.java_classes import java_object


def function_names(gateway: Any, engine: Any) -> FunctionNames:
    """Return the functions that a session (the JVM's own) knows, by their expressions' classes."""
    return FunctionNames(java_object(gateway, "PlanDump").functionNames(engine))
