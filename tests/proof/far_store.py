"""One of a far service's two stores as a separate process, which may go away and come back.

Run: ``python tests/proof/far_store.py s3|postgres``. It prints ``serving ADDRESS`` and obeys lines
of its input: ``away`` (every connection is cut, and none is accepted) and ``back`` (on the same
port, with all that was stored), each answered by its own word. It ends with its input.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from actors.testing.postgres_server import PostgresServer


class FarStore(Protocol):
    """A store that can be taken away."""

    address: str

    def go_away(self) -> None:
        """Ends every connection, and accepts none."""
        ...

    def come_back(self) -> None:
        """Serves again."""
        ...


class FarBucket:
    """An S3 server with one bucket."""

    def __init__(self) -> None:
        """Starts it, and makes the bucket."""
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        import s3_server  # type: ignore[import-not-found]

        s3_server.check_installed()
        self._served = s3_server.S3()
        self.address = f"{self._served.url} {self._served.new_bucket()}"

    def go_away(self) -> None:
        """Ends every connection, and accepts none."""
        self._served.go_away()
        self._served.calls.clear()

    def come_back(self) -> None:
        """Serves again what is stored."""
        self._served.come_back()


class FarDocuments:
    """A PostgreSQL that dies as a machine does, and starts again."""

    def __init__(self) -> None:
        """Starts it."""
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pg"))
        self._server = PostgresServer(Path(folder), {})
        self._stack.enter_context(self._server.guarded())
        self._server.start()
        self.address = f"127.0.0.1:{self._server.port}"

    def go_away(self) -> None:
        """Kills it: SIGKILL."""
        self._server.kill()

    def come_back(self) -> None:
        """Starts it on its data."""
        self._server.start()

    def close(self) -> None:
        """Ends it, and removes its data."""
        self._stack.close()


@contextlib.contextmanager
def documents() -> Iterator[FarStore]:
    """A PostgreSQL until the block ends."""
    with contextlib.closing(FarDocuments()) as store:
        yield store


def main() -> int:
    """Serves until its input ends."""
    kind = sys.argv[1]
    opened: AbstractContextManager[FarStore] = (
        contextlib.nullcontext(FarBucket()) if kind == "s3" else documents()
    )
    with opened as store:
        print(f"serving {store.address}", flush=True)
        for line in sys.stdin:
            word = line.strip()
            if word == "away":
                store.go_away()
            elif word == "back":
                store.come_back()
            print(word, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
