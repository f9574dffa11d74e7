"""Messages between a sink task and its owner.

`number` identifies one rendering of the sink, so that late messages of an earlier one are ignored.
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
    """One sink: its object, the configuration, and the time from which it is written."""

    id: ObjectId
    name: str
    shard: ShardId
    schema: TableSchema
    config: SinkConfig
    as_of: Time


class StopSink(msgspec.Struct, frozen=True, gc=False):
    """Owner → task: stop; answered by `SinkEnded`."""


class SinkProgress(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: everything below `upper` is durable outside. Empty frontier: the sink is
    done."""

    id: ObjectId
    number: int
    upper: Frontier
    statistics: SinkStatistics
    input: Frontier = 0
    """Upper up to which its object is known to be sealed."""
    operators: tuple[OperatorStatistics, ...] = ()


class SinkStatus(msgspec.Struct, frozen=True, gc=False):
    """Task → owner: the status; `stalled` has an error."""

    id: ObjectId
    number: int
    status: Literal["starting", "running", "stalled", "ceased"]
    error: str | None = None
    hint: str | None = None


class SinkEnded(msgspec.Struct, frozen=True, gc=False):
    """Task → owner, the last message. `error`: the reason; None: it was stopped, or is done."""

    id: ObjectId
    number: int
    error: PenstockError | None = None


def hold_of(sink: ObjectId) -> str:
    """Return the name of the sink's hold on its input shard; the hold is dropped with the sink."""
    return f"sink/{sink}"
