"""The course of one run: actions while faults strike, then a fault-free end that must catch up.

When the actions are over nothing fails any more, all partitions end, every acceptor lives, and all
proposers but a fresh one are dead. It must be elected, and all its records must be committed and on
all acceptors. Then each acceptor dies once more, and its state on disk is checked.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Final

from actors.runtime.errors import PenstockError
from actors.wal.acceptor import AcceptorPeer
from actors.wal.acceptor_stores import ControlState
from actors.wal.lsn import SEGMENT_BYTES
from tests.simulators.service.cluster import RunReport, report_of
from tests.simulators.service.faults import FaultInjector, TraceDigest
from tests.simulators.service.history import CheckerViolation
from tests.simulators.wal import file_disk
from tests.simulators.wal import schedule as plan
from tests.simulators.wal.acceptors import AcceptorDisk, AcceptorNode
from tests.simulators.wal.checkers import WalTruth, require
from tests.simulators.wal.file_disk import FileAcceptorDisk, RealRecords
from tests.simulators.wal.leaders import ProposerNode, RecordFactory
from tests.simulators.wal.memory import CellRecords, MemoryDisk
from tests.simulators.wal.network import EventQueue, LinkNetwork
from tests.simulators.wal.schedule import WalAction, WalSchedule

START_LSN: Final = SEGMENT_BYTES + 40
LATE_MS: Final = 500
"""Time behind the last action in which begun work goes on under faults."""
CALM_MS: Final = 180_000
"""Time within which the last proposer must be through."""
CALM_STEP_MS: Final = 50
TRANSACTIONS: Final = 3
"""Number of transactions of the last proposer."""
EVENTS_MAX: Final = 400_000
"""Most events of one run; the longest need a tenth of it."""


class WalTrace(TraceDigest):
    """Steps, with the virtual time of the run."""

    def __init__(self, keep: bool, events: EventQueue) -> None:
        super().__init__(keep)
        self._events = events

    def note(self, *what: object) -> None:
        self.steps += 1
        line = f"{self._events.now_ms} {' '.join(map(str, what))}"
        self._digest.update(line.encode())
        if self._kept is not None:
            self._kept.append(line)


class WalWorld:
    """State that all nodes of one run share."""

    tenant: Final = "a" * 32
    timeline: Final = "b" * 32

    def __init__(self, schedule: WalSchedule, keep_trace: bool) -> None:
        self.schedule = schedule
        setting = schedule.setting
        self.events = EventQueue()
        self.trace = WalTrace(keep_trace, self.events)
        self.told = self.trace.note
        self.injector = FaultInjector(schedule.faults, self.trace)
        self.segment_bytes = file_disk.SEGMENT_BYTES if setting.files else SEGMENT_BYTES
        self.truth = WalTruth(file_disk.START_LSN if setting.files else START_LSN)
        self.network = LinkNetwork(
            self.events,
            (min(setting.delay_ms_min, setting.delay_ms_max), setting.delay_ms_max),
            setting.drop,
            setting.keepalive_ms,
            self.told,
        )
        self.connect_fails = setting.connect_fails
        self.struck: Counter[str] = Counter()
        self._lives = 0
        self.acceptors = [
            AcceptorNode(self, number, self._disk(number)) for number in range(setting.acceptors)
        ]
        self.proposers = [ProposerNode(self, number) for number in range(setting.proposers)]

    def _disk(self, number: int) -> AcceptorDisk:
        state = ControlState(self.tenant, self.timeline)
        dice = random.Random(f"wal disk {self.schedule.seed} {number}")
        return (
            FileAcceptorDisk(state, dice)
            if self.schedule.setting.files
            else MemoryDisk(state, dice)
        )

    def records(self, start_lsn: int, life: int, dice: random.Random) -> RecordFactory:
        """Return the records of life `life` of a proposer from `start_lsn` on."""
        made = RealRecords if self.schedule.setting.files else CellRecords
        return made(start_lsn, life, dice)

    def new_life(self) -> int:
        """Return the next number among all lives of proposers."""
        self._lives += 1
        return self._lives

    # -- the course --

    def drive(self) -> None:
        """Drive the whole run. Raises `CheckerViolation`."""
        for acceptor in self.acceptors:
            acceptor.start()
        for proposer in self.proposers:
            self.events.after(proposer.number * 50, proposer.start)
        when_ms = 0
        for action in self.schedule.operations:
            when_ms += action.pause_ms
            self.events.at(when_ms, self._act, action)
        self._run(when_ms + LATE_MS)
        self._calm()
        for acceptor in self.acceptors:
            if acceptor.acceptor is not None and acceptor.wal is not None:
                acceptor.acceptor.validate()
                acceptor.held.ended(acceptor.acceptor, acceptor.wal)
            acceptor.die(0)
            acceptor.start()

    def _run(self, until_ms: int) -> None:
        while self.events.next(until_ms):
            if self.events.count > EVENTS_MAX:
                raise CheckerViolation(f"livelock: more than {EVENTS_MAX} events")

    def _calm(self) -> None:
        self.told("calm")
        self.injector.active = False
        network = self.network
        network.drop, network.delay_ms_min, network.delay_ms_max = 0.0, 1, 5
        self.connect_fails = 0.0
        network.heal()
        for each in self.proposers:
            each.for_good = True
            each.die(0)
        last = self.proposers[0] = ProposerNode(self, 0)
        for acceptor in self.acceptors:
            acceptor.start()
        last.owed = TRANSACTIONS
        last.start()
        end_ms = self.events.now_ms + CALM_MS
        while self.events.now_ms < end_ms:
            self._run(self.events.now_ms + CALM_STEP_MS)
            proposer = last.proposer
            if proposer is None or not last.is_fully_committed:
                continue
            if all(
                node.acceptor is not None
                and node.acceptor.flush_lsn == proposer.end_lsn
                and node.acceptor.commit_lsn == proposer.end_lsn
                for node in self.acceptors
            ):
                written = proposer.end_lsn > proposer.start_lsn
                require(written, "liveness: nothing was appended")
                return
        shown = [
            (node.acceptor.term, node.acceptor.flush_lsn, node.acceptor.commit_lsn)
            for node in self.acceptors
            if node.acceptor is not None
        ]
        proposer = last.proposer
        leader = proposer and (proposer.phase.value, proposer.term, proposer.commit_lsn)
        raise CheckerViolation(f"liveness: after {CALM_MS} ms of calm: {leader}, {shown}")

    # -- actions --

    def _act(self, action: WalAction) -> None:
        self.told("act", action.kind, action.who, action.count)
        self.struck[action.kind] += 1
        kind, who, count = action.kind, action.who, action.count
        if kind in (plan.WRITE, plan.RESTART_PROPOSER, plan.STOP_PROPOSER):
            proposer = self.proposers[who % len(self.proposers)]
            if kind == plan.WRITE:
                proposer.write(count)
            else:
                proposer.for_good |= kind == plan.STOP_PROPOSER
                proposer.die(count)
            return
        node = self.acceptors[who % len(self.acceptors)]
        if kind == plan.RESTART_ACCEPTOR:
            node.die(count)
        elif kind == plan.PARTITION:
            those = range(len(self.proposers)) if not count else (count - 1,)
            self.network.partition({(proposer, node.number) for proposer in those})
        elif kind == plan.ISOLATE:
            loner = count % len(self.proposers)
            others = [each.number for each in self.acceptors if each is not node]
            self.network.partition({(loner, other) for other in others})
        elif kind == plan.REPLAY:
            node.replay(count)
        elif kind == plan.HEAL:
            self.network.heal()
        elif kind == plan.BUMP and node.acceptor is not None:
            node.guarded(node.acceptor.bump_term, node.acceptor.term + count)
        elif kind == plan.CHECKPOINT and node.acceptor is not None:
            node.guarded(node.acceptor.checkpoint)
        elif kind == plan.RECOVER:
            node.recover(self.acceptors[count % len(self.acceptors)])
        elif kind == plan.GOSSIP and node.acceptor is not None:
            other = self.acceptors[count % len(self.acceptors)].acceptor
            if other is not None:
                state = other.state
                node.guarded(
                    node.acceptor.record_peer,
                    AcceptorPeer(other.last_log_term, state.commit_lsn, 0, state.peer_horizon_lsn),
                )


def simulate(schedule: WalSchedule, *, keep_trace: bool = False) -> RunReport:
    """Run a schedule once."""
    return simulated(WalWorld(schedule, keep_trace))


def simulated(world: WalWorld) -> RunReport:
    """Run a prepared world once."""
    violation = ""
    try:
        world.drive()
    except CheckerViolation as found:
        violation = str(found)
    except (PenstockError, AssertionError) as error:
        violation = f"{type(error).__name__}: {error}"
    finally:
        for node in world.acceptors:
            node.disk.close()
    world.told("violation", violation)
    if violation:
        violation += f"; drawn: {plan.describe_setting(world.schedule.setting)}"
    struck = world.struck + Counter(fault.kind for fault in world.injector.struck)
    if world.truth.committed_cut:
        struck["committed data cut off"] = world.truth.committed_cut
    return report_of(world.schedule.seed, world.trace, struck, violation)
