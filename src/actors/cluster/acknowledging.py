"""Batched acknowledgements of responses to the workers. Pure.

Each worker allows only so many responses, and so many bytes, in flight (`compute.outbox`).
Responses that have left are acknowledged in batches of at most a quarter of that window. So at
least three quarters of each window are open or truly in flight: no worker waits for an
acknowledgement that is withheld here.
"""

from __future__ import annotations

from actors.compute.outbox import response_bytes
from actors.protocol.compute import CopyToResponse, Response, SubscribeResponse


class AcknowledgementWindow:
    """Responses that have left and are not acknowledged yet, by worker. `messages_max` and
    `bytes_max` are those of a worker's window."""

    def __init__(self, workers: int, messages_max: int, bytes_max: int) -> None:
        self._messages = max(1, messages_max // 4)
        self._bytes = max(1, bytes_max // 4)
        self._left: list[list[int]] = [[] for _ in range(workers)]
        self._left_bytes = [0] * workers
        self._due: set[int] = set()

    def left(self, worker: int, serial: int, response: Response) -> None:
        """Note that a response has left, or that nothing was sent for it. Serial 0: no
        acknowledgement is due."""
        # No worker counts a response that the connection answered itself.
        if not serial:
            return
        serials = self._left[worker]
        serials.append(serial)
        self._left_bytes[worker] += response_bytes(response)
        if (
            len(serials) >= self._messages
            or self._left_bytes[worker] >= self._bytes
            # A dataflow or copy waits for the acknowledgement of its batch: it is sent at once.
            or isinstance(response, SubscribeResponse | CopyToResponse)
        ):
            self._due.add(worker)

    def due(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return and forget the (worker, serials) to be acknowledged now."""
        if not self._due:
            return []
        told = [(worker, tuple(self._left[worker])) for worker in sorted(self._due)]
        for worker, _ in told:
            self._left[worker] = []
            self._left_bytes[worker] = 0
        self._due.clear()
        return told
