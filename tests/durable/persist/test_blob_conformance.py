"""What every store of blobs must do. A store that is added gets a URL in conftest, no test of its
own."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_houses import CLOCK, PIECE, StoreHouse  # type: ignore[import-not-found]

from actors.durable.persist.location import BlobStore
from actors.runtime.errors import InvalidUsage, StorageError

SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE + 5]


def bytes_of(size: int, number: int = 0) -> bytes:
    """Such that no two pieces of it are equal."""
    words = (f"{number:04d}{place:012d}".encode() for place in range(size // 16 + 1))
    return b"".join(words)[:size]


async def keys_of(blob: BlobStore, prefix: str = "") -> list[str]:
    return [info.key for info in await blob.list_keys(prefix)]


async def test_what_one_writes_all_read(blobs: StoreHouse) -> None:
    async with blobs.blobs() as (one, other):
        before = CLOCK.now_ms()
        await one.set("s1/b", b"two")
        await other.set("s1/a", b"")
        await one.set("s2/a", b"three")
        for blob in (one, other):
            assert await blob.get("s1/b") == b"two"
            assert await blob.get("s1/a") == b""
            assert await blob.get("s1/c") is None
            assert await blob.get("s3/a") is None
            listed = await blob.list_keys()
            found = [(info.key, info.bytes) for info in listed]
            assert found == [("s1/a", 0), ("s1/b", 3), ("s2/a", 5)]
            assert all(abs(info.modified_ms - before) < 60_000 for info in listed)


async def test_an_object_may_have_any_size(blobs: StoreHouse, tmp_path: Path) -> None:
    async with blobs.blobs() as (one, other):
        for number, size in enumerate(SIZES):
            data = bytes_of(size)
            file = tmp_path / "made-by-spark"
            file.write_bytes(data)
            await one.set(f"{number}/set", data)
            assert await one.adopt(f"{number}/adopted", file) == (size, zlib.crc32(data))
            assert not file.exists()
            for key in (f"{number}/set", f"{number}/adopted"):
                assert await other.get(key) == data
            assert [info.bytes for info in await other.list_keys(f"{number}/")] == [size, size]


async def test_a_file_that_is_not_there_makes_no_blob(blobs: StoreHouse, tmp_path: Path) -> None:
    async with blobs.blobs() as (one, other):
        with pytest.raises(StorageError, match="made-by-spark") as caught:
            await one.adopt("s/b", tmp_path / "made-by-spark")
        assert caught.value.determinate
        assert await other.get("s/b") is None


async def test_a_blob_goes_once_and_may_come_again(blobs: StoreHouse) -> None:
    async with blobs.blobs() as (one, other):
        assert not await one.delete("s/a")
        await one.set("s/a", b"first")
        assert await other.delete("s/a")
        assert not await one.delete("s/a")
        assert await one.get("s/a") is None
        assert await keys_of(one) == []
        await other.set("s/a", b"again")
        assert await one.get("s/a") == b"again"
        assert await keys_of(other, "s/") == ["s/a"]


async def test_to_write_it_twice_is_to_write_it_once(blobs: StoreHouse) -> None:
    async with blobs.blobs() as (one, other):
        await one.set("s/a", b"same")
        await other.set("s/a", b"same")
        assert await one.get("s/a") == b"same"
        assert await keys_of(one) == ["s/a"]


async def test_listings_are_in_order_and_by_letters(blobs: StoreHouse) -> None:
    keys = ["s/1", "s/10", "s/2", "s1/a", "s1/ab", "s1/b", "s10/a", "t/a", "S/a"]
    async with blobs.blobs() as (one, other):
        async with anyio.create_task_group() as group:
            for key in reversed(keys):
                group.start_soon(one.set, key, key.encode())
        for prefix in ("", "s", "s/", "s/1", "s1", "s1/", "s1/a", "S", "u", "u/", "s1/abc"):
            wanted = sorted(key for key in keys if key.startswith(prefix))
            assert await keys_of(other, prefix) == wanted, prefix


NO_KEYS = ["../a", "s/..", "s/.hidden", "s", "s/a/b", "/a", "s/", "s/é", "s/a b", "s/a%2F", "s\0/a"]
ODD_KEYS = ["s=1/a.b-c_d=e", "x" * 200 + "/" + "y" * 200, "_s/0..1", "a/b.tmp"]


async def test_keys_cannot_leave_their_folder(blobs: StoreHouse) -> None:
    async with blobs.blobs() as (blob, _):
        for key in NO_KEYS:
            with pytest.raises(InvalidUsage):
                await blob.set(key, b"")
            with pytest.raises(InvalidUsage):
                await blob.get(key)
            with pytest.raises(InvalidUsage):
                await blob.delete(key)
            with pytest.raises(InvalidUsage):
                blob.path(key)
        assert await keys_of(blob) == []


async def test_odd_keys_are_keys(blobs: StoreHouse) -> None:
    async with blobs.blobs() as (one, other):
        for key in ODD_KEYS:
            await one.set(key, key.encode())
            assert await other.get(key) == key.encode()
            assert await keys_of(other, key[:3]) == [key]
        assert await keys_of(one) == sorted(ODD_KEYS)
        for key in ODD_KEYS:
            assert await other.delete(key)


async def test_many_at_a_time(blobs: StoreHouse) -> None:
    """More than may be on their way at once."""
    whole = {f"s{number % 3}/b{number}": bytes_of(3 * PIECE, number) for number in range(20)}
    read: dict[str, bytes | None] = {}
    async with blobs.blobs() as (one, other):

        async def write_and_read(key: str) -> None:
            await one.set(key, whole[key])
            read[key] = await other.get(key)

        async with anyio.create_task_group() as group:
            for key in whole:
                group.start_soon(write_and_read, key)
        assert read == whole
        assert await keys_of(one) == sorted(whole)


@pytest.mark.parametrize("size", [100, 3 * PIECE])
async def test_who_reads_sees_all_of_it_or_nothing(blobs: StoreHouse, size: int) -> None:
    seen: set[bytes | None] = set()
    written = anyio.Event()
    async with blobs.blobs() as (one, other):

        async def look() -> None:
            while True:
                last = written.is_set()
                seen.update([await other.get(f"s/{number}") for number in range(3)])
                listed = await other.list_keys("s/")
                assert {info.bytes for info in listed} <= {size}
                if last:
                    return

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            for number in range(3):
                await one.set(f"s/{number}", bytes_of(size, number))
            written.set()
    assert seen - {None} == {bytes_of(size, number) for number in range(3)}


async def test_a_cancelled_caller_disturbs_nobody(blobs: StoreHouse, tmp_path: Path) -> None:
    async with blobs.blobs() as (one, other):
        for turns in range(0, 12, 3):
            # One a turn: a thread may still take that of a cancelled caller.
            file = tmp_path / f"file{turns}"
            file.write_bytes(bytes_of(3 * PIECE))
            async with anyio.create_task_group() as group:
                group.start_soon(one.set, f"s/{turns}", bytes_of(3 * PIECE))
                group.start_soon(one.get, "s/0")
                group.start_soon(one.delete, "s/0")
                group.start_soon(one.adopt, f"t/{turns}", file)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        await one.set("s/after", b"fine")
        assert await other.get("s/after") == b"fine"
        for info in await other.list_keys():
            assert info.bytes == (4 if info.key == "s/after" else 3 * PIECE)


NAMES = st.sampled_from(["a/1", "a/2", "a/10", "ab/1", "b/1"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), NAMES, st.sampled_from([0, 3, PIECE + 1])),
        st.tuples(st.just("delete"), NAMES, st.none()),
        st.tuples(st.just("get"), NAMES, st.none()),
        st.tuples(st.just("list"), st.sampled_from(["", "a", "a/", "a/1", "b/", "c"]), st.none()),
    ),
    max_size=15,
)


@pytest.mark.sampled
def test_two_clients_do_what_one_dictionary_does(blobs: StoreHouse) -> None:
    numbers = count()

    async def run(steps: Sequence[tuple[str, str, Any]]) -> None:
        example = f"e{next(numbers)}"
        model: dict[str, bytes] = {}
        async with blobs.blobs() as clients:
            for turn, (what, name, size) in enumerate(steps):
                blob, key = clients[turn % 2], f"{example}-{name}"
                match what:
                    case "set":
                        if key not in model:
                            model[key] = bytes_of(size, turn)
                        await blob.set(key, model[key])
                    case "delete":
                        assert await blob.delete(key) == (model.pop(key, None) is not None)
                    case "get":
                        assert await blob.get(key) == model.get(key)
                    case _:
                        found = [(info.key, info.bytes) for info in await blob.list_keys(key)]
                        wanted = {each: len(data) for each, data in model.items()}
                        assert found == sorted(
                            pair for pair in wanted.items() if pair[0].startswith(key)
                        )

    with asyncio.Runner() as runner:

        @settings(max_examples=blobs.examples)
        @given(STEPS)
        def whole(steps: Sequence[tuple[str, str, Any]]) -> None:
            runner.run(run(steps))

        whole()
