"""The first frame that a child receives, with everything it needs to start Spark."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from actors.model.plan.jobs import Job
from actors.runtime.settings import Settings

CHILD_FOLDER: Final = "child"
"""Folder below the scratch folder for Spark's own files, which are useless once Spark has ended."""
OUT_FOLDER: Final = "out"
"""Folder below the scratch folder for answers that are too large for a frame."""


# Sent over the inherited socket and not as arguments: Spark settings may contain credentials, and
# every user of the machine can read arguments.
class EngineStart(msgspec.Struct, frozen=True, tag="Start"):
    """Start the engine with these settings, and keep every file below `scratch`."""

    settings: Settings
    scratch: str
    class_archive: str = ""
    """Path of the archive with which to start the JVM (`actors.engine.spark.class_archive`)."""
    no_java: str = ""
    """Why there is no Java; only with a remote Spark."""
    defaults: dict[str, str] = {}
    """The settings in the user's `spark-defaults.conf`."""


ChildMessage: TypeAlias = EngineStart | Job
"""Everything that is sent to a child."""
