"""Appends lines of changes to a committed log: the work of ``penstock wal push``.

A line is a JSON object ``{"table": "orders", "row": {...}, "diff": 1}`` (`diff` may be left out: 1)
and becomes one record of the log (`framing`), as compact JSON. Lines go in batches: the next one is
appended when a quorum has the one before on disk.

A run resumes from a `LinesPushed`: the number of acknowledged lines, and the LSN after them. Of the
batch that followed, any number of whole records may be in the log. So the run reads the records
from that LSN up to where its own term begins, and skips as many lines: every line is in the log
once, as long as no other writer has appended in between.
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
"""Bytes of payload in one append, about."""
LINE_BYTES_MAX: Final = PAYLOAD_BYTES_MAX
PAUSE: Final = b""
"""Stands between lines: what has come is to be appended, since more may take a while."""
READ_TIMEOUT_S: Final = 30.0
"""Seconds within which one acceptor must give all records to be skipped."""


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
    """Parse the text that `pushed_text` made. Raises `InvalidUsage`."""
    lines, sign, lsn = text.partition("@")
    if not sign or not lines.isdecimal():
        raise InvalidUsage(f"{text!r}: it should look like 1000@16/B374D848")
    return LinesPushed(int(lines), parse_lsn(lsn))


def payload_of(line: bytes, number: int) -> bytes:
    """Return the record of a line. Raises `InvalidUsage` with the line's number, from 1."""
    try:
        change = msgspec.json.decode(line, type=PushedChange)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidUsage(
            f"line {number} is no change: {error}; it should look like"
            ' {"table": "orders", "row": {"id": 1}, "diff": 1}'
        ) from None
    if not change.table or not change.diff:
        raise InvalidUsage(f"line {number} is no change: a table, and a diff that is not 0")
    payload = msgspec.json.encode(change)
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidUsage(f"line {number} has {len(payload)} bytes: at most {PAYLOAD_BYTES_MAX}")
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
    """Append all lines (empty ones are skipped) after those that are in the log already, and call
    `note` after each batch that is committed.

    Raises `InvalidUsage` for a malformed line (those before it are in the log), `ConnectionBroken`,
    `WalRefused`, `CorruptData`.
    """
    start_lsn = await log.elected()
    done = resume or LinesPushed(0, start_lsn)
    if done.lsn > start_lsn:
        raise InvalidUsage(
            f"the log ends at {lsn_text(start_lsn)}, before {lsn_text(done.lsn)}: it is another one"
        )
    payloads = _payloads(lines, done.lines)
    batches = _batches(payloads)
    if done.lsn < start_lsn:
        # An earlier run appended these, and was cut off before their acknowledgement.
        held = await _held(log, done.lsn, start_lsn, addresses, token, tls)
        for number, payload in enumerate(held, done.lines + 1):
            ours = await anyio.to_thread.run_sync(_next, payloads, abandon_on_cancel=True)
            if ours != payload:
                raise WalRefused(
                    f"behind {lsn_text(done.lsn)} stands a record that is not line {number}:"
                    " somebody else has appended, or the lines are not those of before"
                )
        done = LinesPushed(done.lines + len(held), start_lsn)
        await log.committed(start_lsn)
        note(done)
    system_id = log.core.config.system_id
    # In a thread: reading the input may block, and heartbeats must go on.
    while batch := await anyio.to_thread.run_sync(_next_batch, batches, abandon_on_cancel=True):
        lsn = await log.append_at(
            functools.partial(_framed, batch, system_id),
            sum(framed_bytes_max(len(payload)) for payload in batch),
        )
        done = LinesPushed(done.lines + len(batch), lsn)
        note(done)
    return done


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file or pipe; `PAUSE` where no more have come yet."""
    rest = b""
    while piece := file.read1(BATCH_BYTES):  # type: ignore[attr-defined]
        *whole, rest = (rest + piece).split(b"\n")
        # Bounds memory: input without line ends would be kept whole.
        if len(rest) > LINE_BYTES_MAX:
            raise InvalidUsage(f"a line is longer than {LINE_BYTES_MAX} bytes")
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
    """Return the next payload; None at the end."""
    return next((payload for payload in payloads if payload != PAUSE), None)


def _batches(payloads: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield batches, bounded by bytes."""
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
    # A malformed line does not keep those before it from being appended.
    except InvalidUsage:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _next_batch(batches: Iterator[list[bytes]]) -> list[bytes]:
    """Return the next batch; empty at the end."""
    return next(batches, [])


def _framed(batch: list[bytes], system_id: int, lsn: int) -> bytes:
    out = bytearray()
    for payload in batch:
        out += encode(payload, lsn + len(out), system_id)
    return bytes(out)


async def _held(
    log: LeadingProposer,
    begin_lsn: int,
    end_lsn: int,
    addresses: Sequence[AcceptorAddress],
    token: str,
    tls: ssl.SSLContext | None,
) -> list[bytes]:
    """Return the payloads of [begin_lsn, end_lsn), about a batch at most, from any acceptor that
    has them all."""
    # Only then they are sure to stay in the log.
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
                # In this term alone: under another leader the acceptor's log may be replaced.
                await reader.start(log.core.term)
                decoder = RecordDecoder(begin_lsn)
                found: list[bytes] = []
                while decoder.next_lsn < end_lsn:
                    found += [framed.payload for framed in decoder.feed(await reader.next())]
                return found
        except (ConnectionBroken, WalRefused, TimeoutError) as error:
            failures.append(str(error) or f"nothing from {address} for {READ_TIMEOUT_S} s")
        finally:
            if reader is not None:
                reader.abort()
    raise ConnectionBroken(
        f"the log from {lsn_text(begin_lsn)} to {lsn_text(end_lsn)} could be read from no acceptor:"
        f" {'; '.join(failures)}"
    )
