"""Critical readers: holds with an owner, who proves it with a token.

A hold is durable, has a name, never expires, and holds the since alone, no parts. Whoever knows
its name may move it. A *critical reader* is a hold that has a token beside it, of bytes that mean
nothing here (an epoch, a nonce): it moves only by compare-and-set on that token, which gives it a
new one at will. So a process that took over is never disturbed by the one before it: whoever
comes with an old token is `Fenced`, and is told so before anything has changed. Losing the
token pins the since for ever; the state names who holds it.

Rules
- ``since(shard) <= since(critical reader)``, as for every hold; it never goes back.
- A token changes by `downgraded` alone; plain `set_hold` and `drop_hold` refuse a critical reader.
- A call whose answer was lost finds its own mark and answers as it would have (`shard.is_done`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from actors.errors import Fenced, InvalidUsage
from actors.persist.change import Change, Documents, Outcome
from actors.persist.machine import Machine
from actors.persist.shard import ShardState, is_done, marked, with_hold
from actors.progress import ShardId, Time

TOKEN_BYTES_MAX: Final = 64
R = TypeVar("R")


class CriticalReader(msgspec.Struct, frozen=True):
    """A critical reader as it is: the since that it holds, and whose it is."""

    name: str
    since: Time
    token: bytes


def critical_reader(state: ShardState, name: str) -> CriticalReader | None:
    """The critical reader of that name; None: there is none, or it is a plain hold."""
    token = state.tokens.get(name)
    return None if token is None else CriticalReader(name, state.holds[name], token)


def opened(state: ShardState, name: str, token: bytes) -> ShardState:
    """With the reader, at the shard's since; as it is if it is there, whoever's it is. Raises
    `InvalidUsage` for a name that is a plain hold's, and a token that is none."""
    _check_token(name, token)
    if name in state.tokens:
        return state
    if name in state.holds:
        raise InvalidUsage(f"shard {state.id}: {name} is a hold without a token; take another name")
    taken = with_hold(state, name, state.since)
    return replace(taken, tokens={**taken.tokens, name: token})


def downgraded(
    state: ShardState, name: str, expected: bytes, token: bytes, since: Time
) -> ShardState:
    """Moved to `since`, if that is further, with the new token. Raises `Fenced`."""
    _check_token(name, token)
    _check_owner(state, name, expected)
    since = max(since, state.holds[name])
    holds = {**state.holds, name: since}
    return replace(state, holds=holds, tokens={**state.tokens, name: token})


def closed(state: ShardState, name: str, expected: bytes) -> ShardState:
    """Without the reader; no error if there is none. Raises `Fenced`."""
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
        raise Fenced(f"shard {state.id}: there is no critical reader {name}", determinate=True)
    if found != expected:
        raise Fenced(
            f"shard {state.id}: critical reader {name} has the token {found.hex()} now, not"
            f" {expected.hex()}: another process took it over; stop, or open it again",
            determinate=True,
        )


class CriticalReaders:
    """Those of all shards, durable with each call."""

    def __init__(self, machine: Machine, writer: str, calls: Iterator[int]) -> None:
        self._machine = machine
        self._writer = writer
        self._calls = calls

    async def open(self, shard: ShardId, name: str, token: bytes) -> CriticalReader:
        """Takes the name, at the shard's since, or tells who has it: the token in the answer says
        whose it is. Raises `InvalidUsage`, `UnknownObject`, `StorageError`."""

        def change(documents: Documents) -> Outcome[CriticalReader]:
            state = documents.shard(shard)
            then = opened(state, name, token)
            found = critical_reader(then, name)
            assert found is not None
            return Outcome(found, {} if then is state else {shard: then})

        return await self._machine.change([shard], change)

    async def downgrade(
        self, shard: ShardId, name: str, expected: bytes, token: bytes, since: Time
    ) -> CriticalReader:
        """Moves the reader up to `since` and gives it a new token, or the same, provided that it
        has the `expected` one. Raises `Fenced`, `InvalidUsage`, `UnknownObject`,
        `StorageError`."""
        call = next(self._calls)

        def change(documents: Documents) -> Outcome[CriticalReader]:
            state = documents.shard(shard)
            found = critical_reader(state, name)
            if found is not None and is_done(state, self._writer, call):
                return Outcome(found)
            then = downgraded(state, name, expected, token, since)
            answer = CriticalReader(name, then.holds[name], token)
            return Outcome(answer, {shard: marked(then, self._writer, call)})

        return await self._changed(shard, change)

    async def close(self, shard: ShardId, name: str, expected: bytes) -> None:
        """Gives the reader up for good. Raises as `downgrade` does."""

        def change(documents: Documents) -> Outcome[None]:
            state = documents.shard(shard)
            then = closed(state, name, expected)
            return Outcome(None) if then is state else Outcome(None, {shard: then})

        await self._changed(shard, change)

    async def _changed(self, shard: ShardId, change: Change[R]) -> R:
        """An owner is believed to be fenced only by what was just read."""
        try:
            return await self._machine.change([shard], change)
        except Fenced as error:
            if not error.determinate:  # read within the call; an attempt of ours may be behind it
                raise
            await self._machine.refresh(shard)
            return await self._machine.change([shard], change)
