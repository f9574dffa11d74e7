"""Kills acceptors and proposers with SIGKILL while a bank's workers append to a log, and checks.

Run: ``python tests/proof/wal_crash.py [--kills 200] [--seed 1] [--fault NAME] [--faults]``.

Three acceptors (`penstock wal serve`, which know one another as peers) and a proposer
(`wal_crash_proposer.py`: ten workers, each record a transfer) are separate processes. A seeded
dice says after how many acknowledged transfers, and how much later, whom the next strike hits: one
acceptor, two, all, the proposer, it and acceptors; or two acceptors are stopped (SIGSTOP) for a
moment before all are killed, and the third, which was faster, stays away. One acceptor may stay
away until the next strike, too.
At times two proposers campaign at the same moment; at times the leader is stopped, another is
elected, and the old one goes on. After each strike, while the load goes on:

1. what is committed is read back from an acceptor: every acknowledged transfer is there, once, in
   its place, nothing is there that nobody wrote, the sum holds at each record (`wal_bank`);
2. nobody else led the term of a leader; all say the same of where a term began, and records stand
   within their terms;
3. the files of any two acceptors are equal up to the lower of what both call committed.

In the end all acceptors come up, must come to the same end, and each is read from the log's begin.
A line a strike, then a summary as JSON. Exit status 1 when anything differs. ``--faults`` plants
one fault after another (`wal_crash_faults`) and wants each to be found.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup
from wal_bank import Leaders, Ledger, Wrong
from wal_crash_processes import (
    BYTES_A_LOOK,
    DIAL_TIMEOUT_MS,
    TENANT,
    TIMELINE,
    AcceptorProcess,
    News,
    ProposerProcess,
    Stuck,
)
from wal_crash_proposer import Orders

from actors.runtime.errors import PenstockError
from actors.wal.dialling import dial, parse_addresses
from actors.wal.following import LogReader
from actors.wal.framing import START_LSN, RecordDecoder
from actors.wal.lsn import lsn_text

ACCEPTOR_FAULTS = (
    "writes_stay_in_the_process",
    "votes_are_not_kept",
    "two_grants_in_a_term",
)
PROPOSER_FAULTS = ("one_is_a_quorum",)
WORKERS = 10
LOAD_MAX = 60
"""Acknowledged transfers from one strike to the next, at most."""
PAUSE_S = 0.03
STOP_S = 0.1
STUCK_S = 600
STRIKES = {
    "acceptor": 6,
    "two acceptors": 3,
    "all acceptors": 2,
    "proposer": 5,
    "proposer and acceptor": 3,
    "everything": 1,
    "deposed": 2,
    "proposer behind a stop": 2,
}
RACE_SHARE = 0.5
"""Of the times when a proposer is needed, two campaign at once."""


class Campaign:
    """One."""

    def __init__(
        self, folder: Path, seed: int, fault: str, pause_s: float, group: TaskGroup
    ) -> None:
        self._pause_s = pause_s
        self._dice = random.Random(seed)
        in_acceptors = fault if fault in ACCEPTOR_FAULTS else ""
        self._proposer_fault = fault if fault in PROPOSER_FAULTS else ""
        self.acceptors = [AcceptorProcess(folder, n, in_acceptors) for n in (1, 2, 3)]
        for one, other in itertools.permutations(self.acceptors, 2):
            one.peers.append(other.address)
        self._lives: list[ProposerProcess] = []
        self._leader: ProposerProcess | None = None
        self._ledger = Ledger(START_LSN)
        self._leaders = Leaders()
        self._equal: Counter[tuple[int, int]] = Counter()
        """Up to where two acceptors' files were compared."""
        self.kills: Counter[str] = Counter()
        self.strikes: Counter[str] = Counter()
        self._news = News()
        self._elections: deque[ProposerProcess] = deque()
        """Not looked at yet."""
        self._group = group

    # -- processes --------------------------------------------------------------------------------

    @property
    def leader(self) -> ProposerProcess:
        """The one that campaigned last and was elected."""
        assert self._leader is not None
        return self._leader

    async def start(self) -> None:
        """All of them."""
        await _start(self.acceptors)
        await self._elect()

    async def stop(self) -> None:
        """The rest of them."""
        for acceptor in self.acceptors:
            with contextlib.suppress(Stuck):
                await acceptor.kill()
        for life in self._lives:
            await life.kill()

    async def _elect(self) -> None:
        """Starts proposers until one of them leads, alone."""
        led: list[ProposerProcess] = []
        while not led:
            count = 2 if self._dice.random() < RACE_SHARE else 1
            racing = [await self._made() for _ in range(count)]
            for each in racing:
                await each.campaign()
            led = await self._raced(racing)
        self._leader = led[0]

    async def _raced(self, racing: list[ProposerProcess]) -> list[ProposerProcess]:
        """Who is left of them."""
        await self._until(
            lambda: any(each.acknowledged for each in racing) or all(each.over for each in racing),
            "nobody is elected",
        )
        # Of two one lost the election, or is deposed by the other.
        await self._until(
            lambda: sum(not each.over for each in racing) <= 1, "two go on beside each other"
        )
        for each in racing:
            if each.over and not each.broken:
                raise Wrong(f"life {each.orders.life} died by itself")
        return [each for each in racing if not each.over]

    async def _made(self) -> ProposerProcess:
        orders = Orders(
            ",".join(each.address for each in self.acceptors),
            TENANT,
            TIMELINE,
            len(self._lives),
            self._dice.randrange(1 << 30),
            WORKERS,
            self._pause_s,
            self._ledger.lsn,
            list(self._ledger.balances),
            self._proposer_fault,
        )
        process = ProposerProcess(orders, self._news, self._elections)
        self._lives.append(process)
        await process.start(self._group)
        return process

    async def _until(self, reached: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(STUCK_S):
            while not reached():
                await self._news.wait()
                self._check_leaders()
            return
        said = "; ".join(
            f"life {each.orders.life}: term {each.term}, {len(each.acknowledged)} of"
            f" {each.attempts}, {each.broken}"
            for each in self._lives
            if not each.over
        )
        raise Stuck(f"{what} in {STUCK_S} s ({said})")

    # -- strikes ----------------------------------------------------------------------------------

    def drawn(self) -> str:
        """Whom the next strike hits."""
        return self._dice.choices([*STRIKES], [*STRIKES.values()])[0]

    async def strike(self, number: int, kind: str) -> None:
        """Load, a kill, and all checks."""
        await self._load(self._dice.randrange(1, LOAD_MAX))
        await anyio.sleep(self._dice.random() * PAUSE_S)
        self.strikes[kind] += 1
        victims = self._dice.sample(self.acceptors, 3)
        hit = {
            "acceptor": victims[:1],
            "two acceptors": victims[:2],
            "all acceptors": victims,
            "proposer": [],
            "proposer and acceptor": victims[:1],
            "everything": victims,
            "deposed": victims[:1],
            "proposer behind a stop": victims,
        }[kind]
        old = self.leader
        stopped = victims[1:] if kind == "proposer behind a stop" else []
        for each in stopped:
            each.pause()
        if stopped:
            await anyio.sleep(self._dice.random() * STOP_S)
        if kind == "deposed":
            old.pause()
        elif kind.startswith("proposer") or kind == "everything":
            self.kills["proposer"] += await old.kill()
        for each in hit:
            self.kills["acceptor"] += await each.kill()
        if stopped:
            await _start(stopped)  # without the one that was faster
        else:
            await self._restore(may_stay_away=len(hit) == 1)
        if kind == "deposed":
            await self._elect()
            old.go_on()
            await self._until(lambda: old.over, "who was deposed goes on")
        elif old.over:
            await self._elect()
        await self._load(self._dice.randrange(1, 10))
        await self.check()
        away = [str(each.node_id) for each in self.acceptors if not each.is_up]
        print(
            f"{number}: {kind}{f', {away[0]} stays away' if away else ''}; term"
            f" {self.leader.term}, {len(self._ledger.places)} transfers to"
            f" {lsn_text(self._ledger.lsn)}",
            flush=True,
        )

    async def _restore(self, *, may_stay_away: bool) -> None:
        """Acceptors come back, but perhaps the one that was hit: two are a majority."""
        down = [each for each in self.acceptors if not each.is_up]
        self._dice.shuffle(down)
        if may_stay_away and self._dice.random() < 0.5:
            down = down[1:] if len(down) > 1 else []
        await _start(down)

    async def _load(self, count: int) -> None:
        """Until so many more transfers are acknowledged."""
        while not await self._loaded(self.leader, count):
            await self._elect()

    async def _loaded(self, leader: ProposerProcess, count: int) -> bool:
        """Whether it led for so long."""
        wanted = len(leader.acknowledged) + count
        await self._until(
            lambda: len(leader.acknowledged) >= wanted or leader.over, "nothing is acknowledged"
        )
        if leader.over and not leader.broken:
            raise Wrong(f"life {leader.orders.life} died by itself")
        return not leader.over

    # -- checks -----------------------------------------------------------------------------------

    async def check(self) -> None:
        """Raises `Wrong`."""
        known = {
            (life.orders.life, attempt): lsn
            for life in self._lives
            for attempt, lsn in life.unchecked.items()
        }
        self._check_leaders()
        source = self._dice.choice([each for each in self.acceptors if each.is_up])
        await self._read(source, self._ledger, max(known.values(), default=0))
        self._ledger.check_acknowledged(known)
        self._ledger.check_attempted(self._attempts())
        for each in self.acceptors:
            self._leaders.check_history(each.control().history, f"acceptor {each.node_id}")
        self._ledger.check_history(source.control().history)
        await self._compare()
        for life in self._lives:
            life.checked(self._ledger.lsn)

    def _check_leaders(self) -> None:
        while self._elections:
            life = self._elections.popleft()
            self._leaders.elected(life.orders.life, life.term, life.start_lsn)
            if life.start_lsn < life.orders.lsn:
                raise Wrong(
                    f"life {life.orders.life} begins at {lsn_text(life.start_lsn)}, and all up to"
                    f" {lsn_text(life.orders.lsn)} was committed"
                )

    def _attempts(self) -> list[int]:
        return [life.attempts for life in self._lives]

    async def _read(self, source: AcceptorProcess, ledger: Ledger, target: int) -> None:
        """Takes over what is committed, up to `target` at least."""
        try:
            with anyio.fail_after(STUCK_S):
                [address] = parse_addresses(source.address)
                connection = await dial(address, TENANT, TIMELINE, timeout_ms=DIAL_TIMEOUT_MS)
                reader = LogReader(connection, ledger.lsn)
                try:
                    await reader.start()
                    decoder = RecordDecoder(ledger.lsn)
                    while ledger.lsn < target:
                        for framed in decoder.feed(await reader.next()):
                            ledger.apply(framed.payload, framed.end_lsn)
                finally:
                    reader.abort()
        except TimeoutError:
            raise Stuck(
                f"acceptor {source.node_id} has given the log up to {lsn_text(ledger.lsn)} and not"
                f" to {lsn_text(target)} in {STUCK_S} s"
            ) from None

    async def _compare(self) -> None:
        """The files, from where they were compared before."""
        commits = {each.node_id: await each.commit_lsn() for each in self.acceptors}
        for one, other in itertools.combinations(self.acceptors, 2):
            pair = one.node_id, other.node_id
            end = min(commits[number] for number in pair)
            while (begin := max(self._equal[pair], START_LSN)) < end:
                size = min(end - begin, BYTES_A_LOOK)
                if one.bytes_at(begin, size) != other.bytes_at(begin, size):
                    raise Wrong(
                        f"acceptors {pair} differ between {lsn_text(begin)} and"
                        f" {lsn_text(begin + size)}, and both call {lsn_text(end)} committed"
                    )
                self._equal[pair] = begin + size

    async def finish(self) -> dict[str, object]:
        """Everybody comes up and must have everything; a summary."""
        await _start([each for each in self.acceptors if not each.is_up])
        await self._load(LOAD_MAX)
        await self.leader.kill()
        await self._elect()  # what the last one left is brought to a majority
        await self.check()
        self._equal.clear()
        for each in self.acceptors:
            ledger = Ledger(START_LSN)
            await self._read(each, ledger, self._ledger.lsn)
            for life in self._lives:
                acknowledged = {(life.orders.life, n): end for n, end in life.acknowledged.items()}
                ledger.check_acknowledged(acknowledged)
            ledger.check_attempted(self._attempts())
        await self._compare()
        return self._summary()

    def _summary(self) -> dict[str, object]:
        acknowledged = sum(len(life.acknowledged) for life in self._lives)
        unheard = [key for key in self._ledger.places if not self._heard(*key)]
        reasons = Counter(re.sub(r"\d+", "N", life.broken) for life in self._lives if life.broken)
        return {
            "strikes": dict(self.strikes),
            "killed": dict(self.kills),
            "acknowledged": acknowledged,
            "unknown": sum(self._attempts()) - acknowledged,
            "unknown and in the log": len(unheard),
            "elections": self._leaders.count,
            "lives": len(self._lives),
            "ended by themselves": dict(reasons),
            "log bytes": self._ledger.lsn - START_LSN,
        }

    def _heard(self, life: int, attempt: int) -> bool:
        return attempt in self._lives[life].acknowledged


async def _start(acceptors: list[AcceptorProcess]) -> None:
    try:
        async with anyio.create_task_group() as group:
            for each in acceptors:
                group.start_soon(each.start)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


@asynccontextmanager
async def campaigning(seed: int, fault: str, pause_s: float) -> AsyncIterator[Campaign]:
    """One, whose processes end with the block."""
    failed: Exception | None = None
    with tempfile.TemporaryDirectory() as folder:
        async with anyio.create_task_group() as group:
            made = Campaign(Path(folder), seed, fault, pause_s, group)
            try:
                yield made
            except Exception as error:  # noqa: BLE001 - the block's own: the group would wrap it
                failed = error
            finally:
                await made.stop()
    if failed is not None:
        raise failed


async def run(
    kills: int, strikes: Sequence[str], seed: int, fault: str, pause_s: float
) -> dict[str, object]:
    """A whole campaign. Raises `Wrong`, `ViewStuck`."""
    began = time.perf_counter()
    async with campaigning(seed, fault, pause_s) as campaign:
        await campaign.start()
        for number in range(1, kills + 1):
            kind = strikes[number - 1] if strikes else campaign.drawn()
            await campaign.strike(number, kind)
        summary = await campaign.finish()
    elapsed_s = time.perf_counter() - began
    return summary | {"seconds": round(elapsed_s, 1)}


def find(fault: str, kills: int, seed: int) -> str:
    """What a planted fault made; empty: it was not found. A campaign that fails otherwise has not
    found it."""
    command = [sys.executable, __file__, "--kills", str(kills), "--seed", str(seed)]
    done = subprocess.run([*command, "--fault", fault], capture_output=True, text=True, check=False)
    return next((line for line in done.stderr.splitlines() if line.startswith("Wrong: ")), "")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strikes", help="instead of --kills: whom, one after another")
    parser.add_argument("--pause-ms", type=float, default=0, help="of a worker after a transfer")
    parser.add_argument("--fault", choices=[*ACCEPTOR_FAULTS, *PROPOSER_FAULTS], default="")
    parser.add_argument("--faults", action="store_true")
    given = parser.parse_args()
    if given.faults:
        missed = 0
        for fault in (*ACCEPTOR_FAULTS, *PROPOSER_FAULTS):
            found = find(fault, given.kills, given.seed)
            missed += not found
            print(f"{fault}: {found or 'NOT FOUND'}", flush=True)
        return int(missed > 0)
    try:
        strikes = given.strikes.split(",") if given.strikes else []
        kills = len(strikes) or given.kills
        pause_s = given.pause_ms / 1000
        summary = anyio.run(run, kills, strikes, given.seed, given.fault, pause_s)
    except (Wrong, Stuck, PenstockError, msgspec.DecodeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(summary))
    print(f"{kills} strikes: nothing was lost, nothing differs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
