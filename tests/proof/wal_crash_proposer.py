"""A proposer, and ten workers who transfer money between accounts; killed by `wal_crash`.

Run: ``wal_crash_proposer.py ORDERS`` (JSON). It says ``up``, waits for a line, campaigns, and says
``elected TERM X``; it reads what the log holds behind the place that it was told the balances of,
and goes on: ``try N`` before a transfer is appended, ``ok N LSN`` when a quorum has it. ``broken
TEXT`` and exit status 3: it leads no more.
"""

from __future__ import annotations

import functools
import os
import random
import sys

import anyio
import msgspec
from wal_bank import Transfer, payload_of, transfer, transfer_of
from wal_crash_faults import planted

from actors.doors.commands.console import set_up_logging
from actors.runtime.errors import ConnectionBroken, PenstockError
from actors.wal.dialling import dial, parse_addresses
from actors.wal.following import LogReader
from actors.wal.framing import START_LSN, RecordDecoder, encode, framed_bytes_max
from actors.wal.proposer import ProposerConfig
from actors.wal.proposing import LeadingProposer, ProposerTiming, propose

TIMING = ProposerTiming(connect_timeout_ms=5_000, retry_delay_ms_max=500)  # expires: it dials again
PAYLOAD_BYTES_MAX = 400
READ_TIMEOUT_S = 5.0  # expires: it reads from another one


class Orders(msgspec.Struct):
    """What a life is told."""

    addresses: str
    tenant: str
    timeline: str
    life: int
    seed: int
    workers: int
    pause_s: float
    """Of a worker between two transfers."""
    lsn: int
    balances: list[int]
    """At `lsn`."""
    fault: str = ""


def say(text: str) -> None:
    """At once: a kill may come next."""
    os.write(1, text.encode() + b"\n")


class Bank:
    """One life."""

    def __init__(self, orders: Orders, log: LeadingProposer) -> None:
        self._orders = orders
        self._log = log
        self._addresses = parse_addresses(orders.addresses)
        self._balances = orders.balances
        self._dice = random.Random(orders.seed)
        self._attempts = 0
        self._appended = 0

    async def run(self) -> None:
        """Until it is broken."""
        start_lsn = await self._log.elected()
        say(f"elected {self._log.core.term} {start_lsn}")
        await self._log.committed(start_lsn)
        await self._catch_up(start_lsn)
        async with anyio.create_task_group() as group:
            for _ in range(self._orders.workers):
                group.start_soon(self._work)

    async def _catch_up(self, end_lsn: int) -> None:
        """Takes over what stands between the place that is known and the term's begin."""
        number = 0
        while self._orders.lsn < end_lsn:
            try:
                with anyio.fail_after(READ_TIMEOUT_S):
                    await self._read(number % len(self._addresses), end_lsn)
            except (PenstockError, TimeoutError):
                number += 1
                await anyio.sleep(0.05)
                await self._log.elected()  # or broken meanwhile

    async def _read(self, number: int, end_lsn: int) -> None:
        orders = self._orders
        connection = await dial(
            self._addresses[number],
            orders.tenant,
            orders.timeline,
            timeout_ms=2_000,  # expires: it reads from another one
        )
        reader = LogReader(connection, orders.lsn)
        try:
            await reader.start(self._log.core.term)
            decoder = RecordDecoder(orders.lsn)
            while orders.lsn < end_lsn:
                for framed in decoder.feed(await reader.next()):
                    found = transfer_of(framed.payload)
                    self._balances[found.source] = found.source_balance
                    self._balances[found.target] = found.target_balance
                    orders.lsn = framed.end_lsn
        finally:
            reader.abort()

    async def _work(self) -> None:
        while True:
            attempt = self._attempts
            self._attempts += 1
            say(f"try {attempt}")
            lsn = await self._log.append_at(
                functools.partial(self._encoded, attempt), framed_bytes_max(PAYLOAD_BYTES_MAX)
            )
            say(f"ok {attempt} {lsn}")
            await anyio.sleep(self._orders.pause_s)

    def _encoded(self, attempt: int, lsn: int) -> bytes:
        """In the log's order, whoever was first."""
        made: Transfer = transfer(
            self._balances,
            self._dice,
            life=self._orders.life,
            attempt=attempt,
            order=self._appended,
            term=self._log.core.term,
        )
        self._appended += 1
        return encode(payload_of(made), lsn)


async def live(orders: Orders) -> None:
    """One life."""
    config = ProposerConfig(orders.tenant, orders.timeline, START_LSN)
    async with propose(config, parse_addresses(orders.addresses), timing=TIMING) as log:
        await Bank(orders, log).run()


def main() -> int:
    """The exit status."""
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    set_up_logging("error")
    say("up")
    if not sys.stdin.readline():
        return 0
    reason = ""
    with planted(orders.fault):
        try:
            anyio.run(live, orders)
        except* ConnectionBroken as errors:
            reason = str(_first(errors))
    say(f"broken {reason}")
    return 3


def _first(errors: BaseExceptionGroup[ConnectionBroken]) -> BaseException:
    """All tell the same."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
