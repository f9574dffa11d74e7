"""Peek responses that need no read."""

from __future__ import annotations

from typing import Final

from actors.protocol.compute import PeekRows

NOTHING: Final = PeekRows(b"", 0)
"""Response of a worker that has no part in the peek."""
