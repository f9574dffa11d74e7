"""Traces in a file: one OTLP request as JSON a line, as the OpenTelemetry collector writes them."""

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
    # Spans name statements and objects: they are not for other users of the machine.
    return os.open(path, flags, 0o600)


class FileExporter(SpanExporter):
    """Appends traces to a file. Raises `BadSettings` when it cannot be opened."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115
        except OSError as error:
            raise BadSettings(f"traces cannot be written to {path}: {error.strerror}") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append one line."""
        line = json.dumps(as_json(encode_spans(spans)), separators=(",", ":")) + "\n"
        try:
            # Written whole: a process that is killed leaves at most its last line cut.
            self._file.write(line.encode())
        except (OSError, ValueError):
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: spans are not buffered here."""
        return True


def as_json(request: Any) -> Any:
    """Return an OTLP message as OTLP's JSON."""
    # OTLP's JSON wants hexadecimal ids and enumerations as numbers, unlike protobuf's own.
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
