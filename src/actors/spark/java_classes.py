"""Java classes of ours inside the engine's JVM: compiled there from the sources beside this file.

Janino, which comes with Spark, compiles them. So nothing is built or shipped, and the classes fit
the Spark that runs.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError

_DEFINING: Final = threading.Lock()
"""Guards the definition of a class, which happens once."""


@lru_cache(maxsize=8)
def java_object(gateway: Any, name: str) -> Any:
    """Return an object of one of our Java classes inside a gateway's JVM, where it is compiled
    once.

    `name`: name of the class, and of its source file beside this one.
    """
    return _new_object(gateway, _compiled(gateway.jvm, name).getClassLoader().loadClass(name))


def slot_frames(gateway: Any) -> Any:
    """Return the object that makes frames of slot files (`SlotFrames`); define the file format that
    it needs beside Spark's own classes."""
    with _DEFINING:
        return _slot_frames(gateway)


def resident_plan(gateway: Any, plan: Any) -> Any:
    """Return an RDD that runs `plan` and whose tasks find `plan` in the driver's JVM.

    Args:
        gateway: The gateway to that JVM.
        plan: An RDD without shuffles, no two jobs of which run at the same time.

    Returns:
        The `ResidentRdd`; the plan itself when it has several partitions.
    """
    with _DEFINING:
        method = _resident_method(gateway)
    given = gateway.new_array(gateway.jvm.Object, 1)
    given[0] = plan
    return method.invoke(None, given) or plan


@lru_cache(maxsize=8)
def _slot_frames(gateway: Any) -> Any:
    frames = java_object(gateway, "SlotFrames")
    package = "org.apache.spark.sql.execution.datasources"
    kind = _defined(gateway, f"{package}.SlotFileFormat", f"{package}.FileFormat")
    frames.use(_new_object(gateway, kind))
    return frames


@lru_cache(maxsize=8)
def _resident_method(gateway: Any) -> Any:
    given = gateway.new_array(gateway.jvm.Class, 1)
    given[0] = gateway.jvm.Class.forName("org.apache.spark.rdd.RDD")
    kind = _defined(gateway, "org.apache.spark.rdd.ResidentRdd", "org.apache.spark.rdd.RDD")
    return kind.getMethod("of", given)


def _new_object(gateway: Any, kind: Any) -> Any:
    made = kind.getDeclaredConstructor(gateway.new_array(gateway.jvm.Class, 0))
    return made.newInstance(gateway.new_array(gateway.jvm.Object, 0))


def _defined(gateway: Any, name: str, neighbor: str) -> Any:
    """Define a class of ours, and those of its file, beside one of Spark's; once in a JVM."""
    jvm = gateway.jvm
    beside = jvm.Class.forName(neighbor)
    try:
        return beside.getClassLoader().loadClass(name)
    except Py4JJavaError:  # it is not there yet
        compiled = _compiled(jvm, name.rpartition(".")[2]).getBytecodes()
        # A lookup inside Spark's class defines into its loader, where tasks find the class.
        lookup = jvm.java.lang.invoke.MethodHandles
        places = lookup.privateLookupIn(beside, lookup.lookup())
        for bytecode in compiled.values():
            places.defineClass(bytecode)
        return beside.getClassLoader().loadClass(name)


def _compiled(jvm: Any, name: str) -> Any:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook(Path(__file__).with_name(f"{name}.java").read_text())
    return compiler
