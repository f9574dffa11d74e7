"""The executor of the service's own SQL statements, as the gateway calls it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from actors.doors.connect_gateway.callers import CallerIdentity
from actors.runtime.errors import PenstockError


class StatementAnswer(NamedTuple):
    """The rows that answer a statement; none for one that only changes something."""

    schema: pa.Schema
    batches: Sequence[pa.RecordBatch] = ()


class ExecuteStatement(Protocol):
    """Executes a text that is a statement of the service (CREATE MATERIALIZED VIEW, DROP, SHOW,
    INSERT INTO one of its tables, …)."""

    def __call__(
        self, text: str, who: CallerIdentity, conf: Mapping[str, str]
    ) -> Awaitable[StatementAnswer | None]:
        """Carry the text out for a caller, and return the statement's answer; None, without having
        done anything, for a text that is Spark's. `conf`: settings that the caller's session
        has changed and that may change rows. Raises errors of `actors.runtime.errors`, with
        Spark's condition in the text if there is one."""
        ...


class StatementDeclined(PenstockError):
    """The text is no statement of the service: Spark executes it."""
