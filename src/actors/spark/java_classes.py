"""Java classes of ours inside the engine's JVM: compiled there from the sources beside this file.

Janino compiles them. It comes with Spark, so that nothing is built or shipped, and the classes are
of the Spark that runs.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

_PARQUET: Final = "org.apache.spark.sql.execution.datasources.parquet"
_DEFINING: Final = threading.Lock()
"""A class is defined once."""


@lru_cache(maxsize=8)
def java_object(gateway: Any, name: str) -> Any:
    """Return an object of a Java class of ours inside the JVM of a gateway: compiled there, once.

    `name`: of the class, and of its source file beside this one.
    """
    jvm = gateway.jvm
    kind = _compiled(jvm, name).getClassLoader().loadClass(name)
    made = kind.getDeclaredConstructor(gateway.new_array(jvm.Class, 0))
    return made.newInstance(gateway.new_array(jvm.Object, 0))


def slot_frames(gateway: Any) -> Any:
    """Return the object that makes frames of slot files (`SlotFrames`), with the format they need
    beside Spark's own classes."""
    with _DEFINING:
        return _slot_frames(gateway)


@lru_cache(maxsize=8)
def _slot_frames(gateway: Any) -> Any:
    frames = java_object(gateway, "SlotFrames")
    compiled = _compiled(gateway.jvm, "SlotFileFormat").getBytecodes()
    frames.define(compiled.get(f"{_PARQUET}.SlotFileFormat"))
    return frames


def _compiled(jvm: Any, name: str) -> Any:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook(Path(__file__).with_name(f"{name}.java").read_text())
    return compiler
