"""The trace context of messages, and the definitions of all spans and attributes.

Names, kinds and attributes follow OpenTelemetry's conventions for messaging: the name of a span is
``{operation} {destination}``, and what identifies a message (an object, an interval of times, a
nonce) is an attribute. Spans are opened by `actors.runtime.spans`.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Final, Generic, TypeVar

import msgspec
from opentelemetry.trace import SpanKind

M = TypeVar("M")

TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The sampled context of the message being handled. Messages sent while it is handled inherit it.
Set only by `activate_context`."""


class ContextCount(msgspec.Struct):
    """Counts the blocks in which a context is active."""

    # While it is 0, mailboxes skip the lookup of the context, a tenth of the cost of a message.
    blocks: int = 0
    """Number of calls of `activate_context` without their `deactivate_context`."""


HELD: Final = ContextCount()


def activate_context(traceparent: str | None) -> Token[str | None]:
    """Use a context for everything sent until `deactivate_context`. Call it in the loop's thread.

    A task started in between loses the context if it outlives the block.
    """
    HELD.blocks += 1
    return TRACEPARENT.set(traceparent)


def deactivate_context(token: Token[str | None]) -> None:
    """Restore the context that was active before `activate_context` returned `token`."""
    HELD.blocks -= 1
    TRACEPARENT.reset(token)


class TracedMessage(msgspec.Struct, Generic[M], gc=False):
    """Envelope of a message that belongs to a sampled trace, with the context of its sender.

    Mailboxes and connections use it; other messages have no envelope. On a wire the context is the
    frame's header (`actors.runtime.frames`).
    """

    message: M
    traceparent: str


def with_context(message: M, traceparent: str | None) -> M | TracedMessage[M]:
    """Put a message into an envelope with a context; None leaves the message as it is."""
    return message if traceparent is None else TracedMessage(message, traceparent)


def split_context(message: Any) -> tuple[Any, str | None]:
    """Take a message out of its envelope. Return it with its context, None if it has none."""
    if isinstance(message, TracedMessage):
        return message.message, message.traceparent
    return message, None


UNSAMPLED: Final = "00-00000000000000000000000000000001-0000000000000001-00"
"""Context that a sender puts on a wire if it decided not to trace the request."""

SYSTEM: Final = "penstock"

# -- attributes ------------------------------------------------------------------------------------

NONCE: Final = "penstock.nonce"
"""Nonce of the connection to the replica through which a command came."""
WORKER: Final = "penstock.worker"
DATAFLOW: Final = "penstock.dataflow"
SHARD: Final = "penstock.shard"
LO: Final = "penstock.lo"
HI: Final = "penstock.hi"
"""An interval of times: lo <= time < hi."""
OBJECT: Final = "penstock.object"
REQUEST: Final = "penstock.request"
SESSION: Final = "penstock.session"
TIME: Final = "penstock.time"
NUMBER: Final = "penstock.step"
INCARNATION: Final = "penstock.incarnation"
JOB: Final = "penstock.job"
ROWS: Final = "penstock.rows"
ROWS_IN: Final = "penstock.rows_in"
ROWS_OUT: Final = "penstock.rows_out"
BYTES: Final = "penstock.bytes"
PREPARED: Final = "penstock.prepared"
SPARK_MS: Final = "penstock.spark_ms"
TASKS: Final = "spark.tasks"
STAGE: Final = "spark.stage"
STAGES: Final = "spark.stages"
READ_BYTES: Final = "spark.input_bytes"
READ_ROWS: Final = "spark.input_rows"
SHUFFLE_BYTES: Final = "spark.shuffle_write_bytes"
RUN_MS: Final = "spark.executor_run_ms"
CANCELED: Final = "penstock.canceled"
BATCH: Final = "messaging.batch.message_count"
MESSAGE_BYTES: Final = "messaging.message.body.size"

# -- spans -----------------------------------------------------------------------------------------


class SpanDefinition(msgspec.Struct, frozen=True):
    """One kind of span. `attributes` are the names of the values given to `span`, in order."""

    operation: str
    destination: str
    kind: SpanKind
    attributes: tuple[str, ...] = ()
    type: str = ""
    """Type in the messaging conventions: ``send``, ``receive`` or ``process``; "" if the span is
    not about a message."""
    apart: bool = False
    """True if the span may start after its parent has ended. All others lie within their
    parents."""

    @property
    def name(self) -> str:
        """Return the span's name, ``{operation} {destination}``."""
        return f"{self.operation} {self.destination}"


_CLIENT, _SERVER, _INTERNAL = SpanKind.CLIENT, SpanKind.SERVER, SpanKind.INTERNAL
_PRODUCER, _CONSUMER = SpanKind.PRODUCER, SpanKind.CONSUMER

CLIENT_REQUEST: Final = SpanDefinition("send", "request", _CLIENT, (REQUEST, OBJECT), "send")
"""In the client: from sending a request until it is answered."""
SESSION_REQUEST: Final = SpanDefinition(
    "process", "request", _SERVER, (REQUEST, OBJECT, SESSION), "process"
)
"""In the session: from reading a request until its answer is sent."""
STATEMENT: Final = SpanDefinition("process", "statement", _INTERNAL, (REQUEST, OBJECT))
"""A change of the catalog: from its start until it is durable."""
HYDRATION: Final = SpanDefinition(
    "process", "hydration", _CONSUMER, (DATAFLOW, OBJECT, INCARNATION), "process", True
)
"""A dataflow: from the permission to run until its first contents are durable, or were read."""
GROUP_COMMIT: Final = SpanDefinition("commit", "group", _CONSUMER, (BATCH,), "process")
"""In the table writer: a group of writes that become durable at one timestamp. Links to its
writes."""
APPEND: Final = SpanDefinition("append", "shard", _PRODUCER, (SHARD, LO, HI, ROWS, BYTES), "send")
"""The compare-and-append. `SHARD` lists all shards, separated by commas."""
LISTEN: Final = SpanDefinition(
    "receive", "shard", _CONSUMER, (SHARD, DATAFLOW, LO, HI, ROWS), "receive", True
)
"""The listen task describes what was appended. Links to the other appends that it describes."""
FETCH: Final = SpanDefinition(
    "fetch", "part", _CLIENT, (SHARD, DATAFLOW, LO, HI, ROWS, BYTES), "", True
)
"""A fetch task reads a part."""
STEP: Final = SpanDefinition(
    "process",
    "step",
    _CONSUMER,
    (DATAFLOW, OBJECT, NUMBER, INCARNATION, LO, HI, ROWS_IN),
    "process",
    True,
)
"""A step: from its cut until its changes are installed. Links to all changes that it processes."""
SPARK_JOB: Final = SpanDefinition("run", "job", _CLIENT, (JOB, DATAFLOW), "send")
"""A job as the service sees it, including its wait for the engine."""
ENGINE_JOB: Final = SpanDefinition("process", "job", _SERVER, (JOB,), "process")
"""A job in the engine's process, from when a worker thread takes it."""
ENGINE_STAGE: Final = SpanDefinition("run", "stage", _INTERNAL, (STAGE,))
"""A Spark stage, timed by Spark's own clock."""
STEP_COMMIT: Final = SpanDefinition("commit", "step", _INTERNAL, (SHARD, LO, HI, ROWS))
"""The commit of a step."""
CONNECTION_COMMAND: Final = SpanDefinition(
    "process", "command", _SERVER, (NONCE, REQUEST, OBJECT), "process", True
)
"""The replica's connection splits a command over the workers."""
ADAPTER_COMMAND: Final = SpanDefinition(
    "forward", "command", _CONSUMER, (NONCE, WORKER), "process", True
)
"""A channel adapter forwards a command."""
WORKER_PEEK: Final = SpanDefinition(
    "process", "peek", _CONSUMER, (NONCE, WORKER, OBJECT, TIME), "process", True
)
"""A worker answers a peek from its partition of an index, or one of the workers from a shard."""
WORKER_EMIT: Final = SpanDefinition(
    "emit", "changes", _PRODUCER, (NONCE, WORKER, DATAFLOW, LO, HI), "send", True
)
"""Worker 0 sends a batch of changes to a subscriber."""
ADAPTER_RESPONSE: Final = SpanDefinition(
    "forward", "response", _CONSUMER, (NONCE, WORKER), "process", True
)
"""A channel adapter forwards a response."""
SESSION_CHANGES: Final = SpanDefinition(
    "send", "changes", _PRODUCER, (SESSION, REQUEST, LO, HI, MESSAGE_BYTES), "send", True
)
"""The session sends a batch of changes to its client."""
CLIENT_CHANGES: Final = SpanDefinition(
    "receive", "changes", _CONSUMER, (REQUEST, LO, HI, MESSAGE_BYTES), "receive", True
)
"""The client receives a batch of changes."""

HOPS: Final[dict[str, SpanDefinition]] = {
    hop.name: hop
    for hop in (
        CLIENT_REQUEST,
        SESSION_REQUEST,
        STATEMENT,
        HYDRATION,
        GROUP_COMMIT,
        APPEND,
        LISTEN,
        FETCH,
        STEP,
        SPARK_JOB,
        ENGINE_JOB,
        ENGINE_STAGE,
        STEP_COMMIT,
        CONNECTION_COMMAND,
        ADAPTER_COMMAND,
        WORKER_PEEK,
        WORKER_EMIT,
        ADAPTER_RESPONSE,
        SESSION_CHANGES,
        CLIENT_CHANGES,
    )
}
"""All kinds of spans, by name."""


class ActorStatistics(msgspec.Struct, frozen=True):
    """Statistics of a live actor at one moment. Counts include the time before restarts."""

    path: str
    state: str
    """``starting``, ``idle``, ``handles X``, ``asks /path``, ``restarts``, ``stops``."""
    doing: str
    """The actor's own description."""
    depth: int
    """Number of waiting messages."""
    depth_max: int
    """Largest depth so far."""
    limit: int
    """Bound of the mailbox."""
    senders_waiting: int
    """Number of senders that wait for room."""
    received: int
    """Number of messages taken from the mailbox."""
    busy_ms: float
    """Total time spent handling messages, including waits."""
    effects: int
    """Number of running effects and pending timers."""
    crashes: int
    """Number of crashes."""
