"""Makes changes of documents durable: compare-and-set in a loop, over several documents at once.

A change is a pure function of the current documents that returns their successors; it may run more
than once. The machine reads uncached documents, applies the change, sets all of it in one
compare-and-set, and only then updates the cache and wakes waiters. Documents are locked in the
order of their keys meanwhile, so that changes of one process do not fail each other.

- Mismatch: another process changed a document; all are read again and the change is applied anew.
  When none of ours moved, an `extra` key did: `SeqnoMismatch`.
- Stale cache: a set finds a stale document out; an answer without a set (a mismatch of uppers, an
  error) does not. Such an answer holds only for documents that were read within the call.
- Indeterminate failure: all are read again, with backoff; the change finds its own idempotency
  token in them (`shard.is_applied`) or is applied afresh: never twice. Every later failure of the
  call is indeterminate, too.
- In doubt: a set whose outcome was open when its caller left (cancelled, or out of attempts) may
  still land. Its documents leave the cache, and are **in doubt** while they stand at the seqno that
  it expected.
- Determinate failure: raised at once; nothing happened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import TypeVar

import anyio
from msgspec.structs import replace

from actors.durable.persist.change import (
    ATTEMPTS_MAX,
    Change,
    ChangeAttempts,
    ChangeOutcome,
    SeqnoMismatch,
    ShardDocuments,
)
from actors.durable.persist.document_locks import Held, KeyLocks
from actors.durable.persist.documents import (
    decode_shard,
    decode_tables,
    encode,
    encode_sized,
    size_of,
)
from actors.durable.persist.location import FIRST_BITS, CompareAndSet, ConsensusStore, VersionedData
from actors.durable.persist.part_lists import (
    LOOKS_MAX,
    PartLists,
    Parts,
    list_lost_error,
    parts_by_list,
    with_parts,
)
from actors.durable.persist.shard import FORMAT, TABLES_UPPER, ShardState, TablesUpper, shard_key
from actors.durable.persist.shard_invariants import validate
from actors.runtime.errors import PenstockError, StorageError, UnknownObject
from actors.runtime.progress import TIME_MIN, ShardId
from actors.runtime.settings import Settings

log = logging.getLogger("penstock.persist")

R = TypeVar("R")

CONTENDED_MAX = 200
"""Bound of mismatches of one change."""
_SHARDS = shard_key("")
_AT_ONCE = 2
"""Mismatches after which the change is retried without a pause."""


class ShardMachine:
    """The cached documents of one process, and the changes of them."""

    def __init__(
        self,
        consensus: ConsensusStore,
        lists: PartLists,
        settings: Settings,
        random: Random,
        *,
        exclusive: bool,
        renew: Callable[[ShardState], ShardState],
        changed: Callable[[str], None],
        written: Callable[[ShardState], None],
        reread: Callable[[ShardState], None],
    ) -> None:
        """Take the store and the hooks; `exclusive`: no other process writes here.

        `renew` updates the leases of a state to be written; `written` is called once it is durable,
        `reread` with one that was read, `changed` with each key that changed.
        """
        self._consensus = consensus
        self._lists = lists
        self._settings = settings
        self._random = random
        self._exclusive = exclusive
        self._renew = renew
        self._changed = changed
        self._written = written
        self._reread = reread
        self._shards: dict[ShardId, ShardState] = {}
        self._listed: dict[ShardId, dict[str, Parts]] = {}
        """Contents of the lists of parts of the state that was known last."""
        self._bytes: dict[ShardId, int] = {}
        """Sizes of the documents, unpacked, as they were read or written last."""
        self._tables = TablesUpper(FORMAT, TIME_MIN)
        self._tables_seqno: int | None = None
        self._tables_known = False
        self._locks: Held = {}
        self.conflicts = 0
        """Sets that were tried again because a document had changed."""
        self.failures = 0
        """Sets that were tried again because the store did not say whether they happened."""
        self._in_doubt: dict[str, int | None] = {}
        """Keys that a set with an open outcome may still change, with its expected seqno."""

    # -- reading ----------------------------------------------------------------------------------

    def cached(self, shard: ShardId) -> ShardState | None:
        """Return the cached state, without waiting; None if there is none."""
        return self._shards.get(shard)

    async def state(self, shard: ShardId) -> ShardState:
        """Return the state, from the cache or the store. Raises `UnknownObject`, `StorageError`."""
        state = self._shards.get(shard)
        if state is None:
            # The tables' upper before the shard: a cached table is never older than the upper that
            # seals it.
            await self.tables()
            async with self._locked([shard_key(shard)]):
                state = await self._known(shard)
                self._uncache_in_doubt([shard])
            if state is None:
                raise UnknownObject(f"no shard {shard}")
        return state

    async def tables(self) -> TablesUpper:
        """Return the tables' shared upper. Raises `StorageError`."""
        if not self._tables_known:
            async with self._locked([TABLES_UPPER]):
                if not self._tables_known:
                    await self._read_trusted_tables()
        return self._tables

    def document_bytes(self, shard: ShardId) -> int:
        """Return the size of the shard's cached document, unpacked; 0 if none is cached."""
        return self._bytes.get(shard, 0) if shard in self._shards else 0

    def known_shards(self) -> list[ShardId]:
        """Return the cached shards, and those that are in doubt."""
        doubtful = (key.removeprefix(_SHARDS) for key in self._in_doubt if key != TABLES_UPPER)
        return list(dict.fromkeys([*self._shards, *doubtful]))

    async def refresh_tables(self) -> None:
        """Read the tables' upper from the store. Raises `StorageError`."""
        async with self._locked([TABLES_UPPER]):
            await self._read_trusted_tables()

    async def refresh(self, shard: ShardId) -> ShardState | None:
        """Read the state from the store. Raises `StorageError`."""
        key = shard_key(shard)
        async with self._locked([key]):
            doubtful = key in self._in_doubt
            state = await self._read_trusted(shard)
            self._uncache_in_doubt([shard])
            if doubtful:  # the state of before was forgotten: it may have changed
                self._changed(key)
            return state

    async def _known(self, shard: ShardId) -> ShardState | None:
        state = self._shards.get(shard)
        return state if state is not None else await self._read_trusted(shard)

    async def _read_trusted(self, shard: ShardId) -> ShardState | None:
        """Read the state so that it may be cached: where the cache is trusted, no set in doubt
        remains."""
        return await (self._settle(shard) if self._exclusive else self._read_shard(shard))

    async def _settle(self, shard: ShardId) -> ShardState | None:
        """Read the state, and make sure that no set in doubt changes it any more."""
        state = await self._read_shard(shard)
        key = shard_key(shard)
        if state is None:  # an absence is not cached: it holds for this call only
            self._in_doubt.pop(key, None)
        if state is None or key not in self._in_doubt:
            return state
        # Written again as it is: the later of the two sets loses, so the set in doubt fails, or
        # has happened before this read.
        await self._write_again(CompareAndSet(key, state.seqno, encode(state)))
        return await self._read_shard(shard)

    async def _read_trusted_tables(self) -> None:
        await (self._settle_tables_doubt() if self._exclusive else self._read_tables())

    async def _settle_tables_doubt(self) -> None:
        await self._read_tables()
        if TABLES_UPPER in self._in_doubt:
            await self._write_again(
                CompareAndSet(TABLES_UPPER, self._tables_seqno, encode(self._tables))
            )
            await self._read_tables()

    async def _write_again(self, op: CompareAndSet) -> None:
        try:
            await self._consensus.compare_and_set([op])
        except StorageError as error:  # not the caller's failure: the key stays in doubt
            log.warning("whether %s will still be changed is not known yet: %s", op.key, error)

    async def _read_shard(self, shard: ShardId) -> ShardState | None:
        key = shard_key(shard)
        state = await self._read_with_lists(key, shard)
        held = self._shards.get(shard)
        if state is None:
            self._forget(shard)
            if held is not None:
                self._changed(key)
            return None
        self._keep(state)
        self._reread(state)
        if held is not None and held.seqno != state.seqno:
            self._changed(key)
        return state

    async def _read_with_lists(self, key: str, shard: ShardId) -> ShardState | None:
        """Read the state with its lists of parts."""
        # Lists are immutable and kept by key: another round reads only the document, and new lists.
        known = dict(self._listed.get(shard, {}))
        gone = None
        for _ in range(LOOKS_MAX):
            tables = self._tables_seqno
            head = await self._consensus.head(key)
            self._look(key, None if head is None else head.seqno)
            if head is None:
                return None
            state = replace(decode_shard(key, head.data), seqno=head.seqno)
            self._bytes[shard] = size_of(head.data)
            if state.is_whole:
                return state
            missed = await self._lists.read_all(state, known)
            if missed is not None:
                if gone == (missed, state.seqno):
                    raise list_lost_error(shard, missed)
                gone = missed, state.seqno
            elif self._tables_seqno == tables or not state.tables:
                return with_parts(state, known, self._shards.get(shard))
            # Else the table may be older than the tables' upper that was read meanwhile.
        text = f"shard {shard} was not read: others changed it {LOOKS_MAX} times meanwhile"
        raise StorageError(text, determinate=True)

    def _keep(self, state: ShardState) -> None:
        self._shards[state.id] = state
        if listed := parts_by_list(state):
            self._listed[state.id] = listed
        else:
            self._listed.pop(state.id, None)

    def _forget(self, shard: ShardId) -> None:
        self._shards.pop(shard, None)
        self._bytes.pop(shard, None)
        self._listed.pop(shard, None)

    async def _read_tables(self) -> None:
        """Read the tables' upper; safe without the lock, as an older one changes nothing."""
        head: VersionedData | None = await self._consensus.head(TABLES_UPPER)
        seqno = None if head is None else head.seqno
        if (-1 if seqno is None else seqno) < self._tables_held():
            return  # a stale read: this document is never removed
        self._look(TABLES_UPPER, seqno)
        if head is not None and head.seqno > self._tables_held():
            # Another process moved the upper, hence tables, too: drop them, they are read again
            # after it.
            for shard, state in list(self._shards.items()):
                if state.tables:
                    del self._shards[shard]
            self._tables, self._tables_seqno = decode_tables(head.data), seqno
            self._changed(TABLES_UPPER)
        self._tables_known = not (TABLES_UPPER in self._in_doubt and self._exclusive)

    def _look(self, key: str, seqno: int | None) -> None:
        """Clear the doubt of a key that moved on from the seqno that the set in doubt expects."""
        if self._in_doubt and self._in_doubt.get(key, -1) != seqno:
            self._in_doubt.pop(key, None)

    def _tables_held(self) -> int:
        return -1 if self._tables_seqno is None else self._tables_seqno

    # -- changing ---------------------------------------------------------------------------------

    async def change(
        self,
        shards: Sequence[ShardId],
        change: Change[R],
        *,
        tables: bool = False,
        extra: Sequence[CompareAndSet] = (),
    ) -> R:
        """Apply `change` to these shards (and the tables' upper) with the `extra` keys, all in one
        set. Raises what `change` raises, `SeqnoMismatch` and `StorageError`."""
        names = sorted(set(shards))
        keys = [shard_key(shard) for shard in names] + ([TABLES_UPPER] if tables else [])
        await self.tables()
        async with self._locked(keys):
            tries = ChangeAttempts(self._exclusive)
            try:
                return await self._change(names, change, tables, extra, tries)
            except StorageError as error:
                # An earlier attempt with an open outcome may have landed, or may still.
                if error.determinate and tries.uncertain:
                    raise type(error)(
                        f"{error}; an earlier attempt may have gone through", determinate=False
                    ) from error
                raise
            finally:
                if self._in_doubt:
                    self._uncache_in_doubt(names)
                    for key in self._in_doubt.keys() & keys:
                        self._changed(key)

    async def _change(
        self,
        names: Sequence[ShardId],
        change: Change[R],
        tables: bool,
        extra: Sequence[CompareAndSet],
        tries: ChangeAttempts,
    ) -> R:
        while True:
            held = {shard: await self._known(shard) for shard in names}
            outcome, refusal = None, None
            try:
                outcome = change(ShardDocuments(held, self._tables, tries.uncertain))
            except PenstockError as error:
                refusal = error
            if outcome is None or not outcome.writes:
                if tries.uncertain and self._doubtful(names, tables):
                    # Reads of several documents may be torn across the open set, and miss its
                    # token: no answer without a set before it is settled.
                    await self._settle_all_doubts(names, tables, tries)
                    continue
                if not tries.fresh:
                    # The answer came from a cache that another process may have outdated: ask
                    # again, fresh.
                    tries.fresh = await self._read_fresh(names, tables or _of_tables(held))
                    continue
                if outcome is None:
                    assert refusal is not None, "it answers or raises"
                    raise refusal
                return outcome.result
            try:
                if await self._set(outcome, held, extra):
                    return outcome.result
            except StorageError as error:
                if error.determinate:
                    raise
                tries.uncertain = True
                self.failures += 1
                tries.failed(names, error)
                await self._read_back(names, tables, error, tries.failures)
            else:
                tries.late += 1
                self.conflicts += 1
                await self._after_mismatch(names, tables or outcome.floored, held, tries.late)
                if tries.late == CONTENDED_MAX:
                    raise StorageError(
                        f"gave up changing {', '.join(names)}: another process was faster"
                        f" {CONTENDED_MAX} times; try again",
                        determinate=True,
                    )
            tries.fresh = True

    def _doubtful(self, names: Sequence[ShardId], tables: bool) -> bool:
        keys = [shard_key(name) for name in names] + ([TABLES_UPPER] if tables else [])
        return not self._in_doubt.keys().isdisjoint(keys)

    async def _settle_all_doubts(
        self, names: Sequence[ShardId], tables: bool, tries: ChangeAttempts
    ) -> None:
        """Settle the documents, which may be torn across an attempt with an open outcome."""
        if tables:
            await self._settle_tables_doubt()
        for shard in names:
            await self._settle(shard)
        if self._doubtful(names, tables):
            tries.failed(names, StorageError("it cannot be written", determinate=False))
            await self._pause(tries.failures)

    async def _after_mismatch(
        self,
        names: Sequence[ShardId],
        tables: bool,
        held: Mapping[ShardId, ShardState | None],
        late: int,
    ) -> None:
        """Read what another process changed. Raises `SeqnoMismatch`, `StorageError`."""
        before = {name: state and state.seqno for name, state in held.items()}
        tables_before = self._tables_seqno
        if late > _AT_ONCE:
            # Two losses in a row: another process writes in step. A random pause breaks it.
            limit_ms = min(self._settings.retry_delay_ms_min, 1 << min(late, 16))
            await anyio.sleep(self._random.uniform(0, limit_ms) / 1000)
        await self._read_all(names, tables)
        after = {name: self._seqno(name) for name in names}
        if before == after and tables_before == self._tables_seqno:
            raise SeqnoMismatch("an extra key was not at the seqno expected of it")

    def _seqno(self, shard: ShardId) -> int | None:
        state = self._shards.get(shard)
        return None if state is None else state.seqno

    async def _set(
        self,
        outcome: ChangeOutcome[R],
        held: Mapping[ShardId, ShardState | None],
        extra: Sequence[CompareAndSet],
    ) -> bool:
        if not outcome.writes:
            return True
        ops = list(extra)
        become: dict[ShardId, ShardState | None] = {}
        sizes: dict[ShardId, int] = {}
        for shard, state in outcome.shards.items():
            old = held[shard]
            data = None
            if state is not None:
                # Born at a random seqno: another process may remember a shard of this name that was
                # dropped, and no two lives of it may share a seqno (`location`).
                seqno = self._random.getrandbits(FIRST_BITS) if old is None else old.seqno + 1
                born = seqno if old is None else state.born
                state = replace(self._renew(state), seqno=seqno, born=born)
                validate(state, old)
                data, sizes[shard] = encode_sized(state)
            become[shard] = state
            first = 0 if state is None or old is not None else state.seqno
            ops.append(
                CompareAndSet(shard_key(shard), None if old is None else old.seqno, data, first)
            )
        if outcome.tables is not None:
            ops.append(CompareAndSet(TABLES_UPPER, self._tables_seqno, encode(outcome.tables)))
        elif outcome.floored and not (self._exclusive and self._tables_known):
            # Others may move the tables' upper: compare it in the same set, unchanged.
            ops.append(CompareAndSet(TABLES_UPPER, self._tables_seqno, None, kept=True))
        try:
            # A cancelled scope waits for the answer; `Task.cancel` does not, and leaves the outcome
            # open.
            with anyio.CancelScope(shield=True):
                tables_seqno = self._tables_held() + 1
                if not await self._consensus.compare_and_set(ops):
                    return False
                self._show(become, outcome.tables, tables_seqno, sizes)
            return True
        except BaseException as error:
            if not (isinstance(error, StorageError) and error.determinate):
                self._doubt(op for op in ops[len(extra) :] if not op.kept)
            raise

    def _doubt(self, ops: Iterable[CompareAndSet]) -> None:
        for op in ops:
            self._in_doubt[op.key] = op.expected
            if op.key == TABLES_UPPER:
                self._tables_known = False

    def _show(
        self,
        become: Mapping[ShardId, ShardState | None],
        tables: TablesUpper | None,
        tables_seqno: int,
        sizes: Mapping[ShardId, int],
    ) -> None:
        """Update the cache and wake waiters, without a suspension: no reader sees half of a set."""
        for shard, state in become.items():
            self._look(shard_key(shard), None if state is None else state.seqno)
            if state is None:
                self._forget(shard)
            else:
                self._keep(state)
                self._bytes[shard] = sizes[shard]
                self._written(state)
        if tables is not None:
            if self._tables_held() < tables_seqno:  # `_read_tables` may have been faster
                self._tables, self._tables_seqno = tables, tables_seqno
            self._look(TABLES_UPPER, self._tables_seqno)
            self._changed(TABLES_UPPER)
        for shard in become:
            self._changed(shard_key(shard))

    async def _read_all(self, names: Sequence[ShardId], tables: bool) -> None:
        if tables:
            await self._read_tables()
        for shard in names:
            await self._read_shard(shard)

    async def _read_fresh(self, names: Sequence[ShardId], tables: bool) -> bool:
        """Read all again, with the tables' upper if it matters; return whether to answer from
        that."""
        await self._read_all(names, tables)
        # Not when one turned out to be a table: its upper must be read before it.
        return tables or not _of_tables({name: self._shards.get(name) for name in names})

    async def _read_back(
        self, names: Sequence[ShardId], tables: bool, failure: StorageError, attempt: int
    ) -> None:
        """Read what an open set may have changed, with retries; raise `failure` when all fail."""
        while attempt <= ATTEMPTS_MAX:
            await self._pause(attempt)
            try:
                return await self._read_all(names, tables)
            except StorageError:
                attempt += 1
        raise failure

    def _uncache_in_doubt(self, names: Sequence[ShardId]) -> None:
        """Drop documents in doubt from the cache: they may change without a notification."""
        for shard in names:
            if shard_key(shard) in self._in_doubt:
                self._shards.pop(shard, None)

    async def _pause(self, attempt: int) -> None:
        await anyio.sleep(self._settings.retry_delay_ms(attempt + 1) / 1000)

    def _locked(self, keys: Sequence[str]) -> KeyLocks:
        return KeyLocks(self._locks, keys)


def _of_tables(states: Mapping[ShardId, ShardState | None]) -> bool:
    """Return whether one of these shards is a table, and the tables' upper matters."""
    return any(state is not None and state.tables for state in states.values())
