"""The two ways of a plan: the gateway answers it, or Spark executes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pyarrow as pa

from actors.doors.connect_gateway.local_operations import AnswerStream
from actors.doors.connect_gateway.plan_rewriting import ProtoMessage
from actors.doors.connect_gateway.row_messages import (
    answer_relation,
    command_answer,
    complete_answer,
)


class LocalRoute(msgspec.Struct, frozen=True):
    """The gateway answers by itself."""

    answers: Callable[[], AnswerStream]
    changes: bool = False
    """True if it may change something of the service: then it is carried out once."""


class ForwardRoute(msgspec.Struct, frozen=True):
    """Spark executes this request."""

    request: ProtoMessage
    original: ProtoMessage | None = None
    """Relation that the client gets in place of the one that Spark was given: so it has the names
    again, which are read at the time of each use."""
    views: Mapping[str, ProtoMessage] = {}
    """Relations that must be temporary views while Spark analyses the plan."""
    names_texts: bool = False
    """True if texts in the plan come with temporary views of their own."""
    done: Callable[[], None] | None = None
    """Called when Spark has executed it."""


async def nothing() -> AnswerStream:
    """Answer a command without rows."""
    yield complete_answer()


async def nothing_as_command() -> AnswerStream:
    """Answer a statement without rows."""
    yield command_answer(answer_relation(pa.table({})))
    yield complete_answer()
