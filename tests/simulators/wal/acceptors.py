"""One acceptor of a run: its lives, its connections, and its disk with every operation checked.

It treats an acceptor as the receiver does: messages of all connections come one after the other,
appends are either flushed each or written first and flushed together a little later, a connection
is closed when a message is refused; its received bytes are written and flushed before that. It dies
where a fault of its disk requires it, in the middle of a message too, and no answer to that message
leaves.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, Protocol

from actors.runtime.errors import CorruptData, StorageError, WalRefused
from actors.wal.acceptor import AcceptorCore, AppendUnflushed, FlushWal
from actors.wal.acceptor_stores import ControlState, ControlStore, WalStore
from actors.wal.messages import AppendRequest, ProposerElected
from actors.wal.peer_status import (
    PeerStatus,
    is_useful_donor,
    make_announcement,
    peer_status,
    vote_request,
)
from tests.simulators.service.faults import CRASH_AFTER, InjectedFault
from tests.simulators.service.history import CheckerViolation
from tests.simulators.wal.checkers import AcceptorBefore, AcceptorTruth
from tests.simulators.wal.files import MachineCrashed
from tests.simulators.wal.network import TO_ACCEPTOR, TO_PROPOSER, NetworkLink

if TYPE_CHECKING:
    from tests.simulators.wal.run import WalWorld


LATE_APPEND: Final = 0.3
"""Probability that a new life receives an append that was sent to an earlier one."""


class AcceptorDisk(Protocol):
    """The storage that outlives an acceptor."""

    def open(self) -> tuple[ControlStore, WalStore]:
        """Return the stores of a new life."""
        ...

    def crash(self) -> None:
        """End the life, and lose data that it had not flushed."""
        ...

    def read(self, begin_lsn: int, end_lsn: int) -> bytes:
        """Return the log as a process sees it."""
        ...

    def make_segment_ahead(self) -> bool:
        """Make the next segment, if it is time; return whether it was."""
        ...

    def arm(self, fault: InjectedFault) -> None:
        """Arm a fault for the coming operation. Raises at once if the fault is due now."""
        ...

    def disarm(self) -> None:
        """Disarm a fault that has not struck."""
        ...

    def close(self) -> None:
        """End the run."""
        ...


class _Operations:
    """Counts operations on a disk; fails, or crashes, as the faults require."""

    def __init__(self, node: AcceptorNode) -> None:
        self._node = node

    def before(self) -> InjectedFault | None:
        """Arm the fault of an operation, if it has one. Raises if the operation must not happen."""
        fault = self._node.world.injector.draw(self._node.site)
        if fault is not None:
            self._node.disk.arm(fault)
        return fault

    def after(self, fault: InjectedFault | None) -> None:
        """Disarm the fault of that operation; crash if it is a crash after the operation."""
        if fault is not None:
            self._node.disk.disarm()
        if fault is not None and fault.kind == CRASH_AFTER:
            raise MachineCrashed(fault.site)


class WatchedControl(_Operations):
    """A control file whose changes are checked."""

    def __init__(self, node: AcceptorNode, inner: ControlStore) -> None:
        super().__init__(node)
        self._inner = inner

    @property
    def state(self) -> ControlState:
        return self._inner.state

    def persist(self, state: ControlState) -> None:
        fault = self.before()
        old = self._inner.state
        self._inner.persist(state)
        self._node.held.persisted(old, self._inner.state)
        self.after(fault)


class WatchedWal(_Operations):
    """A log whose changes are checked."""

    def __init__(self, node: AcceptorNode, inner: WalStore) -> None:
        super().__init__(node)
        self._inner = inner

    @property
    def write_lsn(self) -> int:
        return self._inner.write_lsn

    @property
    def write_record_lsn(self) -> int:
        return self._inner.write_record_lsn

    @property
    def flush_lsn(self) -> int:
        return self._inner.flush_lsn

    @property
    def flush_record_lsn(self) -> int:
        return self._inner.flush_record_lsn

    def initialize(self, start_lsn: int) -> None:
        fault = self.before()
        self._inner.initialize(start_lsn)
        self._node.held.initialized(start_lsn)
        self.after(fault)

    def write(self, begin_lsn: int, wal: bytes) -> None:
        fault = self.before()
        self._node.held.writing(wal)
        self._inner.write(begin_lsn, wal)
        self._node.held.wrote(begin_lsn, wal, self._node.handling)
        self.after(fault)

    def flush(self) -> None:
        fault = self.before()
        self._inner.flush()
        self.after(fault)

    def truncate(self, end_lsn: int) -> None:
        fault = self.before()
        self._node.held.truncating(end_lsn, self._node.handling)
        flushed_lsn = self._inner.flush_record_lsn
        self._inner.truncate(end_lsn)
        self._node.held.truncated(end_lsn, flushed_lsn)
        self.after(fault)


class AcceptorNode:
    """One acceptor; see the module's docstring."""

    def __init__(self, world: WalWorld, number: int, disk: AcceptorDisk) -> None:
        self.world = world
        self.number = number
        self.node_id = number + 1
        self.site = f"acceptor {number}"
        self.disk = disk
        self.held = AcceptorTruth(number, world.truth, disk)
        self.acceptor: AcceptorCore | None = None
        self.wal: WatchedWal | None = None
        self.handling: Any = None
        """The message that is being processed."""
        self._dirty: list[NetworkLink] = []
        """Links whose appends are written and not flushed."""
        self._links: list[NetworkLink] = []
        self._last_append: AppendRequest | None = None
        self._last_elected: ProposerElected | None = None
        self._life = 0
        self._dice = random.Random(f"wal acceptor {world.schedule.seed} {number}")

    # -- lives --

    def start(self) -> None:
        """Start a new life, from the state on disk."""
        if self.acceptor is not None:
            return
        self._life += 1
        try:
            control, wal = self.disk.open()
            self.wal = WatchedWal(self, wal)
            self.acceptor = AcceptorCore(self.node_id, WatchedControl(self, control), self.wal)
        except CorruptData as error:
            raise CheckerViolation(
                f"8 durable: acceptor {self.number} cannot start: {error}"
            ) from error
        self.held.opened(self.acceptor, self.wal)
        self.world.told("acceptor lives", self.number, self.acceptor.term, self.acceptor.flush_lsn)
        if self._dice.random() < LATE_APPEND:
            self.world.events.after(self._dice.randrange(500), self.replay, 0)

    def die(self, down_ms: int) -> None:
        """End the life, and start a new one in `down_ms`."""
        if self.acceptor is not None:
            self.world.told("acceptor dies", self.number)
            self.acceptor = self.wal = None
            self._dirty.clear()
            for link in self._links:
                link.close(TO_ACCEPTOR)
            self._links.clear()
            self.disk.crash()
        self.world.events.after(down_ms, self.start)

    # -- connections --

    def accepts(self, link: NetworkLink) -> None:
        """Note a new connection."""
        self._links.append(link)

    def arrived(self, link: NetworkLink, message: Any) -> None:
        """Process a message of a proposer, and send the answer."""
        if isinstance(message, AppendRequest) and message.wal:
            self._last_append = message
        elif isinstance(message, ProposerElected):
            self._last_elected = message
        if isinstance(message, AppendRequest) and self.world.schedule.setting.flush_ms:
            answer = self.process(AppendUnflushed(message), link)
            if answer is not None:
                self._reply(link, answer)
            self._flush_soon(link)
            return
        answer = self.process(message, link)
        if answer is not None:
            self._reply(link, answer)

    def closed(self, link: NetworkLink) -> None:
        """Flush the appends of a closed connection."""
        if link in self._links:
            self._links.remove(link)
        if link in self._dirty:
            self._dirty.remove(link)
            self.process(FlushWal(), link)

    def _reply(self, link: NetworkLink, answer: Any) -> None:
        self.held.answered(answer)
        self.world.told("reply", self.number, link.key[0], type(answer).__name__, answer.term)
        link.send(TO_PROPOSER, answer)

    def _flush_soon(self, link: NetworkLink) -> None:
        if self.acceptor is None or link in self._dirty or link not in self._links:
            return
        self._dirty.append(link)
        delay = self._dice.randint(0, self.world.schedule.setting.flush_ms)
        self.world.events.after(delay, self._flush, link, self._life)

    def _flush(self, link: NetworkLink, life: int) -> None:
        if life != self._life or link not in self._dirty:
            return
        self._dirty.remove(link)
        answer = self.process(FlushWal(), link)
        if answer is not None:
            self._reply(link, answer)

    def process(self, message: Any, link: NetworkLink | None = None) -> Any:
        """Return the answer; None also when the message was refused or the acceptor died of it."""
        acceptor = self.acceptor
        if acceptor is None or self.wal is None:
            return None
        self.world.told("process", self.number, type(message).__name__, acceptor.term)
        before = AcceptorBefore(acceptor, self.wal)
        self.handling = message
        answer = None
        try:
            answer = acceptor.process(message)
        except MachineCrashed:
            self.die(self._dice.choice((0, 20, 300)))
            return None
        except CorruptData as error:
            raise CheckerViolation(f"acceptor: {error}") from error
        except (WalRefused, StorageError) as error:
            self.world.told("refused", self.number, error)
            if link is not None:
                self._hang_up(link)
            if acceptor.stopped is not None:
                self.die(0)
                return None
        finally:
            self.handling = None
        if self.acceptor is acceptor:
            self.held.stepped(acceptor, self.wal, message, before, answer)
            if self.world.schedule.setting.makes_segments_ahead:
                self.world.struck["segment made ahead"] += self.disk.make_segment_ahead()
        return answer

    def _hang_up(self, link: NetworkLink) -> None:
        if link in self._links:
            self._links.remove(link)
        if link in self._dirty:
            self._dirty.remove(link)
        link.close(TO_ACCEPTOR)

    # -- events beside messages --

    def replay(self, which: int) -> None:
        """Process the last append again (1: the last announcement), as if it came late over a
        connection that was given up: the answer is dropped."""
        if which and self._last_elected is not None:
            self.process(self._last_elected)
        elif not which and self._last_append is not None:
            self.process(AppendUnflushed(self._last_append))

    def recover(self, other: AcceptorNode) -> None:
        """Recover from another acceptor, if its log is ahead of ours."""
        if self.acceptor is None or other.acceptor is None or other is self:
            return
        donor = peer_status(other.acceptor)
        if not is_useful_donor(donor, peer_status(self.acceptor)):
            return
        vote = self.process(vote_request(donor, self.acceptor.state.membership.generation))
        try:
            announced = vote and make_announcement(donor, vote)
        except WalRefused as error:
            raise CheckerViolation(f"12 history: {error}") from error
        if announced:
            self.world.told("recovers", self.number, other.number, announced.start_streaming_at)
            self.process(announced)
            self._take(other, donor, announced.start_streaming_at, self._life)

    def _take(self, other: AcceptorNode, donor: PeerStatus, at_lsn: int, life: int) -> None:
        """Append the next piece of a recovery; messages in between may make the acceptor refuse
        it."""
        if self.acceptor is None or life != self._life:
            return
        end_lsn = min(at_lsn + self._dice.choice((8, 100, 10_000)), donor.flush_lsn)
        wal = other.log(at_lsn, end_lsn, donor.term)
        if not wal:
            self.process(FlushWal())
            return
        generation = self.acceptor.state.membership.generation
        end_lsn = at_lsn + len(wal)
        request = AppendRequest(generation, donor.term, at_lsn, end_lsn, 0, 0, wal)
        self.process(AppendUnflushed(request))
        if self.wal is not None and self.wal.write_lsn == end_lsn:
            self.world.struck["recovered a piece"] += 1
            delay = self._dice.choice((0, 0, 5, 200))
            self.world.events.after(delay, self._take, other, donor, end_lsn, life)

    def guarded(self, call: Any, *given: Any) -> None:
        """Run a call beside messages, which may crash on the disk as well."""
        acceptor = self.acceptor
        if acceptor is None or self.wal is None:
            return
        before = AcceptorBefore(acceptor, self.wal)
        try:
            call(*given)
        except MachineCrashed:
            self.die(self._dice.choice((0, 20, 300)))
        except StorageError as error:
            self.world.told("refused", self.number, error)
            if acceptor.stopped is not None:
                self.die(0)
        else:
            self.held.stepped(acceptor, self.wal, call, before, None)

    def log(self, begin_lsn: int, end_lsn: int, term: int) -> bytes:
        """Return the log for a proposer that brings another acceptor up to date; empty if
        unavailable."""
        acceptor, wal = self.acceptor, self.wal
        if acceptor is None or wal is None or acceptor.term != term:
            return b""
        # The padding behind the last record may not be written yet.
        end_lsn = min(end_lsn, acceptor.flush_lsn, wal.write_lsn)
        return self.disk.read(begin_lsn, end_lsn) if begin_lsn < end_lsn else b""
