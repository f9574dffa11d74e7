"""Statistics: counts are added once, whatever their epoch; how things stand is the present's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.model.protocol.message_parts import ObjectStatistics
from actors.model.protocol.storage import StatisticsUpdates
from actors.model.protocol.storage_internal import StatisticsMeasurement, StatisticsUpdate
from actors.replica.storage.task_statistics import LocalStatistics, StatisticsSums


def test_counts_become_increments_and_are_taken_once() -> None:
    local = LocalStatistics()
    assert local.take() == ()
    local.measure(1, ObjectStatistics("u1a", messages=3, rows_inserted=2, lag_ms=50))
    local.measure(1, ObjectStatistics("u1a", messages=5, rows_inserted=2, lag_ms=40))
    assert local.take() == (
        StatisticsMeasurement(1, ObjectStatistics("u1a", messages=5, rows_inserted=2, lag_ms=40)),
    )
    local.measure(1, ObjectStatistics("u1a", messages=5, rows_inserted=2, lag_ms=40))
    assert local.take() == ()
    local.measure(1, ObjectStatistics("u1a", messages=5, rows_inserted=2, lag_ms=41))
    assert local.take() == (StatisticsMeasurement(1, ObjectStatistics("u1a", lag_ms=41)),)


def test_a_new_task_counts_from_its_start() -> None:
    local = LocalStatistics()
    local.measure(1, ObjectStatistics("u1a", bytes=100))
    local.measure(2, ObjectStatistics("u1a", bytes=30))
    local.end(1)
    assert [m.statistics.bytes for m in local.take()] == [100, 30]
    local.measure(2, ObjectStatistics("u1a", bytes=31))
    assert local.take() == (StatisticsMeasurement(2, ObjectStatistics("u1a", bytes=1)),)


def update(epoch: int, statistics: ObjectStatistics) -> StatisticsUpdate:
    return StatisticsUpdate(0, (StatisticsMeasurement(epoch, statistics),))


def test_an_earlier_epoch_counts_and_says_nothing_of_how_things_stand() -> None:
    total = StatisticsSums()
    total.begin("source", ["u1", "u1a"], 1)
    total.absorb(update(1, ObjectStatistics("u1a", messages=2, position_known="7", lag_bytes=3)))
    total.restarted(["u1", "u1a"])
    total.begin("source", ["u1", "u1a"], 4)
    total.absorb(update(4, ObjectStatistics("u1a", messages=1, position_known="5")))
    total.absorb(update(1, ObjectStatistics("u1a", messages=10, position_known="9", lag_bytes=9)))
    assert total.of("u1a") == ObjectStatistics(
        "u1a", messages=13, position_known="5", lag_bytes=3, restarts=1
    )


def test_what_another_object_of_the_same_id_has_done_is_not_added() -> None:
    total = StatisticsSums()
    total.begin("source", ["u1", "u1a"], 1)
    total.absorb(update(1, ObjectStatistics("u1a", messages=2)))
    total.remove(["u1a"])
    total.begin("source", ["u1", "u1a"], 4)
    total.absorb(update(1, ObjectStatistics("u1a", messages=10)))  # it comes late
    total.absorb(update(1, ObjectStatistics("u1", messages=20)))  # this one was never dropped
    assert total.of("u1a") == ObjectStatistics("u1a")
    assert total.of("u1") == ObjectStatistics("u1", messages=20)
    total.remove(["u1", "u1a"])
    total.begin("sink", ["u1"], 5)
    total.absorb(update(4, ObjectStatistics("u1", messages=30)))
    total.absorb(update(5, ObjectStatistics("u1", messages=1)))
    assert total.of("u1") == ObjectStatistics("u1", messages=1)
    assert total.ignored == 2


def test_changed_objects_are_told_whole_and_a_new_client_hears_all() -> None:
    total = StatisticsSums()
    total.begin("source", ["u1", "u1a"], 1)
    total.begin("sink", ["k1"], 2)
    total.begin("oneshot", ["o1"], 3)
    everything = StatisticsUpdates(
        (ObjectStatistics("u1"), ObjectStatistics("u1a")),
        (ObjectStatistics("k1"),),
        (ObjectStatistics("o1"),),
    )
    known = {"u1", "u1a", "k1", "o1"}
    assert total.news(known) == everything
    assert total.news(known) is None
    total.absorb(update(2, ObjectStatistics("k1", bytes=5)))
    assert total.news({"u1"}) is None
    assert total.news(known) == StatisticsUpdates((), (ObjectStatistics("k1", bytes=5),))
    total.remove(["k1", "nobody"])
    total.absorb(update(2, ObjectStatistics("k1", bytes=5)))
    assert (total.ignored, total.of("k1")) == (1, None)
    total.forget_reported()
    news = total.news(known)
    assert news is not None
    assert (len(news.sources), news.sinks, len(news.oneshots)) == (2, (), 1)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.booleans()), max_size=40),
    st.lists(st.booleans(), max_size=40),
)
def test_nothing_is_lost_or_counted_twice(
    steps: list[tuple[int, int, bool]], late: list[bool]
) -> None:
    """Tasks of three renderings count in turn or at once; updates of an earlier epoch come late."""
    local, total = LocalStatistics(), StatisticsSums()
    counted: dict[int, int] = {}
    waiting: list[StatisticsUpdate] = []
    newest = 0
    total.begin("source", ["u1"], 0)
    for number, (epoch, more, taken) in enumerate(steps):
        if epoch > newest:
            newest = epoch
            total.begin("source", ["u1"], epoch)
        counted[epoch] = counted.get(epoch, 0) + more
        local.measure(epoch, ObjectStatistics("u1", messages=counted[epoch], lag_ms=epoch))
        if taken:
            waiting.append(StatisticsUpdate(0, local.take()))
        if late[number : number + 1] != [True]:
            for each in waiting:
                total.absorb(each)
            waiting.clear()
    for each in [*waiting, StatisticsUpdate(0, local.take())]:
        total.absorb(each)
    found = total.of("u1")
    assert found is not None
    assert found.messages == sum(counted.values())
    assert found.lag_ms is None or found.lag_ms == newest or newest not in counted
