"""Processes that tests wait for."""

from __future__ import annotations

import os
import select


def wait_dead(pid: int) -> None:
    """Waits, without polling, until a process of this machine has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 200)[0], f"process {pid} lives on"
    finally:
        os.close(handle)
