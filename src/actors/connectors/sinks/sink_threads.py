"""Runs the blocking calls of a sink in threads, one at a time, each to its end or a deadline.

After a missed deadline no more calls are made (`given_up`). Whatever the abandoned call still
commits is found, or fenced, by the next `open`. Errors of libraries, including panics of native
code, end only this sink: unexpected ones are raised as `SourceUnreachable`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.lowlevel
import pyarrow as pa

from actors.connectors.sources.source import SourceUnreachable
from actors.durable.object_store.bucket_errors import hint_for, reason
from actors.runtime.errors import PenstockError, StorageError, WriterFenced
from actors.runtime.kernel import ActorClock

R = TypeVar("R")

log = logging.getLogger("penstock.sinks")

_EXPECTED: Final = (OSError, pa.ArrowException)
_NEEDED: Final = "list, read, write and remove (s3:ListBucket, GetObject, PutObject, DeleteObject)"
_PANIC: Final = "PanicException"
"""Name of the exception for a panic of native code (pyo3). It is not an `Exception`."""


class SinkThreads:
    """Runs the blocking calls of one sink."""

    def __init__(
        self, clock: ActorClock, deadline_ms: int, what: str, *, private: bool = False
    ) -> None:
        """Make a runner. `what` names the sink in errors. With `private`, texts of libraries may
        contain secrets and are not shown."""
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._what = what
        self._private = private
        self.given_up = False
        """True after a missed deadline; no more calls are made."""

    async def run(self, function: Callable[[], R], doing: str) -> R:
        """Run a function and return its result.

        Errors of stores, files and libraries, and a missed deadline, are raised as
        `SourceUnreachable`. The product's own errors are raised unchanged.
        """
        if self.given_up:
            raise SourceUnreachable(f"{self._what}: an earlier call has not returned")
        try:
            # Shielded: a cancelled call is waited for, because it may still change files that
            # others would touch.
            with anyio.move_on_after(self._deadline_ms / 1000, shield=True) as limit:
                result = await self._clock.run_blocking(function)
        except WriterFenced:
            raise
        except StorageError as error:
            raise SourceUnreachable(f"{self._what}: {error}", self._hint(str(error))) from error
        except _EXPECTED as error:
            text = f"{self._what}: {self.error_text(error)}"
            cause = None if self._private else error
            raise SourceUnreachable(text, self._hint(text)) from cause
        except PenstockError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            text, shown = self.error_text(error), None if self._private else error
            log.error("%s: could not %s: %s", self._what, doing, type(error), exc_info=shown)
            raise SourceUnreachable(
                f"{self._what}: could not {doing}: {type(error).__name__}: {text}",
                "this is an unexpected error: see the log for details",
            ) from shown
        if limit.cancelled_caught:
            # The thread may still be running, so its files must no longer be touched.
            self.given_up = True
            raise SourceUnreachable(
                f"{self._what}: could not {doing} within {self._deadline_ms} ms",
                "check the disk or store, or raise sink_deadline_ms",
            )
        # Deliver the cancellation that the shield delayed.
        await anyio.lowlevel.checkpoint_if_cancelled()
        return result

    def error_text(self, error: BaseException) -> str:
        """Return the part of a library's error text that may be shown."""
        return reason(error) if self._private else str(error)

    def _hint(self, text: str) -> str:
        if not self._private:
            return "check the disk; the service will retry"
        return hint_for(text, _NEEDED)
