"""The first frame a child gets: what it needs to know before it can start Spark.

It travels over the inherited socket and not as arguments, because Spark settings may hold
credentials and arguments can be read by every user of the machine.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from actors.plan.jobs import Job
from actors.settings import Settings

CHILD_FOLDER: Final = "child"
"""Below the scratch folder: what Spark keeps while it runs; of no use to anybody after it."""
OUT_FOLDER: Final = "out"
"""Below the scratch folder: answers that were too large for a frame."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start the engine with these settings; keep every file below `scratch`."""

    settings: Settings
    scratch: str
    class_archive: str = ""
    """Path of the archive that the JVM may start from (`actors.spark.class_archive`)."""
    no_java: str = ""
    """Why there is no Java; only where Spark runs elsewhere."""


ChildMessage: TypeAlias = Start | Job
"""All that is sent to a child."""
