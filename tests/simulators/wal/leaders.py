"""One proposer of a run: its lives, its connections, and the records that it appends.

It does the work of the shell around a proposer: connects, hands messages over, performs effects,
reads from one acceptor the log that another one lacks, ticks; when its proposer stops with a fatal
error, another life begins in a while. It keeps the whole log of its term, to be compared with its
commits.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, Protocol

from actors.wal.messages import AppendRequest, ConfigMember, MembershipConfig
from actors.wal.proposer import WalProposer
from actors.wal.proposer_effects import (
    CommitMoved,
    DropConnection,
    Effect,
    FetchLog,
    LeadTerm,
    ProposerConfig,
    ProposerPhase,
    SendMessage,
    StopProposer,
)
from tests.simulators.wal.checkers import require
from tests.simulators.wal.network import TO_ACCEPTOR, TO_PROPOSER, NetworkLink

if TYPE_CHECKING:
    from tests.simulators.wal.run import WalWorld


class RecordFactory(Protocol):
    """The source of the records that a proposer writes."""

    def next(self) -> bytes:
        """Return one record, which follows the one before."""
        ...


TICKS_PER_HEARTBEAT: Final = 2
RETRY_MS: Final = 100
"""Longest delay before a connection is made again."""
REST_MS: Final = (200, 2_000)
"""Delay between two lives: least and most."""
ROUND_TRIPS: Final = 4
"""Number of keepalives after which a silent acceptor is dropped."""


class ProposerNode:
    """One proposer; see the module's docstring."""

    def __init__(self, world: WalWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.proposer: WalProposer | None = None
        self.life = 0
        self.log = bytearray()
        """Log of the whole timeline, as this life leads it; empty before it is elected."""
        self.commit_lsn = 0
        self.for_good = False
        self.owed = 0
        """Number of transactions with which each life begins."""
        self._links: dict[int, NetworkLink] = {}
        self._wanted = 0
        """Number of transactions that are still to be appended."""
        self._torn = b""
        """Unappended rest of a record whose first part was appended."""
        self._records: RecordFactory | None = None
        self._dice = random.Random(f"wal proposer {world.schedule.seed} {number}")

    # -- lives --

    def start(self) -> None:
        """Start a new life."""
        if self.proposer is not None or self.for_good:
            return
        world = self.world
        self.life = world.new_life()
        self.log = bytearray()
        self._records = None
        self.commit_lsn = 0
        self._wanted = self.owed
        self._torn = b""
        acceptors = range(world.schedule.setting.acceptors)
        setting = world.schedule.setting
        keepalive = setting.keepalive_ms
        self.proposer = WalProposer(
            ProposerConfig(
                tenant=world.tenant,
                timeline=world.timeline,
                start_lsn=world.truth.start_lsn,
                membership=self._membership(),
                segment_bytes=world.segment_bytes,
                proposer_id=self.life.to_bytes(16, "big"),
                heartbeat_ms=keepalive,
                silence_ms_max=ROUND_TRIPS * keepalive,
                donor_absent_ms_max=setting.donor_absent_ms,
                pending_bytes_max=setting.pending_bytes,
                piece_bytes_max=setting.piece_bytes,
                retained_bytes_max=setting.retained_bytes,
            ),
            list(acceptors),
        )
        world.told("proposer lives", self.number, self.life)
        for acceptor in acceptors:
            self._connect(acceptor)
        self._tick(self.life)

    def die(self, down_ms: int) -> None:
        """End the life, and start a new one in `down_ms` unless `for_good` is set."""
        if self.proposer is not None:
            self.world.told("proposer dies", self.number, self.life)
            self.proposer = None
            for link in self._links.values():
                link.close(TO_PROPOSER)
            self._links.clear()
        self.world.events.after(down_ms, self.start)

    def _membership(self) -> MembershipConfig:
        """Return the life's membership. Generations begin with that of the setting and rise with
        lives; every third is joint: of all acceptors and, at once, of the first three."""
        setting = self.world.schedule.setting
        if not setting.generation:
            return MembershipConfig()
        generation = setting.generation + self.life // 3
        members = tuple(ConfigMember(at + 1, f"host{at}", 5454) for at in range(setting.acceptors))
        return MembershipConfig(generation, members, members[:3] if generation % 3 == 0 else ())

    def _tick(self, life: int) -> None:
        if self.proposer is None or self.life != life:
            return
        self._do(self.proposer.tick(self.world.events.now_ms))
        every = max(1, self.world.schedule.setting.keepalive_ms // TICKS_PER_HEARTBEAT)
        self.world.events.after(every, self._tick, life)

    # -- connections --

    def _connect(self, acceptor: int) -> None:
        delay = self._dice.randint(1, self.world.network.delay_ms_max)
        self.world.events.after(delay, self._connected, acceptor, self.life)

    def _connected(self, acceptor: int, life: int) -> None:
        if self.proposer is None or self.life != life or acceptor in self._links:
            return
        node, world = self.world.acceptors[acceptor], self.world
        fails = self._dice.random() < world.connect_fails
        if fails or node.acceptor is None or (self.number, acceptor) in world.network.cut:
            self._retry(acceptor)
            return
        setting = world.schedule.setting
        link = world.network.link(
            (self.number, acceptor),
            node,
            self,
            random.Random(self._dice.getrandbits(64)),
            setting.version,
        )
        self._links[acceptor] = link
        node.accepts(link)
        self._do(self.proposer.connected(acceptor))

    def _retry(self, acceptor: int) -> None:
        delay = self._dice.randint(1, RETRY_MS)
        life = self.life
        self.world.events.after(delay, self._again, acceptor, life)

    def _again(self, acceptor: int, life: int) -> None:
        if self.life == life and self.proposer is not None:
            self._connect(acceptor)

    def arrived(self, link: NetworkLink, message: Any) -> None:
        """Handle a message of an acceptor."""
        acceptor = link.key[1]
        if self.proposer is not None and self._links.get(acceptor) is link:
            self._do(self.proposer.received(acceptor, message))

    def closed(self, link: NetworkLink) -> None:
        """Handle a link that the acceptor closed, or that broke."""
        acceptor = link.key[1]
        if self.proposer is not None and self._links.get(acceptor) is link:
            del self._links[acceptor]
            self._do(self.proposer.disconnected(acceptor))
            if self.proposer is not None:
                self._retry(acceptor)

    # -- effects --

    def _do(self, effects: list[Effect]) -> None:
        life = self.life
        for effect in effects:
            if self.proposer is None or self.life != life:
                return
            if isinstance(effect, SendMessage):
                self._send(effect)
            elif isinstance(effect, DropConnection):
                self.world.told("drop", self.number, effect.acceptor)
                link = self._links.pop(effect.acceptor, None)
                if link is not None:
                    link.close(TO_PROPOSER)
                self._retry(effect.acceptor)
            elif isinstance(effect, LeadTerm):
                self._elected(effect)
            elif isinstance(effect, CommitMoved):
                self._committed(effect.lsn)
            elif isinstance(effect, FetchLog):
                self.world.struck["read back from another acceptor"] += 1
                delay = self._dice.randint(1, self.world.network.delay_ms_max)
                self.world.events.after(delay, self._fetch, effect, life)
            elif isinstance(effect, StopProposer):
                self.world.told("fatal", self.number, effect.reason)
                self.world.struck["donor given up"] += "has been offline" in effect.reason
                self.die(self._dice.randint(*REST_MS))
        if self._wanted:
            self._append()

    def _send(self, effect: SendMessage) -> None:
        message = effect.message
        proposer = self.proposer
        if isinstance(message, AppendRequest) and proposer is not None:
            if message.wal:
                whole = len(message.wal) == proposer.config.piece_bytes_max
                self.world.struck["whole piece" if whole else "part of a piece"] += 1
                if message.begin_lsn < proposer.commit_lsn:
                    self.world.struck["committed log sent"] += 1
            require(
                message.truncate_lsn <= proposer.commit_lsn or not message.truncate_lsn,
                "11 horizon: beyond the commit",
                message.truncate_lsn,
                proposer.commit_lsn,
            )
            require(
                message.commit_lsn <= max(self.commit_lsn, proposer.commit_lsn),
                "3 committed: sent before it is",
                message.commit_lsn,
            )
        link = self._links.get(effect.acceptor)
        if link is not None:
            link.send(TO_ACCEPTOR, message)

    def _elected(self, effect: LeadTerm) -> None:
        proposer, truth = self.proposer, self.world.truth
        if proposer is None:
            return
        self.world.told("elected", self.number, effect.term, effect.start_lsn)
        log = truth.votes.get((effect.donor, effect.term), b"")
        self.log = bytearray(log[: effect.start_lsn - truth.start_lsn])
        require(
            len(self.log) == effect.start_lsn - truth.start_lsn,
            "3 committed: a leader begins where its donor does not end",
            effect,
            len(log),
        )
        truth.elected(self.life, effect.term, effect.start_lsn, bytes(self.log))
        truth.led(effect.term, proposer.history)

    def _committed(self, lsn: int) -> None:
        proposer = self.proposer
        if proposer is None:
            return
        require(lsn > self.commit_lsn, "3 committed: a leader's commit falls", lsn, self.commit_lsn)
        self.commit_lsn = lsn
        self.world.told("commit", self.number, proposer.term, lsn)
        quorum = self.world.schedule.setting.acceptors // 2 + 1
        self.world.truth.commit(proposer.term, proposer.start_lsn, lsn, self.log, quorum)

    def _fetch(self, effect: FetchLog, life: int) -> None:
        proposer = self.proposer
        if proposer is None or self.life != life:
            return
        cut = (self.number, effect.source) in self.world.network.cut
        fails = cut or self._dice.random() < self.world.network.drop
        source = self.world.acceptors[effect.source]
        wal = b"" if fails else source.log(effect.begin_lsn, effect.end_lsn, effect.term)
        if not wal:
            self._do(proposer.fetch_failed(effect.acceptor, effect.begin_lsn))
            return
        begin = effect.begin_lsn - self.world.truth.start_lsn
        ours = self.log[begin : begin + len(wal)]
        require(wal == ours, "9 bytes: read back is another log", effect)
        self._do(proposer.fetched(effect.acceptor, effect.begin_lsn, wal))

    # -- work --

    def write(self, transactions: int) -> None:
        """Append so many transactions as soon as the proposer can."""
        self._wanted += transactions
        self._append()

    @property
    def is_fully_committed(self) -> bool:
        """Return whether all transactions are appended and committed."""
        proposer = self.proposer
        return (
            proposer is not None
            and bool(self.log or proposer.start_lsn)
            and not self._wanted
            and not self._torn
            and proposer.commit_lsn == proposer.end_lsn
        )

    def _append(self) -> None:
        proposer = self.proposer
        while proposer is not None and self._wanted and proposer.phase is ProposerPhase.ELECTED:
            if self._records is None:
                self._records = self.world.records(proposer.end_lsn, self.life, self._dice)
            wal, self._torn = self._torn or self._records.next(), b""
            if len(wal) > proposer.room:
                self.world.struck["waited for room"] += 1
                self._torn = wal
                return
            self.world.struck["had room"] += 1
            if len(wal) > 1 and self._dice.random() < 0.1:
                cut = self._dice.randrange(1, len(wal))
                wal, self._torn = wal[:cut], wal[cut:]
            else:
                self._wanted -= 1
            self.log += wal
            effects = proposer.append(wal)
            wanted, self._wanted = self._wanted, 0  # `_do` must not append in turn
            self._do(effects)
            self._wanted += wanted
            proposer = self.proposer
