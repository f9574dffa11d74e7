"""Generates rows that are inserted, updated and deleted by key, in given proportions.

Theory of operation. Time is divided into *rounds*. In each round every key has one turn, in an
order that depends on the round. An independent random draw per (key, round) decides whether the key
is present after the round, and another one determines its row. So the draws of this round and the
previous one determine the change of a turn: absent then present is an insert, present twice an
update, present then absent a delete, absent twice no change. Retractions are exact although no rows
are stored.

If a share p of the keys is present, the ratio of updates to deletes is p to ``1 - p``, there are as
many inserts as deletes, and the number of rows stays at about p of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
import pyarrow as pa

from actors.connectors.sources.generators import (
    GeneratorConfig,
    PreparedSeries,
    at_least,
    updates,
)
from actors.connectors.sources.random_draws import DrawStream, Numbers, numbered
from actors.connectors.sources.source import SourceExport, SourceRows
from actors.model.plan.schema import TableColumn, TableSchema
from actors.runtime.errors import InvalidUsage

EXPORT: Final = "rows"
SCHEMA: Final = TableSchema(
    (
        TableColumn("key", "bigint", False),
        TableColumn("version", "bigint", False),
        TableColumn("value", "bigint", False),
        TableColumn("payload", "string", False),
    ),
    ("key",),
)
PAYLOADS: Final = 1024
"""Number of distinct payloads."""
PIECE_BYTES: Final = 4 << 20
KEYS_MAX: Final = 1 << 31
PAYLOAD_BYTES_MAX: Final = 4096


class ChurnConfig(GeneratorConfig, frozen=True, kw_only=True, tag="churn"):
    """Configuration of a churn generator. Each event is the turn of one key; `rate` counts the
    events that change something."""

    keys: int = 100_000
    updates: float = 8.0
    """Weight of updates relative to `deletes`. There are as many inserts as deletes."""
    deletes: float = 1.0
    payload_bytes: int = 32
    """Length of each row's text."""

    @property
    def present(self) -> float:
        """Return the share of keys that have a row."""
        return self.updates / (self.updates + self.deletes)

    def check(self) -> None:
        """Raise `InvalidUsage` if an option is out of range."""
        super().check()
        at_least(self, keys=1, updates=0, deletes=0, payload_bytes=0)
        if self.keys > KEYS_MAX:
            raise InvalidUsage(f"invalid keys {self.keys}: expected at most {KEYS_MAX}")
        if self.payload_bytes > PAYLOAD_BYTES_MAX:
            raise InvalidUsage(
                f"invalid payload_bytes {self.payload_bytes}: expected at most {PAYLOAD_BYTES_MAX}"
            )
        if not 0 < self.updates < math.inf or not self.deletes < math.inf:
            raise InvalidUsage(
                f"invalid updates {self.updates}, deletes {self.deletes}: expected finite weights, "
                "with updates above 0"
            )


class ChurnSeries(PreparedSeries):
    """Event n is turn ``n % keys`` of round ``1 + n // keys``; round 0 gives the first contents."""

    exports = (SourceExport(EXPORT, SCHEMA),)

    def __init__(self, config: ChurnConfig) -> None:
        self._keys = config.keys
        self._present = config.present
        self.turns = 1 / (1 - (1 - config.present) ** 2)
        row_bytes = 32 + config.payload_bytes
        self.events_at_once = max(100, PIECE_BYTES // (2 * row_bytes))
        self._there = DrawStream(config.seed, "there")
        self._values = DrawStream(config.seed, "value")
        self._orders = DrawStream(config.seed, "order")
        size = config.payload_bytes
        self._payloads = DrawStream(config.seed, "payload").texts(numbered(0, PAYLOADS), size, size)

    def contents(self, at: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield each key's row as of its last turn."""
        round_, turn = 1 + at // self._keys, at % self._keys
        for start in range(0, self._keys, self.events_at_once):
            turns = numbered(start, min(self._keys, start + self.events_at_once))

            keys = self._keys_at(round_, turns)
            # Keys before `turn` have had their turn in this round.
            rounds = np.where(turns < turn, round_, round_ - 1)
            kept = self._is_there(keys, rounds)
            yield self._rows([(keys[kept], rounds[kept], 1)])

    def changes(self, start: int, stop: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield the changes of these events. A piece ends with its round."""
        while start < stop:
            round_, turn = 1 + start // self._keys, start % self._keys
            count = min(stop - start, self._keys - turn)
            keys = self._keys_at(round_, numbered(turn, turn + count))
            rounds = np.full(count, round_)
            was, now = self._is_there(keys, rounds - 1), self._is_there(keys, rounds)
            yield self._rows([(keys[was], rounds[was] - 1, -1), (keys[now], rounds[now], 1)])
            start += count

    def _keys_at(self, round_: int, turns: Numbers) -> Numbers:
        """Return the keys that have these turns in a round."""
        drawn = self._orders.below(np.array([2 * round_, 2 * round_ + 1]), self._keys)
        factor, shift = int(drawn[0]) | 1, int(drawn[1])
        # Multiplication modulo the number of keys is a permutation if the factor is coprime to it.
        # It is not a shuffle, but it separates neighbours.
        while math.gcd(factor, self._keys) != 1:
            factor += 1
        return (turns * (factor % self._keys) + shift) % self._keys

    def _is_there(self, keys: Numbers, rounds: Numbers) -> np.ndarray:
        return self._there.unit(self._number(keys, rounds)) < self._present

    def _number(self, keys: Numbers, rounds: Numbers) -> Numbers:
        """Return a unique number for each (key, round)."""
        return rounds * self._keys + keys

    def _rows(self, turns: list[tuple[Numbers, Numbers, int]]) -> SourceRows:
        keys = np.concatenate([keys for keys, _, _ in turns])
        rounds = np.concatenate([rounds for _, rounds, _ in turns])
        diffs = np.concatenate([np.full(len(keys), diff) for keys, _, diff in turns])
        bits = self._values.bits(self._number(keys, rounds))
        values = (bits >> np.uint64(32)).astype(np.int64)
        payloads = self._payloads.take(pa.array(bits % np.uint64(PAYLOADS)))
        return SourceRows(EXPORT, updates(SCHEMA, [keys, rounds, values, payloads], diffs))
