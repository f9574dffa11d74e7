"""Writes traces to a file: one OTLP request as JSON per line, as the OpenTelemetry collector does.

Only `actors.runtime.tracing.setup` imports this module, because it needs OpenTelemetry's SDK.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from actors.runtime.errors import BadSettings

_IDS: Final = ("traceId", "spanId", "parentSpanId")


def _private(path: str, flags: int) -> int:
    # Spans name statements and objects, which other users of the machine must not see.
    return os.open(path, flags, 0o600)


class FileExporter(SpanExporter):
    """Appends traces to a file. Raises `BadSettings` if the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115
        except OSError as error:
            raise BadSettings(f"cannot write traces to {path}: {error.strerror}") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans as one line."""
        line = json.dumps(as_json(encode_spans(spans)), separators=(",", ":")) + "\n"
        try:
            # A single write: a killed process leaves at most its last line incomplete.
            self._file.write(line.encode())
        except (OSError, ValueError):
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True, because this exporter buffers no spans."""
        return True


def as_json(request: Any) -> Any:
    """Convert an OTLP protobuf message to OTLP's JSON form."""
    # Unlike protobuf's own JSON, OTLP's has hexadecimal ids and enumerations as numbers.
    return _with_hex(MessageToDict(request, use_integers_for_enums=True))


def _with_hex(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_hex(each) for each in value]
    if isinstance(value, dict):
        return {
            key: base64.b64decode(each).hex() if key in _IDS else _with_hex(each)
            for key, each in value.items()
        }
    return value
