"""Schedules of a run of shards: operations of the tasks of a few processes, and faults, by a seed.

Streams of randomness are apart: the order of the loop, the work, the cancellations, the faults.
Lists are plain, so that a schedule shrinks: a removed entry leaves all others unchanged.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec
from msgspec.structs import replace

from tests.simulators.service.faults import (
    CRASH,
    CRASH_AFTER,
    DELAY,
    FAIL,
    HANG,
    LATE,
    LOST,
    LOST_ANSWER,
    InjectedFault,
)

OPERATOR: Final = -1
"""Process number of the operator, who kills and stops processes, and moves their clocks."""
GRACE_MS: Final = 4_000
"""Age at which a blob that no state names is an orphan: longer than any set of documents is
late."""
DRAWN_SHARE: Final = 0.5
"""Share of seeds with drawn settings."""

TASK: Final = "task"
SCOPE: Final = "scope"


class ShardOperation(msgspec.Struct, frozen=True):
    """Task `task` of process `process` waits `pause_ms` and does `kind` to `shard`."""

    process: int
    task: int
    pause_ms: int
    kind: str
    shard: str = "s"
    number: int = 0
    """Number of rows, distance in time, or pause, by the kind."""
    cancel: str = ""
    """TASK or SCOPE: the operation is cancelled after `cancel_ms`, unless it has ended; a shield
    protects from the cancel of a scope only."""
    cancel_ms: int = 0


class ShardSetting(msgspec.Struct, frozen=True):
    """The settings of the world that a seed draws."""

    processes: int = 2
    """Number of processes; a single one opens the stores exclusively."""
    inline: bool = True
    decoded: bool = False
    pieces: bool = False
    """True if parts are of two rows."""
    batches_max: int = 3
    lease_ms: int = 2_000
    upkeep_ms: int = 150
    listed_from: int = 16
    """Fewest parts of a batch that have a list of parts."""
    skews_ms: tuple[int, ...] = (0, 0, 0)
    """Skew of the clock of each process."""
    drawn: bool = False
    """True if all other thresholds are drawn from the seed (`drawn_settings`), too."""


class ShardSchedule(msgspec.Struct, frozen=True):
    """A whole run."""

    seed: int
    setting: ShardSetting
    operations: tuple[ShardOperation, ...]
    faults: tuple[InjectedFault, ...]


_WORK: Final = (
    ("append", 26),
    ("append both", 5),
    ("append wrong", 4),
    ("append canceled", 4),
    ("append nothing", 5),
    ("discard", 2),
    ("leave", 2),
    ("snapshot", 10),
    ("snapshot slowly", 6),
    ("subscribe", 8),
    ("listen", 5),
    ("hold", 10),
    ("maintain", 5),
    ("collect", 3),
)
_PAUSES_MS: Final = (0, 0, 0, 1, 3, 10, 40, 150)
_CANCELS_MS: Final = (0, 1, 2, 5, 10, 30, 100, 400)
_SITES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "consensus.set": (
        60,
        (FAIL, LOST, LOST_ANSWER, LOST_ANSWER, LATE, LATE, HANG, CRASH, CRASH_AFTER, DELAY, DELAY),
    ),
    "consensus.head": (60, (FAIL, FAIL, HANG, DELAY, DELAY)),
    "blob.set": (25, (FAIL, LOST, LOST_ANSWER, LATE, HANG, CRASH, CRASH_AFTER, DELAY)),
    "blob.get": (25, (FAIL, LOST, HANG, CRASH, DELAY, DELAY)),
    "blob.delete": (15, (FAIL, LOST, LOST_ANSWER, LATE, DELAY, CRASH, CRASH_AFTER)),
    "blob.list": (8, (FAIL, DELAY)),
}
"""Site → the approximate number of its operations in a run, and the faults that may strike
there."""
_DELAYS_MS: Final = (1, 2, 5, 10, 30, 100, 400)
_CRASHES_MAX: Final = 3


def draw(seed: int) -> ShardSchedule:
    """Return the schedule of a seed."""
    work = random.Random(f"shards {seed}")
    processes = work.choice((1, 2, 2, 2, 3, 3))
    lease_ms = work.choice((300, 2_000, 20_000))
    skews = [0, 0, 0]
    if work.random() < 0.5:
        skews = [work.choice((-1, 0, 1)) * work.choice((20, lease_ms // 4)) for _ in range(3)]
    setting = ShardSetting(
        processes=processes,
        inline=work.random() < 0.6,
        decoded=work.random() < 0.6,
        pieces=work.random() < 0.25,
        batches_max=work.choice((1, 2, 3, 6)),
        lease_ms=lease_ms,
        upkeep_ms=work.choice((40, 150, 400, 1_000)),
        listed_from=random.Random(f"shard lists {seed}").choice((1, 1, 2, 16)),
        skews_ms=tuple(skews),
        drawn=random.Random(f"shard settings {seed}").random() < DRAWN_SHARE,
    )
    operations = _canceled(seed, _operations(work, processes))
    return ShardSchedule(seed, setting, tuple(operations), tuple(_faults(seed)))


def describe(item: ShardOperation | InjectedFault) -> str:
    """Return one line for an operation or a fault."""
    if isinstance(item, InjectedFault):
        delay = f", {item.delay_ms} ms" if item.delay_ms else ""
        return f"fault: {item.kind} at operation {item.at} of {item.site}{delay}"
    ends = f", and is cancelled ({item.cancel}) after {item.cancel_ms} ms" if item.cancel else ""
    who = "the operator" if item.process == OPERATOR else f"process {item.process}.{item.task}"
    return f"{who} waits {item.pause_ms} ms: {item.kind} {item.shard} {item.number}{ends}"


def _operations(work: random.Random, processes: int) -> list[ShardOperation]:
    kinds, weights = zip(*_WORK, strict=True)
    found = []
    for _ in range(work.choice((8, 14, 14, 24))):
        kind = work.choices(kinds, weights)[0]
        found.append(
            ShardOperation(
                work.randrange(processes),
                work.randrange(3),
                work.choice(_PAUSES_MS),
                kind,
                "s" if work.random() < 0.85 else "t",
                work.randrange(1, 60),
            )
        )
    for _ in range(work.choice((0, 0, 1, 2))):
        kind = work.choice(("kill", "kill", "stop"))
        found.append(
            ShardOperation(
                OPERATOR, 0, work.choice((5, 30, 100, 300)), kind, "", work.randrange(processes)
            )
        )
    if work.random() < 0.2:
        ahead = work.choice((-1, 1)) * work.choice((100, 3_000, 3_600_000))
        found.append(ShardOperation(OPERATOR, 1, work.choice((5, 30, 200)), "jump", "", ahead))
    return found


def _canceled(seed: int, operations: list[ShardOperation]) -> list[ShardOperation]:
    """Return the operations, some of them cancelled in some runs."""
    dice = random.Random(f"shard cancels {seed}")
    chance = dice.choice((0, 0, 0.1, 0.4))
    return [
        replace(each, cancel=dice.choice((TASK, SCOPE)), cancel_ms=dice.choice(_CANCELS_MS))
        if each.process != OPERATOR and dice.random() < chance
        else each
        for each in operations
    ]


def _faults(seed: int) -> list[InjectedFault]:
    """Return faults at some sites only, so that each kind of fault is also seen alone."""
    dice = random.Random(f"shard faults {seed}")
    if dice.random() < 0.1:
        return []
    sites = [site for site in _SITES if dice.random() < 0.5]
    found: dict[tuple[str, int], InjectedFault] = {}
    crashes = 0
    for _ in range(dice.choice((2, 5, 10, 20))):
        if not sites:
            break
        site = dice.choice(sites)
        length, kinds = _SITES[site]
        kind = dice.choice(kinds)
        delay = dice.choice(_DELAYS_MS)
        if kind == HANG:
            delay = dice.choice((200, 700))
        if kind in (CRASH, CRASH_AFTER):
            crashes += 1
            if crashes > _CRASHES_MAX:
                continue
        at = 1 + min(dice.randrange(length), dice.randrange(2 * length))
        found[site, at] = InjectedFault(site, at, kind, delay)
        if dice.random() < 0.25 and kind not in (CRASH, CRASH_AFTER, HANG):
            for more in range(1, dice.randrange(2, 10)):  # several operations in a row fail
                found[site, at + more] = InjectedFault(site, at + more, kind, delay)
    return sorted(found.values(), key=lambda fault: (fault.site, fault.at))
