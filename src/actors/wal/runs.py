"""Many whole records of a log at once: the way of `records` through a piece that is all right.

What it is: `run_of` looks at a piece from where a record begins and says how many bytes of it are
whole, ordinary records with right CRCs, in pages with right headers. `records.RecordScanner` goes
on behind them; whatever is not of this kind is left to it, a record at a time: records that are
not whole or switch segments, pages that say that a record before them was never finished, damage.

How. The headers of pages are taken out, so that records stand one behind the other. One loop in
Python goes from length to length, and nothing else is done a record at a time. What the pages'
headers should say follows from where the records end. The CRCs are judged together:

- A CRC is the remainder of a polynomial, so it is linear: with a register that begins as zeros, the
  remainder of the sum (XOR) of two messages is the sum of their remainders.
- A record is right when its body, its header's first 20 bytes, and its inverted CRC, in this order
  and with the first 32 bits inverted, leave the remainder 0. (The inversions are what a register
  that begins as ones, and a CRC that is inverted at its end, come to.)
- Zeros before or behind such a message change nothing of that. So each header is moved behind its
  body, where the next record's header was, and the one remainder of the whole run is that of all
  messages: 0 when all are right.

What that is worth: a run with one wrong record is found as surely as by the record's own CRC: a
remainder that is not 0 stays so, whatever right bytes follow. Where several records of one run are
wrong, their errors could make up for each other, by a chance of 2^-32, that of one wrong record
whose CRC fits. Any three wrong bits are found, as always: a CRC-32C tells them in anything shorter
than 2^31 bits.
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
"""A shorter piece of records of some hundred bytes takes longer by this way than by theirs."""
RUN_BYTES_MAX: Final = 256 * 1024
"""Looked at in one go."""

_HEADER_BYTES: Final = 24  # of a page that does not begin a segment; of a record, too
_CONTENT_BYTES: Final = PAGE_BYTES - _HEADER_BYTES
_PAGE: Final = Struct("<HHIQI")
_CONTINUED: Final = 0x0001
_OVERWRITTEN: Final = 0x0008
_SWITCH: Final = np.uint64(0x0040)  # as in `records`
_KIND_MASK: Final = np.uint64(0xFFF0)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_HIGH: Final = np.uint64(0xFFFF_FFFF_0000_0000)
_BODY_MASKS: Final = np.array([2**64 - 1, *((1 << 8 * n) - 1 for n in range(1, 8))], "<u8")
"""Of the last word of a record, by its length modulo 8: without what pads it."""
_ONE: Final = np.uint64(1)
_WORDS: Final = np.arange(3).reshape(3, 1)
"""Of a record's header."""
_WORDS_BEHIND: Final = 4
"""So far the last header reaches when it is moved behind its body."""

Words = NDArray[np.uint64]
Places = NDArray[np.int64]


def run_of(
    data: bytes, at: int, lsn: int, magics: Collection[int], segment_bytes: int
) -> tuple[int, int]:
    """(bytes of whole, right, ordinary records from `at` on, up to where the next may begin or a
    page does; bytes behind which asking again may give more). A record begins at ``data[at]``,
    whose place in the log is `lsn`, behind a page's header."""
    first = PAGE_BYTES - lsn % PAGE_BYTES
    size = min(len(data) - at, RUN_BYTES_MAX, segment_bytes - lsn % segment_bytes)
    pages: list[tuple[int, int]] = []
    if size > first:
        pages = _pages(data, at + first, at + size, lsn + first, magics)
        size = min(size, first + len(pages) * PAGE_BYTES)  # behind it a page is not as others
    words = _content(data, at, size, min(first, size))
    places = _chase(words, len(words) - _WORDS_BEHIND)
    kept = _fitting(pages, first // 8, places, words)
    if not kept:
        return 0, size
    right = _right(words, np.array(places[: kept + 1], np.int64))
    return _raw(places[right] * 8, first), size


def _pages(
    data: bytes, at: int, stop: int, lsn: int, magics: Collection[int]
) -> list[tuple[int, int]]:
    """(info, bytes that go on) of the pages that begin at `at` and later, up to the first that is
    not whole, is another page's, or says that a record was never finished."""
    unpack, pages = _PAGE.unpack_from, list[tuple[int, int]]()
    for place in range(at, stop - _HEADER_BYTES + 1, PAGE_BYTES):
        magic, info, _, own_lsn, to_come = unpack(data, place)
        if magic not in magics or own_lsn != lsn or info & _OVERWRITTEN:
            break
        pages.append((info, to_come))
        lsn += PAGE_BYTES
    return pages


def _content(data: bytes, at: int, size: int, first: int) -> Words:
    """What stands in the pages of ``data[at : at + size]``, `first` bytes of it in the first one,
    without the headers of the others, as words, and room behind it."""
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


def _chase(words: Words, count: int) -> list[int]:
    """Where records begin that are whole in the first `count` words, and where the next would."""
    lengths: Any = words.view("<u4")[::2].data
    at, last, places = 0, count - _HEADER_BYTES // 8, list[int]()
    add = places.append
    # All that is done for each record is here: what is no length is looked for afterwards.
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


def _fitting(pages: list[tuple[int, int]], begin: int, places: list[int], words: Words) -> int:
    """How many of the records end before a page whose header says something else than they do of
    what goes on in it. `begin` is the first page's, in words."""
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


def _right(words: Words, places: Places) -> int:
    """How many of these records are right and ordinary, all or those before the first that is not
    ordinary; 0 where one is wrong. The last place is behind them. See the module; `words` are
    changed."""
    starts, ends = places[:-1], places[1:]
    heads = words.take(starts + _WORDS)
    switches = heads[2] & _KIND_MASK == _SWITCH
    count = int(switches.argmax()) if switches.any() else len(starts)
    if count < len(starts):
        return _right(words, places[: count + 1]) if count else 0
    lengths = heads[0] & _LOW
    over = lengths & np.uint64(7)
    heads[2] ^= _HIGH
    words[starts + _WORDS] = 0
    words[ends - 1] &= _BODY_MASKS.take(over.view(np.int64))
    stop = int(ends[-1]) + _WORDS_BEHIND
    words[stop - _WORDS_BEHIND : stop] = 0
    words[starts + 3] ^= _LOW
    # A header of three words is put at a place that need not be a word's begin: it falls on four.
    shift = over * np.uint64(8)
    low, high = heads << shift, (heads >> _ONE) >> (np.uint64(63) - shift)
    low[1:] ^= high[:2]
    begins = starts + (lengths >> np.uint64(3)).view(np.int64)
    words[begins + _WORDS] ^= low  # no two are the same: a record has three words at least
    words[begins + 3] ^= high[2]
    # Beginning at zeros and not inverted at the end: both are what extending these ones is.
    messages = words[:stop]
    messages.setflags(write=False)  # the checksum takes no other
    remainder = google_crc32c.extend(0xFFFF_FFFF, messages)
    return count if remainder == 0xFFFF_FFFF else 0


def _raw(content: int, first: int) -> int:
    """Behind how many bytes of log so many of content end; where a page ends, before the next."""
    if content <= first:
        return content
    pages, within = divmod(content - first - 1, _CONTENT_BYTES)
    return first + pages * PAGE_BYTES + _HEADER_BYTES + within + 1
