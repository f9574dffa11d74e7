"""Schedules of simulated halves: clients' commands, displacements and faults, drawn by a seed.

An action happens, then a number of deliveries, chosen by the action's own dice: a removed action
leaves the dice of the rest unchanged. Faults name the number of a look-up, of a task's start or
stop, or of a dataflow's start, all counted from the beginning of the run.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec

from actors.model.protocol.internal import Half
from tests.simulators.service.faults import FAIL, HANG, InjectedFault

SAY_STORAGE: Final = "storage says"
"""The client of the storage half sends a few commands."""
SAY_COMPUTE: Final = "compute says"
COMPLETE_STORAGE: Final = "storage completes"
"""The client sends InitializationComplete, if it has not."""
COMPLETE_COMPUTE: Final = "compute completes"
DISPLACE_STORAGE: Final = "displace storage"
"""Another client takes over: the former's last commands may be lost on their way to some workers,
or come late; the new client may replay the former's history, send other commands, and complete."""
DISPLACE_COMPUTE: Final = "displace compute"
LEAVE_STORAGE: Final = "leave storage"
"""The client disconnects, and no other one connects for now."""
LEAVE_COMPUTE: Final = "leave compute"
FLOOD_STORAGE: Final = "flood storage"
"""Many commands at once that the one order must carry, none of which has a response."""
FLOOD_COMPUTE: Final = "flood compute"
TASK: Final = "task"
"""A source, sink or one-shot ingestion advances, fails, ends, or reports its health."""
FLOW: Final = "dataflow"
"""A dataflow advances, emits, ends, crashes, or reports its health."""
STATISTICS: Final = "statistics"
"""The interval of statistics ends on all workers."""
RESTART: Final = "restart"
"""All workers die, with the messages under way; they begin anew, and clients connect again."""
GO_ON: Final = "go on"

HALF_OF: Final[dict[str, Half]] = {
    SAY_STORAGE: "storage",
    SAY_COMPUTE: "compute",
    COMPLETE_STORAGE: "storage",
    COMPLETE_COMPUTE: "compute",
    DISPLACE_STORAGE: "storage",
    DISPLACE_COMPUTE: "compute",
    LEAVE_STORAGE: "storage",
    LEAVE_COMPUTE: "compute",
    FLOOD_STORAGE: "storage",
    FLOOD_COMPUTE: "compute",
}
"""Action → the half whose client performs it."""

_KINDS: Final = (
    (SAY_STORAGE, 18),
    (SAY_COMPUTE, 18),
    (COMPLETE_STORAGE, 6),
    (COMPLETE_COMPUTE, 6),
    (DISPLACE_STORAGE, 4),
    (DISPLACE_COMPUTE, 4),
    (LEAVE_STORAGE, 0.7),
    (LEAVE_COMPUTE, 0.7),
    (FLOOD_STORAGE, 0.4),
    (FLOOD_COMPUTE, 0.4),
    (TASK, 28),
    (FLOW, 24),
    (STATISTICS, 4),
    (RESTART, 0.4),
    (GO_ON, 6),
)

ACTIONS_MAX: Final = 80
STEPS: Final = (0, 2, 5, 12, 25, 50)
"""Numbers of deliveries after an action: one of these is drawn."""
SITES: Final = ("look-up", "task", "stop", "dataflow")
"""Sites of faults: a look-up fails, a task fails as it begins, a task stops only in the end, a
dataflow crashes as it begins."""
FAULT_AT_MAX: Final = 12


class HalvesAction(msgspec.Struct, frozen=True):
    """An action `kind`, then `steps` deliveries; both by dice of their own."""

    kind: str
    steps: int = 0
    dice: int = 0


class HalvesSetting(msgspec.Struct, frozen=True):
    """The settings of the world that a seed draws."""

    workers: int = 2
    window: int = 4
    """Size of the lanes: most commands of one half under way at a worker."""
    responses: int = 4
    """Most responses under way to an adapter."""
    opened: bool = True
    """True if the first clients complete at once, and allow writes."""


class HalvesSchedule(msgspec.Struct, frozen=True):
    """A whole run."""

    seed: int
    setting: HalvesSetting
    operations: tuple[HalvesAction, ...]
    faults: tuple[InjectedFault, ...]


def draw(seed: int) -> HalvesSchedule:
    """Return the schedule of a seed."""
    dice = random.Random(f"halves {seed}")
    setting = HalvesSetting(
        workers=dice.choice((1, 2, 2, 3, 3, 4, 5)),
        window=dice.choice((1, 2, 4, 32)),
        responses=dice.choice((1, 2, 64)),
        opened=dice.random() < 0.8,
    )
    kinds, weights = zip(*_KINDS, strict=True)
    count = dice.randint(10, ACTIONS_MAX)
    chosen = dice.choices(kinds, weights, k=count)
    pace = dice.choice((STEPS, STEPS, STEPS[:4], STEPS[2:]))
    actions = tuple(HalvesAction(kind, dice.choice(pace), dice.getrandbits(32)) for kind in chosen)
    return HalvesSchedule(seed, setting, actions, tuple(_faults(seed)))


def describe(item: HalvesAction | InjectedFault) -> str:
    """Return one line for an action or a fault."""
    if isinstance(item, InjectedFault):
        return f"fault: {item.kind} at {item.site} {item.at}"
    return f"{item.kind} (dice {item.dice}), then {item.steps} deliveries"


def _faults(seed: int) -> list[InjectedFault]:
    dice = random.Random(f"halves faults {seed}")
    found: dict[tuple[str, int], InjectedFault] = {}
    for _ in range(dice.choice((0, 0, 1, 2, 4, 8))):
        site = dice.choice((*SITES, "stop"))
        at = 1 + dice.randrange(FAULT_AT_MAX)
        found[site, at] = InjectedFault(site, at, HANG if site == "stop" else FAIL)
    return sorted(found.values(), key=lambda fault: (fault.site, fault.at))
