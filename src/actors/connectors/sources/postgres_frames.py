"""Payloads of many PostgreSQL messages in one buffer, and the numbers in them. Pure."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]

PAD_BYTES: Final = 16
"""Bytes after the data, so that wide reads at the end stay within the buffer."""


_DATA: Final = ord("d")
_HEADER_BYTES: Final = 5
_CHAIN_BYTES_MIN: Final = 4096
"""Size below which going from frame to frame is faster."""


class CopyFrames(msgspec.Struct):
    """Payloads of CopyData messages: ``data[starts[i]:ends[i]]``, ascending, with `PAD_BYTES`
    readable after the last."""

    data: Bytes
    starts: Places
    ends: Places

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def bytes(self) -> int:
        """Return the bytes from the first to the last."""
        return int(self.ends[-1] - self.starts[0]) if len(self.starts) else 0


def chain(data: Bytes, place: int, end: int) -> tuple[Places, int]:
    """Return consecutive complete CopyData frames from `place` on, and the end of the last. Not
    always all of them, but exactly a prefix of those that going from frame to frame would find."""
    none = np.empty(0, np.int64)
    if end - place < _CHAIN_BYTES_MIN:
        return none, place
    # All bytes that could begin a frame at once; most that begin none lead to no other candidate.
    found = np.flatnonzero(data[place : end - _HEADER_BYTES + 1] == _DATA) + place
    ends = found + 1 + be32(data, found + 1)
    leads = (ends >= found + _HEADER_BYTES) & (ends <= end)
    leads[leads] = (data[ends[leads]] == _DATA) | (ends[leads] == end)
    found, ends = found[leads], ends[leads]
    if not len(found) or int(found[0]) != place:
        return none, place
    broken = np.flatnonzero(found[1:] != ends[:-1])
    count = int(broken[0]) + 1 if len(broken) else len(found)
    return found[:count], int(ends[count - 1])


# -- big-endian numbers at any place ------------------------------------------------------------


def be32(data: Bytes, places: Places) -> Places:
    """Return the signed numbers of four bytes that begin at these places."""
    # Overlapping windows: numbers may begin at any byte.
    view: npt.NDArray[np.int32] = np.ndarray((len(data) - 3,), ">i4", data, strides=(1,))
    return view[places].astype(np.int64)


def be16(data: Bytes, places: Places) -> Places:
    """Return the signed numbers of two bytes that begin at these places."""
    view: npt.NDArray[np.int16] = np.ndarray((len(data) - 1,), ">i2", data, strides=(1,))
    return view[places].astype(np.int64)


def be64(data: Bytes, places: Places) -> Places:
    """Return the signed numbers of eight bytes that begin at these places."""
    view: npt.NDArray[np.int64] = np.ndarray((len(data) - 7,), ">i8", data, strides=(1,))
    return view[places].astype(np.int64)
