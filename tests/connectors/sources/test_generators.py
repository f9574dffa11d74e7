"""Generators: deterministic, resumable at any mark, at their pace; each kind's own rules."""

from __future__ import annotations

from collections import Counter as Bag
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_lab import Contents, around, drive, on_virtual_time  # type: ignore[import-not-found]

from actors.connectors.sources.churn import ChurnConfig, ChurnSeries
from actors.connectors.sources.counter import CounterConfig, CounterSeries
from actors.connectors.sources.generators import EventSeries, GeneratorConfig
from actors.connectors.sources.kinds import decode, encode, make_source
from actors.connectors.sources.nexmark import (
    AUCTION,
    BID,
    FIRST_ID,
    PERSON,
    NexmarkConfig,
    NexmarkSeries,
)
from actors.connectors.sources.random_draws import DrawStream, decimals, numbered
from actors.model.plan.schema import DIFF
from actors.runtime.errors import InvalidUsage
from suite_lanes import examples  # type: ignore[import-not-found]

KINDS: dict[str, Callable[..., Any]] = {
    "counter": CounterConfig,
    "bounded": lambda **given: CounterConfig(max_cardinality=7, **given),
    "churn": lambda **given: ChurnConfig(keys=37, payload_bytes=3, **given),
    "replaced": lambda **given: ChurnConfig(keys=10, updates=1, deletes=3, **given),
    "nexmark": NexmarkConfig,
}


def series_of(config: GeneratorConfig) -> EventSeries:
    match config:
        case CounterConfig():
            return CounterSeries(config)
        case ChurnConfig():
            return ChurnSeries(config)
        case NexmarkConfig():
            return NexmarkSeries(config)
    raise AssertionError(config)


def bags(pieces: Any) -> dict[str, Bag[tuple[Any, ...]]]:
    found: dict[str, Bag[tuple[Any, ...]]] = {}
    for rows in pieces:
        bag = found.setdefault(rows.export, Bag())
        for row in rows.updates.to_pylist():
            diff = row.pop(DIFF)
            bag[tuple(row.values())] += diff
    return {
        export: Bag({row: count for row, count in bag.items() if count})
        for export, bag in found.items()
        if any(bag.values())
    }


kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@given(st.data())
@settings(max_examples=examples(25))
def test_contents_are_the_sum_of_all_changes(kind: str, data: st.DataObject) -> None:
    config = KINDS[kind](seed=data.draw(st.integers(0, 3)))
    at = data.draw(st.integers(0, 300))
    series = series_of(config)
    names = frozenset(export.name for export in series.exports)
    pieces = [*series.contents(0, names)]
    start = 0
    while start < at:  # cut at will: what an event changes does not depend on it
        stop = data.draw(st.integers(start + 1, at))
        pieces += series.changes(start, stop, names)
        start = stop
    assert bags(pieces) == bags(series.contents(at, names))


@kinds
@given(st.data())
@settings(max_examples=examples(15))
def test_stopped_anywhere_it_goes_on_to_the_same_contents(kind: str, data: st.DataObject) -> None:
    up_to = data.draw(st.integers(0, 200))
    config = KINDS[kind](up_to=up_to, rate=1000, every_ms=data.draw(st.sampled_from([1, 7, 50])))
    stops = data.draw(st.lists(st.integers(0, 60), max_size=4))

    async def main() -> tuple[Contents, Contents]:
        whole, parts = Contents(), Contents()
        exports = await make_source(config, around()).describe(None)
        await drive(make_source(config, around()), exports, whole)
        for ms in stops:
            await drive(make_source(config, around()), exports, parts, ms=ms)
        await drive(make_source(config, around()), exports, parts)
        return whole, parts

    whole, parts = on_virtual_time(main)
    assert whole.bags == parts.bags
    assert whole.position == parts.position


@kinds
def test_an_export_that_comes_later_is_filled(kind: str) -> None:
    config = KINDS[kind](up_to=150)

    async def main() -> tuple[Contents, Contents]:
        whole, parts = Contents(), Contents()
        exports = await make_source(config, around()).describe(None)
        await drive(make_source(config, around()), exports, whole)
        early = KINDS[kind](up_to=60)
        await drive(make_source(early, around()), exports[1:], parts)
        before = len(parts.given)
        await drive(make_source(config, around()), exports, parts)
        assert any(rows.snapshot for rows in parts.given[before:]) or kind == "counter"
        return whole, parts

    whole, parts = on_virtual_time(main)
    assert whole.bags == parts.bags


@kinds
def test_columns_left_out_are_not_there(kind: str) -> None:
    config = KINDS[kind](up_to=200)

    async def main() -> None:
        every = await make_source(config, around()).describe(None)
        last = every[-1]
        if len(last.schema.columns) == 1:
            with pytest.raises(InvalidUsage, match="all its columns"):
                await make_source(config, around()).describe({last.name: last.schema.names})
            return
        without = last.schema.names[1:2]
        (chosen,) = await make_source(config, around()).describe({last.name: without})
        contents = Contents()
        await drive(make_source(config, around()), (chosen,), contents)
        assert set(contents.columns) == {last.name}
        assert contents.columns[last.name] == [n for n in last.schema.names if n not in without]

    on_virtual_time(main)


@kinds
def test_two_seeds_differ_and_one_does_not(kind: str) -> None:
    def rows(seed: int) -> Any:
        series = series_of(KINDS[kind](seed=seed))
        return bags(series.changes(0, 100, frozenset(e.name for e in series.exports)))

    assert rows(1) == rows(1)
    assert (rows(1) == rows(2)) == (kind in ("counter", "bounded"))


def test_the_pace_is_the_rate() -> None:
    async def main() -> Contents:
        contents = Contents()
        config = CounterConfig(rate=100, every_ms=100)
        exports = await make_source(config, around()).describe(None)
        await drive(make_source(config, around()), exports, contents, ms=10_050)
        return contents

    contents = on_virtual_time(main)
    assert abs(len(contents.bags["counter"]) - 1000) <= 10
    times = [mark.outside_ms or 0 for mark in contents.marks]
    assert all(after - before >= 99 for before, after in pairwise(times[1:]))
    assert sum(mark.messages for mark in contents.marks) == len(contents.bags["counter"])


def test_a_slow_event_comes_when_it_is_due() -> None:
    async def main() -> list[int]:
        contents = Contents()
        config = CounterConfig(rate=0.1)
        exports = await make_source(config, around()).describe(None)
        clock = around().clock
        began = clock.now_ms()
        await drive(make_source(config, around()), exports, contents, marks=4)
        return [(mark.outside_ms or 0) - began for mark in contents.marks]

    first, *others = on_virtual_time(main)
    assert first <= 1  # that nothing is there yet is known at once
    for expected, at in zip((10_000, 20_000, 30_000), others, strict=True):
        assert abs(at - expected) <= 2


def test_as_fast_as_asked_is_bounded_by_the_asking() -> None:
    async def main() -> Contents:
        contents = Contents()
        exports = await make_source(NexmarkConfig(), around()).describe(None)
        await drive(make_source(NexmarkConfig(), around()), exports, contents, marks=3)
        return contents

    contents = on_virtual_time(main)
    assert contents.marks[-1].position == '{"events":100000,"exports":["auction","bid","person"]}'
    assert max(rows.updates.nbytes for rows in contents.given) < 16 << 20


# -- kinds ----------------------------------------------------------------------------------------


def test_the_counter_keeps_the_newest() -> None:
    series = CounterSeries(CounterConfig(max_cardinality=3))
    assert bags(series.contents(10, {"counter"}))["counter"] == Bag([(8,), (9,), (10,)])
    over = bags(series.changes(2, 10, {"counter"}))["counter"]
    assert over == {(1,): -1, (2,): -1, (8,): 1, (9,): 1, (10,): 1}


def test_churn_keeps_its_proportions_and_its_keys() -> None:
    config = ChurnConfig(keys=20_000, updates=6, deletes=2, payload_bytes=0)
    series = ChurnSeries(config)
    pieces = [rows.updates for rows in series.changes(0, 200_000, {"rows"})]
    gone = sum(pc.sum(pc.less(piece[DIFF], 0)).as_py() for piece in pieces)
    come = sum(pc.sum(pc.greater(piece[DIFF], 0)).as_py() for piece in pieces)
    # An update is both; inserts alone come, and deletes alone go.
    inserted, updated, deleted = 0, 0, 0
    for piece in pieces:
        keys = piece["key"].to_numpy()
        diffs = piece[DIFF].to_numpy()
        both = np.intersect1d(keys[diffs < 0], keys[diffs > 0])
        updated += len(both)
        inserted += int((diffs > 0).sum()) - len(both)
        deleted += int((diffs < 0).sum()) - len(both)
    assert (come, gone) == (inserted + updated, deleted + updated)
    assert updated / deleted == pytest.approx(3, rel=0.05)
    assert inserted / deleted == pytest.approx(1, rel=0.05)
    rows = [piece.updates.num_rows for piece in series.contents(123_456, {"rows"})]
    assert sum(rows) / config.keys == pytest.approx(config.present, rel=0.05)
    # The rate counts turns that change something.
    assert series.turns * (inserted + updated + deleted) == pytest.approx(200_000, rel=0.01)


@given(st.integers(1, 400), st.integers(0, 1 << 30))
@settings(max_examples=examples(60))
def test_each_key_has_one_turn_a_round(keys: int, seed: int) -> None:
    series = ChurnSeries(ChurnConfig(keys=keys, deletes=0, seed=seed, payload_bytes=0))
    for start in (0, keys, 7 * keys):
        (rows,) = (r.updates for r in series.changes(start, start + keys, {"rows"}))
        kept = rows.filter(pc.equal(rows[DIFF], 1))
        assert sorted(kept["key"].to_pylist()) == list(range(keys))


def test_nexmark_has_the_proportions_and_the_columns() -> None:
    series = NexmarkSeries(NexmarkConfig(rate=1000))
    found = {r.export: r.updates for r in series.changes(0, 50_000, {"person", "auction", "bid"})}
    assert {name: rows.num_rows for name, rows in found.items()} == {
        "person": 1_000,
        "auction": 3_000,
        "bid": 46_000,
    }
    for name, schema in (("person", PERSON), ("auction", AUCTION), ("bid", BID)):
        assert tuple(found[name].column_names) == (*schema.names, DIFF)
        assert [found[name].schema.field(n).type for n in schema.names] == schema.arrow().types
        assert sum(column.null_count for column in found[name].columns) == 0
    assert found["person"]["id"].to_pylist() == list(range(FIRST_ID, FIRST_ID + 1_000))
    assert found["auction"]["id"].to_pylist() == list(range(FIRST_ID, FIRST_ID + 3_000))
    times = found["bid"]["dateTime"].cast("int64").to_numpy() // 1000
    assert (np.diff(times) >= 0).all()
    assert times[-1] - times[0] == pytest.approx(50_000, rel=0.01)  # a second a thousand events


def test_nexmark_refers_to_what_is_there_and_has_its_hot_ones() -> None:
    config = NexmarkConfig(hot_auctions=2, hot_bidders=4, hot_sellers=4)
    events = (500_000, 550_000)
    found = {
        r.export: r.updates for r in NexmarkSeries(config).changes(*events, {"auction", "bid"})
    }
    people, auctions = events[1] // 50, events[1] // 50 * 3
    bids = found["bid"]
    auction, bidder = bids["auction"].to_numpy(), bids["bidder"].to_numpy()
    assert auction.min() >= FIRST_ID + 500_000 // 50 * 3 - 110
    assert auction.max() <= FIRST_ID + auctions + 10
    assert bidder.min() >= FIRST_ID + 500_000 // 50 - 1100
    assert bidder.max() <= FIRST_ID + people + 10
    hot = ((auction - FIRST_ID) % 100 == 0).mean()
    assert hot == pytest.approx(1 / 2, abs=0.02)
    assert ((bidder - FIRST_ID) % 100 == 1).mean() == pytest.approx(3 / 4, abs=0.02)
    sellers = found["auction"]["seller"].to_numpy()
    assert ((sellers - FIRST_ID) % 100 == 0).mean() == pytest.approx(3 / 4, abs=0.03)
    assert set(found["auction"]["category"].to_pylist()) == set(range(10, 15))
    assert pc.all(pc.less(found["auction"]["dateTime"], found["auction"]["expires"])).as_py()
    assert pc.all(
        pc.less_equal(found["auction"]["initialBid"], found["auction"]["reserve"])
    ).as_py()
    channels = bids["channel"].to_pylist()
    assert sum(not c.startswith("channel-") for c in channels) / len(channels) == pytest.approx(
        1 / 2, abs=0.02
    )


# -- what is refused, and how configurations travel -----------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CounterConfig(rate=-1), "invalid rate -1"),
        (CounterConfig(rate=float("nan")), "invalid rate nan"),
        (CounterConfig(up_to=-1), "up_to"),
        (CounterConfig(max_cardinality=0), "invalid max_cardinality 0"),
        (ChurnConfig(keys=0), "invalid keys 0"),
        (ChurnConfig(keys=1 << 40), "keys"),
        (ChurnConfig(updates=0), "invalid updates 0"),
        (ChurnConfig(payload_bytes=1 << 20), "payload_bytes"),
        (NexmarkConfig(hot_sellers=0), "invalid hot_sellers 0"),
        (NexmarkConfig(event_rate=0), "event_rate"),
        (NexmarkConfig(every_ms=0), "every_ms"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        make_source(config, around())


def test_configurations_travel_and_strangers_do_not() -> None:
    for config in (CounterConfig(rate=3), ChurnConfig(keys=5), NexmarkConfig(seed=4)):
        assert decode(encode(config)) == config
    for text in ('{"type":"counter","rote":3}', '{"type":"nothing"}', "[]", "{", '{"rate":1}'):
        with pytest.raises(InvalidUsage, match="invalid configuration"):
            decode(text)


def test_a_name_or_a_position_that_is_not_ours_is_refused() -> None:
    async def main() -> None:
        source = make_source(NexmarkConfig(), around())
        with pytest.raises(InvalidUsage, match="no table 'bids'"):
            await source.describe({"bids": ()})
        with pytest.raises(InvalidUsage, match="no column prize"):
            await source.describe({"bid": ("prize",)})
        (bid,) = await source.describe({"bid": ()})
        for position in ("", "{}", '{"events":"x","exports":[]}'):
            with pytest.raises(InvalidUsage, match="invalid position"):
                await source.open((bid,), position)
        with pytest.raises(InvalidUsage, match="has no table 'bid'"):
            await make_source(CounterConfig(), around()).open((bid,), None)

    on_virtual_time(main)


# -- draws ----------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 62), st.integers(1, 1 << 32))
def test_a_draw_depends_on_its_number_alone(seed: int, bound: int) -> None:
    draws = DrawStream(seed, "x")
    many = draws.below(numbered(100, 164), bound)
    assert [int(draws.below(np.array([n]), bound)[0]) for n in range(100, 164)] == many.tolist()
    assert ((many >= 0) & (many < bound)).all()
    assert many.tolist() == draws.below(numbered(100, 164), np.full(64, bound)).tolist()


def test_draws_are_those_of_every_version() -> None:
    """Positions live longer than a version: what was drawn before must be drawn again."""
    assert DrawStream(7, "x").bits(numbered(0, 2)).tolist() == BITS
    assert DrawStream(7, "x").texts(numbered(0, 2), 3, 9).to_pylist() == TEXTS


BITS = [1476209055031750442, 15980729374804989215]
TEXTS = ["cff", "bdmmnbwem"]


def test_draws_are_even_and_streams_are_apart() -> None:
    draws = DrawStream(1, "x").below(numbered(0, 100_000), 10)
    assert np.bincount(draws).min() > 9_600
    other = DrawStream(1, "y").below(numbered(0, 100_000), 10)
    assert abs((draws == other).mean() - 0.1) < 0.01


@given(st.lists(st.integers(-(10**17), 10**17)))
def test_decimals_keep_their_value(cents: list[int]) -> None:
    import pyarrow as pa

    made = decimals(np.array(cents, np.int64), pa.decimal128(18, 2))
    assert [int(value * 100) for value in made.to_pylist()] == cents
