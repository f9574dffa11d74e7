"""The trace context of messages, and the one table of spans and their attributes.

Names, kinds and attributes go by OpenTelemetry's conventions for messaging: a span's name is
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
"""The sampled context of the message being handled: envelopes made meanwhile inherit it.
Set by `activate_context` alone."""


class ContextCount(msgspec.Struct):
    """Counts the blocks that hold a context now."""

    # While it is 0 no message looks for a context, a look that is a tenth of what a message costs.
    blocks: int = 0


HELD: Final = ContextCount()


def activate_context(traceparent: str | None) -> Token[str | None]:
    """Make a context that of all that is sent from here on, until `deactivate_context`. Call it in
    the loop's thread.

    A task that was started in between and goes on afterwards has no context of its own.
    """
    HELD.blocks += 1
    return TRACEPARENT.set(traceparent)


def deactivate_context(token: Token[str | None]) -> None:
    """End what `activate_context` began."""
    HELD.blocks -= 1
    TRACEPARENT.reset(token)


class TracedMessage(msgspec.Struct, Generic[M], gc=False):
    """A message of a sampled trace, with the context of its sender; all others go without.

    It is the envelope of mailboxes and of connections; on a wire the context is the frame's header
    (`actors.runtime.frames`).
    """

    message: M
    traceparent: str


def with_context(message: M, traceparent: str | None) -> M | TracedMessage[M]:
    """Return the message in an envelope with this context, if there is one."""
    return message if traceparent is None else TracedMessage(message, traceparent)


def split_context(message: Any) -> tuple[Any, str | None]:
    """Return a message, out of its envelope, and its context if it has one."""
    if isinstance(message, TracedMessage):
        return message.message, message.traceparent
    return message, None


UNSAMPLED: Final = "00-00000000000000000000000000000001-0000000000000001-00"
"""Context on a wire by which the sender says that it decided not to trace this request."""

SYSTEM: Final = "penstock"

# -- the table: attributes -------------------------------------------------------------------------

NONCE: Final = "penstock.nonce"
"""Nonce of the connection to the cluster that a command came on."""
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

# -- the table: spans ------------------------------------------------------------------------------


class SpanDefinition(msgspec.Struct, frozen=True):
    """One kind of span. `attributes` name the values that `span` is given, in their order."""

    operation: str
    destination: str
    kind: SpanKind
    attributes: tuple[str, ...] = ()
    type: str = ""
    """Type by the messaging conventions: ``send``, ``receive`` or ``process``; empty: no
    message."""
    apart: bool = False
    """True if it may begin after its cause has ended; all others lie within their parents."""

    @property
    def name(self) -> str:
        """Return the name of the span."""
        return f"{self.operation} {self.destination}"


_CLIENT, _SERVER, _INTERNAL = SpanKind.CLIENT, SpanKind.SERVER, SpanKind.INTERNAL
_PRODUCER, _CONSUMER = SpanKind.PRODUCER, SpanKind.CONSUMER

CLIENT_REQUEST: Final = SpanDefinition("send", "request", _CLIENT, (REQUEST, OBJECT), "send")
"""The client, from sending a request until it is answered."""
SESSION_REQUEST: Final = SpanDefinition(
    "process", "request", _SERVER, (REQUEST, OBJECT, SESSION), "process"
)
"""The session, from reading a request until its answer is on its way."""
STATEMENT: Final = SpanDefinition("process", "statement", _INTERNAL, (REQUEST, OBJECT))
"""A change of the catalog, from its turn until it is durable."""
HYDRATION: Final = SpanDefinition(
    "process", "hydration", _CONSUMER, (DATAFLOW, OBJECT, INCARNATION), "process", True
)
"""A dataflow, from its permission to run until its first contents are durable, or read."""
GROUP_COMMIT: Final = SpanDefinition("commit", "group", _CONSUMER, (BATCH,), "process")
"""The table writer: one group of writes, made durable at one time. Links to all its writes."""
APPEND: Final = SpanDefinition("append", "shard", _PRODUCER, (SHARD, LO, HI, ROWS, BYTES), "send")
"""The compare-and-append; `SHARD` names all, with commas between."""
LISTEN: Final = SpanDefinition(
    "receive", "shard", _CONSUMER, (SHARD, DATAFLOW, LO, HI, ROWS), "receive", True
)
"""The listen task describes what was appended. Links to the other appends it describes."""
FETCH: Final = SpanDefinition(
    "fetch", "part", _CLIENT, (SHARD, DATAFLOW, LO, HI, ROWS, BYTES), "", True
)
STEP: Final = SpanDefinition(
    "process",
    "step",
    _CONSUMER,
    (DATAFLOW, OBJECT, NUMBER, INCARNATION, LO, HI, ROWS_IN),
    "process",
    True,
)
"""A step, from its cut until its delta is installed. Links to all changes that it serves."""
SPARK_JOB: Final = SpanDefinition("run", "job", _CLIENT, (JOB, DATAFLOW), "send")
"""The service's side of a job, its wait for a place included."""
ENGINE_JOB: Final = SpanDefinition("process", "job", _SERVER, (JOB,), "process")
"""The engine's own process: a worker thread has the job."""
ENGINE_STAGE: Final = SpanDefinition("run", "stage", _INTERNAL, (STAGE,))
"""A stage of Spark's, by Spark's own clock."""
STEP_COMMIT: Final = SpanDefinition("commit", "step", _INTERNAL, (SHARD, LO, HI, ROWS))
CONNECTION_COMMAND: Final = SpanDefinition(
    "process", "command", _SERVER, (NONCE, REQUEST, OBJECT), "process", True
)
"""The cluster's connection splits a command over the workers."""
ADAPTER_COMMAND: Final = SpanDefinition(
    "forward", "command", _CONSUMER, (NONCE, WORKER), "process", True
)
WORKER_PEEK: Final = SpanDefinition(
    "process", "peek", _CONSUMER, (NONCE, WORKER, OBJECT, TIME), "process", True
)
"""A worker reads its partition, or one of them a shard."""
WORKER_EMIT: Final = SpanDefinition(
    "emit", "changes", _PRODUCER, (NONCE, WORKER, DATAFLOW, LO, HI), "send", True
)
"""Worker 0 has a batch for a subscriber."""
ADAPTER_RESPONSE: Final = SpanDefinition(
    "forward", "response", _CONSUMER, (NONCE, WORKER), "process", True
)
SESSION_CHANGES: Final = SpanDefinition(
    "send", "changes", _PRODUCER, (SESSION, REQUEST, LO, HI, MESSAGE_BYTES), "send", True
)
CLIENT_CHANGES: Final = SpanDefinition(
    "receive", "changes", _CONSUMER, (REQUEST, LO, HI, MESSAGE_BYTES), "receive", True
)
"""The subscriber has a batch."""

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
    """A live actor at one moment. Counts are of its whole life, restarts included."""

    path: str
    state: str
    """``starting``, ``idle``, ``handles X``, ``asks /path``, ``restarts``, ``stops``."""
    doing: str
    """The actor's own description."""
    depth: int
    """Number of waiting messages."""
    depth_max: int
    limit: int
    senders_waiting: int
    received: int
    busy_ms: float
    """Time in handlers, their waits included."""
    effects: int
    crashes: int
