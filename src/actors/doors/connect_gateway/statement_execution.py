"""The interface through which the gateway executes the service's own SQL statements."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from actors.doors.connect_gateway.callers import CallerIdentity
from actors.runtime.errors import PenstockError


class StatementAnswer(NamedTuple):
    """The result of a statement."""

    schema: pa.Schema
    batches: Sequence[pa.RecordBatch] = ()
    """Empty for a statement that returns no rows."""


class ExecuteStatement(Protocol):
    """Executes statements of the service, such as CREATE MATERIALIZED VIEW, SHOW, or INSERT INTO
    one of its tables."""

    def __call__(
        self, text: str, who: CallerIdentity, conf: Mapping[str, str]
    ) -> Awaitable[StatementAnswer | None]:
        """Execute a text for a caller, and return its result; None, with no effect, if the text is
        a statement for Spark. `conf`: changed settings of the caller's session that may affect
        rows. Raises errors of `actors.runtime.errors`, with Spark's error condition, if any, in the
        text."""
        ...


class StatementDeclined(PenstockError):
    """The text is not a statement of the service, so Spark executes it."""
