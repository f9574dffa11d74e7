"""The checkers: one for each promise of the design that the service can break so far.

Each sees the events that it checks and raises `CheckerViolation`, whose text begins with the
checker's name. `ShardHistories` is the truth with which they compare answers. Frontiers of shards,
durability of named parts and compaction are checked there, at the instant of each durable change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from actors.model.plan.schema import DIFF, TIME
from actors.model.plan.updates import from_ipc
from actors.model.protocol import storage
from actors.model.protocol.api import (
    ClientHello,
    EndRequest,
    ReadContents,
    ReadObject,
    RequestFailed,
    ServiceHello,
    SubscribeChanges,
    SubscribeObject,
    WaitFor,
    WriteCommitted,
)
from actors.model.protocol.compute import Command, PeekResponse, Response
from actors.replica.cluster.rules import CommandRules, ResponseRules
from actors.replica.cluster.storage_rules import StorageCommandRules, StorageResponseRules
from actors.runtime.errors import InvalidUsage, RemoteProtocolError
from actors.runtime.progress import EMPTY
from actors.runtime.settings import Settings
from tests.simulators.service.growth import factor_of
from tests.simulators.service.history import CheckerViolation, ShardHistories
from tests.simulators.service.queries import Bag, Row, contents, projected, trimmed
from tests.simulators.service.schedule import SOURCE, WITHOUT_TABLES


class WriteRecord(msgspec.Struct):
    """A write that a client requested: its changes, and its outcome."""

    changes: dict[str, list[tuple[Row, int]]]
    """Table → (row, diff). Rows are never written twice."""
    time: int | None = None
    """Time of the acknowledgement."""
    refused: str = ""
    """Determinate error with which it failed; "" if there was none."""


class WritesChecker:
    """Checks that an acknowledged write is there at its time, once and whole; a refused one is not;
    one of unknown outcome is there whole or not at all; and no other rows are there.

    Does not cover: whether a refusal was right, and the order of writes within a group, which
    share a time.
    """

    def __init__(self, history: ShardHistories) -> None:
        self._history = history
        self.records: list[WriteRecord] = []

    def check(self) -> None:
        """Check all writes, when none is under way."""
        found: dict[tuple[str, Row, int], list[int]] = {}
        for shard, name in self._history.names.items():
            held = self._history.shards.get(shard)
            if held is not None and held.state.tables:
                for row, time, diff in held.updates:
                    found.setdefault((name, row, diff), []).append(time)
        for record in self.records:
            times = [
                found.pop((table, row, diff), [])
                for table, changes in record.changes.items()
                for row, diff in changes
            ]
            self._check_one(record, times)
        if found:
            raise CheckerViolation(f"writes: nobody wrote {dict(list(found.items())[:3])}")

    def _check_one(self, record: WriteRecord, times: list[list[int]]) -> None:
        if any(len(each) > 1 for each in times):
            raise CheckerViolation(f"writes: {record.changes} is there more than once: {times}")
        if not times:
            return
        flat = {each[0] if each else None for each in times}
        if record.time is not None and flat != {record.time}:
            raise CheckerViolation(
                f"writes: {record.changes} was acknowledged at {record.time}, and is there at "
                f"{sorted(flat, key=str)}"
            )
        if record.refused and flat != {None}:
            raise CheckerViolation(
                f"writes: refused by {record.refused}, and is there: {record.changes}"
            )
        if len(flat) > 1:
            raise CheckerViolation(f"writes: only a part of {record.changes} is there: {times}")


class ViewsChecker:
    """Checks that every view equals its query over the tables at every time from its as_of on, at
    the instant at which its output becomes durable.

    Does not cover: hidden states of groupings (they show when a later output is wrong), and
    error updates (no row of a workload is bad; one that appears is a violation).
    """

    def __init__(self, history: ShardHistories) -> None:
        self._history = history
        self._sources = SourcesChecker(history)

    def check(self) -> None:
        """Check the views after a durable change."""
        history = self._history
        grown, history.grown = history.grown, []
        self._sources.check(grown)
        for shard, lower, upper in grown:
            held = history.shards.get(shard)
            name = history.names.get(shard)
            if held is None or held.state.tables or name is None or "-hidden" in shard:
                continue
            entry = next((e for e in history.catalog.objects if e.shard == shard), None)
            if entry is None or entry.kind != "view":
                continue
            first = max(lower, entry.as_of)
            for time in history.times(first, upper) if first < upper else ():
                tables = history.tables_at(time)
                wanted, found = contents(name, tables), held.at(time)
                if wanted != found:
                    raise CheckerViolation(
                        f"views: {name} ({shard}) at {time}, appended [{lower}, {upper}): "
                        f"{difference(found, wanted)}"
                    )


class SourcesChecker:
    """Checks a source that counts: at every time its table holds the numbers from 1 to the position
    that the remap shard binds to that time, each once, and with as many further columns as it says;
    checked as each becomes durable.

    Does not cover: latency.
    """

    def __init__(self, history: ShardHistories) -> None:
        self._history = history

    def check(self, grown: Iterable[tuple[str, int, int]]) -> None:
        """Check the sources after a durable change."""
        history = self._history
        for shard, lower, upper in grown:
            entry = next((e for e in history.catalog.objects if e.shard == shard), None)
            if entry is None or entry.kind != "source table":
                continue
            held, remap = history.shards[shard], history.shards.get(entry.depends[0])
            for time in history.times(lower, upper):
                rows = Counter() if remap is None else remap.at(time)
                known = [json.loads(str(row[0])) for row in rows] or [{"events": 0}]
                factors = [factor_of(name) or 0 for name in entry.schema.names[1:]]
                filled = factors[: known[0].get("grown", 0)]
                counted = range(1, known[0]["events"] + 1)
                wanted: Bag = Counter([(n, *(n * each for each in filled)) for n in counted])
                if len(rows) > 1 or held.at(time) != wanted:
                    raise CheckerViolation(
                        f"sources: {entry.name} at {time}, position {rows}: "
                        f"{difference(held.at(time), wanted)}"
                    )


class ReadsChecker:
    """Checks that a read's answer is the object's contents at the answer's time; that is the
    requested time, or, without one, not before any write acknowledged to any client before the read
    was sent, nor before any answer given to any client before.

    Objects above no table are read at a time of their own source, whatever was written to tables.

    Does not cover: reads by key, and whether an error was right (see `ExchangeChecker` and the
    fault-free end of a run, where no error is).
    """

    def __init__(self, history: ShardHistories) -> None:
        self._history = history
        self.acknowledged = 0
        """The latest time that any client knows of."""

    def answered(self, read: ReadObject, least: int, answers: Sequence[ReadContents]) -> None:
        """Check an answer in all its pieces; `least`: latest acknowledged time when the read was
        sent."""
        answer = answers[-1]
        if any(piece.as_of != answer.as_of for piece in answers):
            raise CheckerViolation(f"reads: {read.name} was answered at several times")
        if read.as_of is not None and answer.as_of != read.as_of:
            raise CheckerViolation(
                f"reads: {read.name} asked at {read.as_of}, answered {answer.as_of}"
            )
        if read.name in WITHOUT_TABLES:
            least = 0
        if read.as_of is None and answer.as_of < least:
            raise CheckerViolation(
                f"reads: {read.name} answered at {answer.as_of}, when {least} was acknowledged"
            )
        if read.as_of is None and read.name not in WITHOUT_TABLES:
            self.acknowledged = max(self.acknowledged, answer.as_of)
        found: Bag = Counter()
        width = 0
        for piece in answers:
            table = from_ipc(piece.arrow)
            for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
                found[trimmed(row[:-1])] += row[-1]
            width = table.num_columns - 1
        wanted = contents(read.name, self._history.tables_at(answer.as_of))
        if read.name == SOURCE:
            wanted = projected(wanted, width)
        if found != wanted:
            raise CheckerViolation(
                f"reads: {read.name} at {answer.as_of}: {difference(found, wanted)}"
            )


class SubscribeChecker:
    """Checks that a subscription gets the object's contents at its start, then every change:
    intervals without gap or repeat, in one answer or in pieces of which the last has the upper,
    each update in its interval, sums equal to the contents at each upper.

    Does not cover: latency; a resumption after a lost connection is a subscription anew.
    """

    def __init__(self, history: ShardHistories, request: SubscribeObject) -> None:
        self._history = history
        self._name = request.name
        self._upper: int | None = None
        self._times: list[int] = []
        """Times of the updates of pieces whose interval has not ended."""
        self._bag: Bag = Counter()
        self._width = 0

    def told(self, changes: SubscribeChanges) -> None:
        """Check the next answer."""
        name = self._name
        if changes.upper < changes.lower or (
            self._upper is not None and changes.lower != self._upper
        ):
            raise CheckerViolation(
                f"subscribe: {name} was told up to {self._upper}, then [{changes.lower}, "
                f"{changes.upper})"
            )
        if changes.arrow is not None:
            table = from_ipc(changes.arrow)
            self._times += table[TIME].to_pylist()
            rows = table.drop_columns([TIME, DIFF])
            values = zip(*(column.to_pylist() for column in rows.columns), strict=True)
            for row, diff in zip(values, table[DIFF].to_pylist(), strict=True):
                self._bag[trimmed(row)] += diff
            self._width = rows.num_columns
        first, self._upper = self._upper is None, changes.upper
        # A piece does not say where its interval ends; the last one does.
        beyond = EMPTY if changes.partial else changes.upper
        wrong = [time for time in self._times if not changes.lower <= time < beyond]
        if wrong or (changes.partial and changes.upper != changes.lower):
            raise CheckerViolation(
                f"subscribe: {name}: updates at {wrong[:4]} in [{changes.lower}, {changes.upper})"
                f"{', a piece' if changes.partial else ''}"
            )
        if changes.partial:
            return
        self._times.clear()
        if changes.upper >= EMPTY or (first and changes.upper == changes.lower):
            return
        found: Bag = Counter({row: n for row, n in self._bag.items() if n})
        wanted = contents(name, self._history.tables_at(changes.upper - 1))
        if name == SOURCE and self._width:
            wanted = projected(wanted, self._width)
        if found != wanted:
            raise CheckerViolation(
                f"subscribe: {name} below {changes.upper}: {difference(found, wanted)}"
            )


class ExchangeChecker:
    """Checks that on one client connection every answer is of an open request, of its kind, and a
    request gets at most one (a read: in pieces); a subscription's changes come before its end.
    Feeds the checkers of reads and subscriptions.

    Does not cover: order between answers of different requests, which is free.
    """

    def __init__(self, history: ShardHistories, reads: ReadsChecker) -> None:
        self._history = history
        self._reads = reads
        self._open: dict[int, tuple[Any, int]] = {}
        self._subscribes: dict[int, SubscribeChecker] = {}
        self._pieces: dict[int, list[ReadContents]] = {}
        self._welcomed = False

    def sent(self, message: Any) -> None:
        """Note a request that the client sends."""
        if isinstance(message, ClientHello):
            return
        self._open[message.request] = (message, self._reads.acknowledged)
        if isinstance(message, SubscribeObject) and message.from_ is None:
            self._subscribes[message.request] = SubscribeChecker(self._history, message)

    def received(self, message: Any) -> None:
        """Check an answer that the client receives."""
        if isinstance(message, ServiceHello) and not self._welcomed:
            self._welcomed = True
            return
        if isinstance(message, RequestFailed) and message.request == 0:
            raise CheckerViolation(f"exchange: the service closed the connection: {message.text}")
        if isinstance(message, RequestFailed) and message.text.startswith("internal fault"):
            raise CheckerViolation(f"exchange: {message.text}")
        request, least = self._open.get(message.request, (None, 0))
        if request is None:
            raise CheckerViolation(f"exchange: {message!r} answers no open request")
        if isinstance(message, SubscribeChanges):
            if not isinstance(request, SubscribeObject):
                raise CheckerViolation(f"exchange: {request!r} was answered with changes")
            if message.request in self._subscribes:
                self._subscribes[message.request].told(message)
            return
        pieces = self._pieces.setdefault(message.request, [])
        if isinstance(message, ReadContents):
            pieces.append(message)
            if message.more and isinstance(request, ReadObject):
                return
        del self._open[message.request], self._pieces[message.request]
        self._subscribes.pop(message.request, None)
        match request, message:
            case ReadObject(), ReadContents():
                self._reads.answered(request, least, pieces)
            case _, WriteCommitted():
                self._reads.acknowledged = max(self._reads.acknowledged, message.time)
            case ReadObject(), RequestFailed():
                pass
            case ReadObject(), _:
                raise CheckerViolation(f"exchange: {request!r} was answered with {message!r}")
            case _:
                pass

    @property
    def unanswered(self) -> list[Any]:
        """Return the requests that were not answered."""
        return [
            request
            for request, _ in self._open.values()
            if not isinstance(request, EndRequest | SubscribeObject | WaitFor)
        ]


class ReplicaChecker:
    """Checks that on one connection to the cluster both sides keep the rules of the protocol, as
    the rules of commands and responses have them.

    Does not cover: contents (the checkers of reads and subscriptions see them at the client), and
    responses without a reader.
    """

    name = "replica"
    sent: Any = Command
    received: Any = Response

    def __init__(self, settings: Settings) -> None:
        self._commands: Any = CommandRules(None, settings)
        self._responses: Any = ResponseRules()

    def heard(self, message: Any) -> None:
        """Check a command sent, or a response received."""
        try:
            if isinstance(message, self.received):
                self._responses.check(message)
                if isinstance(message, PeekResponse):
                    self._commands.answered(message.uuid)
                for id_ in self._responses.ended:
                    self._commands.ended(id_)
                self._responses.ended.clear()
            elif isinstance(message, self.sent):
                self._commands.check(message)
                self._responses.note_command(message)
        except (RemoteProtocolError, InvalidUsage) as error:
            raise CheckerViolation(f"{self.name}: {error}") from None


class StorageChecker(ReplicaChecker):
    """Checks the same on one connection to a storage half."""

    name = "storage"
    sent = storage.Command
    received = storage.Response

    def __init__(self, settings: Settings) -> None:
        self._commands = StorageCommandRules(settings)
        self._responses = StorageResponseRules()


def difference(found: Bag, wanted: Bag) -> str:
    """Return the difference of two contents, for people."""
    more = {row: n - wanted[row] for row, n in found.items() if n != wanted[row]}
    less = {row: n - found[row] for row, n in wanted.items() if n > found[row]}
    return f"too much {_few(more.items())}, missing {_few(less.items())}"


def _few(items: Iterable[Any]) -> str:
    listed = list(items)
    return f"{listed[:4]}{' …' if len(listed) > 4 else ''}"
