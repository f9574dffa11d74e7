"""Class archives, from which an engine's JVM starts in about half the time.

Most of a start is the reading, checking and laying out of some 11,000 classes of Spark. A JVM can
write them to a file when it ends and map that file when it starts (application class-data sharing).
`make_archive` has `actors.engine.spark.archive_training` run an engine that does a few jobs and
ends in order; `find_archive` only looks for the file, so that no start waits for one to be made. An
archive changes nothing but the time that a start takes.
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
"""Words in a JVM's build once Java's own classes have an archive."""
_SILENT: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""Options that keep an archive that does not fit out of the engine's log."""


def archives_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the archives' folder: in the virtual environment, or else in the user's cache."""
    given = os.environ if environment is None else environment
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "var" / "cache" / "penstock"
    cache = given.get("XDG_CACHE_HOME") or os.path.join(given.get("HOME") or "/", ".cache")
    return Path(cache) / "penstock"


def archive_name(java: JavaHome) -> str:
    """Return the beginning of the name of an archive for this Java and the installed PySpark."""
    spec = importlib.util.find_spec("pyspark")  # the place alone: nothing is imported
    place = "" if spec is None or spec.origin is None else spec.origin
    # The name holds a hash of these, so that archives of several installations lie side by side.
    made_of = (java.build.replace(_SHARING, ""), importlib.metadata.version("pyspark"), place)
    return "spark-" + hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]


def find_archive(java: JavaHome, folder: Path | None = None) -> Path | None:
    """Return the archive to start an engine with; None if there is none."""
    for path in (folder or archives_folder()).glob(f"{archive_name(java)}-*{SUFFIX}"):
        # A JVM dies of an archive that was cut short, so the name holds the size, too.
        if path.name == _whole_name(java, path) and path not in _distrusted:
            return path
    return None


def exclude_archive(archive: Path) -> None:
    """Exclude an archive from later starts of this process: an engine that began with it ended
    early."""
    # The JVM does not check an archive's contents, and dies of one that was damaged.
    _distrusted.add(archive)


def _whole_name(java: JavaHome, path: Path) -> str:
    return f"{archive_name(java)}-{path.stat().st_size}{SUFFIX}"


def archive_options(archive: str | Path | None) -> str:
    """Return a JVM's options for an archive, as Spark splits them."""
    # The JVM compares its build, and the jars' paths, sizes and times, and ignores a misfit.
    return f'"-XX:SharedArchiveFile={archive}" {_SILENT}' if archive else ""


def recording_options(archive: Path) -> str:
    """Return a JVM's options to write an archive when it ends."""
    # So short a run is not worth the second compiler.
    return f'"-XX:ArchiveClassesAtExit={archive}" -XX:TieredStopAtLevel=1 {_SILENT}'


def make_archive(
    java: JavaHome, scratch: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Path:
    """Run an engine to make the archive, in half a minute; replace an existing one.

    `scratch`: an empty folder of the caller's; `environment`: an engine's. Blocking. Raises
    `EngineUnavailable` with the log's tail when no archive was made, and `OSError` when the folder
    cannot be written.
    """
    folder = folder or archives_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if _SHARING not in java.build:
        # Ours is made on top of one of Java's own classes, which trimmed runtimes come without.
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
                f"no class archive was made with Java {java.version} from {java.origin} "
                f"(exit status {done.returncode}); the log ends:\n{tail}"
            )
        # Renamed when it is complete: no start finds half an archive.
        path = unfinished.replace(folder / _whole_name(java, unfinished))
    except subprocess.TimeoutExpired:
        raise EngineUnavailable(
            f"no class archive was made in {TRAINING_SECONDS_MAX} s; is the machine busy?"
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)
    _keep_newest(path)
    return path


def _keep_newest(path: Path) -> None:
    """Remove the oldest archives beyond `ARCHIVES_MAX`, never the one at `path`."""
    others = [other for other in path.parent.glob(f"*{SUFFIX}") if other != path]
    others.sort(key=lambda other: other.stat().st_mtime_ns, reverse=True)
    for other in others[ARCHIVES_MAX - 1 :]:
        other.unlink(missing_ok=True)
