"""Which blobs may go, as people are told."""

from __future__ import annotations

from msgspec.structs import replace

from actors.durable.persist.location import STASH_FOLDER, BlobInfo
from actors.durable.persist.orphans import RETIRED, STASHED, UNNAMED, GarbageBlob, list_garbage
from actors.durable.persist.shard import NewShard, ReaderLease, RetiredBlob, ShardState, created
from actors.model.plan.schema import TableColumn, TableSchema

NOW, GRACE, STASH = 1_000_000, 1000, 100


def told(
    state: ShardState, *infos: tuple[str, int], ignored: frozenset[str] = frozenset()
) -> list[GarbageBlob]:
    """Of blobs of this age each."""
    blobs = [BlobInfo(key, 7, NOW - age_ms) for key, age_ms in infos]
    return list_garbage(
        {state.id: state}, blobs, NOW, grace_ms=GRACE, stash_ms=STASH, ignored=ignored
    )


def shard() -> ShardState:
    state = created(NewShard("s", TableSchema((TableColumn("a", "bigint"),))), "w", 1)
    return replace(state, retired=(RetiredBlob("s/old", 5),))


def test_what_no_document_names_stays_while_it_may_be_about_to_be_named() -> None:
    assert told(shard(), ("s/a", GRACE - 1), ("s/b", GRACE), ("t/c", GRACE + 1)) == [
        GarbageBlob("s/a", 7, GRACE - 1, UNNAMED, f"younger than {GRACE} ms"),
        GarbageBlob("s/b", 7, GRACE, UNNAMED),
        GarbageBlob("t/c", 7, GRACE + 1, UNNAMED),
    ]


def test_an_answer_stays_while_it_may_be_taken() -> None:
    young, old = f"{STASH_FOLDER}/a", f"{STASH_FOLDER}/b"
    assert told(shard(), (young, STASH - 1), (old, STASH)) == [
        GarbageBlob(young, 7, STASH - 1, STASHED, f"taken within {STASH} ms"),
        GarbageBlob(old, 7, STASH, STASHED),
    ]


def test_what_was_replaced_stays_for_leases_of_before() -> None:
    assert told(shard(), ("s/old", 1)) == [GarbageBlob("s/old", 7, 1, RETIRED)]
    leases = {name: ReaderLease(0, seqno, NOW) for name, seqno in (("b", 4), ("a", 3), ("late", 5))}
    held = replace(shard(), leases=leases)
    assert told(held, ("s/old", 1)) == [GarbageBlob("s/old", 7, 1, RETIRED, "lease a, b")]
    (found,) = told(held, ("s/old", 1), ignored=frozenset({"a"}))
    assert found.kept == "lease b"
    assert told(held, ("s/old", 1), ignored=frozenset({"a", "b"}))[0].kept == ""
