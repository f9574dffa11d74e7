"""Names of messages on the wire."""

from __future__ import annotations

from typing import Any


def wire_name(kind: Any) -> str:
    """A message's name on the wire: its tag, or a record's class name."""
    return str(kind.__struct_config__.tag or kind.__name__)
