"""Answers that a worker gives without reading anything."""

from __future__ import annotations

from typing import Final

from actors.protocol.compute import PeekRows

NOTHING: Final = PeekRows(b"", 0)
"""The answer of a worker that has no part in the peek."""
