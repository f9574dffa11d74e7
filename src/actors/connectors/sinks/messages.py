"""Messages between a sink task and its owner.

`number` identifies one rendering of the sink, so that late messages of an earlier rendering are
ignored.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.connectors.sinks.kinds import SinkConfig
from actors.connectors.sinks.sink import SinkStatistics
from actors.model.plan.schema import TableSchema
from actors.model.protocol.message_parts import OperatorStatistics
from actors.runtime.errors import PenstockError
from actors.runtime.progress import Frontier, ObjectId, ShardId, Time


class SinkWork(msgspec.Struct, frozen=True, gc=False):
    """One sink: its object, its configuration, and the time from which on it is written."""

    id: ObjectId
    name: str
    shard: ShardId
    schema: TableSchema
    config: SinkConfig
    as_of: Time


class StopSink(msgspec.Struct, frozen=True, gc=False):
    """Owner → task: stop. Answered by `SinkEnded`."""


class SinkProgress(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: everything below `upper` is durable in the external system. With the empty
    frontier, the sink is done."""

    id: ObjectId
    number: int
    upper: Frontier
    statistics: SinkStatistics
    input: Frontier = 0
    """Upper up to which the object is known to be sealed."""
    operators: tuple[OperatorStatistics, ...] = ()


class SinkStatus(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: the status. `error` is set if it is `stalled`."""

    id: ObjectId
    number: int
    status: Literal["starting", "running", "stalled", "ceased"]
    error: str | None = None
    hint: str | None = None


class SinkEnded(msgspec.Struct, frozen=True, gc=False):
    """Task → owner, the last message. `error` is the reason; None if the task was stopped or is
    done."""

    id: ObjectId
    number: int
    error: PenstockError | None = None


def hold_of(sink: ObjectId) -> str:
    """Return the name of the sink's hold on its input shard. The hold is dropped with the sink."""
    return f"sink/{sink}"
