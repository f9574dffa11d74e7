"""Blobs in a bucket whose store fails, hangs, refuses or answers late: an error says rightly
whether it may have happened, and nothing of ours is left half."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import moto.s3.models
import pytest
from msgspec.structs import replace
from store_houses import CLOCK, PIECE, SETTINGS  # type: ignore[import-not-found]

from actors.durable.persist.blob_bucket import ByteBudget
from actors.durable.persist.location import BlobStore
from actors.durable.persist.store_urls import open_blob
from actors.runtime.errors import StorageError, StoreBusy
from actors.testing.patience import growing_deadlines_ms
from s3_server import KEY_ID, S3, SECRET, Fate  # type: ignore[import-not-found]

LIMITS = replace(SETTINGS, store_request_retries_max=1, retry_delay_ms_max=5)


class Place:
    """A bucket, and clients of it."""

    def __init__(self, scheme: str, served: S3) -> None:
        self.s3 = served
        self.bucket = served.new_bucket()
        self.url = f"{scheme}://{self.bucket}/x"

    async def blob(self, **changes: Any) -> BlobStore:
        return await open_blob(self.url, replace(LIMITS, **changes), CLOCK)

    def calls(self, method: str) -> int:
        return sum(line.startswith(f"{method} ") for line in self.s3.calls)


@pytest.fixture(params=["s3", "google"])
def place(request: pytest.FixtureRequest) -> Place:
    scheme = {"s3": "s3", "google": "gs"}[request.param]
    return Place(scheme, request.getfixturevalue(request.param))


def first(fate: Fate, *methods: str) -> Callable[[str], Fate]:
    """The first request of these methods has that fate, all others are served."""
    left = [1]

    def rule(line: str) -> Fate:
        if line.split()[0] in methods and left:
            left.pop()
            return fate
        return None

    return rule


def always(fate: Fate, *methods: str) -> Callable[[str], Fate]:
    return lambda line: fate if line.split()[0] in methods else None


@asynccontextmanager
async def ticking() -> AsyncIterator[Callable[[], int]]:
    """Whether the loop turns meanwhile."""
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.001)
            turns += 1

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        yield lambda: turns
        group.cancel_scope.cancel()


async def failed(call: Any, kind: type[StorageError] = StorageError, *, determinate: bool) -> str:
    with anyio.fail_after(200), pytest.raises(kind) as caught:
        await call
    assert caught.value.determinate is determinate, caught.value
    text = str(caught.value)
    assert KEY_ID not in text
    assert SECRET not in text
    return text


# -- blobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["fail", "late"])
@pytest.mark.parametrize("size", [10, 3 * PIECE])
async def test_one_failure_is_not_noticed(place: Place, fate: Fate, size: int) -> None:
    blob = await place.blob()
    for methods in (("PUT",), ("POST",), ("PUT", "POST"), ("HEAD",)):
        place.s3.rule = first(fate, *methods)
        key = f"s/{'-'.join(methods)}"
        await blob.set(key, b"x" * size)
        place.s3.rule = first(fate, "GET")
        assert await blob.get(key) == b"x" * size
        place.s3.rule = first(fate, "GET")
        assert [info.key for info in await blob.list_keys(key)] == [key]
    if fate == "fail":  # of an upload whose beginning was not answered nobody knows the name
        assert place.s3.uploads(place.bucket) == []


@pytest.mark.parametrize("size", [10, 3 * PIECE])
async def test_a_write_that_happened_all_the_same_is_found(
    place: Place, size: int, tmp_path: Path
) -> None:
    """The store writes, and says each time that it has not."""
    blob = await place.blob()
    file = tmp_path / "file"
    file.write_bytes(b"y" * size)
    # Of a large one the request that makes it an object; the pieces are served.
    place.s3.rule = lambda line: (
        "late"
        if line.startswith("PUT" if size <= PIECE else "POST") and "uploads" not in line
        else None
    )
    await blob.set("s/set", b"x" * size)
    await blob.adopt("s/adopted", file)
    place.s3.rule = lambda _: None
    assert await blob.get("s/set") == b"x" * size
    assert await blob.get("s/adopted") == b"y" * size
    assert not file.exists()


@pytest.mark.parametrize("size", [10, 3 * PIECE])
async def test_a_store_that_fails_for_good(place: Place, size: int, tmp_path: Path) -> None:
    blob = await place.blob()
    file = tmp_path / "file"
    file.write_bytes(b"y" * size)
    place.s3.rule = always("fail", "PUT", "POST")
    assert "500" in await failed(blob.set("s/a", b"x" * size), determinate=False)
    await failed(blob.adopt("s/a", file), determinate=False)
    assert file.exists()
    place.s3.rule = always("fail", "GET", "HEAD", "DELETE", "POST")
    await failed(blob.get("s/a"), determinate=True)
    await failed(blob.list_keys(), determinate=True)
    await failed(blob.delete("s/a"), determinate=True)
    place.s3.rule = lambda _: None
    assert await blob.list_keys() == []
    await blob.set("s/a", b"z")
    place.s3.rule = always("fail", "DELETE", "POST")
    await failed(blob.delete("s/a"), determinate=False)


async def test_a_store_that_is_asked_too_often_has_changed_nothing(place: Place) -> None:
    blob = await place.blob()
    place.s3.rule = always("busy", "PUT")
    text = await failed(blob.set("s/a", b"x"), StoreBusy, determinate=True)
    assert "too many requests to the store (429" in text
    place.s3.rule = lambda _: None
    assert await blob.get("s/a") is None


async def test_a_store_that_refuses_has_changed_nothing(place: Place) -> None:
    blob = await place.blob()
    place.s3.rule = always("deny", "PUT", "GET", "HEAD", "POST", "DELETE")
    for call in (blob.set("s/a", b"x"), blob.get("s/a"), blob.list_keys(), blob.delete("s/a")):
        assert "credentials do not allow it" in await failed(call, determinate=True)
    # Of several requests the last may be refused again although it was done.
    await failed(blob.set("s/large", b"x" * 3 * PIECE), determinate=False)


@pytest.mark.parametrize("size", [10, 3 * PIECE])
async def test_a_refusal_of_a_later_try_says_nothing_of_the_first(place: Place, size: int) -> None:
    """The store has done it, and does not say so; asked again, it refuses."""
    blob = await place.blob()
    whole = ("PUT",) if size <= PIECE else ("POST",)
    left = [1]

    def then_denied(line: str) -> Fate:
        if line.startswith(whole) and "uploads" not in line and left:
            left.pop()
            return "late"
        return None if left else "deny"

    place.s3.rule = then_denied
    await failed(blob.set("s/a", b"x" * size), determinate=False)
    place.s3.rule = lambda _: None
    assert await blob.get("s/a") == b"x" * size


async def test_a_removal_that_is_refused_later_may_have_happened(place: Place) -> None:
    blob = await place.blob()
    await blob.set("s/a", b"x")
    left = [1]

    def then_denied(line: str) -> Fate:
        if line.startswith(("POST", "DELETE")):
            return "late" if left and left.pop() else "deny"
        return None

    place.s3.rule = then_denied
    await failed(blob.delete("s/a"), determinate=False)
    assert await blob.get("s/a") is None


@pytest.mark.sampled(every=2)
async def test_a_store_that_hangs_holds_nobody(place: Place) -> None:
    for timeout_ms in growing_deadlines_ms():
        with suppress(StorageError):
            limits = {"store_request_timeout_ms": timeout_ms, "store_request_retries_max": 0}
            blob = await place.blob(**limits)
            break
    place.s3.rule = always("hang", "PUT", "GET", "HEAD")
    async with ticking() as turns:
        async with anyio.create_task_group() as group:
            for call, determinate in (
                (blob.set("s/a", b"x"), False),
                (blob.get("s/a"), True),
                (blob.list_keys(), True),
            ):

                async def fails(call: Any = call, determinate: bool = determinate) -> None:
                    await failed(call, determinate=determinate)

                group.start_soon(fails)
        assert turns() > 20
    place.s3.release()
    place.s3.rule = lambda _: None
    blob = await place.blob()
    await blob.set("s/a", b"x")
    assert await blob.get("s/a") == b"x"


async def test_a_listing_of_several_pages_is_whole(place: Place) -> None:
    blob = await place.blob()
    backend = moto.s3.models.s3_backends["123456789012"]["aws"]
    for number in range(1_005):
        backend.put_object(place.bucket, f"x/blobs/s{number % 2}/{number:04d}", b"12")
    backend.put_object(place.bucket, "x/blobs/s0/not/ours", b"")
    backend.put_object(place.bucket, "x/blobs/.hidden/a", b"")
    backend.put_object(place.bucket, "x/other/a", b"")
    place.s3.calls.clear()
    listed = await blob.list_keys()
    assert [info.key for info in listed] == sorted(
        f"s{number % 2}/{number:04d}" for number in range(1_005)
    )
    assert place.calls("GET") == 2
    assert len(await blob.list_keys("s1/00")) == 50


async def test_no_more_is_on_its_way_than_is_allowed(place: Place) -> None:
    blob = await place.blob(store_requests_in_flight_max=3)
    place.s3.put_at_once = 0
    async with anyio.create_task_group() as group:
        for number in range(12):
            group.start_soon(blob.set, f"s/{number}", b"x")
    assert 1 <= place.s3.put_at_once <= 3


async def test_a_room_is_shared_in_the_order_of_arrival() -> None:
    room, order = ByteBudget(100), []

    async def take(name: str, size: int) -> None:
        async with room.take(size):
            order.append(name)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(take, "a", 60)
        group.start_soon(take, "b", 60)
        group.start_soon(take, "c", 10)
        group.start_soon(take, "all", 1_000)
        await anyio.lowlevel.checkpoint()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await take("never", 1)
    assert order == ["a", "b", "c", "all"]
    assert room.free == 100
