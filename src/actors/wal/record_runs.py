"""Checks many complete records of a log at once: the fast path of `records`.

`run_of` returns how many bytes of a piece are complete, ordinary records with correct CRCs, in
pages with correct headers. `records.RecordScanner` handles everything else, one record at a time:
incomplete records, switches of segments, pages that report an unfinished record, damage.

Page headers are removed, so that records are adjacent. One loop in Python follows the lengths from
record to record. The page headers are compared with the records' ends, and all CRCs are checked
together:

- A CRC is the remainder of a polynomial, so it is linear: if the register starts as zeros, the
  remainder of the sum (XOR) of two messages is the sum of their remainders.
- A record is correct if its body, its header's first 20 bytes, and its inverted CRC, in this order
  and with the first 32 bits inverted, leave the remainder 0. (The inversions are equivalent to a
  register that starts as ones and a CRC that is inverted at its end.)
- Zeros before or after such a message do not change that. So each header is moved after its body,
  to where the next record's header was, and the remainder of the whole run is 0 if all records are
  correct.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from struct import Struct
from typing import Any, Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from actors.wal.lsn import PAGE_BYTES

RUN_BYTES_MIN: Final = 64 * 1024
"""Shorter pieces with records of a few hundred bytes are faster in the record loop of `records`."""
RUN_BYTES_MAX: Final = 256 * 1024
"""Maximum number of bytes examined at once."""

_PAGE: Final = Struct("<HHIQI")  # as in `records`
_HEADER_BYTES: Final = 24  # of a page that does not start a segment, and of a record
_CONTENT_BYTES: Final = PAGE_BYTES - _HEADER_BYTES
_CONTINUED: Final = 0x0001
_OVERWRITTEN: Final = 0x0008
_SWITCH: Final = np.uint64(0x0040)  # as in `records`
_KIND_MASK: Final = np.uint64(0xFFF0)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_HIGH: Final = np.uint64(0xFFFF_FFFF_0000_0000)
_BODY_MASKS: Final = np.array([2**64 - 1, *((1 << 8 * n) - 1 for n in range(1, 8))], "<u8")
"""Masks that clear the padding in a record's last word, by the record's length modulo 8."""
_ONE: Final = np.uint64(1)
_WORDS: Final = np.arange(3).reshape(3, 1)
"""Offsets of the words of a record's header."""
_WORDS_BEHIND: Final = 4
"""Number of words after a body that its header may reach when it is moved there."""

Words = NDArray[np.uint64]
Places = NDArray[np.int64]


def run_of(
    data: bytes, at: int, lsn: int, magics: Collection[int], segment_bytes: int
) -> tuple[int, int]:
    """Return (bytes of complete, correct, ordinary records from `at` on, bytes examined).

    The first number ends where the next record may start, or where a page does. Another call pays
    off only after the second. A record starts at ``data[at]``, whose LSN is `lsn`, after a page's
    header.
    """
    first = PAGE_BYTES - lsn % PAGE_BYTES
    size = min(len(data) - at, RUN_BYTES_MAX, segment_bytes - lsn % segment_bytes)
    pages: list[tuple[int, int]] = []
    if size > first:
        pages = _pages(data, at + first, at + size, lsn + first, magics)
        size = min(size, first + len(pages) * PAGE_BYTES)  # up to the first unusual page
    words = _content(data, at, size, min(first, size))
    places = _record_starts(words, len(words) - _WORDS_BEHIND)
    kept = _consistent_with_pages(pages, first // 8, places, words)
    if not kept:
        return 0, size
    right = _count_correct(words, np.array(places[: kept + 1], np.int64))
    return _log_bytes(places[right] * 8, first), size


def _pages(
    data: bytes, at: int, stop: int, lsn: int, magics: Collection[int]
) -> list[tuple[int, int]]:
    """Return (info, number of continuing bytes) of the pages from `at` on.

    Stop at the first page that is incomplete, has another page's header, or reports an unfinished
    record.
    """
    unpack, pages = _PAGE.unpack_from, list[tuple[int, int]]()
    for place in range(at, stop - _HEADER_BYTES + 1, PAGE_BYTES):
        magic, info, _, own_lsn, to_come = unpack(data, place)
        if magic not in magics or own_lsn != lsn or info & _OVERWRITTEN:
            break
        pages.append((info, to_come))
        lsn += PAGE_BYTES
    return pages


def _content(data: bytes, at: int, size: int, first: int) -> Words:
    """Return the contents of the pages of ``data[at : at + size]`` as words, with spare room at the
    end.

    The first page has `first` bytes and no header; the headers of the others are left out.
    """
    full, tail = divmod(size - first, PAGE_BYTES)
    tail = max(0, tail - _HEADER_BYTES) & -8
    first &= -8
    behind = first + full * _CONTENT_BYTES
    words: Words = np.empty((behind + tail) // 8 + _WORDS_BEHIND, "<u8")
    out, raw = words.view(np.uint8), np.frombuffer(data, np.uint8, size, at)
    out[:first] = raw[:first]
    if full:
        begin, shape = at + first + _HEADER_BYTES, (full, _CONTENT_BYTES)
        pages: NDArray[np.uint8] = np.ndarray(shape, np.uint8, data, begin, (PAGE_BYTES, 1))
        out[first:behind].reshape(shape)[...] = pages
    if tail:
        begin = first + full * PAGE_BYTES + _HEADER_BYTES
        out[behind : behind + tail] = raw[begin : begin + tail]
    return words


def _record_starts(words: Words, count: int) -> list[int]:
    """Return where the records start that are complete in the first `count` words, and where the
    next would start."""
    lengths: Any = words.view("<u4")[::2].data
    at, last, places = 0, count - _HEADER_BYTES // 8, list[int]()
    add = places.append
    # This loop is all the Python work per record; wrong lengths are searched for afterwards.
    for _ in range(count // 3):
        if at > last:
            break
        add(at)
        at += lengths[at] + 7 >> 3
    add(at)
    wrong = words.take(np.array(places[:-1], np.int64)) & _LOW < _HEADER_BYTES
    if wrong.any():
        return places[: int(wrong.argmax()) + 1]
    return places if at <= count else places[:-1]


def _consistent_with_pages(
    pages: list[tuple[int, int]], begin: int, places: list[int], words: Words
) -> int:
    """Return how many of the records end before a page whose header contradicts them.

    `begin` is the first page's offset, in words.
    """
    behind = places[-1]
    for info, to_come in pages:
        if begin >= behind:
            break
        before = bisect_left(places, begin) - 1
        end = places[before] * 8 + int(words[places[before]] & _LOW)
        left = max(0, end - begin * 8)
        if to_come != left or bool(info & _CONTINUED) != bool(left):
            return bisect_right(places, begin) - 1
        begin += _CONTENT_BYTES // 8
    return len(places) - 1


def _count_correct(words: Words, places: Places) -> int:
    """Return how many of these records are correct and ordinary.

    That is all of them, those before the first that is not ordinary, or 0 if one is wrong. The last
    place is after the records. `words` are changed.
    """
    starts, ends = places[:-1], places[1:]
    heads = words.take(starts + _WORDS)
    switches = heads[2] & _KIND_MASK == _SWITCH
    count = int(switches.argmax()) if switches.any() else len(starts)
    if count < len(starts):
        return _count_correct(words, places[: count + 1]) if count else 0
    lengths = heads[0] & _LOW
    over = lengths & np.uint64(7)
    heads[2] ^= _HIGH
    words[starts + _WORDS] = 0
    words[ends - 1] &= _BODY_MASKS.take(over.view(np.int64))
    stop = int(ends[-1]) + _WORDS_BEHIND
    words[stop - _WORDS_BEHIND : stop] = 0
    words[starts + 3] ^= _LOW
    # A header of three words moves to a place that need not be the start of a word, so it spans
    # four.
    shift = over * np.uint64(8)
    low, high = heads << shift, (heads >> _ONE) >> (np.uint64(63) - shift)
    low[1:] ^= high[:2]
    begins = starts + (lengths >> np.uint64(3)).view(np.int64)
    # XOR by index requires distinct indexes. They are distinct, because a record has at least three
    # words.
    words[begins + _WORDS] ^= low
    words[begins + 3] ^= high[2]
    # Extending a CRC of all ones starts with a register of zeros; remainder 0 produces all ones.
    # One wrong record is found as reliably as by its own CRC. The errors of several could cancel
    # out with a chance of 2^-32; any three wrong bits are found in less than 2^31 bits.
    messages = words[:stop]
    messages.setflags(write=False)  # the checksum takes only read-only buffers
    remainder = google_crc32c.extend(0xFFFF_FFFF, messages)
    return count if remainder == 0xFFFF_FFFF else 0


def _log_bytes(content: int, first: int) -> int:
    """Return how many bytes of log contain this many bytes of contents.

    If they end with a page, the next page's header is not included.
    """
    if content <= first:
        return content
    pages, within = divmod(content - first - 1, _CONTENT_BYTES)
    return first + pages * PAGE_BYTES + _HEADER_BYTES + within + 1
