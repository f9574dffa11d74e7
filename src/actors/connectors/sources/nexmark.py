"""NEXMark: people who offer items in auctions and bid for them. Of 50 events, one is a person,
three are auctions, and 46 are bids.

Theory of operation. As in the benchmark's generator, event n of epoch ``n // 50`` is a person (the
first of the epoch), an auction (the next three) or a bid. Ids count up, so the number of an event
determines the last person and auction before it. References are drawn from those: one of the active
people or auctions in flight or, with the frequency of the *hot* ratios, one that many other events
choose, too. Event time advances evenly. Unlike the benchmark's generator, this one uses other
random numbers, and takes texts from pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from actors.connectors.sources.generators import (
    GeneratorConfig,
    PreparedSeries,
    at_least,
    updates,
)
from actors.connectors.sources.random_draws import (
    TEXT,
    DrawStream,
    Numbers,
    joined,
    numbered,
    padded,
)
from actors.connectors.sources.source import SourceExport, SourceRows
from actors.model.plan.schema import TableColumn, TableSchema


def _schema(text: str, key: tuple[str, ...]) -> TableSchema:
    columns = [part.split() for part in text.split(",")]
    return TableSchema(tuple(TableColumn(name, kind, False) for name, kind in columns), key)


PERSON: Final = _schema(
    "id bigint, name string, emailAddress string, creditCard string, city string, state string, "
    "dateTime timestamp, extra string",
    ("id",),
)
AUCTION: Final = _schema(
    "id bigint, itemName string, description string, initialBid bigint, reserve bigint, "
    "dateTime timestamp, expires timestamp, seller bigint, category bigint, extra string",
    ("id",),
)
BID: Final = _schema(
    "auction bigint, bidder bigint, price bigint, channel string, url string, "
    "dateTime timestamp, extra string",
    (),
)
EPOCH: Final = 50
"""Number of events in an epoch. The first is a person, the next three are auctions, and the others
are bids."""
AUCTIONS: Final = 3
FIRST_ID: Final = 1000
"""First id of people and auctions."""
FIRST_CATEGORY: Final = 10
CATEGORIES: Final = 5
ID_LEAD: Final = 10
"""References may point this many ids beyond the last existing one."""
HOT: Final = 100
"""One of this many consecutive ids is the hot one."""
CHANNELS: Final = 10_000
HOT_CHANNELS: Final = ("Google", "Facebook", "Baidu", "Apple")
STATES: Final = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES: Final = (
    "Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle",
    "Kent", "Cheyenne",
)  # fmt: skip
FIRST_NAMES: Final = (
    "Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"
)  # fmt: skip
LAST_NAMES: Final = (
    "Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"
)  # fmt: skip
POOL: Final = 4096
"""Number of distinct texts of a kind."""
EVENTS_AT_ONCE: Final = 50_000
SECOND_US: Final = 1_000_000


class NexmarkConfig(GeneratorConfig, frozen=True, kw_only=True, tag="nexmark"):
    """Configuration of a NEXMark generator. An event is a person, an auction or a bid."""

    start_ms: int = 1_436_918_400_000
    """Event time of the first event, in Unix ms."""
    event_rate: float | None = None
    """Events per second of event time. None: `rate`, or 10,000 if that is 0."""
    hot_auctions: int = 2
    """One of this many bids is not for the hot auction."""
    hot_bidders: int = 4
    """One of this many bids is not by the hot bidder."""
    hot_sellers: int = 4
    """One of this many auctions is not by the hot seller."""
    auctions_in_flight: int = 100
    """A bid that is not for the hot auction is for one of this many recent auctions."""
    active_people: int = 1000
    """Bidders and sellers that are not hot are among this many recent people."""

    def check(self) -> None:
        """Raise `InvalidUsage` if an option is out of range."""
        super().check()
        at_least(self, start_ms=0, hot_auctions=1, hot_bidders=1, hot_sellers=1)
        at_least(self, auctions_in_flight=1, active_people=1)
        if self.event_rate is not None:
            at_least(self, event_rate=1e-3)


class NexmarkSeries(PreparedSeries):
    """Changes of the three tables. Rows are never deleted."""

    exports = (
        SourceExport("person", PERSON),
        SourceExport("auction", AUCTION),
        SourceExport("bid", BID),
    )
    events_at_once = EVENTS_AT_ONCE

    def __init__(self, config: NexmarkConfig) -> None:
        self._config = config
        self._us_per_event = SECOND_US / (config.event_rate or config.rate or 10_000.0)
        self._drawn: dict[str, DrawStream] = {}
        self._pools = _pools(config.seed)

    def contents(self, at: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield all rows of the first `at` events."""
        for start in range(0, at, EVENTS_AT_ONCE):
            yield from self.changes(start, min(at, start + EVENTS_AT_ONCE), wanted)

    def changes(self, start: int, stop: int, wanted: AbstractSet[str]) -> Iterator[SourceRows]:
        """Yield the rows of the events ``start <= n < stop``."""
        events = numbered(start, stop)
        place = events % EPOCH
        if "person" in wanted:
            yield SourceRows("person", self._people(events[place == 0]))
        if "auction" in wanted:
            yield SourceRows("auction", self._auctions(events[(place > 0) & (place <= AUCTIONS)]))
        if "bid" in wanted:
            yield SourceRows("bid", self._bids(events[place > AUCTIONS]))

    # -- rows -------------------------------------------------------------------------------------

    def _people(self, events: Numbers) -> pa.Table:
        name = self._draws("name").bits(events)
        first = _picked(pa.array(FIRST_NAMES), name >> np.uint64(32))
        last = _picked(pa.array(LAST_NAMES), name & np.uint64(0xFFFFFFFF))
        mail = self._draws("mail")
        address = joined(mail.texts(events, 3, 7), "@", mail.texts(~events, 3, 5), ".com")
        groups = [padded(self._draws(f"card {g}").below(events, 10_000), 4) for g in range(4)]
        card = joined(groups[0], " ", groups[1], " ", groups[2], " ", groups[3])
        city = self._choice("city", events, pa.array(CITIES))
        state = self._choice("state", events, pa.array(STATES))
        columns = [events // EPOCH + FIRST_ID, joined(first, " ", last), address, card, city, state]
        return updates(PERSON, [*columns, self._times(events), self._extra("person", events)], 1)

    def _auctions(self, events: Numbers) -> pa.Table:
        ids = _last_auction(events) + FIRST_ID
        first = self._price("initial", events)
        reserve = first + self._price("reserve", events)
        # An auction is open for about as long as it takes to start `auctions_in_flight` others.
        ahead_ms = self._config.auctions_in_flight * EPOCH / AUCTIONS * self._us_per_event / 1000
        open_ms = 1 + self._draws("open").below(events, max(1, min(1 << 31, int(2 * ahead_ms))))
        last = events // EPOCH
        hot = self._draws("hot seller").below(events, self._config.hot_sellers) > 0
        seller = np.where(hot, last // HOT * HOT, self._person("seller", events)) + FIRST_ID
        category = FIRST_CATEGORY + self._draws("category").below(events, CATEGORIES)
        columns: Sequence[pa.Array | np.ndarray] = [
            ids,
            self._choice("item name", events, self._pools.items),
            self._choice("described", events, self._pools.descriptions),
            first,
            reserve,
            self._times(events),
            self._times(events, open_ms * 1000),
            seller,
            category,
            self._extra("auction", events),
        ]
        return updates(AUCTION, columns, 1)

    def _bids(self, events: Numbers) -> pa.Table:
        config = self._config
        newest = _last_auction(events)
        oldest = np.maximum(newest - config.auctions_in_flight, 0)
        some = oldest + self._draws("auction").below(events, newest - oldest + 1 + ID_LEAD)
        hot = self._draws("hot auction").below(events, config.hot_auctions) > 0
        auction = np.where(hot, newest // HOT * HOT, some) + FIRST_ID
        last = events // EPOCH
        hot = self._draws("hot bidder").below(events, config.hot_bidders) > 0
        bidder = np.where(hot, last // HOT * HOT + 1, self._person("bidder", events)) + FIRST_ID
        number = self._draws("channel").below(events, 2 * CHANNELS)
        # Half of all bids use a hot channel; hot channels have the numbers after the others.
        channel = np.where(number < CHANNELS, number, CHANNELS + number % len(HOT_CHANNELS))
        taken = pa.array(channel)
        columns: Sequence[pa.Array | np.ndarray] = [
            auction,
            bidder,
            self._price("price", events),
            self._pools.channels.take(taken),
            self._pools.urls.take(taken),
            self._times(events),
            self._extra("bid", events),
        ]
        return updates(BID, columns, 1)

    # -- columns ----------------------------------------------------------------------------------

    def _draws(self, stream: str) -> DrawStream:
        found = self._drawn.get(stream)
        if found is None:
            found = self._drawn[stream] = DrawStream(self._config.seed, stream)
        return found

    def _choice(self, stream: str, events: Numbers, among: pa.Array) -> pa.Array:
        return among.take(pa.array(self._draws(stream).below(events, len(among))))

    def _extra(self, export: str, events: Numbers) -> pa.Array:
        return self._choice(f"{export} extra", events, self._pools.extras[export])

    def _price(self, stream: str, events: Numbers) -> Numbers:
        """Return prices from 100 to 100 million, with a log-uniform distribution."""
        return np.rint(10.0 ** (6 * self._draws(stream).unit(events)) * 100).astype(np.int64)

    def _person(self, stream: str, events: Numbers) -> Numbers:
        """Return one of the active people, or one of the next ones."""
        people = events // EPOCH + 1
        active = np.minimum(people, self._config.active_people)
        return people - active + self._draws(stream).below(events, active + ID_LEAD)

    def _times(self, events: Numbers, later_us: Numbers | int = 0) -> pa.Array:
        at = (events * self._us_per_event).astype(np.int64) // 1000 * 1000
        made = at + self._config.start_ms * 1000 + later_us
        return pa.array(made).cast(pa.timestamp("us", tz="UTC"))


class _Pools(NamedTuple):
    """Texts to choose from, by the column that they are for."""

    items: pa.Array
    descriptions: pa.Array
    extras: dict[str, pa.Array]
    channels: pa.Array
    urls: pa.Array


@lru_cache(maxsize=4)
def _pools(seed: int) -> _Pools:
    pool = numbered(0, POOL)
    extras = {
        "person": DrawStream(seed, "person extra").texts(pool, 60, 110),
        "auction": DrawStream(seed, "auction extra").texts(pool, 290, 430),
        "bid": DrawStream(seed, "bid extra").texts(pool, 54, 82),
    }
    items = DrawStream(seed, "item").texts(pool, 3, 20, TEXT)
    descriptions = DrawStream(seed, "description").texts(pool, 3, 100, TEXT)
    return _Pools(items, descriptions, extras, *_channels(seed))


def _channels(seed: int) -> tuple[pa.Array, pa.Array]:
    """Return the names and URLs of the regular channels, followed by those of the hot ones."""
    numbers = numbered(0, CHANNELS)
    texts = pa.array(numbers).cast(pa.string())
    names = [*joined("channel-", texts).to_pylist(), *HOT_CHANNELS]
    every = numbered(0, CHANNELS + len(HOT_CHANNELS))
    draws = DrawStream(seed, "url")
    parts = [draws.texts(every + (1 << 20) * part, 3, 5) for part in range(3)]
    paths = joined(parts[0], "/", parts[1], "/", parts[2])
    urls = joined("https://www.nexmark.com/", paths, "/item.htm?query=1").to_pylist()
    # Nine of ten URLs of regular channels contain the channel's id.
    tells = DrawStream(seed, "channel id").below(numbers, 10) > 0
    ids = DrawStream(seed, "channel number").below(numbers, 1 << 31)
    for number in np.flatnonzero(tells).tolist():
        urls[number] += f"&channel_id={ids[number]}"
    return pa.array(names), pa.array(urls)


def _picked(among: pa.Array, bits: np.ndarray) -> pa.Array:
    return among.take(pa.array((bits % np.uint64(len(among))).astype(np.int64)))


def _last_auction(events: Numbers) -> Numbers:
    """Return the number of the newest auction at or before each event (from 0; 0 before the first
    one)."""
    place = np.minimum(events % EPOCH, AUCTIONS)
    return np.maximum(events // EPOCH * AUCTIONS + place - 1, 0)
