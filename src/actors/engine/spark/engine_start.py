"""The first frame that a child gets: all that it needs to start Spark."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from actors.model.plan.jobs import Job
from actors.runtime.settings import Settings

CHILD_FOLDER: Final = "child"
"""Folder below the scratch folder for Spark's own files, of no use after Spark's end."""
OUT_FOLDER: Final = "out"
"""Folder below the scratch folder for answers that were too large for a frame."""


# Sent over the inherited socket and not as arguments: Spark settings may hold credentials, and
# arguments can be read by every user of the machine.
class EngineStart(msgspec.Struct, frozen=True, tag="Start"):
    """Start the engine with these settings; keep every file below `scratch`."""

    settings: Settings
    scratch: str
    class_archive: str = ""
    """Path of the archive that the JVM may start from (`actors.engine.spark.class_archive`)."""
    no_java: str = ""
    """Reason why there is no Java; only with a remote Spark."""
    defaults: dict[str, str] = {}
    """The user's `spark-defaults.conf`."""


ChildMessage: TypeAlias = EngineStart | Job
"""All that is sent to a child."""
