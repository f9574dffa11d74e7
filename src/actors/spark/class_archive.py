"""Class archives: with one, an engine's JVM starts in about half the time.

Theory of operation. Most of a start is the reading, checking and laying out of some 11,000
classes of Spark. A JVM can write them to a file when it ends and map that file when it starts
(application class-data sharing). `make_archive` has `actors.spark.training` run an engine that
does a few jobs and ends in order; `find_archive` only looks whether the file is there, so that no
start ever waits for one to be made.

Rules. An archive's name holds a hash of what it was made of (the build of Java, PySpark's release
and place), so several of them lie side by side, `ARCHIVES_MAX` at most. The name holds its size
too: a JVM dies of an archive that was cut short, so one of another size is none. Whether it fits
is for the JVM to say: it compares its own build, and the paths, sizes and times of the jars, and
goes on without an archive that does not fit. It does not look at the contents: after a start that
failed the next goes without (`distrust`). An archive changes nothing but the time a start
takes.
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

from actors.errors import EngineUnavailable
from actors.spark.java import JavaHome

ARCHIVES_MAX: Final = 4
TRAINING_SECONDS_MAX: Final = 300
LOG_TAIL_CHARACTERS: Final = 2000
SUFFIX: Final = ".jsa"
_distrusted: Final[set[Path]] = set()
_SILENT: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""An archive that does not fit is no news to anybody who reads the engine's log."""


def archives_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where archives lie: in the virtual environment, or else in the user's cache."""
    given = os.environ if environment is None else environment
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "var" / "cache" / "penstock"
    cache = given.get("XDG_CACHE_HOME") or os.path.join(given.get("HOME") or "/", ".cache")
    return Path(cache) / "penstock"


def archive_name(java: JavaHome) -> str:
    """How the name of an archive for this Java and the installed PySpark begins."""
    spec = importlib.util.find_spec("pyspark")  # the place alone: nothing is imported
    place = "" if spec is None or spec.origin is None else spec.origin
    made_of = (java.build, importlib.metadata.version("pyspark"), place)
    return "spark-" + hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]


def find_archive(java: JavaHome, folder: Path | None = None) -> Path | None:
    """The archive to start an engine with; None when none was made."""
    for path in (folder or archives_folder()).glob(f"{archive_name(java)}-*{SUFFIX}"):
        if path.name == _whole_name(java, path) and path not in _distrusted:
            return path
    return None


def distrust(archive: Path) -> None:
    """An engine that began with it ended before it was up: the next ones of this process begin
    without it. It may have been damaged since it was made, and a JVM dies of that."""
    _distrusted.add(archive)


def _whole_name(java: JavaHome, path: Path) -> str:
    return f"{archive_name(java)}-{path.stat().st_size}{SUFFIX}"


def archive_options(archive: str | Path | None) -> str:
    """A JVM's options for an archive, as Spark splits them. One that does not fit is ignored."""
    return f'"-XX:SharedArchiveFile={archive}" {_SILENT}' if archive else ""


def recording_options(archive: Path) -> str:
    """A JVM's options to write an archive when it ends. It is not worth its second compiler."""
    return f'"-XX:ArchiveClassesAtExit={archive}" -XX:TieredStopAtLevel=1 {_SILENT}'


def make_archive(
    java: JavaHome, scratch: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Path:
    """Runs an engine to make the archive, in half a minute; replaces one that is there.

    `scratch` is an empty folder of the caller's, `environment` an engine's. Blocking. Raises
    `EngineUnavailable` when nothing came of it, with the log's tail, and `OSError` when the
    folder cannot be written.
    """
    folder = folder or archives_folder()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{archive_name(java)}.{os.getpid()}"
    command = [sys.executable, "-m", "actors.spark.training", str(unfinished), str(scratch)]
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
    """Removes the oldest archives beyond `ARCHIVES_MAX`, never the one at `path`."""
    others = [other for other in path.parent.glob(f"*{SUFFIX}") if other != path]
    others.sort(key=lambda other: other.stat().st_mtime_ns, reverse=True)
    for other in others[ARCHIVES_MAX - 1 :]:
        other.unlink(missing_ok=True)
