"""What processes did to one shard, and whether it can be true: a checker of whole histories.

A history is a file of one life of a process, a JSON list a line, in the order in which it was
written; times are nanoseconds of the machine's monotonic clock, which all processes share.

    ["i", id, began, lower, value, [retracted, …]]   an append of [lower, lower + 1) begins
    ["a", id, ended, outcome, current]               its outcome: appended, mismatch, failed, open
    ["u", began, ended, upper]                       the upper as it is in the store
    ["r", began, ended, as_of, count, sum]           contents at a time
    ["l", began, ended, lower, upper, [[time, value, diff], …]]   what a listener was told
    ["c", began, ended, what]                        a compaction, a collection
    ["e", ended, what, text]                         something else that failed, and was told so

Appends are of one time each, so those that happened have an order: their times. An append whose
outcome nobody knows happened wholly or not at all; which, is found out by what was read later.

What is checked.

1. *Order.* Between uppers and appends: one that ended before another began has the lower time.
   A mismatch saw an upper that the shard had at some instant of the call; so did each upper read.
2. *Each acknowledged append is in every later read exactly once*, one that failed determinately
   in none, an open one in all or none: the contents at a time, as a sum over hashed values, are
   those of exactly the appends before it. What a listener was told of an interval is row by row
   what was appended in it.
3. *Uppers never go back*; nothing is read at a time that no append had sealed by then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

MASK = (1 << 64) - 1
WORLDS_MAX = 256
APPENDED, MISMATCH, FAILED, OPEN = "appended", "mismatch", "failed", "open"


def hashed(value: int) -> int:
    """64 bits of a value (splitmix64)."""
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def summed(values: Any, diffs: Any) -> int:
    """The sum of the hashes of numpy arrays of values and their diffs."""
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        return int((z * diffs.astype(np.uint64)).sum(dtype=np.uint64))


class Call(msgspec.Struct):
    """One append."""

    id: int
    began: int
    time: int
    value: int
    retracted: tuple[int, ...]
    ended: int = 1 << 62
    outcome: str = OPEN
    current: int = 0

    @property
    def rows(self) -> list[tuple[int, int]]:
        """What it appends: values and diffs."""
        return sorted([(self.value, 1), *((value, -1) for value in self.retracted)])

    @property
    def delta(self) -> tuple[int, int]:
        """By which it changes count and sum of the contents."""
        total = sum(hashed(value) * diff for value, diff in self.rows)
        return 1 - len(self.retracted), total & MASK


class History:
    """All that several processes recorded."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.uppers: list[tuple[int, int, int]] = []
        self.reads: list[tuple[int, int, int, int, int]] = []
        self.listens: list[tuple[int, int, int, int, list[list[int]]]] = []
        self.kinds: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    @property
    def operations(self) -> int:
        """Appends, reads, listens, compactions and collections that ended."""
        return self.kinds.total()

    def load(self, paths: Iterable[Path]) -> None:
        """Reads files; what a killed process had begun to write of a line is left out."""
        decoder = msgspec.json.Decoder()
        for path in paths:
            data = path.read_bytes()
            for line in data[: data.rfind(b"\n") + 1].splitlines():
                self.add(decoder.decode(line))

    def add(self, record: Sequence[Any]) -> None:
        """One line."""
        kind, *rest = record
        match kind:
            case "i":
                id_, began, time, value, retracted = rest
                self.calls[id_] = Call(id_, began, time, value, tuple(retracted))
                return
            case "a":
                id_, ended, outcome, current = rest
                call = self.calls[id_]
                call.ended, call.outcome, call.current = ended, outcome, current
                kind = f"append: {outcome}"
            case "u":
                self.uppers.append((rest[0], rest[1], rest[2]))
            case "r":
                self.reads.append((rest[0], rest[1], rest[2], rest[3], rest[4]))
            case "l":
                self.listens.append((rest[0], rest[1], rest[2], rest[3], rest[4]))
            case "e":
                self.errors[f"{rest[1]}: {rest[2]}"] += 1
                return
        self.kinds[NAMES.get(kind, kind)] += 1


NAMES = {"u": "upper", "r": "read", "l": "listen", "c": "upkeep"}


def check(history: History, upper: int) -> list[str]:
    """What cannot be true of a shard that ended at `upper`; nothing, when all can."""
    wrong: list[str] = []
    done = _resolved(history, upper, wrong)
    if wrong:
        return wrong
    _check_order(history, done, upper, wrong)
    _check_uppers(history, done, upper, wrong)
    _check_listens(history, done, wrong)
    return wrong


def _resolved(history: History, upper: int, wrong: list[str]) -> dict[int, Call]:
    """Which append happened at each time. Reads tell it of those whose outcome is open."""
    acked: dict[int, Call] = {}
    candidates: dict[int, list[Call]] = defaultdict(list)
    for call in history.calls.values():
        if call.outcome == APPENDED:
            if call.time in acked:
                wrong.append(f"two appends at {call.time}: {acked[call.time]} and {call}")
            acked[call.time] = call
        elif call.outcome == OPEN:
            candidates[call.time].append(call)
    told: dict[int, list[tuple[int, int]]] = {}
    for _, _, low, high, rows in history.listens:
        for time in range(low, high):
            told.setdefault(time, [])
        seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for time, value, diff in rows:
            seen[time].append((value, diff))
        for time, pairs in seen.items():
            told[time] = sorted(pairs)
    reads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for _, _, as_of, count, total in history.reads:
        reads[as_of].append((count, total))
    # Worlds: what the contents may be, and which appends of open outcome they hold.
    worlds: list[tuple[int, int, dict[int, Call]]] = [(0, 0, {})]
    for time in range(upper):
        if time in acked:
            options = [acked[time]]
        else:
            options = candidates.get(time, [])
            if time in told:
                options = [call for call in options if call.rows == told[time]]
        if not options:
            wrong.append(f"nobody appended at {time}, and the upper is {upper}")
            return {}
        then = []
        for count, total, chosen in worlds:
            for call in options:
                more, delta = call.delta
                open_ = chosen if time in acked else {**chosen, time: call}
                then.append((count + more, (total + delta) & MASK, open_))
        for found in reads.get(time, ()):
            kept = [world for world in then if world[:2] == found]
            if not kept:
                wrong.append(
                    f"a read at {time} saw {found[0]} rows, sum {found[1]}; right are"
                    f" {sorted({world[:2] for world in then})[:3]}"
                )
                kept = then
            then = kept
        if len(then) > WORLDS_MAX:
            wrong.append(f"more than {WORLDS_MAX} histories are possible at {time}: read more")
            return {}
        worlds = then
    return acked | worlds[0][2]


def _check_order(history: History, done: dict[int, Call], upper: int, wrong: list[str]) -> None:
    """Times of appends agree with what ended before what."""
    latest = 0
    for time in range(upper):
        call = done[time]
        if call.ended < latest:
            wrong.append(f"the append at {time} ended before one at a lower time began: {call}")
        latest = max(latest, call.began)
    for began, ended, as_of, *_ in history.reads:
        if as_of >= upper or done[as_of].began > ended:
            wrong.append(f"a read at {as_of} ended at {ended}, before that was sealed ({began})")
    for _, ended, low, high, _ in history.listens:
        if high > upper or (high > low and done[high - 1].began > ended):
            wrong.append(f"a listener was told of [{low}, {high}) before it was appended")


def _check_uppers(history: History, done: dict[int, Call], upper: int, wrong: list[str]) -> None:
    """An upper that was seen, by a look or a mismatch, was the shard's within the call."""
    seen = [*history.uppers]
    seen += [
        (call.began, call.ended, call.current)
        for call in history.calls.values()
        if call.outcome == MISMATCH
    ]
    wrong += [
        f"a mismatch that is none: {call}"
        for call in history.calls.values()
        if call.outcome == MISMATCH and call.current == call.time
    ]
    ends = np.array([done[time].ended for time in range(upper)], dtype=np.int64)
    begins = np.array([done[time].began for time in range(upper)], dtype=np.int64)
    # At its end an append has surely happened, and all of lower times; at its begin none later.
    sure = np.minimum.accumulate(ends[::-1])[::-1] if upper else ends
    possible = np.maximum.accumulate(begins) if upper else begins
    looks: list[tuple[int, int, int]] = []
    for began, ended, found in seen:
        least = int(np.searchsorted(sure, began, side="left"))
        most = int(np.searchsorted(possible, ended, side="right"))
        if not least <= found <= most:
            wrong.append(f"upper {found} was seen where it was {least} to {most}")
        looks.append((began, ended, found))
    looks.sort(key=lambda look: look[1])
    ended_at = np.array([look[1] for look in looks], dtype=np.int64)
    highest = np.maximum.accumulate(np.array([look[2] for look in looks] or [0], dtype=np.int64))
    for began, _, found in looks:
        before = int(np.searchsorted(ended_at, began, side="left"))
        if before and highest[before - 1] > found:
            wrong.append(f"upper {found} was seen after {highest[before - 1]}")


def _check_listens(history: History, done: dict[int, Call], wrong: list[str]) -> None:
    """What listeners were told is row by row what was appended."""
    for _, _, low, high, rows in history.listens:
        right = [
            (time, value, diff)
            for time in range(low, high)
            if time in done
            for value, diff in done[time].rows
        ]
        told = sorted((row[0], row[1], row[2]) for row in rows)
        if told != sorted(right):
            wrong.append(f"a listener was told {told[:4]}… of [{low}, {high}): {right[:4]}…")
