"""Answers of several workers to one peek put together: rows, and what lies in the stash. Pure.

Workers hold disjoint rows, so nothing is summed. What one stashed stays there; rows that came in
responses go along beside it (`PeekStashed.inline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from actors.errors import InvalidUsage
from actors.plan.updates import from_ipc, to_ipc
from actors.protocol.compute import PeekError, PeekRows, PeekStashed

NOTHING: Final = PeekRows(b"", 0)
"""The answer of a worker that has no part in the peek."""


def merged(
    results: Sequence[PeekRows | PeekStashed], bytes_max: int
) -> PeekRows | PeekStashed | PeekError:
    """One answer of all workers' answers; one in a response has at most `bytes_max` bytes."""
    stashed = [result for result in results if isinstance(result, PeekStashed)]
    inline = [result for result in results if isinstance(result, PeekRows)]
    if not stashed:
        return _together(inline, bytes_max)
    inline += [PeekRows(result.inline) for result in stashed if result.inline is not None]
    filled = [result for result in inline if count_of(result)]
    rows = [count_of(result) for result in filled]
    joined = _joined(filled) if filled else None
    return PeekStashed(
        tuple(part for result in stashed for part in result.parts),
        sum(part.rows for result in stashed for part in result.parts) + sum(rows),
        sum(part.size_bytes for result in stashed for part in result.parts) + len(joined or b""),
        joined,
    )


def _together(results: Sequence[PeekRows], bytes_max: int) -> PeekRows | PeekError:
    speaking = [result for result in results if result.arrow]
    if not speaking:
        return results[0]
    if len(speaking) > 1:
        speaking = [result for result in speaking if count_of(result)] or speaking[:1]
    if len(speaking) == 1:
        return speaking[0]
    size = sum(len(result.arrow) for result in speaking)
    if size > bytes_max:
        return too_large(bytes_max)
    return PeekRows(_joined(speaking), sum(count_of(result) for result in speaking))


def too_large(bytes_max: int) -> PeekError:
    """The refusal of a result that fits no response."""
    text = f"the result takes more than result_bytes_max ({bytes_max}); read by key, or subscribe"
    return PeekError(InvalidUsage.__name__, text, "bytes")


def count_of(result: PeekRows) -> int:
    """Rows of the stream, counted if they are not yet."""
    if result.rows >= 0 or not result.arrow:
        return max(0, result.rows)
    return int(from_ipc(result.arrow).num_rows)


def _joined(results: Sequence[PeekRows]) -> bytes:
    if len(results) == 1:
        return results[0].arrow
    return to_ipc(pa.concat_tables([from_ipc(result.arrow) for result in results]))
