"""What all commands share: the event loop, log lines, options with one meaning everywhere.

Here the event loop is chosen (uvloop).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

import anyio
import typer

from actors.errors import BadSettings
from actors.settings import Settings

R = TypeVar("R")

LEVELS: Final = ("debug", "info", "warning", "error")

LogLevel = Annotated[str, typer.Option("--log-level", help=f"One of {', '.join(LEVELS)}.")]
Connect = Annotated[
    str,
    typer.Option(
        "--connect", envvar="PENSTOCK_LISTEN", help="host:port of a running service's listener."
    ),
]
DEFAULT_ADDRESS: Final = Settings().listen


class OneLine(logging.Formatter):
    """One line a record: time (UTC), level, logger, text; a traceback's lines joined by ``|``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """The record's time as ISO 8601, in UTC, with milliseconds."""
        when = datetime.fromtimestamp(record.created, UTC)
        return f"{when:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        """The record, without line ends."""
        return " | ".join(line for line in super().format(record).splitlines() if line.strip())


def set_up_logging(level: str, *, traced: bool = False) -> None:
    """Everything of `level` and above to stderr; `traced`: by structlog, with the ids of traces
    (which takes a while to import). Raises `BadSettings` for an unknown level."""
    if level.lower() not in LEVELS:
        raise BadSettings(f"log level {level!r}: must be one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    if traced:
        from actors.tracing.logs import formatter

        handler.setFormatter(formatter())
    else:
        handler.setFormatter(OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def run_loop(body: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Runs `body` on uvloop."""
    return anyio.run(body, backend="asyncio", backend_options={"use_uvloop": True})
