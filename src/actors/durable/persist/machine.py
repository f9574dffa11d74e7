"""Makes changes of documents durable: a compare-and-set loop over several documents at once.

A change is a pure function that takes the current documents and returns their successors. It may
run more than once. The machine reads documents that are not cached, applies the change, writes all
results in one compare-and-set, and only then updates the cache and wakes waiters. Meanwhile the
documents are locked, in the order of their keys, so that changes within one process do not make
each other fail.

- Mismatch: another process changed a document. All documents are read again and the change is
  applied again. If none of our documents changed, an `extra` key did: `SeqnoMismatch`.
- Stale cache: a set detects stale documents. A result without a set (an upper mismatch, an error)
  does not, so it only counts if the documents were read within the call.
- Indeterminate failure: all documents are read again, with backoff. The change finds its own
  idempotency token in them (`shard.is_applied`) or is applied again, so it never happens twice.
  From then on, every failure of the call is indeterminate, too.
- In doubt: if the caller leaves (cancelled, or out of attempts) while the outcome of a set is
  unknown, the set may still land. Its documents leave the cache, and are **in doubt** as long as
  they are at the seqno that the set expected.
- Determinate failure: raised immediately; nothing happened.
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
"""Maximum number of mismatches of one change."""
_SHARDS = shard_key("")
_AT_ONCE = 2
"""Number of mismatches after which a change is retried without a pause."""


class ShardMachine:
    """The cached documents of one process, and changes to them."""

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
        """Make a machine. `exclusive` means that no other process writes to the store.

        `renew` updates the leases in a state to be written. `written` is called with each state
        that became durable, `reread` with each state that was read, and `changed` with each key
        that changed.
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
        """Cached states."""
        self._listed: dict[ShardId, dict[str, Parts]] = {}
        """Contents of the part lists of the latest known state, by list key."""
        self._bytes: dict[ShardId, int] = {}
        """Sizes of the documents, unpacked, when they were last read or written."""
        # The tables' shared upper and its seqno, as of the last read or write, and whether the
        # cache is valid.
        self._tables = TablesUpper(FORMAT, TIME_MIN)
        self._tables_seqno: int | None = None
        self._tables_known = False
        self._locks: Held = {}
        """Locks that are held or waited for, by key."""
        self.conflicts = 0
        """Sets that were tried again because a document had changed."""
        self.failures = 0
        """Sets that were tried again because the store did not say whether they happened."""
        self._in_doubt: dict[str, int | None] = {}
        """Seqno that a set with an unknown outcome expects, by the key that it may still change."""

    # -- reading ----------------------------------------------------------------------------------

    def cached(self, shard: ShardId) -> ShardState | None:
        """Return the cached state without waiting; None if it is not cached."""
        return self._shards.get(shard)

    async def state(self, shard: ShardId) -> ShardState:
        """Return the state, from the cache or the store. Raises `UnknownObject` and
        `StorageError`."""
        state = self._shards.get(shard)
        if state is None:
            # Read the tables' upper before the shard: a cached table is then never older than the
            # upper that seals it.
            await self.tables()
            async with self._locked([shard_key(shard)]):
                state = await self._known(shard)
                self._uncache_in_doubt([shard])
            if state is None:
                raise UnknownObject(f"no shard {shard}")
        return state

    async def tables(self) -> TablesUpper:
        """Return the upper shared by all tables. Raises `StorageError`."""
        if not self._tables_known:
            async with self._locked([TABLES_UPPER]):
                if not self._tables_known:
                    await self._read_trusted_tables()
        return self._tables

    def document_bytes(self, shard: ShardId) -> int:
        """Return the size of the shard's cached document, unpacked; 0 if it is not cached."""
        return self._bytes.get(shard, 0) if shard in self._shards else 0

    def known_shards(self) -> list[ShardId]:
        """Return the shards that are cached or in doubt."""
        doubtful = (key.removeprefix(_SHARDS) for key in self._in_doubt if key != TABLES_UPPER)
        return list(dict.fromkeys([*self._shards, *doubtful]))

    async def refresh_tables(self) -> None:
        """Read the tables' upper from the store. Raises `StorageError`."""
        async with self._locked([TABLES_UPPER]):
            await self._read_trusted_tables()

    async def refresh(self, shard: ShardId) -> ShardState | None:
        """Read a shard's state from the store; None if it does not exist. Raises `StorageError`."""
        key = shard_key(shard)
        async with self._locked([key]):
            doubtful = key in self._in_doubt
            state = await self._read_trusted(shard)
            self._uncache_in_doubt([shard])
            if doubtful:  # its former state is not cached, so it may have changed
                self._changed(key)
            return state

    async def _known(self, shard: ShardId) -> ShardState | None:
        state = self._shards.get(shard)
        return state if state is not None else await self._read_trusted(shard)

    async def _read_trusted(self, shard: ShardId) -> ShardState | None:
        """Read the state so that it may be cached. In an exclusive store, that resolves any doubt
        first."""
        return await (self._settle(shard) if self._exclusive else self._read_shard(shard))

    async def _settle(self, shard: ShardId) -> ShardState | None:
        """Read the state, and make sure that no set in doubt can change it any more."""
        state = await self._read_shard(shard)
        key = shard_key(shard)
        if state is None:  # absence is not cached; it only counts for this call
            self._in_doubt.pop(key, None)
        if state is None or key not in self._in_doubt:
            return state
        # Write the state again, unchanged. The later of the two sets loses, so the set in doubt
        # either fails or happened before this read.
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
        except StorageError as error:  # not the caller's failure; the key stays in doubt
            log.warning("cannot determine yet whether %s will still be changed: %s", op.key, error)

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
        """Read the state and its part lists; None if the shard does not exist."""
        # Lists are immutable and cached by key, so another round reads only the document and new
        # lists.
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
            # Otherwise the table may be older than the tables' upper, which was read meanwhile.
        raise StorageError(
            f"could not read shard {shard}: other processes kept changing it ({LOOKS_MAX} times)",
            determinate=True,
        )

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
        """Read the tables' upper. Safe without the lock, because an older value is ignored."""
        head: VersionedData | None = await self._consensus.head(TABLES_UPPER)
        seqno = None if head is None else head.seqno
        if (-1 if seqno is None else seqno) < self._tables_held():
            return  # a stale read, because this document is never removed
        self._look(TABLES_UPPER, seqno)
        if head is not None and head.seqno > self._tables_held():
            # Another process moved the upper, so it changed tables, too. Drop them from the cache;
            # they are read again after the upper.
            for shard, state in list(self._shards.items()):
                if state.tables:
                    del self._shards[shard]
            self._tables, self._tables_seqno = decode_tables(head.data), seqno
            self._changed(TABLES_UPPER)
        self._tables_known = not (TABLES_UPPER in self._in_doubt and self._exclusive)

    def _look(self, key: str, seqno: int | None) -> None:
        """End the doubt about a key that is no longer at the seqno that the set in doubt
        expects."""
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
        """Apply `change` to these shards (and the tables' upper) and the `extra` keys, in one set.

        Raises what `change` raises, `SeqnoMismatch` and `StorageError`.
        """
        names = sorted(set(shards))
        keys = [shard_key(shard) for shard in names] + ([TABLES_UPPER] if tables else [])
        await self.tables()
        async with self._locked(keys):
            tries = ChangeAttempts(self._exclusive)
            try:
                return await self._change(names, change, tables, extra, tries)
            except StorageError as error:
                # An earlier attempt with an unknown outcome may have landed, or may still.
                if error.determinate and tries.uncertain:
                    raise type(error)(
                        f"{error}; an earlier attempt may have succeeded", determinate=False
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
                    # Reads of several documents may be torn across the set in doubt, and miss its
                    # token. Resolve the doubt before giving an answer without a set.
                    await self._settle_all_doubts(names, tables, tries)
                    continue
                if not tries.fresh:
                    # The answer is based on a cache that another process may have outdated: try
                    # again with fresh reads.
                    tries.fresh = await self._read_fresh(names, tables or _of_tables(held))
                    continue
                if outcome is None:
                    assert refusal is not None, "the change returns or raises"
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
                        f"could not change {', '.join(names)}: other processes changed it first, "
                        f"{CONTENDED_MAX} times; try again",
                        determinate=True,
                    )
            tries.fresh = True

    def _doubtful(self, names: Sequence[ShardId], tables: bool) -> bool:
        keys = [shard_key(name) for name in names] + ([TABLES_UPPER] if tables else [])
        return not self._in_doubt.keys().isdisjoint(keys)

    async def _settle_all_doubts(
        self, names: Sequence[ShardId], tables: bool, tries: ChangeAttempts
    ) -> None:
        """Resolve the doubt about these documents, which may be torn across an attempt with an
        unknown outcome."""
        if tables:
            await self._settle_tables_doubt()
        for shard in names:
            await self._settle(shard)
        if self._doubtful(names, tables):
            tries.failed(names, StorageError("cannot write the document", determinate=False))
            await self._pause(tries.failures)

    async def _after_mismatch(
        self,
        names: Sequence[ShardId],
        tables: bool,
        held: Mapping[ShardId, ShardState | None],
        late: int,
    ) -> None:
        """Read what another process changed. Raises `SeqnoMismatch` and `StorageError`."""
        before = {name: state and state.seqno for name, state in held.items()}
        tables_before = self._tables_seqno
        if late > _AT_ONCE:
            # After repeated mismatches, another process writes in step with this one. A random
            # pause breaks the pattern.
            limit_ms = min(self._settings.retry_delay_ms_min, 1 << min(late, 16))
            await anyio.sleep(self._random.uniform(0, limit_ms) / 1000)
        await self._read_all(names, tables)
        after = {name: self._seqno(name) for name in names}
        if before == after and tables_before == self._tables_seqno:
            raise SeqnoMismatch("an extra key was not at the expected seqno")

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
                # A shard starts at a random seqno: another process may remember a dropped shard of
                # the same name, and the two must never share a seqno (`location`).
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
            # Other processes may move the tables' upper: compare it in the same set, unchanged.
            ops.append(CompareAndSet(TABLES_UPPER, self._tables_seqno, None, kept=True))
        try:
            # A cancelled scope waits for the answer. `Task.cancel` does not, which leaves the
            # outcome unknown.
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
        """Update the cache and wake waiters, without an await in between, so that no reader sees
        part of a set."""
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
        """Read all documents again, and with `tables` the tables' upper before them. Return False
        if a document turns out to be a table's although `tables` is False: read again with it."""
        await self._read_all(names, tables)
        # Not if one turned out to be a table: then its upper must be read before it.
        return tables or not _of_tables({name: self._shards.get(name) for name in names})

    async def _read_back(
        self, names: Sequence[ShardId], tables: bool, failure: StorageError, attempt: int
    ) -> None:
        """Read what a set with an unknown outcome may have changed, with retries. Raise `failure`
        if all reads fail."""
        while attempt <= ATTEMPTS_MAX:
            await self._pause(attempt)
            try:
                return await self._read_all(names, tables)
            except StorageError:
                attempt += 1
        raise failure

    def _uncache_in_doubt(self, names: Sequence[ShardId]) -> None:
        """Drop documents in doubt from the cache, because they may change without a
        notification."""
        for shard in names:
            if shard_key(shard) in self._in_doubt:
                self._shards.pop(shard, None)

    async def _pause(self, attempt: int) -> None:
        await anyio.sleep(self._settings.retry_delay_ms(attempt + 1) / 1000)

    def _locked(self, keys: Sequence[str]) -> KeyLocks:
        return KeyLocks(self._locks, keys)


def _of_tables(states: Mapping[ShardId, ShardState | None]) -> bool:
    """Return whether one of these shards is a table, so that the tables' upper matters."""
    return any(state is not None and state.tables for state in states.values())
