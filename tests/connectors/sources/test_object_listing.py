"""Which objects were taken: each once, whatever their times and the stops; told in bounded
bytes, found in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.connectors.sources import object_listing
from actors.connectors.sources.file_listing import FoundFile, hash_of
from actors.connectors.sources.object_listing import (
    RECENT_MAX,
    BucketListing,
    BucketScan,
    IngestedObjects,
    data_objects,
)
from actors.connectors.sources.source import POSITION_BYTES_MAX
from actors.durable.object_store.bucket_store import ListedObject, ObjectVersion
from actors.runtime.errors import InvalidUsage
from suite_lanes import examples  # type: ignore[import-not-found]


def file(name: str, modified: int, tag: str | None = "1", size: int = 1) -> FoundFile:
    version = ObjectVersion(tag, None)
    return FoundFile(modified, hash_of(name), name, f"s3://b/{name}", size, modified, version)


def looked(taken: IngestedObjects, files: list[FoundFile]) -> BucketListing:
    looking = BucketScan(taken)
    looking.see(files)
    return looking.done()


@given(st.data())
@settings(max_examples=examples(80))
def test_each_object_is_taken_once_and_those_that_are_not_are_counted(data: st.DataObject) -> None:
    """Against a model that remembers all: objects come with any time, are written again or
    removed, are taken in batches, and the position goes through its text between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_listing, "RECENT_MAX", data.draw(st.integers(2, 6)))
        patch.setattr(object_listing, "PENDING_MAX", data.draw(st.integers(1, 4)))
        bucket: dict[str, FoundFile] = {}
        taken, done, told, removed = IngestedObjects(), set[str](), set[str](), False
        late, ever_late = 0, set[str]()
        for round_ in range(data.draw(st.integers(1, 8))):
            for number in range(data.draw(st.integers(0, 4))):
                name = f"{round_}-{number}"
                bucket[name] = file(name, data.draw(st.integers(0, 20)))
            for name in data.draw(st.lists(st.sampled_from(sorted(bucket) or ["-"]), max_size=1)):
                if data.draw(st.booleans()) and name in bucket:
                    del bucket[name]
                    removed = True
                elif name in bucket and hash_of(name) in taken.recent:
                    bucket[name] = file(name, 21 + round_, f"{round_}")
                    told.add(name)
            seen = looked(taken, list(bucket.values()))
            names = [each.name for each in seen.new]
            assert not set(names) & done
            assert {each.name for each in seen.changed} <= told
            assert seen.new == tuple(sorted(seen.new))
            late += seen.late
            untaken = {name for name in bucket if name not in done}
            below = {name for name in untaken if bucket[name].key <= taken.low}
            # What is new is found, what is late is counted; only removed ones can hide those.
            assert len(names) + seen.behind == len(untaken) - len(below)
            ever_late |= below
            assert late <= len(ever_late) if removed else late == len(below)
            taken = seen.taken
            left = list(seen.new)
            for _ in range(data.draw(st.integers(0, len(left)))):
                batch, left = left[:2], left[2:]
                taken = taken.plus(batch)
                done |= {each.name for each in batch}
                # Invariant: nothing that was listed lies at or below the mark.
                assert all(each.key > taken.low for each in left)
            if data.draw(st.booleans()):
                taken = IngestedObjects.of(taken.position())
            assert len(taken.recent) <= object_listing.RECENT_MAX


def test_a_look_tells_the_first_in_order_and_counts_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_listing, "PENDING_MAX", 3)
    seen = looked(IngestedObjects(), [file(f"{n}", 100 - n, size=n) for n in range(10)])
    assert [each.name for each in seen.new] == ["9", "8", "7"]
    assert (seen.behind, seen.behind_bytes, seen.newest) == (7, sum(range(7)), "0")
    rest = looked(seen.taken.plus(seen.new), [file(f"{n}", 100 - n, size=n) for n in range(10)])
    assert [each.name for each in rest.new] == ["6", "5", "4"]


def test_a_position_is_bounded() -> None:
    taken = IngestedObjects().plus([file(f"{n:05}" * 40, n) for n in range(3 * RECENT_MAX)])
    taken = taken._replace(exports=("rows",), low=(1 << 62, bytes(12)), forgotten=1 << 40)
    text = taken.position()
    assert len(text.encode()) <= POSITION_BYTES_MAX
    assert IngestedObjects.of(text) == taken


def test_what_was_written_again_is_told_once_and_the_same_bytes_are_not() -> None:
    taken = IngestedObjects().plus([file("a", 5), file("b", 6)])
    assert taken.verdict(file("a", 5)) == "taken"
    assert taken.verdict(file("a", 5, "2")) == "changed"
    assert taken.verdict(file("a", 5, size=2)) == "changed"
    assert taken.verdict(file("a", 7)) == "touched"
    seen = looked(taken, [file("a", 9, "2"), file("b", 9)])
    assert [each.name for each in seen.changed] == ["a"]
    again = looked(seen.taken, [file("a", 9, "2"), file("b", 9)])
    assert again.changed == ()
    assert again.taken == seen.taken


def test_without_a_version_the_time_tells() -> None:
    taken = IngestedObjects().plus([file("a", 5, None)])
    assert taken.verdict(file("a", 5, None)) == "taken"
    assert taken.verdict(file("a", 6, None)) == "changed"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"low_ns":"x"}', "AAAA"])
def test_a_position_that_is_not_ours_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match="invalid position"):
        IngestedObjects.of(text)
    broken = (
        IngestedObjects().plus([file("a", 5)]).position().replace('"objects":"', '"objects":"A')
    )
    with pytest.raises(InvalidUsage, match="invalid position"):
        IngestedObjects.of(broken)


def test_what_is_data_below_a_prefix() -> None:
    keys = {
        "in/a.csv": 1,
        "in/b.json": 1,
        "in/_c.csv": 1,
        "in/.d.csv": 1,
        "in/empty.csv": 0,
        "in": 5,
        "inner/e.csv": 1,
        "in/sub/f.csv": 1,
        "in/_sub/g.csv": 1,
        "in/.s/t/h.csv": 1,
    }
    objects = [ListedObject(key, size, 7, ObjectVersion("x", None)) for key, size in keys.items()]

    def names(prefix: str, pattern: str, recursive: bool) -> list[str]:
        return [each.name for each in data_objects("s3://b", prefix, pattern, recursive, objects)]

    assert names("in/", "*", False) == ["a.csv", "b.json"]
    assert names("in/", "*.csv", True) == ["a.csv", "sub/f.csv"]
    assert names("", "*", False) == ["in"]
    (one,) = data_objects("s3://b", "in/", "a*", False, objects)
    assert (one.path, one.size, one.modified_ns) == ("s3://b/in/a.csv", 1, 7)
