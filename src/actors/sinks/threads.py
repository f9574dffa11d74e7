"""Blocking calls of a sink: each in a thread, one at a time, to its end, but not for ever.

A call that is cancelled is waited for, so that nobody touches what it still changes; one that
takes longer than the deadline is given up: it may go on, and come to an end or not. Then the
calls are over (`given_up`), and nothing that it may be using may be touched. What it commits
nonetheless is found, or fenced, by the next `open`.

Other people's libraries run here. Whatever they raise is the end of this one sink, and of nothing
else: what is not of the family comes as `Unreachable`, a panic of native code included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.lowlevel
import pyarrow as pa

from actors.buckets.bucket_errors import hint_for, reason
from actors.errors import Fenced, PenstockError, StorageError
from actors.kernel import Clock
from actors.sources.source import Unreachable

R = TypeVar("R")

log = logging.getLogger("penstock.sinks")

_EXPECTED: Final = (OSError, pa.ArrowException)
_NEEDED: Final = "list, read, write and remove (s3:ListBucket, GetObject, PutObject, DeleteObject)"
_PANIC: Final = "PanicException"
"""What native code raises when it should have raised something else; no `Exception`."""


class Threads:
    """Runs the blocking calls of one sink."""

    def __init__(self, clock: Clock, deadline_ms: int, what: str, *, private: bool = False) -> None:
        """`what`: the sink, for errors. `private`: what libraries say may hold secrets, and is
        told to nobody."""
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._what = what
        self._private = private
        self.given_up = False

    async def run(self, function: Callable[[], R], doing: str) -> R:
        """Its result. Raises what it raises, errors of stores, files and libraries as
        `Unreachable`, and `Unreachable` when it takes too long."""
        if self.given_up:
            raise Unreachable(f"{self._what}: an earlier call has not come back")
        try:
            with anyio.move_on_after(self._deadline_ms / 1000, shield=True) as limit:
                result = await self._clock.run_blocking(function)
        except Fenced:
            raise
        except StorageError as error:
            raise Unreachable(f"{self._what}: {error}", self._hint(str(error))) from error
        except _EXPECTED as error:
            told = f"{self._what}: {self.told(error)}"
            cause = None if self._private else error
            raise Unreachable(told, self._hint(told)) from cause
        except PenstockError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            shown = None if self._private else error
            log.error("%s: could not %s: %s", self._what, doing, type(error), exc_info=shown)
            raise Unreachable(
                f"{self._what}: could not {doing}: {type(error).__name__}: {self.told(error)}",
                "this was not foreseen: the log holds more",
            ) from shown
        if limit.cancelled_caught:
            self.given_up = True
            raise Unreachable(
                f"{self._what}: to {doing} took longer than {self._deadline_ms} ms",
                "look at the disk or the store that holds it, or raise sink_deadline_ms",
            )
        await anyio.lowlevel.checkpoint_if_cancelled()
        return result

    def told(self, error: BaseException) -> str:
        """What may be said of an error of a library."""
        return reason(error) if self._private else str(error)

    def _hint(self, told: str) -> str:
        if not self._private:
            return "look at the disk that holds it, then wait"
        return hint_for(told, _NEEDED)
