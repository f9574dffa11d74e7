"""When a connection tells the workers that responses of theirs have left. Pure.

Theory of operation. Each worker lets only so many responses, and so many bytes, be on their way
(`compute.outbox`), and takes up the next when some have left. Nobody waits for a single one of
them, but for a batch of a subscribe: its dataflow goes on when the batch was taken. So what has
left is told in lots, of a quarter of what may be on its way at most, and a batch at once,
together with all before it.

Invariant: of each worker's window at least three quarters are open or truly on their way, so
nothing can wait for what is withheld here.
"""

from __future__ import annotations

from actors.compute.outbox import response_bytes
from actors.protocol.compute import CopyToResponse, Response, SubscribeResponse


class Acknowledgements:
    """What has left and was not told yet, by worker. `messages_max` and `bytes_max` are those of
    a worker's window."""

    def __init__(self, workers: int, messages_max: int, bytes_max: int) -> None:
        self._messages = max(1, messages_max // 4)
        self._bytes = max(1, bytes_max // 4)
        self._left: list[list[int]] = [[] for _ in range(workers)]
        self._left_bytes = [0] * workers
        self._due: set[int] = set()

    def left(self, worker: int, serial: int, response: Response) -> None:
        """A response has left, or there was nothing to send of it; 0: nobody counts it."""
        if not serial:
            return
        serials = self._left[worker]
        serials.append(serial)
        self._left_bytes[worker] += response_bytes(response)
        if (
            len(serials) >= self._messages
            or self._left_bytes[worker] >= self._bytes
            or isinstance(response, SubscribeResponse | CopyToResponse)
        ):
            self._due.add(worker)

    def due(self) -> list[tuple[int, tuple[int, ...]]]:
        """(worker, serials) to be told now."""
        if not self._due:
            return []
        told = [(worker, tuple(self._left[worker])) for worker in sorted(self._due)]
        for worker, _ in told:
            self._left[worker] = []
            self._left_bytes[worker] = 0
        self._due.clear()
        return told
