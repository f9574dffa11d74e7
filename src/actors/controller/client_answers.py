"""Answers of the service as the client's callers get them."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

from actors.errors import RemoteProtocolError, from_wire
from actors.plan.updates import from_ipc
from actors.progress import Frontier
from actors.protocol.api import Changes, Contents, Failed
from actors.spans import accept, span_below
from actors.telemetry import CLIENT_CHANGES


class Change(msgspec.Struct, frozen=True):
    """Updates of a subscribe with ``lower <= time < upper``, complete: a subscriber that has
    taken it resumes with ``from_=upper``. `table` has the object's columns, ``__time`` and
    ``__diff`` (+1 a row came, -1 a row went); None when there was only progress."""

    lower: Frontier
    upper: Frontier
    table: pa.Table | None = None


def contents(answer: Any) -> Contents:
    """One answer of a read. Raises what the service says instead."""
    if isinstance(answer, Failed):
        raise from_wire(answer.code, answer.text, answer.determinate)
    if not isinstance(answer, Contents):
        raise RemoteProtocolError(f"the service answered Read with {type(answer).__name__}")
    return answer


def change_of(answer: Any) -> Change:
    """One answer of a subscribe. Raises `RemoteProtocolError`."""
    if not isinstance(answer, Changes):
        raise RemoteProtocolError(f"the service answered Subscribe with {type(answer).__name__}")
    arrow = answer.arrow
    if arrow is None:
        return Change(answer.lower, answer.upper)
    with span_below(accept(answer.traceparent), CLIENT_CHANGES) as opened:
        if opened is not None:
            opened.describe(answer.request, answer.lower, answer.upper, len(arrow))
        return Change(answer.lower, answer.upper, from_ipc(arrow))
