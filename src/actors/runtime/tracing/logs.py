"""Formats log records with structlog: one line per record, with its trace.

Records of the standard library's loggers and of structlog's look the same: time (UTC), level,
logger, text, then ``name=value`` for every bound value. ``trace_id`` and ``span_id`` are among
these while a sampled message is handled. The lines of a traceback are joined by ``|``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

import structlog

from actors.runtime.spans import split_traceparent
from actors.runtime.telemetry import TRACEPARENT

LogFormat: TypeAlias = Literal["text", "json"]
_SHOWN_FIRST: Final = ("timestamp", "level", "logger", "event", "exception", "stack")


def add_trace(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the ``trace_id`` and ``span_id`` of the message being handled, if it is sampled."""
    traceparent = TRACEPARENT.get()
    if traceparent is not None:
        event["trace_id"], event["span_id"] = split_traceparent(traceparent)
    return event


def _add_time(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record = event.get("_record")
    when = datetime.now(UTC) if record is None else datetime.fromtimestamp(record.created, UTC)
    event["timestamp"] = f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03d}Z"
    return event


def _one_line(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    words = [event["timestamp"], str(event.get("level", "")).upper(), str(event.get("logger", ""))]
    words.append(str(event["event"]))
    words += [f"{name}={value}" for name, value in event.items() if name not in _SHOWN_FIRST]
    lines = [" ".join(words)]
    lines += [str(event[name]) for name in ("stack", "exception") if event.get(name)]
    return " | ".join(line for line in "\n".join(lines).splitlines() if line.strip())


def _one_object(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    return json.dumps(dict(event), default=str)


def formatter(log_format: LogFormat = "text") -> logging.Formatter:
    """Return a formatter for handlers of the standard library.

    It writes a line of text or a JSON object per record. Also configures structlog's own loggers to
    log through the standard library from now on.
    """
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        add_trace,
    ]
    structlog.configure(
        processors=[
            *common,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*common, structlog.stdlib.ExtraAdder()],
        processors=[
            _add_time,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _one_object if log_format == "json" else _one_line,
        ],
    )
