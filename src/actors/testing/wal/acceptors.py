"""One acceptor of a run: its lives, its connections, and its disk with everything looked at.

It does what the receiver does with an acceptor: messages of all connections one after the other,
appends either flushed each or written first and flushed together a little later, a connection
closed when a message is refused, what was received written and flushed before that. It dies where a
fault of its disk says so, in the middle of a message too, and no answer of that message leaves.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, Protocol

from actors.errors import Corrupt, StorageError, WalRefused
from actors.testing.simulation.faults import CRASH_AFTER, Fault
from actors.testing.simulation.history import Violation
from actors.testing.wal.checkers import Before, Held
from actors.testing.wal.files import Crashed
from actors.testing.wal.network import TO_ACCEPTOR, TO_PROPOSER, Link
from actors.wal.acceptor import Acceptor, AppendUnflushed, FlushWal
from actors.wal.donors import PeerStatus, can_give, elected, status_of, vote_request
from actors.wal.messages import AppendRequest, ProposerElected
from actors.wal.stores import ControlState, ControlStore, WalStore

if TYPE_CHECKING:
    from actors.testing.wal.run import World


LATE_APPEND: Final = 0.3
"""How likely a new life is given an append that an earlier one was sent."""


class Disk(Protocol):
    """What outlives an acceptor."""

    def open(self) -> tuple[ControlStore, WalStore]:
        """The stores of a new life."""
        ...

    def crash(self) -> None:
        """The life is over, and what it had not flushed with it."""
        ...

    def read(self, begin_lsn: int, end_lsn: int) -> bytes:
        """The log as a process sees it."""
        ...

    def make_segment_ahead(self) -> bool:
        """Make the next segment, if it is time; return whether it was."""
        ...

    def arm(self, fault: Fault) -> None:
        """Something goes wrong now, or in the operation to come. Raises what does now."""
        ...

    def disarm(self) -> None:
        """What did not go wrong until now does not."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class _Operations:
    """Counts what is done to a disk; fails, or dies, where a fault says so."""

    def __init__(self, node: AcceptorNode) -> None:
        self._node = node

    def before(self) -> Fault | None:
        """Of an operation; raises when it does not happen."""
        fault = self._node.world.injector.draw(self._node.site)
        if fault is not None:
            self._node.disk.arm(fault)
        return fault

    def after(self, fault: Fault | None) -> None:
        """Of the same operation."""
        if fault is not None:
            self._node.disk.disarm()
        if fault is not None and fault.kind == CRASH_AFTER:
            raise Crashed(fault.site)


class WatchedControl(_Operations):
    """A control file, looked at."""

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
    """A log, looked at."""

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
    """See the module's text."""

    def __init__(self, world: World, number: int, disk: Disk) -> None:
        self.world = world
        self.number = number
        self.node_id = number + 1
        self.site = f"acceptor {number}"
        self.disk = disk
        self.held = Held(number, world.truth, disk)
        self.acceptor: Acceptor | None = None
        self.wal: WatchedWal | None = None
        self.handling: Any = None
        """The message that is being processed."""
        self._dirty: list[Link] = []
        """Whose appends were written and not flushed."""
        self._links: list[Link] = []
        self._last_append: AppendRequest | None = None
        self._last_elected: ProposerElected | None = None
        self._life = 0
        self._dice = random.Random(f"wal acceptor {world.schedule.seed} {number}")

    # -- lives --

    def start(self) -> None:
        """A new life, on what the disk has."""
        if self.acceptor is not None:
            return
        self._life += 1
        try:
            control, wal = self.disk.open()
            self.wal = WatchedWal(self, wal)
            self.acceptor = Acceptor(self.node_id, WatchedControl(self, control), self.wal)
        except Corrupt as error:
            raise Violation(f"8 durable: acceptor {self.number} cannot start: {error}") from error
        self.held.opened(self.acceptor, self.wal)
        self.world.told("acceptor lives", self.number, self.acceptor.term, self.acceptor.flush_lsn)
        if self._dice.random() < LATE_APPEND:
            self.world.events.after(self._dice.randrange(500), self.replay, 0)

    def die(self, down_ms: int) -> None:
        """It is gone, and comes back."""
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

    def accepts(self, link: Link) -> None:
        """A new connection."""
        self._links.append(link)

    def arrived(self, link: Link, message: Any) -> None:
        """Of a proposer."""
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

    def closed(self, link: Link) -> None:
        """What it brought is flushed."""
        if link in self._links:
            self._links.remove(link)
        if link in self._dirty:
            self._dirty.remove(link)
            self.process(FlushWal(), link)

    def _reply(self, link: Link, answer: Any) -> None:
        self.held.answered(answer)
        self.world.told("reply", self.number, link.key[0], type(answer).__name__, answer.term)
        link.send(TO_PROPOSER, answer)

    def _flush_soon(self, link: Link) -> None:
        if self.acceptor is None or link in self._dirty or link not in self._links:
            return
        self._dirty.append(link)
        delay = self._dice.randint(0, self.world.schedule.setting.flush_ms)
        self.world.events.after(delay, self._flush, link, self._life)

    def _flush(self, link: Link, life: int) -> None:
        if life != self._life or link not in self._dirty:
            return
        self._dirty.remove(link)
        answer = self.process(FlushWal(), link)
        if answer is not None:
            self._reply(link, answer)

    def process(self, message: Any, link: Link | None = None) -> Any:
        """The answer; None also when it was refused or the acceptor died of it."""
        acceptor = self.acceptor
        if acceptor is None or self.wal is None:
            return None
        self.world.told("process", self.number, type(message).__name__, acceptor.term)
        before = Before(acceptor, self.wal)
        self.handling = message
        answer = None
        try:
            answer = acceptor.process(message)
        except Crashed:
            self.die(self._dice.choice((0, 20, 300)))
            return None
        except Corrupt as error:
            raise Violation(f"acceptor: {error}") from error
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

    def _hang_up(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
        if link in self._dirty:
            self._dirty.remove(link)
        link.close(TO_ACCEPTOR)

    # -- what else happens to it --

    def replay(self, which: int) -> None:
        """The last append comes again (1: the last announcement), as over a connection that was
        given up long ago: nobody hears the answer."""
        if which and self._last_elected is not None:
            self.process(self._last_elected)
        elif not which and self._last_append is not None:
            self.process(AppendUnflushed(self._last_append))

    def recover(self, other: AcceptorNode) -> None:
        """From another acceptor, if that has something to give."""
        if self.acceptor is None or other.acceptor is None or other is self:
            return
        donor = status_of(other.acceptor)
        if not can_give(donor, status_of(self.acceptor)):
            return
        vote = self.process(vote_request(donor, self.acceptor.state.membership.generation))
        try:
            announced = vote and elected(donor, vote)
        except WalRefused as error:
            raise Violation(f"12 history: {error}") from error
        if announced:
            self.world.told("recovers", self.number, other.number, announced.start_streaming_at)
            self.process(announced)
            self._take(other, donor, announced.start_streaming_at, self._life)

    def _take(self, other: AcceptorNode, donor: PeerStatus, at_lsn: int, life: int) -> None:
        """The next piece of a recovery; whatever came in between is refused, or goes on."""
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
        """A call beside messages, which may die of the disk as well."""
        acceptor = self.acceptor
        if acceptor is None or self.wal is None:
            return
        before = Before(acceptor, self.wal)
        try:
            call(*given)
        except Crashed:
            self.die(self._dice.choice((0, 20, 300)))
        except StorageError as error:
            self.world.told("refused", self.number, error)
            if acceptor.stopped is not None:
                self.die(0)
        else:
            self.held.stepped(acceptor, self.wal, call, before, None)

    def log(self, begin_lsn: int, end_lsn: int, term: int) -> bytes:
        """For a proposer that brings another one up; empty when it cannot be given."""
        acceptor, wal = self.acceptor, self.wal
        if acceptor is None or wal is None or acceptor.term != term:
            return b""
        # the zeros behind the last record may be yet to come
        end_lsn = min(end_lsn, acceptor.flush_lsn, wal.write_lsn)
        return self.disk.read(begin_lsn, end_lsn) if begin_lsn < end_lsn else b""
