"""Critical readers: durable holds that a fencing token protects.

A hold is durable, has a name, never expires, and holds the since alone, no parts. Any process that
knows its name may move it. A *critical reader* is a hold with a token of opaque bytes (an epoch, a
nonce): it moves only by compare-and-set on the token. So a process that took over cannot be
disturbed by its predecessor, whose old token is `WriterFenced`. Losing the token pins the since for
ever; the state names the holder.

Rules
- ``since(shard) <= since(critical reader)``, as for every hold; it never goes back.
- A token changes by `downgraded` alone; plain `set_hold` and `drop_hold` refuse a critical reader.
- A retry whose first answer was lost finds its idempotency token (`shard.is_done`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from actors.errors import InvalidUsage, WriterFenced
from actors.persist.change import Change, ChangeOutcome, ShardDocuments
from actors.persist.machine import ShardMachine
from actors.persist.shard import ShardState, is_applied, marked, with_hold
from actors.progress import ShardId, Time

TOKEN_BYTES_MAX: Final = 64
R = TypeVar("R")


class CriticalReader(msgspec.Struct, frozen=True):
    """A critical reader: the since that it holds, and its token."""

    name: str
    since: Time
    token: bytes


def critical_reader(state: ShardState, name: str) -> CriticalReader | None:
    """Return the critical reader of that name; None: there is none, or it is a plain hold."""
    token = state.tokens.get(name)
    return None if token is None else CriticalReader(name, state.holds[name], token)


def opened(state: ShardState, name: str, token: bytes) -> ShardState:
    """Return the state with the reader, at the shard's since; unchanged if the reader exists.

    Raises `InvalidUsage` for the name of a plain hold, or a token of a wrong length.
    """
    _check_token(name, token)
    # Opened before, perhaps by another process: the caller compares the token.
    if name in state.tokens:
        return state
    if name in state.holds:
        raise InvalidUsage(f"shard {state.id}: {name} is a hold without a token; take another name")
    taken = with_hold(state, name, state.since)
    return replace(taken, tokens={**taken.tokens, name: token})


def downgraded(
    state: ShardState, name: str, expected: bytes, token: bytes, since: Time
) -> ShardState:
    """Return the state with the reader moved to `since`, if that is later, and the new token.
    Raises `WriterFenced`."""
    _check_token(name, token)
    _check_owner(state, name, expected)
    # A hold never goes back; the token changes all the same.
    since = max(since, state.holds[name])
    holds = {**state.holds, name: since}
    return replace(state, holds=holds, tokens={**state.tokens, name: token})


def closed(state: ShardState, name: str, expected: bytes) -> ShardState:
    """Return the state without the reader; no error if there is none. Raises `WriterFenced`."""
    if name not in state.tokens:
        return state
    _check_owner(state, name, expected)
    holds = {holder: since for holder, since in state.holds.items() if holder != name}
    tokens = {holder: token for holder, token in state.tokens.items() if holder != name}
    return replace(state, holds=holds, tokens=tokens)


def _check_token(name: str, token: bytes) -> None:
    if not 0 < len(token) <= TOKEN_BYTES_MAX:
        raise InvalidUsage(
            f"critical reader {name}: a token has 1 to {TOKEN_BYTES_MAX} bytes, not {len(token)}"
        )


def _check_owner(state: ShardState, name: str, expected: bytes) -> None:
    found = state.tokens.get(name)
    if found is None:
        raise WriterFenced(
            f"shard {state.id}: there is no critical reader {name}", determinate=True
        )
    if found != expected:
        raise WriterFenced(
            f"shard {state.id}: critical reader {name} has the token {found.hex()} now, not"
            f" {expected.hex()}: another process took it over; stop, or open it again",
            determinate=True,
        )


class CriticalReaders:
    """Critical readers of all shards; each call is durable."""

    def __init__(self, machine: ShardMachine, writer: str, calls: Iterator[int]) -> None:
        self._machine = machine
        self._writer = writer
        self._calls = calls

    async def open(self, shard: ShardId, name: str, token: bytes) -> CriticalReader:
        """Open the reader at the shard's since, or return the existing one, whose token names its
        owner. Raises `InvalidUsage`, `UnknownObject`, `StorageError`."""

        def change(documents: ShardDocuments) -> ChangeOutcome[CriticalReader]:
            state = documents.shard(shard)
            then = opened(state, name, token)
            found = critical_reader(then, name)
            assert found is not None
            return ChangeOutcome(found, {} if then is state else {shard: then})

        return await self._machine.change([shard], change)

    async def downgrade(
        self, shard: ShardId, name: str, expected: bytes, token: bytes, since: Time
    ) -> CriticalReader:
        """Advance the reader to `since` and set its new token, if its token is `expected`.

        Raises `WriterFenced`, `InvalidUsage`, `UnknownObject`, `StorageError`.
        """
        call = next(self._calls)

        def change(documents: ShardDocuments) -> ChangeOutcome[CriticalReader]:
            state = documents.shard(shard)
            found = critical_reader(state, name)
            # Before the token is compared: an attempt of ours may have changed it already.
            if found is not None and is_applied(state, self._writer, call):
                return ChangeOutcome(found)
            then = downgraded(state, name, expected, token, since)
            answer = CriticalReader(name, then.holds[name], token)
            return ChangeOutcome(answer, {shard: marked(then, self._writer, call)})

        return await self._changed(shard, change)

    async def close(self, shard: ShardId, name: str, expected: bytes) -> None:
        """Drop the reader and its hold. Raises as `downgrade` does."""

        def change(documents: ShardDocuments) -> ChangeOutcome[None]:
            state = documents.shard(shard)
            then = closed(state, name, expected)
            # A retry finds no reader, which is no error: done once.
            return ChangeOutcome(None) if then is state else ChangeOutcome(None, {shard: then})

        await self._changed(shard, change)

    async def _changed(self, shard: ShardId, change: Change[R]) -> R:
        """Apply the change; on `WriterFenced` read the shard again and retry once."""
        try:
            return await self._machine.change([shard], change)
        except WriterFenced as error:
            if not error.determinate:  # an earlier attempt of this call may have changed the token
                raise
            # The cached token may be older than the store's: only a fresh one proves the fencing.
            await self._machine.refresh(shard)
            return await self._machine.change([shard], change)
