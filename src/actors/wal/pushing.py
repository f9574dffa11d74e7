"""Appends lines of changes to a committed log: the work of ``penstock wal push``.

A line is a JSON object ``{"table": "orders", "row": {...}, "diff": 1}`` (`diff` defaults to 1) and
becomes one record of the log (`framing`), as compact JSON. Lines are appended in batches: the next
batch is appended once a quorum has the previous one on disk.

A run resumes from a `LinesPushed`: the number of acknowledged lines, and the LSN after them. Any
number of complete records of the following batch may already be in the log. So the run reads the
records from that LSN up to the start of its own term, and skips as many lines. Every line is in the
log once, provided that no other writer has appended in between.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Final

import anyio
import msgspec

from actors.runtime.errors import ConnectionBroken, InvalidUsage, WalRefused
from actors.wal.dialling import AcceptorAddress, dial
from actors.wal.following import LogReader
from actors.wal.framing import PAYLOAD_BYTES_MAX, RecordDecoder, encode, framed_bytes_max
from actors.wal.lsn import lsn_text, parse_lsn
from actors.wal.proposing import LeadingProposer

BATCH_BYTES: Final = 256 * 1024
"""Approximate number of payload bytes in one append."""
LINE_BYTES_MAX: Final = PAYLOAD_BYTES_MAX
PAUSE: Final = b""
"""Marks a pause between lines: append what has arrived, because more may take a while."""
READ_TIMEOUT_S: Final = 30.0
"""Seconds within which one acceptor must send all records to be skipped."""


class PushedChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of input."""

    table: str
    row: dict[str, Any]
    diff: int = 1


class LinesPushed(msgspec.Struct, frozen=True):
    """The first `lines` lines are in the log before `lsn`, on the disks of a quorum."""

    lines: int
    lsn: int


def pushed_text(done: LinesPushed) -> str:
    """Return the acknowledgement as ``LINES@X/X``."""
    return f"{done.lines}@{lsn_text(done.lsn)}"


def parse_pushed(text: str) -> LinesPushed:
    """Parse the text that `pushed_text` returned. Raise `InvalidUsage`."""
    lines, sign, lsn = text.partition("@")
    if not sign or not lines.isdecimal():
        raise InvalidUsage(f"invalid position {text!r}: expected a form like 1000@16/B374D848")
    return LinesPushed(int(lines), parse_lsn(lsn))


def payload_of(line: bytes, number: int) -> bytes:
    """Return the record for a line. Raise `InvalidUsage` with the line's number, counted from 1."""
    try:
        change = msgspec.json.decode(line, type=PushedChange)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(
            f"invalid change in line {number}: {error}; expected a form like"
            ' {"table": "orders", "row": {"id": 1}, "diff": 1}'
        ) from None
    if not change.table or not change.diff:
        raise InvalidUsage(
            f"invalid change in line {number}: expected a table and a diff other than 0"
        )
    payload = msgspec.json.encode(change)
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidUsage(
            f"line {number} is too long: {len(payload)} bytes (limit {PAYLOAD_BYTES_MAX})"
        )
    return payload


async def push(
    log: LeadingProposer,
    lines: Iterable[bytes],
    addresses: Sequence[AcceptorAddress],
    *,
    resume: LinesPushed | None = None,
    note: Callable[[LinesPushed], None] = lambda _: None,
    token: str = "",
    tls: ssl.SSLContext | None = None,
) -> LinesPushed:
    """Append all lines after those that are already in the log. Empty lines are skipped.

    `note` is called after each committed batch. Raise `InvalidUsage` for a malformed line (those
    before it are in the log), `ConnectionBroken`, `WalRefused` or `CorruptData`.
    """
    start_lsn = await log.elected()
    done = resume or LinesPushed(0, start_lsn)
    if done.lsn > start_lsn:
        raise InvalidUsage(
            f"the log ends at {lsn_text(start_lsn)}, before {lsn_text(done.lsn)}: wrong log"
        )
    payloads = _payloads(lines, done.lines)
    batches = _batches(payloads)
    if done.lsn < start_lsn:
        # An earlier run appended these, and ended before they were acknowledged.
        held = await _read_unacknowledged(log, done.lsn, start_lsn, addresses, token, tls)
        for number, payload in enumerate(held, done.lines + 1):
            ours = await anyio.to_thread.run_sync(_next, payloads, abandon_on_cancel=True)
            if ours != payload:
                raise WalRefused(
                    f"the record after {lsn_text(done.lsn)} is not line {number}:"
                    " another writer has appended, or the input is not the same"
                )
        done = LinesPushed(done.lines + len(held), start_lsn)
        await log.committed(start_lsn)
        note(done)
    system_id = log.core.config.system_id
    # Run it in a thread: reading the input may block, and heartbeats must continue.
    while batch := await anyio.to_thread.run_sync(_next_batch, batches, abandon_on_cancel=True):
        lsn = await log.append_at(
            functools.partial(_framed, batch, system_id),
            sum(framed_bytes_max(len(payload)) for payload in batch),
        )
        done = LinesPushed(done.lines + len(batch), lsn)
        note(done)
    return done


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file or pipe, and `PAUSE` where no more have arrived yet."""
    rest = b""
    while piece := file.read1(BATCH_BYTES):  # type: ignore[attr-defined]
        *whole, rest = (rest + piece).split(b"\n")
        # Bound the memory: input without line ends would be kept entirely.
        if len(rest) > LINE_BYTES_MAX:
            raise InvalidUsage(f"line too long: more than {LINE_BYTES_MAX} bytes")
        yield from (line + b"\n" for line in whole)
        yield PAUSE
    if rest:
        yield rest


def _payloads(lines: Iterable[bytes], skipped: int) -> Iterator[bytes]:
    """Yield the payloads after the first `skipped`, and `PAUSE` where there is one."""
    count = number = 0
    for line in lines:
        number += line != PAUSE
        if line == PAUSE:
            yield PAUSE
        elif line.strip():
            count += 1
            if count > skipped:
                yield payload_of(line, number)


def _next(payloads: Iterator[bytes]) -> bytes | None:
    """Return the next payload, or None at the end."""
    return next((payload for payload in payloads if payload != PAUSE), None)


def _batches(payloads: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield batches of limited size."""
    batch: list[bytes] = []
    size = 0
    try:
        for payload in payloads:
            if payload != PAUSE:
                batch.append(payload)
                size += len(payload)
            if batch and (payload == PAUSE or size >= BATCH_BYTES):
                yield batch
                batch, size = [], 0
    # A malformed line does not keep the lines before it from being appended.
    except InvalidUsage:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _next_batch(batches: Iterator[list[bytes]]) -> list[bytes]:
    """Return the next batch, which is empty at the end."""
    return next(batches, [])


def _framed(batch: list[bytes], system_id: int, lsn: int) -> bytes:
    out = bytearray()
    for payload in batch:
        out += encode(payload, lsn + len(out), system_id)
    return bytes(out)


async def _read_unacknowledged(
    log: LeadingProposer,
    begin_lsn: int,
    end_lsn: int,
    addresses: Sequence[AcceptorAddress],
    token: str,
    tls: ssl.SSLContext | None,
) -> list[bytes]:
    """Return the payloads of [begin_lsn, end_lsn), at most about a batch, from any acceptor that
    has all of them."""
    # Only then are they certain to stay in the log.
    await log.committed(end_lsn)
    config = log.core.config
    failures: list[str] = []
    for address in addresses:
        reader: LogReader | None = None
        try:
            with anyio.fail_after(READ_TIMEOUT_S):
                connection = await dial(
                    address, config.tenant, config.timeline, timeout_ms=5_000, token=token, tls=tls
                )
                reader = LogReader(connection, begin_lsn)
                # Read only in this term: under another leader the acceptor's log may be replaced.
                await reader.start(log.core.term)
                decoder = RecordDecoder(begin_lsn)
                found: list[bytes] = []
                while decoder.next_lsn < end_lsn:
                    found += [framed.payload for framed in decoder.feed(await reader.next())]
                return found
        except (ConnectionBroken, WalRefused, TimeoutError) as error:
            failures.append(str(error) or f"{address} sent nothing for {READ_TIMEOUT_S} s")
        finally:
            if reader is not None:
                reader.abort()
    raise ConnectionBroken(
        f"no acceptor could be read from {lsn_text(begin_lsn)} to {lsn_text(end_lsn)}:"
        f" {'; '.join(failures)}"
    )
