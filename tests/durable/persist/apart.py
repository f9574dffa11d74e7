"""Services in separate processes, on stores by URL; see `serving.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio


def given(tmp_path: Path, name: str, urls: dict[str, str]) -> dict[str, Any]:
    """Settings of a service with a state directory of its own. Most parts are no inline ones."""
    return {
        "state_dir": str(tmp_path / name),
        "listen": "127.0.0.1:0",
        "inline_part_bytes_max": 1,
        "batches_per_shard_max": 4,
        "maintenance_ms": 20,
        "store_poll_ms": 20,
        "retry_delay_ms_min": 1,
        "retry_delay_ms_max": 20,
        **urls,
    }


class Apart:
    """A service in a separate process."""

    def __init__(self, tmp_path: Path, urls: dict[str, str], name: str, **more: Any) -> None:
        script = Path(__file__).with_name("serving.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(given(tmp_path, name, urls) | more)],
            stdout=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await anyio.to_thread.run_sync(self._process.stdout.readline)).strip()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self.wait()

    def wait(self) -> int:
        assert self._process.stdout is not None
        status = self._process.wait()
        self._process.stdout.close()
        return status
