"""Many records at once against one at a time: the same ends and verdicts, whatever the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from struct import pack_into

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.errors import CorruptData
from actors.wal import record_runs, records
from actors.wal.lsn import PAGE_BYTES, SEGMENT_BYTES
from actors.wal.record_runs import run_of
from actors.wal.records import MAGICS, RecordScanner
from tests.simulators.wal.made_up import MadeUpLog

SMALL = 1 << 17
MAGIC = frozenset({0xD110})
KNOWN = frozenset(MAGICS.values())


@pytest.fixture(autouse=True, scope="module")
def runs_of_any_size() -> object:
    """Short pieces, too, are looked at as runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "RUN_BYTES_MIN", 0)
        yield


class Scanners:
    """One that looks for runs, and one that is told of each record and so cannot."""

    def __init__(self, log: MadeUpLog) -> None:
        self.found: list[tuple[int, int]] = []
        self.fast = RecordScanner(log.start_lsn, segment_bytes=log.segment_bytes)
        self.slow = RecordScanner(
            log.start_lsn,
            segment_bytes=log.segment_bytes,
            found=lambda begin, behind, _: self.found.append((begin, behind)),
        )

    def feed(self, piece: bytes) -> bool:
        """To both; whether they took it. They must agree in all that they know."""
        taken = []
        for scanner in (self.fast, self.slow):
            try:
                scanner.feed(piece)
                taken.append(True)
            except CorruptData:
                taken.append(False)
        assert taken[0] == taken[1]
        assert self.fast.bad == self.slow.bad
        assert known(self.fast) == known(self.slow)
        return taken[0]


def known(scanner: RecordScanner) -> tuple[object, ...]:
    """All that counts: of a record that is over nothing does."""
    lsn, held, record_lsn, skip_to, left, *record, overwritten = scanner.saved()
    return lsn, held, record_lsn, skip_to, left, record if left else None, overwritten


def made_up(sizes: Sequence[int | None], start: int) -> MadeUpLog:
    """None: a switch. No two bodies of a size are the same."""
    log = MadeUpLog(start, segment_bytes=SMALL)
    for number, size in enumerate(sizes):
        if size is None:
            log.switch()
        else:
            log.record((number.to_bytes(2, "little") * (size // 2 + 1))[:size])
    return log


SIZES = st.lists(
    st.one_of(
        st.integers(0, 40),
        st.integers(0, 300),
        st.integers(8100, 8200),
        st.integers(0, 30_000),
        st.none(),
    ),
    min_size=1,
    max_size=40,
)
PLACES = st.integers(0, SMALL // 8 - 1).map(lambda at: 8 * SMALL + at * 8)


def place(at: int) -> int:
    """Where a record may begin: not in a header."""
    return at + 40 if 0 < at % SMALL < 40 or 0 < at % PAGE_BYTES < 24 else at


def pieces(log: MadeUpLog, cuts: list[int]) -> list[bytes]:
    """Of the log, cut at these shares of 1000."""
    size = len(log.wal)
    ends = sorted({0, size, *(size * cut // 1000 for cut in cuts)})
    return [bytes(log.wal[at:to]) for at, to in pairwise(ends)]


CUTS = st.lists(st.integers(0, 1000), max_size=4)


@given(SIZES, PLACES, CUTS)
def test_whole_logs_are_read_to_the_same_ends(
    sizes: list[int | None], at: int, cuts: list[int]
) -> None:
    log = made_up(sizes, place(at))
    both = Scanners(log)
    for piece in pieces(log, cuts):
        assert both.feed(piece)
    assert both.fast.record_lsn == log.end_lsn
    assert both.found == log.records
    # and nothing of a run is left to the other way
    if log.start_lsn % PAGE_BYTES:
        stop = log.start_lsn - log.start_lsn % SMALL + SMALL
        ordinary = [behind for _, behind in log.records][: [*sizes, None].index(None)]
        whole = [log.start_lsn, *(behind for behind in ordinary if behind <= stop)]
        taken, _ = run_of(bytes(log.wal), 0, log.start_lsn, KNOWN, SMALL)
        assert log.start_lsn + taken == whole[-1]


LENGTHS = (0, 1, 23, 24, 25, 26, 48, 2**31, 2**32 - 1)
ZERO = st.just(0)
DAMAGE = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 7), ZERO),
    st.tuples(st.just("zeros"), st.integers(1, 600), ZERO),
    st.tuples(st.just("length"), st.sampled_from(LENGTHS), ZERO),
    st.tuples(st.just("kind"), st.sampled_from((0x0040, 0x0041, 0x00D0, 0x0140)), ZERO),
    st.tuples(
        st.just("page"), st.sampled_from((0, 2, 4, 8, 16, 20)), st.sampled_from((1, 2, 8, 9))
    ),
)


@pytest.mark.sampled
def test_damaged_logs_end_at_the_same_places_for_the_same_reasons() -> None:
    reasons = set()

    @given(SIZES, PLACES, CUTS, st.lists(st.tuples(st.integers(0, 2**20), DAMAGE), max_size=3))
    def read(
        sizes: list[int | None],
        at: int,
        cuts: list[int],
        damage: list[tuple[int, tuple[str, int, int]]],
    ) -> None:
        log = made_up(sizes, place(at))
        for where, (what, one, two) in damage:
            spoil(log, where, what, one, two)
        both = Scanners(log)
        whole = all(both.feed(piece) for piece in pieces(log, cuts))
        reasons.add("whole" if whole else str(both.fast.bad))

    read()
    assert "whole" in reasons
    assert len(reasons) > 5, reasons


def spoil(log: MadeUpLog, where: int, what: str, one: int, two: int) -> None:
    """Somewhere in a record, or in the header of a page."""
    begin = log.records[where % len(log.records)][0] - log.start_lsn
    if what == "page":
        first = -log.start_lsn % PAGE_BYTES
        count = -(-max(0, len(log.wal) - first) // PAGE_BYTES)
        if count:
            log.wal[first + where % count * PAGE_BYTES + one] ^= two
    elif what == "flip":
        log.wal[where % len(log.wal)] ^= 1 << one
    elif what == "zeros":
        at = where % len(log.wal)
        size = min(one, len(log.wal) - at)
        log.wal[at : at + size] = bytes(size)
    elif what == "length":
        pack_into("<I", log.wal, begin, one)
    elif begin + 18 <= len(log.wal):
        pack_into("<H", log.wal, begin + 16, one)


@given(st.integers(0, 120), st.integers(0, 23 + 120), st.integers(0, 7), st.integers(0, 60))
def test_any_wrong_bit_of_any_record_is_found(size: int, at: int, bit: int, which: int) -> None:
    log = made_up([size + number % 9 for number in range(61)], 8 * SMALL + 40)
    begin, behind = log.records[which]
    header = 24 if (begin % PAGE_BYTES) == 0 else 0
    place = begin - log.start_lsn + header + at % (24 + size)
    log.wal[place] ^= 1 << bit
    taken, looked = run_of(bytes(log.wal), 0, log.start_lsn, MAGIC, SMALL)
    assert taken <= max(0, log.records[which][0] - log.start_lsn)
    assert looked <= len(log.wal)
    log.wal[place] ^= 1 << bit
    taken, _ = run_of(bytes(log.wal), 0, log.start_lsn, MAGIC, SMALL)
    assert taken == log.end_lsn - log.start_lsn
    assert behind <= log.end_lsn


def test_what_pads_a_record_is_not_looked_at() -> None:
    log = made_up([1, 2, 3, 4, 5, 6, 7] * 50, 8 * SMALL + 40)
    for begin, behind in log.records:
        size = int.from_bytes(log.wal[begin - log.start_lsn :][:4], "little")
        if behind - begin < 32 + PAGE_BYTES and begin // PAGE_BYTES == (behind - 1) // PAGE_BYTES:
            pad = behind - begin - size
            log.wal[behind - log.start_lsn - pad : behind - log.start_lsn] = b"\xff" * pad
    both = Scanners(log)
    assert both.feed(bytes(log.wal))
    assert both.fast.record_lsn == log.end_lsn
    taken, _ = run_of(bytes(log.wal), 0, log.start_lsn, KNOWN, SMALL)
    assert log.start_lsn + taken == log.end_lsn


@pytest.mark.parametrize("body_bytes", [100, 3_000, 20_000])
def test_any_wrong_page_header_is_found(body_bytes: int) -> None:
    """Each field of each page's, where a record goes on and where none does."""
    log = made_up([body_bytes] * (60_000 // body_bytes), 8 * SMALL + 40)
    first = -log.start_lsn % PAGE_BYTES
    for page in range(first, len(log.wal) - 24, PAGE_BYTES):
        for offset, bits in ((0, 1), (2, 1), (2, 8), (2, 9), (8, 32), (15, 1), (16, 8), (19, 128)):
            log.wal[page + offset] ^= bits
            Scanners(log).feed(bytes(log.wal))
            log.wal[page + offset] ^= bits
    assert Scanners(log).feed(bytes(log.wal))


def test_a_record_that_ends_with_its_page_is_told_from_what_follows() -> None:
    """What pads it is the last of the page, whose next one begins with a record."""
    log = made_up([PAGE_BYTES - 40 - 24 - 3] + [10] * 10, 8 * SMALL + 40)
    assert log.records[0][1] % PAGE_BYTES == 0
    whole, _ = run_of(bytes(log.wal), 0, log.start_lsn, KNOWN, SMALL)
    assert whole == len(log.wal)
    log.wal[PAGE_BYTES - 40 + 16] = 1
    before, _ = run_of(bytes(log.wal), 0, log.start_lsn, KNOWN, SMALL)
    assert before == PAGE_BYTES - 40


def test_a_run_ends_before_what_is_not_ordinary() -> None:
    """A record cut short, a switch, the end of a segment, and more than one look is for."""
    log = made_up([100] * 500 + [20_000] + [100] * 10 + [None], 8 * SMALL + 40)
    data = bytes(log.wal)
    begins = [begin - log.start_lsn for begin, _ in log.records]
    whole, _ = run_of(data, 0, log.start_lsn, KNOWN, SMALL)
    assert whole == begins[-1]
    cut, _ = run_of(data[: begins[505] - 1], 0, log.start_lsn, KNOWN, SMALL)
    assert cut == begins[504]
    short, _ = run_of(data[: begins[500] + 9_000], 0, log.start_lsn, KNOWN, SMALL)
    assert short == begins[500]
    long = MadeUpLog(SEGMENT_BYTES + 40)
    while len(long.wal) < 2 * record_runs.RUN_BYTES_MAX:
        long.record(bytes(500))
    taken, looked = run_of(bytes(long.wal), 0, long.start_lsn, KNOWN, SEGMENT_BYTES)
    assert looked == record_runs.RUN_BYTES_MAX
    assert looked - 600 < taken <= looked
    assert long.start_lsn + taken in {behind for _, behind in long.records}
