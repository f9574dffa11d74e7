"""Consensus in memory, for tests and simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import anyio.lowlevel

from actors.persist.location import CompareAndSet, VersionedData, check_key, check_ops


class MemoryConsensus:
    """A `ConsensusStore` that several clients of one test may share."""

    several_at_once: Final = True

    def __init__(self) -> None:
        self._documents: dict[str, VersionedData] = {}

    async def head(self, key: str) -> VersionedData | None:
        """Return the document, or None."""
        return self._documents.get(check_key(key))

    async def compare_and_set(self, ops: Sequence[CompareAndSet]) -> bool:
        """Change all keys or none."""
        check_ops(ops)
        # Yield as any other store does, so that tests meet the same interleavings.
        await anyio.lowlevel.checkpoint()
        for op in ops:
            held = self._documents.get(op.key)
            if (None if held is None else held.seqno) != op.expected:
                return False
        for op in ops:
            if op.kept:
                continue
            if op.data is None:
                self._documents.pop(op.key, None)
            else:
                self._documents[op.key] = VersionedData(op.seqno, op.data)
        return True

    async def list_keys(self, prefix: str = "") -> list[str]:
        """Return keys that start with `prefix`."""
        return sorted(key for key in self._documents if key.startswith(prefix))

    async def close(self) -> None:
        """Do nothing: memory needs no release."""
