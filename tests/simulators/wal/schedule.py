"""Schedules of a simulated WAL: writes, deaths, partitions and disk faults, drawn by a seed.

Source of the shape: the random schedules of Neon's simulation of its proposer (1 to 99 actions, up
to 499 ms apart; keepalives of 100 to 1,999 ms, delays up to twice that, messages lost with up to
nine in ten). Most seeds draw milder networks, as no proposer is elected on the worst.

Streams of randomness are apart: the setting and the actions, the disks, and (while it runs) each
connection, each acceptor. Lists are plain, so that a schedule shrinks: a removed entry leaves all
others unchanged.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec

from actors.wal.messages import WAL_BYTES_MAX
from tests.simulators.service.faults import (
    CRASH,
    CRASH_AFTER,
    FAIL,
    InjectedFault,
)

WRITE: Final = "write"
"""Proposer `who` is given `count` transactions."""
RESTART_ACCEPTOR: Final = "restart acceptor"
"""Acceptor `who` dies, loses what is not on disk, and is back after `count` ms."""
RESTART_PROPOSER: Final = "restart proposer"
"""Proposer `who` dies; another life of it begins after `count` ms."""
STOP_PROPOSER: Final = "stop proposer"
"""Proposer `who` dies and has no further life."""
PARTITION: Final = "partition"
"""Acceptor `who` is cut off from all proposers; with `count` 1 or 2 from that proposer alone."""
ISOLATE: Final = "isolate"
"""Proposer `count` is cut off from all acceptors but `who`: these two write records of their
own."""
REPLAY: Final = "replay"
"""Acceptor `who` receives its last append again, in whatever life; with `count` the last leader's
announcement."""
HEAL: Final = "heal"
"""All partitions end."""
BUMP: Final = "bump"
"""Acceptor `who` has its term raised by `count`."""
CHECKPOINT: Final = "checkpoint"
"""Acceptor `who` persists its state in memory."""
GOSSIP: Final = "gossip"
"""Acceptor `who` learns the positions of acceptor `count`."""
RECOVER: Final = "recover"
"""Acceptor `who` recovers from acceptor `count`, if that one's log is ahead."""

RECORD_BYTES: Final = 64
RECORD_BYTES_FILES: Final = 8_192
"""Most bytes of a record of a run."""

ACTIONS_MAX: Final = 99
GAP_MS_MAX: Final = 499
TRANSACTIONS_MAX: Final = 9


class WalAction(msgspec.Struct, frozen=True):
    """An action `kind` on node number `who`, `pause_ms` after the one before."""

    pause_ms: int
    kind: str
    who: int = 0
    count: int = 0


class WalSetting(msgspec.Struct, frozen=True):
    """The settings of the world that a seed draws."""

    acceptors: int = 3
    proposers: int = 1
    keepalive_ms: int = 1_000
    """Time for which a connection may be cut off before it is closed."""
    delay_ms_min: int = 1
    delay_ms_max: int = 30
    """Longest delay of a message, either way."""
    drop: float = 0.0
    """Probability that a message is lost; its connection breaks with it."""
    connect_fails: float = 0.1
    flush_ms: int = 0
    """Longest time between an append and its flush, which covers all appends since; 0: flush
    each."""
    version: int = 0
    """Version of the protocol: 3 or 2 send every message as bytes; 0 as values."""
    generation: int = 0
    """First generation of the membership; a later life of a proposer may bring a greater one."""
    piece_bytes: int = WAL_BYTES_MAX
    """Most bytes of log in one message."""
    pending_bytes: int = 16 * 1024 * 1024
    """Most bytes of uncommitted log; further appends wait for room."""
    retained_bytes: int = 200
    """Bytes of committed log that a proposer keeps; older log comes from another acceptor."""
    donor_absent_ms: int = 30_000
    """Time after which a proposer gives up if its donor stays away."""
    makes_segments_ahead: bool = False
    """True if, in files, the next segment is made when one is half full, not when it is needed."""
    files: bool = False
    """True if acceptors keep their logs in files."""


class WalSchedule(msgspec.Struct, frozen=True):
    """A whole run."""

    seed: int
    setting: WalSetting
    operations: tuple[WalAction, ...]
    faults: tuple[InjectedFault, ...]
    """Faults of the disks: operation `at` of site ``acceptor N`` fails, or the acceptor dies at
    it."""


_KINDS: Final = (
    (WRITE, 50),
    (RESTART_ACCEPTOR, 12),
    (RESTART_PROPOSER, 10),
    (STOP_PROPOSER, 1),
    (PARTITION, 7),
    (ISOLATE, 5),
    (REPLAY, 3),
    (HEAL, 6),
    (BUMP, 2),
    (CHECKPOINT, 4),
    (GOSSIP, 7),
)
_DOWN_MS: Final = (0, 10, 100, 500, 3_000)
_FAULTS: Final = (CRASH, CRASH, CRASH_AFTER, CRASH_AFTER, FAIL)
_FAULTS_AT_MAX: Final = 80


def draw(seed: int, *, files: bool = False) -> WalSchedule:
    """Return the schedule of a seed."""
    work = random.Random(f"wal {seed}")
    keepalive = work.choice((100, 300, 1_000, work.randrange(100, 2_000)))
    delay = work.choice((2, 5, 20, keepalive // 4, work.randrange(1, 2 * keepalive)))
    setting = WalSetting(
        acceptors=work.choice((3, 3, 5)),
        proposers=work.choice((1, 2, 2)),
        keepalive_ms=keepalive,
        delay_ms_min=work.choice((0, delay // 4, delay)),
        delay_ms_max=max(1, delay),
        drop=work.choice((0.0, 0.0, 0.01, 0.05, 0.2, work.random() * 0.9)),
        connect_fails=work.choice((0.0, 0.1, 0.1, 0.5)),
        flush_ms=work.choice((0, 0, 1, delay, 1_000)),
        version=work.choice((0, 0, 0, 2, 3)),
        generation=work.choice((0, 0, 1)),
        files=files,
    )
    if setting.version == 2:
        setting = msgspec.structs.replace(setting, generation=0)  # version 2 has no generations
    setting = _thresholds(seed, setting)
    actions = _actions(work, setting)
    _recoveries(seed, setting, actions)
    return WalSchedule(seed, setting, tuple(actions), tuple(_faults(seed, setting)))


def _thresholds(seed: int, setting: WalSetting) -> WalSetting:
    """Return the setting with sizes at which a proposer takes another path: a few records cross
    each."""
    dice = random.Random(f"wal thresholds {seed}")
    if dice.random() < 0.4:
        return setting
    usual, record = WalSetting(), RECORD_BYTES_FILES if setting.files else RECORD_BYTES
    piece = dice.choice((usual.piece_bytes, record // 32, record // 2, record))
    window = dice.choice((1, 3)) * record
    return msgspec.structs.replace(
        setting,
        piece_bytes=piece,
        pending_bytes=dice.choice((usual.pending_bytes, max(piece, window))),
        retained_bytes=dice.choice((usual.retained_bytes, 0, 0, 1 << 24)),
        donor_absent_ms=dice.choice((usual.donor_absent_ms, 20, 500)),
        makes_segments_ahead=dice.random() < 0.5,
    )


def draw_files(seed: int) -> WalSchedule:
    """Return the schedule of a seed, for acceptors whose logs are files."""
    return draw(seed, files=True)


def describe_setting(setting: WalSetting) -> str:
    """Return the drawn values that differ from the defaults."""
    usual = msgspec.structs.asdict(WalSetting())
    drawn = msgspec.structs.asdict(setting).items()
    return ", ".join(f"{name} {value}" for name, value in drawn if value != usual[name])


def describe(item: WalAction | InjectedFault) -> str:
    """Return one line for an action or a fault."""
    if isinstance(item, InjectedFault):
        return f"fault: {item.kind} at operation {item.at} of {item.site}"
    return f"after {item.pause_ms} ms: {item.kind} {item.who} {item.count}"


def _actions(work: random.Random, setting: WalSetting) -> list[WalAction]:
    kinds, weights = zip(*_KINDS, strict=True)
    gap = work.choice((20, 100, GAP_MS_MAX))
    found = []
    for _ in range(min(work.randrange(1, ACTIONS_MAX + 1), work.randrange(1, ACTIONS_MAX + 1))):
        kind = work.choices(kinds, weights)[0]
        of_proposers = kind in (WRITE, RESTART_PROPOSER, STOP_PROPOSER)
        count = 0
        if kind == WRITE:
            count = work.randint(1, TRANSACTIONS_MAX)
        elif kind in (RESTART_ACCEPTOR, RESTART_PROPOSER):
            count = work.choice(_DOWN_MS)
        elif kind == PARTITION:
            count = work.randrange(setting.proposers + 1)
        elif kind == ISOLATE:
            count = work.randrange(setting.proposers)
        elif kind == REPLAY:
            count = work.randrange(2)
        elif kind == BUMP:
            count = work.randint(1, 3)
        elif kind == GOSSIP:
            count = work.randrange(setting.acceptors)
        who = work.randrange(setting.proposers if of_proposers else setting.acceptors)
        found.append(WalAction(work.randint(0, gap), kind, who, count))
    return found


def _recoveries(seed: int, setting: WalSetting, actions: list[WalAction]) -> None:
    """Insert recoveries between the actions."""
    dice = random.Random(f"wal recoveries {seed}")
    for _ in range(dice.choice((0, 0, 1, 4, 12))):
        who, other = dice.sample(range(setting.acceptors), 2)
        at = dice.randrange(len(actions) + 1)
        actions.insert(at, WalAction(dice.choice((0, 0, 50)), RECOVER, who, other))


def _faults(seed: int, setting: WalSetting) -> list[InjectedFault]:
    dice = random.Random(f"wal disks {seed}")
    if dice.random() < 0.3:
        return []
    found: dict[tuple[str, int], InjectedFault] = {}
    for _ in range(dice.choice((1, 2, 4, 8))):
        site = f"acceptor {dice.randrange(setting.acceptors)}"
        at = 1 + min(dice.randrange(_FAULTS_AT_MAX), dice.randrange(_FAULTS_AT_MAX))
        found[site, at] = InjectedFault(site, at, dice.choice(_FAULTS))
    return sorted(found.values(), key=lambda fault: (fault.site, fault.at))
