"""Java classes of ours inside the engine's JVM: compiled there from the sources beside this file.

Janino compiles them. It comes with Spark, so that nothing is built or shipped, and the classes are
of the Spark that runs.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=8)
def java_object(gateway: Any, name: str) -> Any:
    """Return an object of a Java class of ours inside the JVM of a gateway: compiled there, once.

    `name`: of the class, and of its source file beside this one.
    """
    jvm = gateway.jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    compiler.cook(Path(__file__).with_name(f"{name}.java").read_text())
    kind = compiler.getClassLoader().loadClass(name)
    made = kind.getDeclaredConstructor(gateway.new_array(jvm.Class, 0))
    return made.newInstance(gateway.new_array(jvm.Object, 0))
