"""Class archives, with which an engine's JVM starts in about half the time.

Most of a start goes into reading, verifying and laying out some 11,000 classes of Spark. A JVM can
write them to a file when it exits and map that file when it starts (application class-data
sharing). `make_archive` has `actors.engine.spark.archive_training` run an engine that does a few
jobs and exits normally. `find_archive` only looks for the file, so no start waits for one to be
made. An archive affects nothing but the time to start.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from actors.engine.spark.java import JavaHome, run_java
from actors.runtime.errors import EngineUnavailable

ARCHIVES_MAX: Final = 4
TRAINING_SECONDS_MAX: Final = 300
LOG_TAIL_CHARACTERS: Final = 2000
SUFFIX: Final = ".jsa"
_distrusted: Final[set[Path]] = set()
_SHARING: Final = ", sharing"
"""Words in a JVM's build text once Java's own classes have an archive."""
_SILENT: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""Options that keep messages about an archive that does not fit out of the engine's log."""


def archives_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the archives: in the virtual environment, or else in the user's
    cache."""
    given = os.environ if environment is None else environment
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "var" / "cache" / "penstock"
    cache = given.get("XDG_CACHE_HOME") or os.path.join(given.get("HOME") or "/", ".cache")
    return Path(cache) / "penstock"


def archive_name(java: JavaHome) -> str:
    """Return the prefix of the name of an archive for this Java and the installed PySpark."""
    spec = importlib.util.find_spec("pyspark")  # This only locates the package; it imports nothing.
    place = "" if spec is None or spec.origin is None else spec.origin
    # The name contains a hash of these, so that archives of several installations can be in the
    # same folder.
    made_of = (java.build.replace(_SHARING, ""), importlib.metadata.version("pyspark"), place)
    return "spark-" + hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]


def find_archive(java: JavaHome, folder: Path | None = None) -> Path | None:
    """Return the archive with which to start an engine; None if there is none."""
    for path in (folder or archives_folder()).glob(f"{archive_name(java)}-*{SUFFIX}"):
        # A truncated archive crashes the JVM, so the name also contains the size.
        if path.name == _whole_name(java, path) and path not in _distrusted:
            return path
    return None


def exclude_archive(archive: Path) -> None:
    """Exclude an archive from later starts of this process, because an engine that started with it
    ended early."""
    # The JVM does not verify the contents of an archive, and a damaged one crashes it.
    _distrusted.add(archive)


def _whole_name(java: JavaHome, path: Path) -> str:
    return f"{archive_name(java)}-{path.stat().st_size}{SUFFIX}"


def archive_options(archive: str | Path | None) -> str:
    """Return the JVM options for using an archive, in the form in which Spark splits them."""
    # The JVM compares its build and the paths, sizes and times of the jars, and ignores an archive
    # that does not fit.
    return f'"-XX:SharedArchiveFile={archive}" {_SILENT}' if archive else ""


def recording_options(archive: Path) -> str:
    """Return the JVM options for writing an archive at exit."""
    # Such a short run is not worth the second compiler.
    return f'"-XX:ArchiveClassesAtExit={archive}" -XX:TieredStopAtLevel=1 {_SILENT}'


def make_archive(
    java: JavaHome, scratch: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Path:
    """Run an engine to make the archive, which takes half a minute; replace an existing one.

    `scratch`: an empty folder of the caller's. `environment`: that of an engine. Blocking. Raises
    `EngineUnavailable` with the tail of the log if no archive was made, and `OSError` if the folder
    cannot be written.
    """
    folder = folder or archives_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if _SHARING not in java.build:
        # The archive is made on top of one of Java's own classes, which trimmed runtimes lack.
        run_java(java.home / "bin" / "java", ("-Xshare:dump",))
    unfinished = folder / f"{archive_name(java)}.{os.getpid()}"
    command = [
        sys.executable,
        "-m",
        "actors.engine.spark.archive_training",
        str(unfinished),
        str(scratch),
    ]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TRAINING_SECONDS_MAX,
            check=False,
        )
        if done.returncode != 0 or not unfinished.is_file():
            tail = done.stdout[-LOG_TAIL_CHARACTERS:].strip()
            raise EngineUnavailable(
                f"cannot make a class archive with Java {java.version} from {java.origin} "
                f"(exit status {done.returncode}); the log ends:\n{tail}"
            )
        # Renamed once it is complete, so that no start finds an incomplete archive.
        path = unfinished.replace(folder / _whole_name(java, unfinished))
    except subprocess.TimeoutExpired:
        raise EngineUnavailable(
            f"making a class archive took more than {TRAINING_SECONDS_MAX} s; try again when the"
            " machine is less busy"
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)
    _keep_newest(path)
    return path


def _keep_newest(path: Path) -> None:
    """Remove the oldest archives beyond `ARCHIVES_MAX`, but never the one at `path`."""
    others = [other for other in path.parent.glob(f"*{SUFFIX}") if other != path]
    others.sort(key=lambda other: other.stat().st_mtime_ns, reverse=True)
    for other in others[ARCHIVES_MAX - 1 :]:
        other.unlink(missing_ok=True)
