"""Answers of the service as the client's callers get them."""

from __future__ import annotations

from typing import Any

from actors.errors import RemoteProtocolError, from_wire
from actors.protocol.api import Contents, Failed


def contents(answer: Any) -> Contents:
    """One answer of a read. Raises what the service says instead."""
    if isinstance(answer, Failed):
        raise from_wire(answer.code, answer.text, answer.determinate)
    if not isinstance(answer, Contents):
        raise RemoteProtocolError(f"the service answered Read with {type(answer).__name__}")
    return answer
