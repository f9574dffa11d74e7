"""The two routes of a plan: the gateway executes it, or Spark does."""

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
    """The gateway executes the plan."""

    answers: Callable[[], AnswerStream]
    """Starts the execution, and yields its responses."""
    changes: bool = False
    """True if it may change state of the service, so that it must be executed at most once."""


class ForwardRoute(msgspec.Struct, frozen=True):
    """Spark executes the plan."""

    request: ProtoMessage
    """The request to send to Spark."""
    original: ProtoMessage | None = None
    """The relation to return to the client instead of the one that Spark returns. It contains the
    original names, so each use of it reads the rows of its own time."""
    views: Mapping[str, ProtoMessage] = {}
    """Relations that must be temporary views while Spark analyzes the plan."""
    names_texts: bool = False
    """True if texts in the plan have their own temporary views."""
    done: Callable[[], None] | None = None
    """Called after Spark has executed the plan."""


async def nothing() -> AnswerStream:
    """Yield the responses to a command without rows."""
    yield complete_answer()


async def nothing_as_command() -> AnswerStream:
    """Yield the responses to an SQL statement without rows."""
    yield command_answer(answer_relation(pa.table({})))
    yield complete_answer()
