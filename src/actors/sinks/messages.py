"""What a sink task is told, and what it tells its owner.

`number` names one rendering of the sink, as its owner gave it: what an earlier one said last is
told apart by it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.errors import PenstockError
from actors.plan.schema import Schema
from actors.progress import Frontier, ObjectId, ShardId, Time
from actors.protocol.storage import OperatorStatistics
from actors.sinks.kinds import SinkConfig
from actors.sinks.sink import SinkStatistics


class SinkWork(msgspec.Struct, frozen=True, gc=False):
    """One sink: what it writes, from `as_of` on, and to where."""

    id: ObjectId
    name: str
    shard: ShardId
    schema: Schema
    config: SinkConfig
    as_of: Time


class StopSink(msgspec.Struct, frozen=True, gc=False):
    """Owner → task: end; answered by `SinkEnded`."""


class SinkProgress(msgspec.Struct, frozen=True, gc=False):
    """Everything below `upper` is outside, and durable there. Empty: it is done."""

    id: ObjectId
    number: int
    upper: Frontier
    statistics: SinkStatistics
    input: Frontier = 0
    """To where its object is known to be sealed."""
    operators: tuple[OperatorStatistics, ...] = ()


class SinkStatus(msgspec.Struct, frozen=True, gc=False):
    """How it is. `stalled` with an error; of `SinkEnded` it is the last status."""

    id: ObjectId
    number: int
    status: Literal["starting", "running", "stalled", "ceased"]
    error: str | None = None
    hint: str | None = None


class SinkEnded(msgspec.Struct, frozen=True, gc=False):
    """Its last message. `error`: why; None: it was stopped, or is done."""

    id: ObjectId
    number: int
    error: PenstockError | None = None


def hold_of(sink: ObjectId) -> str:
    """The holder's name on the input shard: to be dropped by who drops the sink."""
    return f"sink/{sink}"
